"""The whole model on a GPU: against transformers + peft, graphs against eager steps, rows against rows."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from peft import PeftModel

from engine.model.adapter_reading import read_adapter
from engine.model.adapter_weights import HostAdapter
from engine.model.llama import LlamaModel
from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.step import RowResult, SamplingParams, StepAdapter, StepPlan, StepRow
from engine.step_memory import measure_step_memory
from tests.model_zoo import save_adapter, save_tiny_model, scale_adapter

pytestmark = pytest.mark.gpu

VOCAB = 512
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = (8, 16, 64)
NUM_ADAPTERS = 66
MAX_SEQS = 72
BLOCKS_EACH = 6
NUM_PAGES = 160
SAMPLING = SamplingParams(logprobs=VOCAB)
TIGHT, ROUNDED = 2e-5, 1e-2
"""Largest ‖Δ‖ / ‖ref‖ of logits in float32, and in bfloat16; of two results in bfloat16, twice that."""


@dataclass(frozen=True, slots=True)
class Zoo:
    """A saved model and its adapters by number, whose ranks take turns; peft holds the first six in float32
    over weights rounded to bfloat16, so that both precisions compute the same function."""

    model_folder: Path
    adapters: dict[int, Path]
    peft: PeftModel


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    folder = tmp_path_factory.mktemp("zoo")
    model = save_tiny_model(folder / "rough", **LLAMA)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    model.save_pretrained(folder / "model")
    adapters = {}
    for i in range(NUM_ADAPTERS):
        adapters[i] = save_adapter(
            model, folder / f"adapter{i}", rank=RANKS[i % 3], targets=MODULES, seed=i, lora_alpha=4
        )
    for i in range(6):
        _round_adapter(adapters[i])
    peft = PeftModel.from_pretrained(model, str(adapters[0]), adapter_name="0")
    for i in range(1, 6):
        peft.load_adapter(str(adapters[i]), adapter_name=str(i))
    return Zoo(folder / "model", adapters, peft.cuda().eval())


def _round_adapter(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({name: value.bfloat16().float() for name, value in load_file(path).items()}, path)


class Engine:
    """A runner with its adapters, and the blocks of sequences by number."""

    def __init__(self, zoo: Zoo, dtype: str, *, graphs: bool) -> None:
        self._zoo = zoo
        self.model: LoadedModel = load_model(
            str(zoo.model_folder), dtype=dtype, device="cuda", max_model_len=None
        )
        self.runner = Runner(
            self.model, num_blocks=MAX_SEQS * BLOCKS_EACH, num_rank_pages=NUM_PAGES, max_lora_rank=64
        )
        if graphs:  # as an engine starts: the first call compiles all kernels at once
            most = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": 512}
            measure_step_memory(self.model, max_lora_rank=64, has_graphs=True, **most)
            self.runner.warm_up(**most)
            self.runner.capture_graphs(**most)

    def read(self, number: int) -> HostAdapter:
        return read_adapter(self._zoo.adapters[number], self.model.network, pin=True)

    def place(self, number: int, pages: tuple[int, ...], adapter_id: int) -> StepAdapter:
        weights = self.read(number)
        self.runner.write_adapter(pages, weights)
        return StepAdapter(adapter_id, pages, weights.rank)


def blocks_of(seq: int) -> tuple[int, ...]:
    """Scattered over the pool, and nobody else's."""
    return tuple(seq + MAX_SEQS * i for i in range(BLOCKS_EACH))


def prefill_row(seq: int, tokens: list[int], adapter: StepAdapter | None) -> StepRow:
    return StepRow(seq, tokens, 0, blocks_of(seq), adapter, sampling=SAMPLING)


def decode_row(seq: int, token: int, start: int, adapter: StepAdapter | None) -> StepRow:
    return StepRow(seq, [token], start, blocks_of(seq), adapter, sampling=SAMPLING)


def logits_of(result: RowResult) -> torch.Tensor:
    """float64 [VOCAB]: a row's log-probabilities, less their mean, which are its logits less theirs."""
    assert result.error is None and result.logprobs is not None, result
    values = torch.empty(VOCAB, dtype=torch.float64)
    values[list(result.logprobs.top_tokens)] = torch.tensor(result.logprobs.top_logprobs, dtype=torch.float64)
    return values - values.mean()


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def free_pages(adapters: list[StepAdapter]) -> list[int]:
    taken = {page for adapter in adapters for page in adapter.pages}
    return [page for page in range(NUM_PAGES) if page not in taken]


@torch.inference_mode()
def peft_logits(peft: PeftModel, adapter: int | None, tokens: list[int], count: int) -> torch.Tensor:
    """float64 [count, VOCAB] on the CPU: the logits after the last tokens, less their means."""
    ids = torch.tensor([tokens], device="cuda")
    if adapter is None:
        with peft.disable_adapter():
            logits = peft(ids).logits
    else:
        peft.set_adapter(str(adapter))
        logits = peft(ids).logits
    wanted = logits[0, -count:].double().cpu()
    return wanted - wanted.mean(dim=1, keepdim=True)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", TIGHT), ("bfloat16", ROUNDED)])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_mixed_adapters_compute_what_peft_does(zoo: Zoo, dtype: str, limit: float, graphs: bool) -> None:
    """Prompts of mixed lengths in one step, then four decode steps, ranks 8, 16 and 64 beside base rows."""
    engine = Engine(zoo, dtype, graphs=graphs)
    rng = random.Random(0)
    adapters: list[StepAdapter | None] = [None]
    for i in range(6):
        free = free_pages([a for a in adapters if a is not None])
        count = engine.read(i).num_pages
        adapters.append(engine.place(i, tuple(rng.sample(free, count)), i + 1))
    owners = [None, 2, 0, 5, None, 1, 4, 3, 0, 2]
    texts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice((5, 16, 33, 80)) + 4)] for _ in owners]
    placed = [adapters[0] if owner is None else adapters[owner + 1] for owner in owners]
    rows = [prefill_row(i, text[:-4], placed[i]) for i, text in enumerate(texts)]
    steps = [engine.runner.execute(StepPlan(tuple(rows)))]
    for k in range(4):
        at = [len(text) - 4 + k for text in texts]
        rows = [decode_row(i, text[at[i]], at[i], placed[i]) for i, text in enumerate(texts)]
        steps.append(engine.runner.execute(StepPlan(tuple(rows))))
    for i, (owner, text) in enumerate(zip(owners, texts, strict=True)):
        want = peft_logits(zoo.peft, owner, text, 5)
        got = torch.stack([logits_of(step.rows[i]) for step in steps])
        assert difference(got, want) < limit, (i, owner)
    base = peft_logits(zoo.peft, None, texts[1], 5)
    assert difference(peft_logits(zoo.peft, owners[1], texts[1], 5), base) > 5 * ROUNDED, (
        "adapters must matter"
    )


class Pair:
    """The same steps by graphs and eagerly, over the same caches and pages."""

    def __init__(self, zoo: Zoo, dtype: str) -> None:
        self._both = [Engine(zoo, dtype, graphs=True), Engine(zoo, dtype, graphs=False)]
        self.adapters: dict[int, StepAdapter] = {}
        self._next_id = 1

    def load(self, number: int) -> None:
        """Place an adapter, into pages that others have just left if need be."""
        count = self._both[0].read(number).num_pages
        pages = tuple(free_pages(list(self.adapters.values()))[:count][::-1])
        for engine in self._both:
            self.adapters[number] = engine.place(number, pages, self._next_id)
        self._next_id += 1

    def evict(self, number: int) -> None:
        del self.adapters[number]

    def check(self, rows: list[StepRow], limit: float) -> None:
        graph, eager = (engine.runner.execute(StepPlan(tuple(rows))).rows for engine in self._both)
        for row, got, want in zip(rows, graph, eager, strict=True):
            assert difference(logits_of(got), logits_of(want)) < limit, (len(rows), row.seq_id)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", TIGHT), ("bfloat16", 2 * ROUNDED)])
def test_graphs_equal_eager_steps_whatever_the_batch_holds(zoo: Zoo, dtype: str, limit: float) -> None:
    """1, 4, 8, 2, 64 adapters in turn, in batches that grow and shrink and are of no captured size, while
    adapters are loaded, evicted and replaced."""
    pair = Pair(zoo, dtype)
    rng = random.Random(1)
    lengths = [rng.choice((1, 15, 16, 40, 70)) for _ in range(MAX_SEQS)]
    for first in range(0, MAX_SEQS, 8):
        prompts = [[rng.randrange(VOCAB) for _ in range(lengths[i])] for i in range(first, first + 8)]
        pair.check([prefill_row(first + i, prompt, None) for i, prompt in enumerate(prompts)], limit)
    for count, size in (
        (1, 1),
        (1, 5),
        (4, 9),
        (8, 27),
        (2, 3),
        (64, 71),
        (64, 66),
        (0, 13),
        (3, 72),
        (8, 2),
    ):
        for number in list(pair.adapters):
            if number >= count or rng.random() < 0.3:
                pair.evict(number)
        for number in rng.sample(range(count), count):
            if number not in pair.adapters:
                pair.load(number)
        owners: list[StepAdapter | None] = list(pair.adapters.values())
        while len(owners) < size:
            owners.append(rng.choice([None, *pair.adapters.values()]))
        owners = rng.sample(owners, size)
        seqs = rng.sample(range(MAX_SEQS), size)
        rows = []
        for seq, owner in zip(seqs, owners, strict=True):
            rows.append(decode_row(seq, rng.randrange(VOCAB), lengths[seq], owner))
            lengths[seq] += 1
        pair.check(rows, limit)


def test_an_earlier_graph_may_become_garbage_while_others_are_captured(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = torch.cuda.CUDAGraph()
    with torch.cuda.graph(earlier):
        torch.zeros(1, device="cuda")
    held, forward = [earlier], LlamaModel.forward
    del earlier

    def littering(*args: Any, **kwargs: Any) -> torch.Tensor:
        if held and torch.cuda.is_current_stream_capturing():
            cycle: list[Any] = [held.pop()]
            cycle.append(cycle)
            del cycle
            assert [[] for _ in range(100_000)], "enough for a collection to be due"
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", littering)
    Engine(zoo, "bfloat16", graphs=True)
    assert not held and gc.isenabled()


def test_base_rows_do_not_notice_adapters_beside_them(zoo: Zoo) -> None:
    engine = Engine(zoo, "bfloat16", graphs=True)
    text = [[(7 * i + 3 * seq) % VOCAB for i in range(30)] for seq in range(8)]
    adapters = [
        engine.place(i, tuple(range(i * 4, i * 4 + engine.read(i).num_pages)), i + 1) for i in range(3)
    ]

    def base_logits(beside: Sequence[StepAdapter | None]) -> list[torch.Tensor]:
        """Five base rows behind three others, at one batch size."""
        owners = [*beside, *[None] * 5]
        found = []
        prompts = [prefill_row(i, text[i], owner) for i, owner in enumerate(owners)]
        decodes = [decode_row(i, 5 + i, 30, owner) for i, owner in enumerate(owners)]
        for rows in (prompts, decodes):
            found += [logits_of(row) for row in engine.runner.execute(StepPlan(tuple(rows))).rows[3:]]
        return found

    alone = base_logits([None] * 3)
    for beside in ([adapters[0], None, adapters[2]], [*adapters]):
        for got, want in zip(base_logits(beside), alone, strict=True):
            assert torch.equal(got, want)


def test_an_overflowing_adapter_spoils_only_its_row(zoo: Zoo, tmp_path: Path) -> None:
    engine = Engine(zoo, "bfloat16", graphs=True)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in zoo.adapters[1].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    scale_adapter(broken, 1e25)
    good = engine.place(2, (0, 1, 2, 3), 1)
    weights = read_adapter(broken, engine.model.network, pin=True)
    engine.runner.write_adapter((9,), weights)
    bad = StepAdapter(2, (9,), weights.rank)
    text = [[(5 * i + seq) % VOCAB for i in range(20)] for seq in range(5)]

    def run(third: StepAdapter | None) -> list[RowResult]:
        owners = [good, None, third, None, good]
        prompts = [prefill_row(i, text[i], owner) for i, owner in enumerate(owners)]
        decodes = [decode_row(i, 9, 20, owner) for i, owner in enumerate(owners)]
        found: list[RowResult] = []
        for rows in (prompts, decodes):
            found += engine.runner.execute(StepPlan(tuple(rows))).rows
        return found

    clean, spoilt = run(good), run(bad)
    for i, (want, got) in enumerate(zip(clean, spoilt, strict=True)):
        if i % 5 == 2:
            assert got.error is not None
        else:
            assert difference(logits_of(got), logits_of(want)) < 2 * ROUNDED
    # What the bad row wrote into its blocks is gone with the next sequence that has them.
    for got, want in zip(run(good), clean, strict=True):
        assert torch.equal(logits_of(got), logits_of(want))
