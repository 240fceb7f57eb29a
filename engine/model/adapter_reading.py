"""From an adapter's files to its weights in host memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from adapters.base_model import BaseModelShape
from adapters.layout import AdapterLayout, LowRank
from adapters.peft_config import MAX_RANK
from adapters.reader import read_layout
from engine.model.adapter_tensors import AdapterTensors
from engine.model.adapter_weights import GroupWeights, HostAdapter, pages_of_rank
from engine.model.config import PROJECTION_GROUPS, ModelConfig
from engine.model.dora import row_gains
from engine.model.ends_reading import EndsReader
from engine.model.llama import LlamaModel
from kernels.plans import GAIN_ROW, RANK_PAGE, SHIFT_ROW

_GROUP_OF = {
    projection: (group, m)
    for group, projections in PROJECTION_GROUPS.items()
    for m, projection in enumerate(projections)
}
_MOST_RESERVED = 64
"""Adapters whose host memory is page-locked at the start: those of a small model are soon locked."""
_NUM_VECTORS = 2
"""Rows above the ranks in the last page, of an adapter that has any."""


def read_adapter(folder: Path, network: LlamaModel, *, pin: bool) -> HostAdapter:
    """Read a validated adapter from its folder and lay it out for the device, whatever its rank.

    Weights are converted to the model's dtype. DoRA's norms and the comparison of whole tables need the
    base's weights, which are read where they are: on a GPU beside the steps, on a stream of its own.

    Args:
        pin: in page-locked memory, so that a copy to the device runs beside the decode.

    Raises:
        adapters.errors.InvalidAdapter: the files do not fit the model.
    """
    config = network.config
    shape = BaseModelShape(
        config.num_layers, config.modules, MAX_RANK, config.vocab_size, config.tie_word_embeddings
    )
    layout = read_layout(folder, shape)
    rank = max(1, layout.rank)
    num_pages = pages_of_rank(rank + _NUM_VECTORS if layout.has_vectors else rank)
    groups, nbytes = _empty_groups(num_pages, config, network.dtype, pin=pin)
    ends = None
    tensors = AdapterTensors(folder)
    with _own_stream(network.device):
        for (layer, group), updates in _by_group(layout).items():
            _fill_group(groups[group], updates, layer, group, network, tensors)
        if layout.has_ends or layout.vocab_size != config.vocab_size:
            reader = EndsReader(network.embedding_weight(), network.lm_head_weight(), pin=pin)
            ends = reader.read(layout, tensors)
    nbytes += 0 if ends is None else ends.nbytes
    return HostAdapter(rank, num_pages, nbytes, groups, layout.has_vectors, ends)


def reserve_host_memory(network: LlamaModel, *, nbytes: int, max_rank: int) -> None:
    """Page-lock memory for adapters to come: one of the largest rank, and of one page as many as fit.

    To lock memory makes every launch on the device wait, so it is better not done while sequences decode.
    torch keeps what is given back here, and gives it out again to whoever asks for as much.
    """
    held: list[dict[str, GroupWeights]] = []
    num_pages = pages_of_rank(max_rank)
    while nbytes > 0 and len(held) < _MOST_RESERVED:
        groups, taken = _empty_groups(num_pages, network.config, network.dtype, pin=True)
        held.append(groups)
        nbytes -= taken
        num_pages = 1


def _empty_groups(
    num_pages: int, config: ModelConfig, dtype: torch.dtype, *, pin: bool
) -> tuple[dict[str, GroupWeights], int]:
    """All groups' weights, zero, and the bytes that they take.

    They are cut from one block. Page-locked memory is given out in powers of two, and to lock more of it
    takes long: with a block for each tensor much would be wasted, and seldom would one be found again.
    """
    head = (config.num_layers, num_pages)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    for group, projections in PROJECTION_GROUPS.items():
        width, out = config.group_in(group), config.group_splits(group)[-1]
        shapes[group] = (
            (*head, len(projections), RANK_PAGE, width),
            (*head, RANK_PAGE, out),
            (*head, len(projections)),
        )
    weights_bytes = sum(math.prod(shape) for a, b, _ in shapes.values() for shape in (a, b)) * dtype.itemsize
    scales_bytes = sum(math.prod(scales) for _, _, scales in shapes.values()) * torch.float32.itemsize
    nbytes = weights_bytes + scales_bytes
    if pin:
        nbytes = 1 << (nbytes - 1).bit_length()
    block = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin)
    weights = iter(_cut(block, dtype, [shape for a, b, _ in shapes.values() for shape in (a, b)]))
    scales = _cut(block[weights_bytes:], torch.float32, [scales for _, _, scales in shapes.values()])
    groups = {
        group: GroupWeights(next(weights), next(weights), own)
        for group, own in zip(shapes, scales, strict=True)
    }
    return groups, nbytes


def _cut(block: torch.Tensor, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors of these shapes, one behind the other from the beginning of a block of bytes."""
    tensors, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape) * dtype.itemsize
        tensors.append(block[start:end].view(dtype).view(shape))
        start = end
    return tensors


def _by_group(layout: AdapterLayout) -> dict[tuple[int, str], dict[int, LowRank]]:
    """The updates of each projection group of each layer, by the projection's place in the group."""
    grouped: dict[tuple[int, str], dict[int, LowRank]] = {}
    for (layer, module), update in layout.linear.items():
        group, m = _GROUP_OF[module]
        grouped.setdefault((layer, group), {})[m] = update
    return grouped


def _fill_group(
    weights: GroupWeights,
    updates: Mapping[int, LowRank],
    layer: int,
    group: str,
    network: LlamaModel,
    tensors: AdapterTensors,
) -> None:
    """Write one layer's updates of a group into its pages, and their vectors into the last page."""
    splits = network.config.group_splits(group)
    base = None
    for m, update in updates.items():
        columns = slice(splits[m], splits[m + 1])
        a, b = tensors.get(update.a), tensors.get(update.b)
        vectors = weights.b[layer, -1, :, columns]
        if update.magnitude is not None:
            # One copy for the group: on some devices the base's layout is another, and this unpacks it.
            base = network.group_weight(layer, group) if base is None else base
            gain = row_gains(tensors.get(update.magnitude), base[columns], a, b, update.scale)
            vectors[GAIN_ROW] = gain
            b = b * (1 + gain)[:, None]
        if update.bias is not None:
            vectors[SHIFT_ROW] = tensors.get(update.bias).float() * update.scale
        _fill_ranks(weights, update, layer, m, columns, (a, b))


def _fill_ranks(
    weights: GroupWeights,
    update: LowRank,
    layer: int,
    m: int,
    columns: slice,
    sides: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """A is [r, in] as stored, B is [out, r]; in the pages the rank comes first in both."""
    a, b = sides[0], sides[1].T
    for page in range(pages_of_rank(update.rank)):
        ranks = slice(page * RANK_PAGE, min((page + 1) * RANK_PAGE, update.rank))
        live = ranks.stop - ranks.start
        weights.a[layer, page, m, :live] = a[ranks]
        weights.b[layer, page, :live, columns] = b[ranks]
        weights.scales[layer, page, m] = update.scale


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Work on the device within goes beside that of the steps, and none of theirs waits for it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_load_stream(device)):
        yield


@functools.cache
def _load_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loads, since what the allocator keeps for a stream serves that stream alone."""
    return torch.cuda.Stream(device)
