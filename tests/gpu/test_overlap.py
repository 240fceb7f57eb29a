"""The loop over a GPU: graphs with a step under way give the text of eager steps in turn, searches and
background work among them; cold adapters come beside them; and nothing waits for the device, compiles, or
locks memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from triton import knobs

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from engine.launched_step import LaunchedStep
from engine.model.adapter_weights import HostAdapter
from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.sequence import FinishReason, Request
from engine.step import SamplingParams, StepPlan, StepRow
from engine.step_memory import measure_step_memory
from engine.transfer import lock_host_memory
from tests.engine.sampled_serving import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    NUM_REQUESTS,
    Served,
    company,
    random_request,
    serve_requests,
)
from tests.model_zoo import save_adapter, save_tiny_model

pytestmark = pytest.mark.gpu

NUM_PAGES = 6
MOST = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Zoo = tuple[LoadedModel, dict[bytes, Path]]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A small model, and adapters of ranks 8, 64 and 16, which do not all fit at once."""
    folder = tmp_path_factory.mktemp("zoo")
    source = save_tiny_model(folder / "model", head_dim=64, hidden_size=256, num_attention_heads=4)
    folders = {
        b"adapter-%d" % i: save_adapter(source, folder / str(i), rank=rank, targets=MODULES, seed=i)
        for i, rank in enumerate((8, 64, 16, 64))
    }
    model = load_model(str(folder / "model"), dtype="float32", device="cuda", max_model_len=None)
    measure_step_memory(model, max_lora_rank=64, has_graphs=True, **MOST)  # compiles all kernels at once
    return model, folders


class Unwaiting:
    """A runner on a GPU which raises where a launch waits for the device."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan) -> LaunchedStep:
        return self._strictly(self._runner.submit, plan)

    def write_adapter(self, pages: Sequence[int], adapter: HostAdapter) -> Any:
        return self._strictly(self._runner.write_adapter, pages, adapter)

    def drop_adapter(self, pages: Sequence[int]) -> None:
        self._runner.drop_adapter(pages)

    @staticmethod
    def _strictly(launch: Any, *args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def made_runner(model: LoadedModel, num_blocks: int, *, graphs: bool) -> Runner:
    runner = Runner(model, num_blocks=num_blocks, num_rank_pages=NUM_PAGES, max_lora_rank=64)
    if graphs:
        runner.warm_up(**MOST)
        runner.capture_graphs(**MOST)
        lock_host_memory(model.device)
    return runner


def run(
    zoo: Zoo, requests: list[Request], *, num_blocks: int = 200, overlap: bool, at_once: int = 2
) -> Served:
    """In turn eagerly, or overlapped by graphs."""
    model, folders = zoo
    runner = made_runner(model, num_blocks, graphs=overlap)
    return serve_requests(
        model,
        cast(Any, Unwaiting(runner)) if overlap else runner,
        requests,
        num_blocks=num_blocks,
        overlap=overlap,
        folders=folders,
        num_pages=NUM_PAGES,
        at_once=at_once,
    )


def sampled(zoo: Zoo, seed: int) -> list[Request]:
    model, folders = zoo
    rng, digests = random.Random(seed), [b"", *folders]
    return [
        random_request(rng, number, model.config.vocab_size, digests[number % len(digests)])
        for number in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_same_text_by_graphs_with_a_step_under_way(zoo: Zoo, seed: int) -> None:
    want = run(zoo, sampled(zoo, seed), overlap=False)
    assert set(want.ends.values()) == {FinishReason.STOP, FinishReason.LENGTH} and want.logprobs
    for num_blocks in (200, 12):
        got = run(zoo, sampled(zoo, seed), num_blocks=num_blocks, overlap=True)
        assert (got.tokens, got.ends) == (want.tokens, want.ends)
        for key, logprobs in want.logprobs.items():
            assert got.logprobs[key] == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("seed", [1, 5])
def test_searches_beside_background_work_find_what_a_cpu_finds(zoo: Zoo, seed: int) -> None:
    """Beams copy blocks beside a step under way, and background work gives way. With these seeds no search
    hangs on a difference as small as between two devices.
    """
    model, folders = zoo

    def requests() -> list[Request]:
        return company(model.config.vocab_size, [b"", *folders], seed)

    source = str(next(iter(folders.values())).parent / "model")
    cpu = load_model(source, dtype="float32", device="cpu", max_model_len=None), folders
    want = run(cpu, requests(), overlap=False, at_once=MAX_NUM_SEQS)
    assert want.num_yields, "background work gives way"
    for overlap, num_blocks in ((False, 200), (True, 200), (True, 22)):
        got = run(zoo, requests(), num_blocks=num_blocks, overlap=overlap, at_once=MAX_NUM_SEQS)
        assert (got.tokens, got.ends) == (want.tokens, want.ends), (overlap, num_blocks)


def test_no_kernel_is_made_while_requests_run(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folders = zoo
    runner, made = made_runner(model, 200, graphs=True), set[str]()
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *_, fn, **__: made.add(fn.name))
    for seed in range(2):
        for requests in (sampled(zoo, seed), company(model.config.vocab_size, [b"", *folders], seed)):
            serve_requests(
                model, runner, requests, num_blocks=200, overlap=True, folders=folders, num_pages=NUM_PAGES
            )
    assert not made


def test_no_host_memory_is_locked_while_steps_run(zoo: Zoo) -> None:
    """Whatever their number of rows, with two under way."""
    model, _ = zoo
    runner = made_runner(model, 200, graphs=True)
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    for count in range(1, MAX_NUM_SEQS + 1):
        row = StepRow(0, [5], 40, (0, 1, 2), sampling=SamplingParams(temperature=1.0, logprobs=3))
        rows = [replace(row, seq_id=i, tokens=[5] * (1 + i % 2)) for i in range(count)]
        for _ in range(2):
            for step in [runner.submit(StepPlan(tuple(rows))) for _ in range(2)]:
                step.result()
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
