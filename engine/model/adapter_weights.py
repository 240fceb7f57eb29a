"""An adapter's weights in host memory, already in the layout of rank pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.adapter_ends import AdapterEnds
from kernels.plans import RANK_PAGE


@dataclass(frozen=True, slots=True)
class GroupWeights:
    """One projection group of all ``L`` layers, in ``P`` pages of ``M`` projections.

    Attributes:
        a: [L, P, M, 16, in]. b: [L, P, 16, out] (Bᵀ). Zero above a projection's rank, but for vectors.
        scales: float32 [L, P, M]; 0 where the adapter lacks the projection.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory.

    Attributes:
        rank: the largest of its projections', and at least 1: every adapter has a page.
        num_pages: what ``groups`` fill.
        nbytes: of ``groups`` and ``ends``.
        has_vectors: the last page has vectors above its ranks (``kernels.plans.LoraPool``).
        ends: what it changes outside the decoder layers, if anything.
    """

    rank: int
    num_pages: int
    nbytes: int
    groups: dict[str, GroupWeights]
    has_vectors: bool = False
    ends: AdapterEnds | None = None

    @property
    def ends_bytes(self) -> int:
        """Device memory that it takes beside its pages."""
        return 0 if self.ends is None else self.ends.nbytes

    @property
    def vocab_size(self) -> int:
        """Tokens that it can read and draw; 0: those of the base model."""
        return 0 if self.ends is None else self.ends.vocab_size


def pages_of_rank(rank: int) -> int:
    """Rank pages that this many rank rows take."""
    return -(-rank // RANK_PAGE)
