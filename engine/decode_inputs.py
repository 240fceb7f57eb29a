"""The inputs of a decode step in buffers that stay where they are, as a captured graph needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from engine.batch import page_width
from engine.drawn_tokens import DrawnTokens
from engine.model.llama import ForwardBatch
from engine.step import UNSEEN, StepAdapter, StepRow
from engine.transfer import PackedLayout, to_device
from kernels.plans import BLOCK_SIZE, AttentionPlan, LoraPlan


class DecodeInputs:
    """Room for a step of up to ``max_rows`` rows of one token each, on the device.

    Every step is written over the one before, in a few copies that the host does not wait for. What a step
    leaves unused becomes padding: no slot, no context, no adapter. So any batch that is as large as the step
    or larger computes the step's rows.

    Args:
        max_context_len: tokens of the longest context; gives the width of the block tables.
        page_widths: ascending; how many columns the table of rank pages may have. Each step has the least
            that holds its widest adapter. None leaves no room for adapters.
    """

    def __init__(
        self, *, max_rows: int, max_context_len: int, page_widths: Sequence[int], device: torch.device
    ) -> None:
        self._max_rows = max_rows
        self._page_widths = page_widths
        self._max_pages = max(page_widths, default=0)
        int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
        self._layout = PackedLayout(
            {
                "token_places": ((max_rows,), int64),
                "positions": ((max_rows,), int64),
                "slots": ((max_rows,), int64),
                "context_lens": ((max_rows,), int32),
                "lora_rows": ((max_rows,), int32),
                "segment_starts": ((max_rows + 1,), int32),
                "segment_ranks": ((max_rows,), int32),
                **{f"segment_pages_{width}": ((max_rows, width), int32) for width in (0, *page_widths)},
            }
        )
        self._packed = torch.zeros(self._layout.nbytes, dtype=torch.uint8, device=device)
        self._tensors = self._layout.tensors(self._packed)
        # What the step before has drawn, then what is known, then a token for padding: see "token_places".
        self._tokens = torch.zeros(2 * max_rows + 1, dtype=torch.int64, device=device)
        self._block_tables = _BlockTables(max_rows, -(-max_context_len // BLOCK_SIZE), device)
        self._query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._output_rows = torch.arange(max_rows, device=device)
        self.write(())

    def fits(self, rows: Sequence[StepRow]) -> bool:
        """Whether a step is a pure decode step, no larger than there is room for."""
        if len(rows) > self._max_rows:
            return False
        for row in rows:
            if len(row.tokens) != 1 or row.sampling is None:
                return False
            adapter = row.adapter
            if adapter is not None and (
                len(adapter.pages) > self._max_pages or adapter.has_vectors or adapter.has_ends
            ):
                return False
        return True

    def size_of(self, rows: Sequence[StepRow]) -> int:
        """The tokens of a step, which are its rows."""
        return len(rows)

    def write(self, rows: Sequence[StepRow], drawn: DrawnTokens | None = None) -> int:
        """Put a step that `fits` into the buffers. Returns its page width: 0 if it has no adapters.

        Args:
            drawn: what the step before has drawn, at most ``max_rows`` tokens.
        """
        # A new buffer each time: the last may still be on its way to the device.
        host = torch.empty(self._layout.nbytes, dtype=torch.uint8, pin_memory=self._packed.is_cuda)
        arrays = self._layout.arrays(host)
        positions = _column([row.start for row in rows], np.int64)
        blocks = _column([row.block_ids[row.start // BLOCK_SIZE] for row in rows], np.int64)
        _fill(arrays["token_places"], self._place_tokens(rows, drawn), padding=2 * self._max_rows)
        _fill(arrays["positions"], positions, padding=0)
        _fill(arrays["slots"], blocks * BLOCK_SIZE + positions % BLOCK_SIZE, padding=-1)
        _fill(arrays["context_lens"], positions + 1, padding=0)
        width = _group_by_adapter(rows, arrays, self._page_widths)
        self._packed.copy_(host, non_blocking=True)
        self._block_tables.write([row.block_ids for row in rows])
        return width

    def _place_tokens(self, rows: Sequence[StepRow], drawn: DrawnTokens | None) -> np.ndarray:
        """Put what was drawn, and what is known, where the batch finds it. Returns each row's place there."""
        tokens = _column([row.tokens[0] for row in rows], np.int64)
        known = tokens != UNSEEN
        places = np.arange(self._max_rows, self._max_rows + len(rows))
        if not known.all():
            assert drawn is not None, "an unseen token comes from the step before"
            self._tokens[: len(drawn.tokens)].copy_(drawn.tokens)
            places = np.where(known, places, drawn.places(rows))
        if known.any():
            target = self._tokens[self._max_rows : self._max_rows + len(rows)]
            target.copy_(to_device(np.where(known, tokens, 0), target.device), non_blocking=True)
        return places

    def batch(self, size: int, *, page_width: int) -> ForwardBatch:
        """The first ``size`` rows of the buffers, for launches that fit whatever is written there.

        Launches the look-up of the tokens: under capture that must be in the graph.
        """
        tensors = self._tensors
        num_lora_rows = size if page_width else 0
        return ForwardBatch(
            tokens=self._tokens.index_select(0, tensors["token_places"][:size]),
            attention=AttentionPlan(
                query_starts=self._query_starts[: size + 1],
                context_lens=tensors["context_lens"][:size],
                block_tables=self._block_tables.device[:size],
                slots=tensors["slots"][:size],
                positions=tensors["positions"][:size],
                max_query_len=1,
            ),
            lora=LoraPlan(
                rows=tensors["lora_rows"][:size],
                segment_starts=tensors["segment_starts"][: size + 1],
                segment_pages=tensors[f"segment_pages_{page_width}"][:size],
                segment_ranks=tensors["segment_ranks"][:size],
                num_rows=num_lora_rows,
                num_segments=num_lora_rows,
            ),
            output_rows=self._output_rows[:size],
        )


class _BlockTables:
    """The block tables of a step's rows, of which only what has changed is read again.

    A table is only ever appended to. So one that was in the same row the step before, and is no longer now,
    is there already; reading ten thousand block ids again would take a tenth of a step.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.device = torch.full((max_rows, max_blocks), -1, dtype=torch.int32, device=device)
        self._host = np.full((max_rows, max_blocks), -1, np.int32)
        self._tables: list[Sequence[int]] = [()] * max_rows
        self._lengths = [0] * max_rows

    def write(self, tables: Sequence[Sequence[int]]) -> None:
        """Only as many columns as there are now: nothing beyond a row's own context is ever read."""
        if not tables:
            return
        width = 0
        for i, table in enumerate(tables):
            length = len(table)
            width = max(width, length)
            known = self._lengths[i] if table is self._tables[i] else 0
            if known != length or not known:
                self._host[i, known:length] = table[known:]
                self._tables[i] = table
                self._lengths[i] = length
        host = torch.empty(
            (len(tables), width), dtype=torch.int32, pin_memory=self.device.device.type == "cuda"
        )
        host.numpy()[:] = self._host[: len(tables), :width]
        self.device[: len(tables), :width].copy_(host, non_blocking=True)


def _column(values: Sequence[int], dtype: type) -> np.ndarray:
    return np.array(values, dtype)


def _fill(target: np.ndarray, values: np.ndarray, *, padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding


def _group_by_adapter(
    rows: Sequence[StepRow], arrays: Mapping[str, np.ndarray], page_widths: Sequence[int]
) -> int:
    """Fill the LoRA plan's arrays; segments beyond the last are empty. Returns the page width."""
    adapters: dict[int, StepAdapter] = {}
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        adapter = row.adapter
        if adapter is not None and row.start >= row.adapter_start:
            adapters[adapter.adapter_id] = adapter
            groups.setdefault(adapter.adapter_id, []).append(i)
    grouped = _column(list(chain.from_iterable(groups.values())), np.int32)
    ends = np.cumsum([len(group) for group in groups.values()], dtype=np.int32)
    _fill(arrays["lora_rows"], grouped, padding=-1)
    arrays["segment_starts"][0] = 0
    _fill(arrays["segment_starts"][1:], ends, padding=len(grouped))
    _fill(arrays["segment_ranks"], _column([a.rank for a in adapters.values()], np.int32), padding=0)
    width = page_width(adapters, page_widths) if adapters else 0
    pages = arrays[f"segment_pages_{width}"]
    pages.fill(-1)
    for segment, adapter in enumerate(adapters.values()):
        pages[segment, : len(adapter.pages)] = adapter.pages
    return width
