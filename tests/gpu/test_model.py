"""The whole model on a GPU: against transformers + peft, graphs against eager steps, rows against rows."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from engine.model.adapter_reading import read_adapter
from engine.model.llama import LlamaModel
from engine.step import RowResult, StepAdapter, StepPlan, StepRow
from tests.gpu.peft_zoo import (
    MAX_SEQS,
    ROUNDED,
    TIGHT,
    VOCAB,
    Engine,
    Zoo,
    assert_computes_what_peft_does,
    decode_row,
    difference,
    free_pages,
    logits_of,
    make_zoo,
    prefill_row,
)
from tests.model_zoo import scale_adapter

pytestmark = pytest.mark.gpu

NUM_ADAPTERS = 66


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return make_zoo(tmp_path_factory.mktemp("zoo"), num_adapters=NUM_ADAPTERS)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", TIGHT), ("bfloat16", ROUNDED)])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_mixed_adapters_compute_what_peft_does(zoo: Zoo, dtype: str, limit: float, graphs: bool) -> None:
    owners = (None, 2, 0, 5, None, 1, 4, 3, 0, 2)
    assert_computes_what_peft_does(Engine(zoo, dtype, graphs=graphs), zoo, owners, limit)


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
