"""Vectors of prompts: what the model's last layer says of their tokens, in one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.step import Pooling, StepRow
from engine.transfer import Readback


def pooled_tokens(row: StepRow) -> range:
    """Indices among a row's tokens of those whose final hidden states its vector is made of."""
    if row.pooling is Pooling.MEAN:
        return range(len(row.tokens))
    if row.pooling is Pooling.LAST and row.sampling is not None:
        return range(len(row.tokens) - 1, len(row.tokens))
    return range(0)


class PendingVectors:
    """What the pooled rows of one step add to their vectors, on its way to the host.

    Args:
        rows: those of the step that have a pooling.
        hidden: [P, H], of the tokens that `pooled_tokens` names, one row after another.
    """

    def __init__(self, rows: Sequence[StepRow], hidden: torch.Tensor, readback: Readback) -> None:
        counts = [len(pooled_tokens(row)) for row in rows]
        parts = hidden.float().split(counts)
        self._seq_ids = [row.seq_id for row, count in zip(rows, counts, strict=True) if count]
        sums = [part.sum(dim=0) for part, count in zip(parts, counts, strict=True) if count]
        self._copies = readback.start([torch.stack(sums)]) if sums else None

    def result(self) -> dict[int, np.ndarray]:
        """By sequence the sum of its tokens' states, float32 [H]; waits for the device."""
        if self._copies is None:
            return {}
        (sums,) = self._copies.wait()
        return dict(zip(self._seq_ids, sums.numpy(), strict=True))
