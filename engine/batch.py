"""A ``StepPlan`` as the tensors that the kernels read. Built anew for every step, kept by nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.model.llama import ForwardBatch
from engine.step import StepAdapter, StepRow
from kernels.plans import BLOCK_SIZE, AttentionPlan, LoraPlan


def build_forward_batch(
    rows: Sequence[StepRow], device: torch.device, *, page_widths: Sequence[int] = ()
) -> ForwardBatch:
    """Lay out a step's rows as one flat batch of tokens, in their order.

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
    return ForwardBatch(
        tokens=_tensor(np.concatenate([np.asarray(row.tokens, np.int64) for row in rows]), device),
        attention=_attention_plan(rows, starts, owners, positions, first_positions + lengths, device),
        lora=_lora_plan(rows, starts, device, page_widths),
        output_rows=_tensor(starts[1:][sampled] - 1, device),
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
        query_starts=_tensor(starts.astype(np.int32), device),
        context_lens=_tensor(context_lens.astype(np.int32), device),
        block_tables=_tensor(tables, device),
        slots=_tensor(blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE, device),
        positions=_tensor(positions, device),
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
        rows=_tensor(flat, device),
        segment_starts=_tensor(segment_starts, device),
        segment_pages=_tensor(
            _padded([adapter.pages for adapter in adapters.values()], page_width(adapters, page_widths)),
            device,
        ),
        segment_ranks=_tensor(np.array([adapter.rank for adapter in adapters.values()], np.int32), device),
        num_rows=len(flat),
        num_segments=len(segments),
        max_segment_rows=max(sizes, default=0),
    )


def page_width(adapters: Mapping[int, StepAdapter], widths: Sequence[int]) -> int:
    """The least of the ascending ``widths`` that holds each adapter's pages; if none does, what they need."""
    needed = max((len(adapter.pages) for adapter in adapters.values()), default=0)
    return next((width for width in widths if width >= needed), needed)


def _padded(lists: Sequence[Sequence[int]], min_width: int = 0) -> np.ndarray:
    """int32 [len(lists), longest or more], -1 beyond the end of each."""
    table = np.full((len(lists), max(min_width, *(len(ids) for ids in lists), 0)), -1, np.int32)
    for i, ids in enumerate(lists):
        table[i, : len(ids)] = ids
    return table


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
