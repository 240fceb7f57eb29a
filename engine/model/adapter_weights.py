"""An adapter's weights in host memory, already in the layout of rank pages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.model import huge_pages
from engine.model.adapter_ends import AdapterEnds
from engine.model.config import PROJECTION_GROUPS, ModelConfig
from kernels.plans import RANK_PAGE

if TYPE_CHECKING:
    from engine.model.adapter_packing import StoredWeights


@dataclass(frozen=True, slots=True)
class GroupWeights:
    """One projection group of all ``L`` layers, in ``P`` pages of ``M`` projections.

    Attributes:
        a: [L, P, M, 16, in]. b: [L, P, 16, out] (Bᵀ). Zero above a projection's rank, but for vectors, or of
            any content where nobody reads: above the adapter's rank, and in what it lacks.
        scales: float32 [L, P, M]; 0 where the adapter lacks the projection.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostBlock:
    """One block of host memory for an adapter's pages.

    Page-locked memory is given out in powers of two, and to lock more of it takes long: with a block for each
    tensor much would be wasted, and seldom would one be found again.

    Attributes:
        weights: all groups' A and B, in the model's dtype. scales: float32, all groups'.
        groups: the same by group; they share memory with the above.
        nbytes: of the block.
    """

    weights: torch.Tensor
    scales: torch.Tensor
    groups: dict[str, GroupWeights]
    nbytes: int

    @classmethod
    def empty(
        cls, num_pages: int, config: ModelConfig, dtype: torch.dtype, *, pin: bool, zero: bool = True
    ) -> HostBlock:
        """All zero, or of any content; ``pin`` for page-locked memory."""
        shapes = page_shapes(num_pages, config)
        sides = [shape for a, b, _ in shapes.values() for shape in (a, b)]
        weights_bytes = sum(map(math.prod, sides)) * dtype.itemsize
        nbytes = weights_bytes + sum(math.prod(s) for _, _, s in shapes.values()) * torch.float32.itemsize
        taken = 1 << (nbytes - 1).bit_length() if pin else huge_pages.taken_for(nbytes)
        if pin:
            block = (torch.zeros if zero else torch.empty)(taken, dtype=torch.uint8, pin_memory=True)
        else:
            block = (huge_pages.zeros if zero else huge_pages.empty)(taken)
        weights = block[:weights_bytes].view(dtype)
        scales = block[weights_bytes:nbytes].view(torch.float32)
        of_groups = zip(
            shapes,
            *[iter(cut(weights, sides))] * 2,
            cut(scales, [own for _, _, own in shapes.values()]),
            strict=True,
        )
        return cls(weights, scales, {group: GroupWeights(a, b, own) for group, a, b, own in of_groups}, taken)


def page_shapes(num_pages: int, config: ModelConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """By group, the shapes of `GroupWeights` in so many pages."""
    head = (config.num_layers, num_pages)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    for group, projections in PROJECTION_GROUPS.items():
        width, out = config.group_in(group), config.group_splits(group)[-1]
        shapes[group] = (
            (*head, len(projections), RANK_PAGE, width),
            (*head, RANK_PAGE, out),
            (*head, len(projections)),
        )
    return shapes


def cut(flat: torch.Tensor, shapes: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors of these shapes, one behind the other."""
    tensors, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        tensors.append(flat[start:end].view(shape))
        start = end
    return tensors


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory.

    Attributes:
        rank: the largest of its projections', and at least 1: every adapter has a page.
        num_pages: what ``groups`` fill.
        nbytes: of all that follows.
        groups: laid out for the pages; empty where ``stored`` is there in their place.
        has_vectors: the last page has vectors above its ranks (``kernels.plans.LoraPool``).
        ends: what it changes outside the decoder layers, if anything.
    """

    rank: int
    num_pages: int
    nbytes: int
    groups: dict[str, GroupWeights]
    has_vectors: bool = False
    ends: AdapterEnds | None = None
    stored: StoredWeights | None = None

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
