"""The embedding and lm_head of an adapter: what of its files is kept, and which rows it reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.model import dora, ends_reading
from engine.model.adapter_ends import AdapterEnds, End, ReplacedRows, ResidentEnds
from engine.model.adapter_reading import read_adapter
from engine.model.loading import LoadedModel, load_model
from engine.step import SamplingParams, StepAdapter, StepRow
from tests.adapter_kinds import Kind, save_kind
from tests.model_zoo import save_tiny_model

CPU = torch.device("cpu")
VOCAB, HIDDEN = 6, 4
SAMPLING = SamplingParams()


def read(tmp_path: Path, kind: Kind, *, tied: bool) -> tuple[LoadedModel, AdapterEnds]:
    model = save_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    loaded = load_model(str(tmp_path / "model"), dtype="float32", device="cpu", max_model_len=None)
    folder = save_kind(model, tmp_path / "adapter", kind, seed=1)
    ends = read_adapter(folder, loaded.network, pin=False).ends
    assert ends is not None
    return loaded, ends


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dora, ends_reading):
        monkeypatch.setattr(module, "CHUNK_ROWS", 50)


def test_of_a_resized_vocabulary_only_the_added_rows_are_kept(tmp_path: Path) -> None:
    _, ends = read(tmp_path, Kind(4, ("q_proj",), added_tokens=3), tied=False)
    assert ends.vocab_size == 323
    for end in (ends.embedding, ends.lm_head):
        assert end is not None and end.replaced is not None and end.a is None
        assert end.replaced.tokens.tolist() == [320, 321, 322]
    assert ends.nbytes == 2 * 3 * (64 * 4 + 8)


def test_of_a_saved_table_the_changed_rows_are_kept(tmp_path: Path) -> None:
    kind = Kind(4, ("q_proj",), options={"modules_to_save": ["embed_tokens"]})
    _, ends = read(tmp_path, kind, tied=False)
    assert ends.lm_head is None and ends.embedding is not None and ends.embedding.replaced is not None
    assert ends.embedding.replaced.tokens.tolist() == list(range(0, 320, 3))


def test_tied_ends_share_their_rows(tmp_path: Path) -> None:
    kind = Kind(4, ("q_proj",), options={"trainable_token_indices": [300, 7]})
    _, ends = read(tmp_path, kind, tied=True)
    assert ends.embedding is not None and ends.lm_head is not None and ends.embedding.replaced is not None
    assert ends.embedding.replaced is ends.lm_head.replaced
    assert ends.embedding.replaced.tokens.tolist() == [7, 300]
    assert ends.nbytes == 2 * (64 * 4 + 8)
    moved = ends.to(torch.device("meta"))
    assert moved.nbytes == ends.nbytes, "what is shared stays so"


def make_ends(*, vocab_size: int = VOCAB, spoilt: bool = False) -> AdapterEnds:
    """Every part of both ends; with ``spoilt``, NaN in all of them."""
    torch.manual_seed(vocab_size)

    def random(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan")) if spoilt else torch.randn(*shape)

    tokens = torch.tensor([1, *range(VOCAB, vocab_size)])
    before = End(ReplacedRows(tokens, random(len(tokens), HIDDEN)), random(vocab_size, 2), random(2, HIDDEN))
    after = End(
        ReplacedRows(tokens, random(len(tokens), HIDDEN)),
        random(HIDDEN, 2),
        random(2, vocab_size),
        random(vocab_size),
        random(vocab_size),
    )
    return AdapterEnds(before, after, vocab_size)


def rows_of(*owners: tuple[int | None, int]) -> list[StepRow]:
    """Rows of ``(first page of the adapter, number of tokens)``; all sample."""
    return [
        StepRow(
            i, [0] * count, 0, (i,), None if page is None else StepAdapter(1, (page,), 1), sampling=SAMPLING
        )
        for i, (page, count) in enumerate(owners)
    ]


def test_only_the_adapters_own_rows_are_reached() -> None:
    resident = ResidentEnds(CPU)
    resident.write((3,), make_ends())
    resident.write((5, 4), make_ends(spoilt=True))
    resident.write((1,), None)
    step = resident.of(rows_of((None, 2), (5, 3), (1, 1), (3, 2), (5, 1)))
    assert step is not None
    table, tokens = torch.randn(VOCAB, HIDDEN), torch.tensor([0, 1, 1, 2, 3, 5, 1, 4, 0])
    x = step.embed(tokens, table)
    assert torch.equal(x[[0, 1, 5]], table[tokens[[0, 1, 5]]])
    assert x[[2, 3, 4, 8]].isnan().all() and not x[[6, 7]].isnan().any()
    hidden, logits = torch.randn(5, HIDDEN), torch.randn(5, VOCAB)
    changed = step.change_logits(hidden, logits.clone())
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert changed[[1, 4]].isnan().all() and not changed[3].isnan().any()
    assert not torch.equal(changed[3], logits[3])


def test_added_tokens_are_beyond_the_reach_of_other_rows() -> None:
    resident = ResidentEnds(CPU)
    resident.write((0,), make_ends(vocab_size=9))
    resident.write((1,), make_ends(vocab_size=7))
    step = resident.of(rows_of((None, 1), (0, 1), (1, 1)))
    assert step is not None
    hidden, logits = torch.randn(3, HIDDEN), torch.randn(3, VOCAB)
    changed = step.change_logits(hidden, logits.clone())
    assert changed.shape == (3, 9)
    assert changed.isinf().sum(dim=1).tolist() == [3, 0, 2]
    assert torch.equal(changed[0, :VOCAB], logits[0])
    x = step.embed(torch.tensor([2, 8, 6]), torch.randn(VOCAB, HIDDEN))
    assert x.isfinite().all()


def test_a_step_without_such_adapters_has_nothing() -> None:
    resident = ResidentEnds(CPU)
    assert resident.of(rows_of((2, 1))) is None
    resident.write((0,), make_ends())
    assert resident.of(rows_of((None, 3), (2, 1))) is None


@pytest.mark.parametrize("forget", ["drop", "overwrite", "overwrite as another's last page"])
def test_an_adapter_that_has_gone_leaves_nothing_in_its_pages(forget: str) -> None:
    resident = ResidentEnds(CPU)
    resident.write((2, 0), make_ends())
    if forget == "drop":
        resident.drop((2, 0))
    else:
        resident.write((2,) if forget == "overwrite" else (7, 2), None)
    assert resident.of(rows_of((2, 1))) is None


def test_activated_rows_are_reached_from_their_start_on() -> None:
    resident = ResidentEnds(CPU)
    resident.write((0,), make_ends())
    adapter = StepAdapter(1, (0,), 1)
    before = StepRow(1, [0] * 4, 0, (0,), adapter, adapter_start=10, sampling=SAMPLING)
    across = StepRow(2, [0] * 4, 8, (1,), adapter, adapter_start=10, sampling=SAMPLING)
    step = resident.of([before, across])
    assert step is not None
    table = torch.randn(VOCAB, HIDDEN)
    x = step.embed(torch.zeros(8, dtype=torch.int64), table)
    assert [torch.equal(row, table[0]) for row in x] == [True] * 6 + [False] * 2
    logits = torch.randn(2, VOCAB)
    changed = step.change_logits(torch.randn(2, HIDDEN), logits.clone())
    assert [torch.equal(a, b) for a, b in zip(changed, logits, strict=True)] == [True, False]


def test_a_trained_row_stands_above_a_saved_one(tmp_path: Path) -> None:
    """PEFT saves the grown table as it was before training, and the trained rows beside it."""
    kind = Kind(4, ("q_proj",), added_tokens=3, options={"trainable_token_indices": [322, 5, 320]})
    _, ends = read(tmp_path, kind, tied=False)
    assert ends.embedding is not None and ends.embedding.replaced is not None
    assert ends.embedding.replaced.tokens.tolist() == [5, 320, 321, 322]
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    delta = next(value for name, value in stored.items() if name.endswith("trainable_tokens_delta"))
    assert torch.equal(ends.embedding.replaced.rows[[3, 0, 1]], delta)
