"""The runner against transformers + peft on tiny random models, and rows against each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.adapter_reading import read_as_stored
from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.scheduler import SchedulerLimits
from engine.step import SamplingParams, StepAdapter, StepPlan, StepRow
from tests.engine.engine_driver import Ask, EngineDriver
from tests.engine.step_driver import Request, StepDriver
from tests.model_zoo import save_adapter, save_tiny_model, scale_adapter
from tests.oracles import Answer, PeftOracle, assert_only_ties

NUM_BLOCKS = 96
NUM_PAGES = 8
ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, PeftOracle, dict[str, Path]]:
    """A tiny model, and adapters of ranks 4, 8, 16 and 64 on different modules."""
    folder = tmp_path_factory.mktemp("zoo")
    model = save_tiny_model(folder / "model")
    adapters = {
        "r4": save_adapter(model, folder / "r4", rank=4, targets=("q_proj", "v_proj"), seed=1),
        "r8": save_adapter(model, folder / "r8", rank=8, targets=ALL_MODULES, seed=2, use_rslora=True),
        "r16": save_adapter(
            model,
            folder / "r16",
            rank=16,
            targets=("down_proj", "gate_proj", "k_proj"),
            seed=3,
            rank_pattern={"layers.1.mlp.gate_proj": 3},
            alpha_pattern={"k_proj": 5},
        ),
        "r64": save_adapter(
            model, folder / "r64", rank=64, targets=("o_proj", "up_proj"), seed=4, layers_to_transform=[0, 2]
        ),
    }
    loaded = load_model(str(folder / "model"), dtype="float32", device="cpu", max_model_len=None)
    return loaded, PeftOracle(model, adapters), adapters


def make_runner(model: LoadedModel) -> Runner:
    return Runner(model, num_blocks=NUM_BLOCKS, num_rank_pages=NUM_PAGES)


def place(
    runner: Runner, model: LoadedModel, folder: Path, pages: tuple[int, ...], adapter_id: int
) -> StepAdapter:
    """Puts an adapter into pages that are full of NaN: of what it does not fill, nothing may be read."""
    adapter = read_as_stored(folder, model.network)
    assert adapter.num_pages == len(pages)
    for pools in runner._adapters.layers:
        for pool in pools:
            pool.a[list(pages)] = pool.b[list(pages)] = float("nan")
    runner.write_adapter(pages, adapter)
    return StepAdapter(adapter_id, pages, adapter.rank)


def place_all(
    runner: Runner, model: LoadedModel, folders: dict[str, Path]
) -> dict[str | None, StepAdapter | None]:
    """All four, in pages out of order; the last page of the pool included."""
    pages = {"r4": (7,), "r8": (2,), "r16": (0,), "r64": (5, 1, 6, 3)}
    placed: dict[str | None, StepAdapter | None] = {None: None}
    for i, (name, folder) in enumerate(folders.items(), start=1):
        placed[name] = place(runner, model, folder, pages[name], i)
    return placed


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 320, (length,), generator=generator).tolist())


def test_interleaved_adapters_answer_as_peft_does(
    zoo: tuple[LoadedModel, PeftOracle, dict[str, Path]],
) -> None:
    model, oracle, folders = zoo
    runner = make_runner(model)
    placed = place_all(runner, model, folders)
    prompts = [prompt(length, seed) for seed, length in enumerate((3, 17, 17, 90))]
    named = [
        (name, Request(ids, adapter, max_tokens=24)) for ids in prompts for name, adapter in placed.items()
    ]
    StepDriver(runner, NUM_BLOCKS).run([request for _, request in named])
    answers = [Answer(name, tuple(request.prompt), tuple(request.tokens)) for name, request in named]
    assert_only_ties(oracle.differences(answers))
    for ids in prompts:
        distinct = {answer.tokens for answer in answers if answer.prompt == ids}
        assert len(distinct) == len(placed), "an adapter that changes nothing would hide a mistake"


@pytest.mark.parametrize("overlap", [False, True])
def test_scheduled_answers_are_pefts_under_preemption_and_eviction(
    zoo: tuple[LoadedModel, PeftOracle, dict[str, Path]], overlap: bool
) -> None:
    """Through the scheduler: cached prefixes, chunks, too few blocks for all and too few pages for all."""
    model, oracle, folders = zoo
    engine = EngineDriver(
        model,
        folders,
        num_blocks=24,
        num_rank_pages=5,
        limits=SchedulerLimits(max_num_seqs=10, max_num_batched_tokens=40),
        overlap=overlap,
    )
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 40, 100))]
    prompts += [prompts[2][:70], prompts[1][:33]]
    asks = [Ask(name, ids, 24) for ids in prompts for name in (None, *folders)]
    answers = engine.run(asks)
    engine.close()
    assert engine.scheduler.num_preemptions > 0
    assert engine.num_cached_tokens > 0
    assert_only_ties(oracle.differences(answers))


def base_rows(runner: Runner, beside: StepAdapter | None) -> tuple[list[list[int]], torch.Tensor]:
    """Three base requests beside a fourth with ``beside``: their tokens, and their logprobs bit for bit."""
    sampling = SamplingParams(logprobs=5)
    requests = [Request(prompt(20, seed), max_tokens=12, sampling=sampling) for seed in range(3)]
    neighbour = Request(prompt(20, 9), beside, max_tokens=12, sampling=sampling)
    # The neighbour first: its rows come before the base rows, so that a wrong index reaches it.
    StepDriver(runner, NUM_BLOCKS, token_budget=30).run([neighbour, *requests])
    logprobs = [
        found.top_logprobs
        for request in requests
        for r in request.results
        if (found := r.logprobs) is not None
    ]
    return [request.tokens for request in requests], torch.tensor(logprobs)


def test_base_rows_have_the_same_bits_whatever_is_loaded_or_runs_beside(
    zoo: tuple[LoadedModel, PeftOracle, dict[str, Path]], tmp_path: Path
) -> None:
    model, _, folders = zoo
    expected_tokens, expected = base_rows(make_runner(model), None)
    loaded = make_runner(model)
    placed = place_all(loaded, model, folders)
    huge = tmp_path / "huge"
    huge.mkdir()
    for file in folders["r4"].iterdir():
        (huge / file.name).write_bytes(file.read_bytes())
    scale_adapter(huge, 1e6)
    placed["huge"] = place(loaded, model, huge, (NUM_PAGES - 1,), 9)
    for beside in (None, placed["r64"], placed["huge"]):
        tokens, logprobs = base_rows(loaded, beside)
        assert tokens == expected_tokens
        assert torch.equal(logprobs, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_overflowing_adapter_spoils_only_its_own_request(
    zoo: tuple[LoadedModel, PeftOracle, dict[str, Path]], tmp_path: Path, dtype: str
) -> None:
    _, _, folders = zoo
    model = load_model(str(folders["r8"].parent / "model"), dtype=dtype, device="cpu", max_model_len=None)
    overflowing = tmp_path / "overflowing"
    overflowing.mkdir()
    for file in folders["r8"].iterdir():
        (overflowing / file.name).write_bytes(file.read_bytes())
    scale_adapter(overflowing, 1e25)

    clean = make_runner(model)
    expected = StepDriver(clean, NUM_BLOCKS).run([Request(prompt(40, i), max_tokens=20) for i in range(3)])

    runner = make_runner(model)
    adapter = place(runner, model, overflowing, (NUM_PAGES - 1,), 1)
    driver = StepDriver(runner, NUM_BLOCKS)
    spoilt = [Request(prompt(length, length), adapter) for length in (33, 40)]
    beside = Request(prompt(40, 0), max_tokens=20)
    driver.run([spoilt[0], beside, spoilt[1]])
    assert all(request.error is not None and "not finite" in request.error for request in spoilt)
    assert beside.tokens == expected[0]
    # The blocks that the two freed, with NaN in them, are the next to be handed out.
    after = driver.run([Request(prompt(40, i), max_tokens=20) for i in (1, 2)])
    assert after == expected[1:]


def test_copied_blocks_continue_as_the_original(zoo: tuple[LoadedModel, PeftOracle, dict[str, Path]]) -> None:
    model, _, _ = zoo
    runner = make_runner(model)
    ids = prompt(20, 5)
    first = runner.execute(StepPlan((StepRow(1, ids, 0, (4, 9), sampling=SamplingParams()),)))
    token = first.rows[0].token
    step = StepRow(1, (token,), 20, (4, 9), sampling=SamplingParams(logprobs=3))
    copied = StepRow(2, (token,), 20, (4, 11), sampling=SamplingParams(logprobs=3))
    result = runner.execute(StepPlan((step, copied), block_copies=((9, 11),)))
    assert result.rows[0].logprobs == result.rows[1].logprobs


def test_adapter_start_leaves_the_tokens_before_it_to_the_base_model(
    zoo: tuple[LoadedModel, PeftOracle, dict[str, Path]],
) -> None:
    """Base KV up to the invocation tokens, the adapter from there on, as activated LoRA has it."""
    model, _, folders = zoo
    runner = make_runner(model)
    adapter = place(runner, model, folders["r8"], (2,), 1)
    ids = prompt(30, 6)
    rows = (
        StepRow(1, ids, 0, (0, 1), adapter=adapter, adapter_start=20, sampling=SamplingParams(logprobs=3)),
        StepRow(2, ids[:20], 0, (2, 3)),
    )
    at_once = runner.execute(StepPlan(rows)).rows[0]
    then = StepRow(2, ids[20:], 20, (2, 3), adapter=adapter, sampling=SamplingParams(logprobs=3))
    in_two = runner.execute(StepPlan((then,))).rows[0]
    assert at_once.token == in_two.token
    assert at_once.logprobs is not None and in_two.logprobs is not None
    assert at_once.logprobs.top_logprobs == pytest.approx(in_two.logprobs.top_logprobs, abs=1e-4)


def test_a_chunk_that_does_not_sample_returns_no_row(
    zoo: tuple[LoadedModel, PeftOracle, dict[str, Path]],
) -> None:
    model, _, _ = zoo
    assert make_runner(model).execute(StepPlan((StepRow(1, (5, 6), 0, (0,)),))).rows == ()


def test_warming_up_leaves_no_trace(zoo: tuple[LoadedModel, PeftOracle, dict[str, Path]]) -> None:
    model, _, _ = zoo
    expected = StepDriver(make_runner(model), NUM_BLOCKS).run([Request(prompt(40, 3))])
    runner = make_runner(model)
    runner.warm_up(max_num_seqs=8, max_num_batched_tokens=10_000)
    assert StepDriver(runner, NUM_BLOCKS).run([Request(prompt(40, 3))]) == expected
