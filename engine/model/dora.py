"""The gains of DoRA: by how much it scales what each output computes.

DoRA (Liu et al., 2024) replaces a weight ``W`` by ``m / ‖W + ΔW‖ · (W + ΔW)``, with one trained magnitude
``m`` and one norm for each output. The norm depends on the adapter alone, so it is computed once, when the
adapter is loaded, and directly: expanded into its products it would cost as much and cancel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

CHUNK_ROWS = 1024
"""Rows of a weight that are in float32 at once: few enough to pass for small beside a step's memory."""


def row_gains(
    magnitude: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """``m / ‖W + s·B·A‖ - 1`` by output, float32 [out] on the CPU.

    Args:
        magnitude: [out]. weight: W, [out, in], on any device; the work is done there.
        a: [r, in]. b: [out, r].
    """
    a = a.to(weight.device, torch.float32)
    norms = [
        torch.addmm(rows.float(), part.to(weight.device, torch.float32), a, alpha=scale).norm(dim=1)
        for rows, part in zip(weight.split(CHUNK_ROWS), b.split(CHUNK_ROWS), strict=True)
    ]
    return _gains(magnitude, torch.cat(norms))


def column_gains(
    magnitude: torch.Tensor, chunks: Iterable[torch.Tensor], a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same of an embedding, whose outputs are its columns: float32 [hidden].

    Args:
        magnitude: [hidden]. chunks: float32 parts of the table [vocabulary, hidden], in order.
        a: [r, vocabulary]. b: [hidden, r].
    """
    squares = torch.zeros(len(b), dtype=torch.float64)
    start = 0
    for rows in chunks:
        columns = a[:, start : start + len(rows)].to(rows.device, torch.float32)
        total = torch.addmm(rows, columns.T, b.T.to(rows.device, torch.float32), alpha=scale)
        squares += total.square().sum(dim=0, dtype=torch.float64).cpu()
        start += len(rows)
    return _gains(magnitude, squares.sqrt())


def _gains(magnitude: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    return (magnitude.double().flatten() / norms.double().cpu() - 1).float()
