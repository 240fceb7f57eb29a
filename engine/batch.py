"""A ``StepPlan`` as the tensors that the kernels read. Built anew for every step, kept by nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.drawn_tokens import DrawnTokens, fill_unseen
from engine.model.adapter_weights import pages_of_rank
from engine.model.llama import ForwardBatch
from engine.pooling import pooled_tokens
from engine.step import StepAdapter, StepRow
from engine.transfer import pack_to_device
from kernels.plans import BLOCK_SIZE, AttentionPlan, LoraPlan, RowVectors


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step's rows as one flat batch of tokens, in host memory.

    Attributes:
        arrays: the parts of ``ForwardBatch`` and its plans, with their shapes and dtypes: tokens (`UNSEEN`
            where not known), positions, slots, query_starts, context_lens, block_tables, output_rows,
            lora_rows, segment_starts, segment_pages, segment_ranks; and vector_rows, vector_pages if any.
        max_query_len: see ``kernels.plans``.
    """

    arrays: dict[str, np.ndarray]
    max_query_len: int


def build_forward_batch(
    rows: Sequence[StepRow],
    device: torch.device,
    *,
    page_widths: Sequence[int] = (),
    drawn: DrawnTokens | None = None,
) -> ForwardBatch:
    """A step as a batch of its own tensors, in one copy that the host does not wait for.

    Tokens that no host has seen are taken from ``drawn``, what the step before has drawn. For ``page_widths``
    see `lay_out`.
    """
    layout = lay_out(rows, page_widths)
    tensors = pack_to_device(layout.arrays, device)
    vectors = None
    if "vector_rows" in tensors:
        vectors = RowVectors(tensors["vector_rows"], tensors["vector_pages"])
    return ForwardBatch(
        tokens=fill_unseen(tensors["tokens"], layout.arrays["query_starts"][:-1], rows, drawn),
        attention=AttentionPlan(
            query_starts=tensors["query_starts"],
            context_lens=tensors["context_lens"],
            block_tables=tensors["block_tables"],
            slots=tensors["slots"],
            positions=tensors["positions"],
            max_query_len=layout.max_query_len,
        ),
        lora=LoraPlan(
            rows=tensors["lora_rows"],
            segment_starts=tensors["segment_starts"],
            segment_pages=tensors["segment_pages"],
            segment_ranks=tensors["segment_ranks"],
            num_rows=len(layout.arrays["lora_rows"]),
            num_segments=len(layout.arrays["segment_ranks"]),
            vectors=vectors,
        ),
        output_rows=tensors["output_rows"],
    )


def lay_out(rows: Sequence[StepRow], page_widths: Sequence[int] = ()) -> StepLayout:
    """Lay out a step's rows one after another, in their order.

    The table of rank pages is padded to the least of ``page_widths`` that holds it, if there is one: kernels
    may be compiled for its width.

    ::

        row      0: decode    1: decode    2: a chunk of 5
        flat     [ a17 ]      [ b4 ]       [ c8 c9 c10 c11 c12 ]
        starts   0            1            2                     7
    """
    lengths = np.fromiter((len(row.tokens) for row in rows), np.int64, len(rows))
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    owners = np.repeat(np.arange(len(rows)), lengths)
    first_positions = np.fromiter((row.start for row in rows), np.int64, len(rows))
    positions = np.arange(starts[-1]) + (first_positions - starts[:-1])[owners]
    sampled = np.fromiter((row.sampling is not None for row in rows), np.bool_, len(rows))
    tables = _padded([row.block_ids for row in rows])
    blocks = tables[owners, positions // BLOCK_SIZE]
    assert (blocks >= 0).all(), "a row's block table covers every token of its step"
    grouped = _group_by_adapter(rows, starts, page_widths)
    arrays = {
        "tokens": np.concatenate([np.asarray(row.tokens, np.int64) for row in rows]),
        "positions": positions,
        "slots": blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        "query_starts": starts.astype(np.int32),
        "context_lens": (first_positions + lengths).astype(np.int32),
        "block_tables": tables,
        "output_rows": _output_rows(rows, starts, sampled),
        **grouped,
    }
    return StepLayout(arrays, int(lengths.max()))


def _output_rows(rows: Sequence[StepRow], starts: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """The tokens after which something is drawn, in order; then those after which a prompt is scored; then
    those that are pooled.
    """
    drawn = starts[1:][sampled] - 1
    scored = [
        np.arange(start + row.scoring.first, start + row.scoring.first + len(row.scoring.tokens))
        for row, start in zip(rows, starts[:-1], strict=True)
        if row.scoring is not None
    ]
    pooled = [
        start + np.array(pooled_tokens(row), np.int64)
        for row, start in zip(rows, starts[:-1], strict=True)
        if row.pooling is not None
    ]
    return np.concatenate([drawn, *scored, *pooled]) if scored or pooled else drawn


def _group_by_adapter(
    rows: Sequence[StepRow], starts: np.ndarray, page_widths: Sequence[int]
) -> dict[str, np.ndarray]:
    """The arrays of the LoRA plan: tokens by their adapter, in order of first appearance."""
    adapters: dict[int, StepAdapter] = {}
    groups: dict[int, list[np.ndarray]] = {}
    for row, start, end in zip(rows, starts[:-1], starts[1:], strict=True):
        # The adapter belongs to tokens, not to the row: those before an activated adapter's start are base.
        first = start + max(0, row.adapter_start - row.start)
        if row.adapter is not None and first < end:
            adapters[row.adapter.adapter_id] = row.adapter
            groups.setdefault(row.adapter.adapter_id, []).append(np.arange(first, end, dtype=np.int32))
    segments = [np.concatenate(parts) for parts in groups.values()]
    sizes = [len(segment) for segment in segments]
    segment_starts = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(sizes, out=segment_starts[1:])
    pages = [_ranked_pages(adapter) for adapter in adapters.values()]
    return {
        "lora_rows": np.concatenate(segments) if segments else np.zeros(0, np.int32),
        "segment_starts": segment_starts,
        "segment_pages": _padded(pages, page_width(adapters, page_widths)),
        "segment_ranks": np.array([adapter.rank for adapter in adapters.values()], np.int32),
        **_vectors(segments, list(adapters.values())),
    }


def _vectors(segments: Sequence[np.ndarray], adapters: Sequence[StepAdapter]) -> dict[str, np.ndarray]:
    """The tokens of those adapters that have vectors, each with the page that holds them; {} if none has."""
    owned = [(rows, a.pages[-1]) for rows, a in zip(segments, adapters, strict=True) if a.has_vectors]
    if not owned:
        return {}
    return {
        "vector_rows": np.concatenate([segment for segment, _ in owned]).astype(np.int64),
        "vector_pages": np.concatenate([np.full(len(segment), page, np.int64) for segment, page in owned]),
    }


def _ranked_pages(adapter: StepAdapter) -> Sequence[int]:
    """Its pages without a last one that holds vectors alone."""
    return adapter.pages[: pages_of_rank(adapter.rank)]


def page_width(adapters: Mapping[int, StepAdapter], widths: Sequence[int]) -> int:
    """The least of the ascending ``widths`` that holds each adapter's ranks; if none does, what they need."""
    needed = max((pages_of_rank(adapter.rank) for adapter in adapters.values()), default=0)
    return next((width for width in widths if width >= needed), needed)


def _padded(lists: Sequence[Sequence[int]], min_width: int = 0) -> np.ndarray:
    """int32 [len(lists), longest or more], -1 beyond the end of each."""
    table = np.full((len(lists), max(min_width, *(len(ids) for ids in lists), 0)), -1, np.int32)
    for i, ids in enumerate(lists):
        table[i, : len(ids)] = ids
    return table
