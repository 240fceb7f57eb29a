"""Adapter weights on the device, in rank pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.model import huge_pages
from engine.model.adapter_weights import HostAdapter
from engine.model.config import PROJECTION_GROUPS, ModelConfig
from kernels.plans import RANK_PAGE, LoraPool


class LayerLoraPools(NamedTuple):
    """One layer's pools, by projection group."""

    qkv: LoraPool
    o: LoraPool
    gate_up: LoraPool
    down: LoraPool


class RankPagePool:
    """Owns the rank pages of all layers: one allocation for the life of the process.

    A page id is valid in every layer and group. Pages hold whatever was last written to them: who may read
    one is the scheduler's knowledge, through the pages a step names.
    """

    def __init__(self, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self._groups = {
            group: _GroupPages(config, group, num_pages, dtype, device) for group in PROJECTION_GROUPS
        }
        self.layers = [
            LayerLoraPools(**{group: pages.layer(i) for group, pages in self._groups.items()})
            for i in range(config.num_layers)
        ]

    def write(self, pages: Sequence[int], adapter: HostAdapter) -> None:
        """Overwrite ``pages``, which nobody may reference, with an adapter's, in order."""
        assert len(pages) == adapter.num_pages, "an adapter fills exactly its own number of pages"
        for group, weights in adapter.groups.items():
            target = self._groups[group]
            for whole, source in (
                (target.a, weights.a),
                (target.b, weights.b),
                (target.scales, weights.scales),
            ):
                # In one piece to the device first: from there on no copy of it makes the host wait.
                staged = source.to(whole.device, non_blocking=True)
                for i, page in enumerate(pages):
                    whole[:, page].copy_(staged[:, i])


class _GroupPages:
    """One projection group's pages: layers first, so that an adapter is written by a copy for each tensor."""

    def __init__(
        self, config: ModelConfig, group: str, num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.splits = config.group_splits(group)
        layers, projections = config.num_layers, len(PROJECTION_GROUPS[group])
        width = config.group_in(group)
        self.a = _zeros((layers, num_pages, projections, RANK_PAGE, width), dtype, device)
        self.b = _zeros((layers, num_pages, RANK_PAGE, self.splits[-1]), dtype, device)
        self.scales = torch.zeros(layers, num_pages, projections, dtype=torch.float32, device=device)

    def layer(self, index: int) -> LoraPool:
        return LoraPool(self.a[index], self.b[index], self.scales[index], self.splits)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Written here already: no step shall wait for the system to find the memory.
    return huge_pages.zeros(math.prod(shape) * dtype.itemsize).zero_().view(dtype).view(shape)


def rank_page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one rank page in all layers and groups, scales included."""
    per_layer = 0
    for group, projections in PROJECTION_GROUPS.items():
        width = len(projections) * config.group_in(group) + config.group_splits(group)[-1]
        per_layer += RANK_PAGE * width * dtype.itemsize + len(projections) * torch.float32.itemsize
    return config.num_layers * per_layer
