"""The inputs of a step with prompts in it, in buffers that stay where they are, for captured graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import lay_out
from engine.drawn_tokens import DrawnTokens, fill_unseen
from engine.model.llama import ForwardBatch
from engine.step import StepRow
from engine.transfer import PackedLayout, to_device
from kernels.plans import BLOCK_SIZE, AttentionPlan, LoraPlan

_PADDING = {"slots": -1, "lora_rows": -1}
"""What stands beyond a step's own; 0 where nothing else is said."""


class MixedInputs:
    """Room for a step of up to ``max_tokens`` tokens in up to ``max_rows`` rows, on the device.

    The counterpart of ``engine.decode_inputs.DecodeInputs`` for rows of any length. What a step leaves unused
    becomes padding: tokens without a slot, sequences without tokens, segments without rows.

    Args:
        max_context_len: tokens of the longest context; gives the width of the block tables.
        page_widths: ascending; how many columns the table of rank pages may have. None leaves no room for
            adapters.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        max_context_len: int,
        page_widths: Sequence[int],
        device: torch.device,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._page_widths = page_widths
        self._max_pages = max(page_widths, default=0)
        int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
        self._layout = PackedLayout(
            {
                "tokens": ((max_tokens,), int64),
                "positions": ((max_tokens,), int64),
                "slots": ((max_tokens,), int64),
                "output_rows": ((max_rows,), int64),
                "query_starts": ((max_rows + 1,), int32),
                "context_lens": ((max_rows,), int32),
                "lora_rows": ((max_tokens,), int32),
                "segment_starts": ((max_rows + 1,), int32),
                "segment_ranks": ((max_rows,), int32),
                **{f"segment_pages_{width}": ((max_rows, width), int32) for width in (0, *page_widths)},
            }
        )
        self._packed = torch.zeros(self._layout.nbytes, dtype=torch.uint8, device=device)
        self._tensors = self._layout.tensors(self._packed)
        # As these are the only inputs whose idle rest is never read, they are not rewritten as a whole.
        self._block_tables = torch.full(
            (max_rows, -(-max_context_len // BLOCK_SIZE)), -1, dtype=torch.int32, device=device
        )

    def fits(self, rows: Sequence[StepRow]) -> bool:
        """Whether a step is no larger than there is room for, and its adapters are of pages alone."""
        if len(rows) > self._max_rows or self.size_of(rows) > self._max_tokens:
            return False
        adapters = {id(row.adapter): row.adapter for row in rows}.values()
        return all(
            a is None or (len(a.pages) <= self._max_pages and not a.has_vectors and not a.has_ends)
            for a in adapters
        )

    def size_of(self, rows: Sequence[StepRow]) -> int:
        """The tokens of a step."""
        return sum(len(row.tokens) for row in rows)

    def write(self, rows: Sequence[StepRow], drawn: DrawnTokens | None = None) -> int:
        """Put a step that `fits` into the buffers. Returns its page width: 0 if it has no adapters."""
        step = lay_out(rows, (0, *self._page_widths)).arrays
        width = step["segment_pages"].shape[1]
        host = torch.empty(self._layout.nbytes, dtype=torch.uint8, pin_memory=self._packed.is_cuda)
        for name, target in self._layout.arrays(host).items():
            field, _, of_width = name.partition("_pages_")
            if of_width:
                target[...] = -1
                if int(of_width) == width:
                    target[: len(step["segment_pages"])] = step["segment_pages"]
            else:
                _fill(target, step[field], field)
        self._packed.copy_(host, non_blocking=True)
        tables = step["block_tables"]
        self._block_tables[: len(rows), : tables.shape[1]].copy_(
            to_device(tables, self._packed.device), non_blocking=True
        )
        tokens = self._tensors["tokens"][: len(step["tokens"])]
        filled = fill_unseen(tokens, step["query_starts"][:-1], rows, drawn)
        if filled is not tokens:
            tokens.copy_(filled)
        return width

    def batch(self, size: int, *, page_width: int) -> ForwardBatch:
        """The first ``size`` tokens of the buffers, for launches that fit whatever is written there."""
        tensors = self._tensors
        num_rows = min(size, self._max_rows)
        return ForwardBatch(
            tokens=tensors["tokens"][:size],
            attention=AttentionPlan(
                query_starts=tensors["query_starts"][: num_rows + 1],
                context_lens=tensors["context_lens"][:num_rows],
                block_tables=self._block_tables[:num_rows],
                slots=tensors["slots"][:size],
                positions=tensors["positions"][:size],
                max_query_len=size,
            ),
            lora=LoraPlan(
                rows=tensors["lora_rows"][:size],
                segment_starts=tensors["segment_starts"][: num_rows + 1],
                segment_pages=tensors[f"segment_pages_{page_width}"][:num_rows],
                segment_ranks=tensors["segment_ranks"][:num_rows],
                num_rows=size if page_width else 0,
                num_segments=num_rows if page_width else 0,
            ),
            output_rows=tensors["output_rows"][:num_rows],
        )


def _fill(target: np.ndarray, values: np.ndarray, field: str) -> None:
    """Starts go on where the last has ended: what follows is empty."""
    target[: len(values)] = values
    padding = values[-1] if field.endswith("_starts") else _PADDING.get(field, 0)
    target[len(values) :] = padding
