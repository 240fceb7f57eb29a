"""Every kind of adapter on a GPU, in one batch, against transformers + peft; and rows against rows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from transformers import PreTrainedModel

from engine.model.adapter_ends import AdapterEnds
from engine.model.adapter_reading import read_adapter
from engine.model.adapter_weights import HostAdapter
from engine.model.loading import load_model
from engine.runner import Runner
from engine.step import PromptScoring, SamplingParams, StepAdapter, StepPlan, StepRow
from engine.step_memory import measure_step_memory
from kernels import reference
from kernels.lora import apply_vectors
from kernels.plans import GAIN_ROW, RANK_PAGE, SHIFT_ROW, LoraPool, RowVectors
from tests.adapter_kinds import KINDS, differences, save_kind, vocab_size
from tests.engine.step_driver import Request, StepDriver
from tests.model_zoo import save_tiny_model
from tests.oracles import Answer, assert_only_ties

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 400
MAX_SEQS = 64


@dataclass(frozen=True)
class Zoo:
    """A saved model and an adapter of each kind."""

    model: PreTrainedModel
    folders: Mapping[str, Path]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    folder = tmp_path_factory.mktemp("zoo")
    model = save_tiny_model(
        folder / "model",
        hidden_size=256,
        intermediate_size=704,
        num_attention_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    folders = {
        name: save_kind(model, folder / name, kind, seed=i) for i, (name, kind) in enumerate(KINDS.items())
    }
    return Zoo(model, folders)


class Engine:
    """A runner with graphs, and every adapter in its pages."""

    def __init__(self, zoo: Zoo, dtype: str) -> None:
        folder = next(iter(zoo.folders.values())).parent / "model"
        self.model = load_model(str(folder), dtype=dtype, device="cuda", max_model_len=None)
        self.runner = Runner(self.model, num_blocks=NUM_BLOCKS, num_rank_pages=64, max_lora_rank=64)
        most = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": 256}
        measure_step_memory(self.model, max_lora_rank=64, has_graphs=True, **most)  # compiles all at once
        self.runner.warm_up(**most)
        self.runner.capture_graphs(**most)
        self._zoo = zoo
        self.adapters: dict[str | None, StepAdapter | None] = {None: None}
        page = 0
        for number, name in enumerate(zoo.folders, start=1):
            weights = self.read(name)
            pages = tuple(range(page, page + weights.num_pages))
            page += weights.num_pages
            self.runner.write_adapter(pages, weights)
            self.adapters[name] = StepAdapter(
                number, pages, weights.rank, weights.has_vectors, weights.ends_bytes > 0, weights.vocab_size
            )

    def read(self, name: str) -> HostAdapter:
        return read_adapter(self._zoo.folders[name], self.model.network, pin=True)


@pytest.fixture(scope="module")
def engine(zoo: Zoo) -> Engine:
    return Engine(zoo, "float32")


def prompt(zoo: Zoo, name: str | None, length: int, seed: int) -> tuple[int, ...]:
    size = vocab_size(zoo.model, KINDS.get(name or ""))
    tokens = random.Random(seed).choices(range(3, size), k=length)
    if size > zoo.model.config.vocab_size:
        tokens[1] = size - 1
    return tuple(tokens)


def test_all_kinds_in_one_batch_answer_as_peft_does(zoo: Zoo, engine: Engine) -> None:
    named = [
        (name, Request(prompt(zoo, name, length, seed), adapter, max_tokens=16))
        for seed, length in enumerate((5, 40, 90))
        for name, adapter in engine.adapters.items()
    ]
    StepDriver(engine.runner, NUM_BLOCKS, token_budget=200).run([request for _, request in named])
    answers = [Answer(name, tuple(request.prompt), tuple(request.tokens)) for name, request in named]
    assert_only_ties(differences(zoo.model, KINDS, zoo.folders, answers))


def test_no_launch_waits_for_the_device(zoo: Zoo, engine: Engine) -> None:
    """Whatever an adapter has beside its ranks, and where its prompt is scored as well."""
    rows = []
    for i, (name, adapter) in enumerate(engine.adapters.items()):
        tokens = prompt(zoo, name, 20, seed=3)
        scoring = PromptScoring(0, tokens[1:], 2) if i % 2 else None
        rows.append(
            StepRow(i, tokens, 0, (2 * i, 2 * i + 1), adapter, sampling=SamplingParams(), scoring=scoring)
        )
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = engine.runner.submit(StepPlan(tuple(rows)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(row.error is None for row in step.result().rows)


def test_nan_in_one_kind_reaches_no_other_row(zoo: Zoo, engine: Engine) -> None:
    def run() -> list[Request]:
        requests = [
            Request(prompt(zoo, None, 20, 1), adapter, max_tokens=1, sampling=SamplingParams(logprobs=5))
            for adapter in engine.adapters.values()
        ]
        StepDriver(engine.runner, NUM_BLOCKS, token_budget=1000).run(requests)
        return requests

    clean = run()
    for name in ("dora r8", "bias r15", "dora everywhere", "saved", "lora over added tokens"):
        adapter = engine.adapters[name]
        assert adapter is not None
        engine.runner.write_adapter(adapter.pages, poison(engine.read(name)))
        spoilt = run()
        engine.runner.write_adapter(adapter.pages, engine.read(name))
        for owner, got, want in zip(engine.adapters, spoilt, clean, strict=True):
            assert (got.error is not None) == (owner == name)
            assert owner == name or [r.logprobs for r in got.results] == [r.logprobs for r in want.results]


def poison(weights: HostAdapter) -> HostAdapter:
    """The same adapter with NaN for every weight that is not zero."""

    def spoil(tensor: torch.Tensor) -> None:
        tensor[tensor != 0] = float("nan")

    for group in weights.groups.values():
        spoil(group.a)
        spoil(group.b)
    ends: AdapterEnds | None = weights.ends
    for end in (ends.embedding, ends.lm_head) if ends else ():
        for tensor in (end.a, end.b, end.gain, end.shift, end.replaced and end.replaced.rows) if end else ():
            if tensor is not None:
                spoil(tensor)
    return weights


def test_added_tokens_are_drawn_by_their_own_rows_alone(zoo: Zoo, engine: Engine) -> None:
    base = zoo.model.config.vocab_size
    ids = prompt(zoo, None, 8, 2)
    hot = SamplingParams(temperature=50.0)
    owners = [engine.adapters["added tokens"], None] * 5
    requests = [
        Request(ids, owner, max_tokens=40, sampling=replace(hot, seed=seed))
        for seed, owner in enumerate(owners)
    ]
    StepDriver(engine.runner, NUM_BLOCKS).run(requests)
    drawn = [sum(token >= base for token in request.tokens) for request in requests]
    assert sum(drawn[::2]) > 0 and sum(drawn[1::2]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "out"), [(1, 64), (7, 6144), (300, 28672), (2000, 1000)])
def test_vectors(rows: int, out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    b = torch.full((9, RANK_PAGE, out), float("nan"), dtype=dtype, device="cuda")
    for row in (GAIN_ROW, SHIFT_ROW):
        b[1:, row] = torch.randn(8, out, device="cuda").to(dtype)
    pool = LoraPool(torch.zeros(0), b, torch.zeros(0), (0, out))
    chosen = torch.randperm(rows + 5, device="cuda")[:rows]
    vectors = RowVectors(chosen, torch.randint(1, 9, (rows,), device="cuda"))
    got = torch.randn(rows + 5, out, device="cuda").to(dtype)
    want = got.clone()
    reference.apply_vectors(want, pool, vectors)
    apply_vectors(got, pool, vectors)
    torch.testing.assert_close(got, want)
