"""Adapter weights on the device, in rank pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.model import huge_pages
from engine.model.adapter_packing import StoredWeights
from engine.model.adapter_weights import HostAdapter, cut, page_shapes
from engine.model.config import PROJECTION_GROUPS, ModelConfig
from kernels.packing import TARGET_FIELD, pack
from kernels.plans import RANK_PAGE, LoraPool


class LayerLoraPools(NamedTuple):
    """One layer's pools, by projection group."""

    qkv: LoraPool
    o: LoraPool
    gate_up: LoraPool
    down: LoraPool


class RankPagePool:
    """Owns the rank pages of all layers: allocated once, for the life of the process.

    A page id is valid in every layer and group. Pages hold whatever was last written to them, rank rows that
    nobody reads included: who may read one is the scheduler's knowledge, through the pages a step names.
    """

    def __init__(self, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._num_pages = num_pages
        shapes = page_shapes(num_pages, config)
        sides = [shape for a, b, _ in shapes.values() for shape in (a, b)]
        if device.type == "cpu":
            # In one piece, so that one call fills a page, and written here already: no step shall wait for
            # the system to find the memory.
            nbytes = sum(map(math.prod, sides)) * dtype.itemsize
            self._weights = huge_pages.zeros(nbytes).zero_().view(dtype)
            tensors = iter(cut(self._weights, sides))
        else:
            tensors = (torch.zeros(shape, dtype=dtype, device=device) for shape in sides)
        self._groups = {
            group: _GroupPages(
                next(tensors),
                next(tensors),
                torch.zeros(own, dtype=torch.float32, device=device),
                config.group_splits(group),
            )
            for group, (_, _, own) in shapes.items()
        }
        self.layers = [
            LayerLoraPools(**{group: pages.layer(i) for group, pages in self._groups.items()})
            for i in range(config.num_layers)
        ]

    def write(self, pages: Sequence[int], adapter: HostAdapter) -> None:
        """Overwrite ``pages``, which nobody may reference, with an adapter's, in order.

        What the adapter has no weights for stays as it was, under scales of 0.
        """
        assert len(pages) == adapter.num_pages, "an adapter fills exactly its own number of pages"
        if adapter.stored is not None:
            self._pack(pages, adapter.stored)
            return
        for group, weights in adapter.groups.items():
            target = self._groups[group]
            copies = [(target.scales, weights.scales)]
            if adapter.has_vectors or weights.scales.any():  # else nobody reads the others
                copies += [(target.a, weights.a), (target.b, weights.b)]
            for whole, source in copies:
                # In one piece to the device first: from there on no copy of it makes the host wait.
                staged = source.to(whole.device, non_blocking=True)
                for i, page in enumerate(pages):
                    whole[:, page].copy_(staged[:, i])

    def _pack(self, pages: Sequence[int], stored: StoredWeights) -> None:
        """Lays an adapter's files out in its pages. Rank rows above its rank stay as they were."""
        plan = stored.plan
        shapes = page_shapes(len(pages), self._config)
        scales = cut(plan.scales, [own for _, _, own in shapes.values()])
        for group, own in zip(self._groups.values(), scales, strict=True):
            for i, page in enumerate(pages):
                group.scales[:, page].copy_(own[:, i])
                if plan.has_gaps:
                    group.a[:, page].zero_()
                    group.b[:, page].zero_()
        copies = plan.copies.copy()
        copies[:, TARGET_FIELD] = self._places(copies[:, TARGET_FIELD], pages)
        pack(stored.contents, copies, self._weights, num_threads=torch.get_num_threads())

    def _places(self, targets: np.ndarray, pages: Sequence[int]) -> np.ndarray:
        """Offsets in the weights of a `HostBlock` of so many pages, as those in the pool's."""
        own, whole = (
            [math.prod(shape) for a, b, _ in page_shapes(count, self._config).values() for shape in (a, b)]
            for count in (len(pages), self._num_pages)
        )
        starts = np.cumsum([0, *own[:-1]])
        side = np.searchsorted(starts, targets, side="right") - 1
        page_size = np.array(own)[side] // (self._config.num_layers * len(pages))
        row, within = np.divmod(targets - starts[side], page_size)
        layer, index = np.divmod(row, len(pages))
        row = layer * self._num_pages + np.array(pages)[index]
        return np.cumsum([0, *whole[:-1]])[side] + row * page_size + within


class _GroupPages(NamedTuple):
    """One projection group's pages: layers first, so that an adapter is written by a copy for each tensor."""

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    splits: tuple[int, ...]

    def layer(self, index: int) -> LoraPool:
        return LoraPool(self.a[index], self.b[index], self.scales[index], self.splits)


def rank_page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one rank page in all layers and groups, scales included."""
    per_layer = 0
    for group, projections in PROJECTION_GROUPS.items():
        width = len(projections) * config.group_in(group) + config.group_splits(group)[-1]
        per_layer += RANK_PAGE * width * dtype.itemsize + len(projections) * torch.float32.itemsize
    return config.num_layers * per_layer
