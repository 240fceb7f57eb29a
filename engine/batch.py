"""A ``StepPlan`` as the tensors that the kernels read. Built anew for every step, kept by nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.drawn_tokens import DrawnTokens, fill_unseen
from engine.model.adapter_weights import pages_of_rank
from engine.model.llama import ForwardBatch
from engine.step import StepAdapter, StepRow
from engine.transfer import to_device
from kernels.plans import BLOCK_SIZE, AttentionPlan, LoraPlan, RowVectors


def build_forward_batch(
    rows: Sequence[StepRow],
    device: torch.device,
    *,
    page_widths: Sequence[int] = (),
    drawn: DrawnTokens | None = None,
) -> ForwardBatch:
    """Lay out a step's rows as one flat batch of tokens, in their order. The host waits for nothing.

    Tokens that no host has seen are taken from ``drawn``, what the step before has drawn.
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
    tokens = to_device(np.concatenate([np.asarray(row.tokens, np.int64) for row in rows]), device)
    return ForwardBatch(
        tokens=fill_unseen(tokens, starts[:-1], rows, drawn),
        attention=_attention_plan(rows, starts, owners, positions, first_positions + lengths, device),
        lora=_lora_plan(rows, starts, device, page_widths),
        output_rows=to_device(starts[1:][sampled] - 1, device),
    )


def _attention_plan(
    rows: Sequence[StepRow],
    starts: np.ndarray,
    owners: np.ndarray,
    positions: np.ndarray,
    context_lens: np.ndarray,
    device: torch.device,
) -> AttentionPlan:
    tables = _padded([row.block_ids for row in rows])
    blocks = tables[owners, positions // BLOCK_SIZE]
    assert (blocks >= 0).all(), "a row's block table covers every token of its step"
    return AttentionPlan(
        query_starts=to_device(starts.astype(np.int32), device),
        context_lens=to_device(context_lens.astype(np.int32), device),
        block_tables=to_device(tables, device),
        slots=to_device(blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE, device),
        positions=to_device(positions, device),
        max_query_len=int(np.diff(starts).max()),
        max_context_len=int(context_lens.max()),
    )


def _lora_plan(
    rows: Sequence[StepRow], starts: np.ndarray, device: torch.device, page_widths: Sequence[int]
) -> LoraPlan:
    """Group the tokens that an adapter applies to by adapter, in order of first appearance."""
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
    flat = np.concatenate(segments) if segments else np.zeros(0, np.int32)
    return LoraPlan(
        rows=to_device(flat, device),
        segment_starts=to_device(segment_starts, device),
        segment_pages=to_device(
            _padded([_ranked_pages(a) for a in adapters.values()], page_width(adapters, page_widths)),
            device,
        ),
        segment_ranks=to_device(np.array([adapter.rank for adapter in adapters.values()], np.int32), device),
        num_rows=len(flat),
        num_segments=len(segments),
        max_segment_rows=max(sizes, default=0),
        vectors=_row_vectors(segments, list(adapters.values()), device),
    )


def _row_vectors(
    segments: Sequence[np.ndarray], adapters: Sequence[StepAdapter], device: torch.device
) -> RowVectors | None:
    """The tokens of those adapters that have vectors, each with the page that holds them."""
    owned = [(rows, a.pages[-1]) for rows, a in zip(segments, adapters, strict=True) if a.has_vectors]
    if not owned:
        return None
    rows = np.concatenate([segment for segment, _ in owned]).astype(np.int64)
    pages = np.concatenate([np.full(len(segment), page, np.int64) for segment, page in owned])
    return RowVectors(to_device(rows, device), to_device(pages, device))


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
