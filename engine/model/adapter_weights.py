"""An adapter's weights in host memory, already in the layout of rank pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from adapters.peft_config import MAX_RANK
from adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    BaseModelShape,
    LoraTensor,
    map_tensors,
    parse_config,
    read_header,
)
from engine.model.config import PROJECTION_GROUPS, ModelConfig
from kernels.plans import RANK_PAGE

_GROUP_OF = {
    projection: (group, m)
    for group, projections in PROJECTION_GROUPS.items()
    for m, projection in enumerate(projections)
}


@dataclass(frozen=True, slots=True)
class GroupWeights:
    """One projection group of all ``L`` layers, in ``P`` pages of ``M`` projections.

    Attributes:
        a: [L, P, M, 16, in]. b: [L, P, 16, out] (Bᵀ). Zero above a projection's rank.
        scales: float32 [L, P, M]; 0 where the adapter lacks the projection.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory. ``rank`` is the largest of its projections'."""

    rank: int
    num_pages: int
    nbytes: int
    groups: dict[str, GroupWeights]


def read_adapter(folder: Path, config: ModelConfig, dtype: torch.dtype, *, pin: bool) -> HostAdapter:
    """Read a validated adapter from its folder and lay it out in rank pages, whatever its rank.

    Args:
        dtype: the pool's; weights are converted to it.
        pin: in page-locked memory, so that a copy to the device runs beside the decode.

    Raises:
        adapters.errors.InvalidAdapter: the files do not fit the model.
    """
    shape = BaseModelShape(config.num_layers, config.modules, MAX_RANK)
    tensors = map_tensors(
        parse_config((folder / CONFIG_FILE).read_bytes()), read_header(folder / WEIGHTS_FILE), shape
    )
    adapter = _empty_adapter(max(tensor.rank for tensor in tensors), config, dtype, pin=pin)
    _fill(adapter, tensors, folder / WEIGHTS_FILE, config)
    return adapter


def pages_of_rank(rank: int) -> int:
    """Rank pages that an adapter of this rank takes."""
    return -(-rank // RANK_PAGE)


def _empty_adapter(rank: int, config: ModelConfig, dtype: torch.dtype, *, pin: bool) -> HostAdapter:
    num_pages = pages_of_rank(rank)
    groups = {}
    for group, projections in PROJECTION_GROUPS.items():
        head = (config.num_layers, num_pages)
        width, out = config.group_in(group), config.group_splits(group)[-1]
        groups[group] = GroupWeights(
            a=torch.zeros(*head, len(projections), RANK_PAGE, width, dtype=dtype, pin_memory=pin),
            b=torch.zeros(*head, RANK_PAGE, out, dtype=dtype, pin_memory=pin),
            scales=torch.zeros(*head, len(projections), dtype=torch.float32, pin_memory=pin),
        )
    nbytes = sum(
        tensor.nbytes for weights in groups.values() for tensor in (weights.a, weights.b, weights.scales)
    )
    return HostAdapter(rank, num_pages, nbytes, groups)


def _fill(adapter: HostAdapter, tensors: Iterable[LoraTensor], file: Path, config: ModelConfig) -> None:
    splits = {group: config.group_splits(group) for group in PROJECTION_GROUPS}
    with safe_open(file, framework="pt") as handle:
        for tensor in tensors:
            group, m = _GROUP_OF[tensor.module]
            weights = adapter.groups[group]
            values = handle.get_tensor(tensor.name)
            # Rank rows first in both: A is [r, in] as stored, B is [out, r].
            rows = values if tensor.side == "A" else values.T
            columns = slice(splits[group][m], splits[group][m + 1])
            for page in range(pages_of_rank(tensor.rank)):
                part = rows[page * RANK_PAGE : (page + 1) * RANK_PAGE]
                if tensor.side == "A":
                    weights.a[tensor.layer, page, m, : len(part)] = part
                else:
                    weights.b[tensor.layer, page, : len(part), columns] = part
                weights.scales[tensor.layer, page, m] = tensor.scale
