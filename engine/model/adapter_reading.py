"""From an adapter's files to its weights in host memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from adapters.layout import LowRank
from adapters.peft_config import LoraConfig, parse_config
from adapters.reader import read_raw_config
from adapters.weight_files import read_headers
from engine.model import huge_pages
from engine.model.adapter_packing import GroupUpdates, PackingPlan, StoredWeights, packing_plan
from engine.model.adapter_tensors import AdapterTensors
from engine.model.adapter_weights import GroupWeights, HostAdapter, HostBlock, pages_of_rank
from engine.model.dora import row_gains
from engine.model.ends_reading import EndsReader
from engine.model.llama import LlamaModel
from kernels.packing import pack
from kernels.plans import GAIN_ROW, RANK_PAGE, SHIFT_ROW

_MOST_KEPT = 64
"""Configs that are kept parsed."""
_LARGEST_KEPT = 16 * 1024
"""Bytes of such a config; one may have a megabyte of patterns."""
_MOST_RESERVED = 64
"""Adapters whose host memory is page-locked at the start: those of a small model are soon locked."""
_UNDER_WAY = 4
"""Adapters that are being read, or have been and no budget counts them yet."""


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
    plan = packing_plan(_read_config(folder), read_headers(folder), config, network.dtype)
    layout, tensors = plan.layout, AdapterTensors(folder)
    block = HostBlock.empty(plan.num_pages, config, network.dtype, pin=pin, zero=plan.must_be_zero)
    pack([tensors.file(name) for name in plan.files], plan.copies, block.weights)
    block.scales.copy_(plan.scales)
    ends = None
    with _own_stream(network.device):
        for group in plan.vectors:
            _fill_vectors(block.groups[group.group], group, network, tensors)
        if _has_ends(plan, network):
            reader = EndsReader(network.embedding_weight(), network.lm_head_weight(), pin=pin)
            ends = reader.read(layout, tensors)
    nbytes = block.nbytes + (0 if ends is None else ends.nbytes)
    return HostAdapter(plan.rank, plan.num_pages, nbytes, block.groups, layout.has_vectors, ends)


def read_as_stored(folder: Path, network: LlamaModel) -> HostAdapter:
    """Read a validated adapter for a model on a CPU.

    Where nothing is computed from its weights, they stay as the files have them: to lay them out in the rank
    pages is little more than the copy from host memory would be. Else as `read_adapter`, which says more.
    """
    headers = read_headers(folder)
    plan = packing_plan(_read_config(folder), headers, network.config, network.dtype)
    if plan.vectors or _has_ends(plan, network):
        return read_adapter(folder, network, pin=False)
    contents = tuple(_content(folder / name, header.file_size) for name, header in headers.files)
    nbytes = sum(huge_pages.taken_for(len(content)) for content in contents)
    return HostAdapter(plan.rank, plan.num_pages, nbytes, {}, stored=StoredWeights(plan, contents))


def _read_config(folder: Path) -> LoraConfig:
    """The adapter's config. Others have had the same to the byte; to parse it again would take 0.2 ms of
    Python, for which the engine's loop waits.
    """
    raw = read_raw_config(folder)
    return _kept_config(raw) if len(raw) <= _LARGEST_KEPT else parse_config(raw)


_kept_config = functools.lru_cache(_MOST_KEPT)(parse_config)


def _has_ends(plan: PackingPlan, network: LlamaModel) -> bool:
    return plan.layout.has_ends or plan.layout.vocab_size != network.config.vocab_size


def _content(path: Path, size: int) -> torch.Tensor:
    """The bytes of a file that has so many. Raises EOFError if it has become shorter."""
    content = huge_pages.empty(size)
    with path.open("rb", buffering=0) as file:
        left = content.numpy().data
        while left:
            count = file.readinto(left)
            if not count:
                raise EOFError(f"{path.name} became shorter while it was read")
            left = left[count:]
    return content


def reserve_host_memory(network: LlamaModel, *, nbytes: int, max_rank: int) -> None:
    """Page-lock memory for adapters to come: one of the largest rank, and of one page as many as fit into
    ``nbytes``, and a few more for those under way.

    To lock memory makes every launch on the device wait, so it is better not done while sequences decode.
    torch keeps what is given back here, and gives it out again to whoever asks for as much.
    """
    held: list[HostBlock] = []
    num_pages = pages_of_rank(max_rank)
    while nbytes > 0 and len(held) < _MOST_RESERVED:
        held.append(HostBlock.empty(num_pages, network.config, network.dtype, pin=True, zero=False))
        nbytes -= held[-1].nbytes
        num_pages = 1
    for _ in range(_UNDER_WAY if held else 0):
        held.append(HostBlock.empty(1, network.config, network.dtype, pin=True, zero=False))


def _fill_vectors(
    weights: GroupWeights, group: GroupUpdates, network: LlamaModel, tensors: AdapterTensors
) -> None:
    """Write one layer's vectors of a group into its last page, and every B that a magnitude changes."""
    splits = network.config.group_splits(group.group)
    base = None
    for m, update in group.updates.items():
        columns = slice(splits[m], splits[m + 1])
        vectors = weights.b[group.layer, -1, :, columns]
        if update.magnitude is not None:
            # One copy for the group: on some devices the base's layout is another, and this unpacks it.
            base = network.group_weight(group.layer, group.group) if base is None else base
            a, b = tensors.get(update.a), tensors.get(update.b)
            gain = row_gains(tensors.get(update.magnitude), base[columns], a, b, update.scale)
            vectors[GAIN_ROW] = gain
            _fill_b(weights.b[group.layer, :, :, columns], update, b * (1 + gain)[:, None])
        if update.bias is not None:
            vectors[SHIFT_ROW] = tensors.get(update.bias).float() * update.scale


def _fill_b(pages: torch.Tensor, update: LowRank, b: torch.Tensor) -> None:
    """Write B [out, r] into the pages [P, 16, out], where the rank comes first."""
    for page in range(pages_of_rank(update.rank)):
        ranks = slice(page * RANK_PAGE, min((page + 1) * RANK_PAGE, update.rank))
        pages[page, : ranks.stop - ranks.start] = b.T[ranks]


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
