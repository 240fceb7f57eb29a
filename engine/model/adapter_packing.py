"""Where each tensor of an adapter's files goes in rank pages: worked out once for all adapters of one shape.

Adapters that one program saves with one config differ in nothing but their weights. To lay one out takes ten
milliseconds of Python, for which the engine's loop must wait in turns; to find one laid out takes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from adapters.base_model import BaseModelShape
from adapters.layout import AdapterLayout, LowRank, StoredTensor
from adapters.peft_config import MAX_RANK, LoraConfig
from adapters.reader import lay_out
from adapters.weight_files import RawHeaders, parse_headers
from engine.model.adapter_weights import GroupWeights, HostBlock, pages_of_rank
from engine.model.config import PROJECTION_GROUPS, ModelConfig
from kernels.packing import MatrixCopy, copies_array
from kernels.plans import RANK_PAGE

_GROUP_OF = {
    projection: (group, m)
    for group, projections in PROJECTION_GROUPS.items()
    for m, projection in enumerate(projections)
}
_DTYPES = ("F32", "F16", "BF16")
"""In the order of ``kernels.packing.SOURCE_DTYPES``."""
_NUM_VECTORS = 2
"""Rows above the ranks in the last page, of an adapter that has any."""
_MOST_KEPT = 32
"""Kinds of adapters whose plan is kept; one takes about a kilobyte for each tensor."""
_LARGEST_KEPT = 512 * 1024
"""Bytes of headers: the adapters of the largest models have less. One may have megabytes of anything."""


@dataclass(frozen=True, slots=True)
class GroupUpdates:
    """The updates of one projection group of one layer, by the projection's place in the group."""

    layer: int
    group: str
    updates: Mapping[int, LowRank]

    @property
    def has_vectors(self) -> bool:
        """Whether any has a bias or a magnitude."""
        return any(update.bias or update.magnitude for update in self.updates.values())


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """How to fill the host block of an adapter.

    Attributes:
        rank: the largest of its projections', and at least 1.
        files: to which the copies' file indices point.
        copies: `kernels.packing.copies_array`, from the files to the block's weights: every A, and every B
            that goes into the pages as it is.
        scales: float32, the block's.
        vectors: groups with biases or magnitudes. A B with a magnitude changes, so it is not in
            ``copies``.
        has_gaps: some projection has fewer ranks than the largest, so there are rank rows that are read
            though no copy fills them: they must be zero.
    """

    layout: AdapterLayout
    rank: int
    num_pages: int
    files: tuple[str, ...]
    copies: np.ndarray
    scales: torch.Tensor
    vectors: tuple[GroupUpdates, ...]
    has_gaps: bool

    @property
    def must_be_zero(self) -> bool:
        """Whether a block is read where nothing is copied: in a gap, or a vector that a projection lacks."""
        return self.has_gaps or bool(self.vectors)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """An adapter's weights as its files have them, in host memory.

    Attributes:
        contents: uint8, all bytes of each of the plan's files.
    """

    plan: PackingPlan
    contents: tuple[torch.Tensor, ...]


def packing_plan(
    config: LoraConfig, headers: RawHeaders, model: ModelConfig, dtype: torch.dtype
) -> PackingPlan:
    """The plan of an adapter with this config and these headers, kept for others like it.

    Raises:
        adapters.errors.InvalidAdapter: the files do not fit the model.
    """
    targets = (
        config.target_modules
    )  # PEFT has them as a set, which every program writes in an order of its own
    names = targets if isinstance(targets, str) else tuple(sorted(targets))
    config = replace(config, target_modules=names, base_model=None)
    is_small = sum(len(header.text) for _, header in headers.files) <= _LARGEST_KEPT
    return (_kept_plan if is_small else _make_plan)(config, headers, model, dtype)


def _make_plan(
    config: LoraConfig, headers: RawHeaders, model: ModelConfig, dtype: torch.dtype
) -> PackingPlan:
    shape = BaseModelShape(
        model.num_layers, model.modules, MAX_RANK, model.vocab_size, model.tie_word_embeddings
    )
    layout = lay_out(config, parse_headers(headers), shape)
    rank = max(1, layout.rank)
    num_pages = pages_of_rank(rank + _NUM_VECTORS if layout.has_vectors else rank)
    block = HostBlock.empty(num_pages, model, dtype, pin=False)
    files = tuple(name for name, _ in headers.files)
    copies: list[MatrixCopy] = []
    grouped = _by_group(layout)
    for group in grouped:
        copies.extend(_copies(block.groups[group.group], group, model, files))
    return PackingPlan(
        layout,
        rank,
        num_pages,
        files,
        copies_array(copies),
        block.scales.clone(),
        tuple(group for group in grouped if group.has_vectors),
        any(update.rank != rank for update in layout.linear.values()),
    )


_kept_plan = lru_cache(_MOST_KEPT)(_make_plan)


def _by_group(layout: AdapterLayout) -> list[GroupUpdates]:
    grouped: dict[tuple[int, str], dict[int, LowRank]] = {}
    for (layer, module), update in layout.linear.items():
        group, m = _GROUP_OF[module]
        grouped.setdefault((layer, group), {})[m] = update
    return [GroupUpdates(layer, group, updates) for (layer, group), updates in grouped.items()]


def _copies(
    weights: GroupWeights, group: GroupUpdates, model: ModelConfig, files: tuple[str, ...]
) -> Iterator[MatrixCopy]:
    """The copies of one layer's group; its scales are set along the way.

    A is [r, in] as stored, B is [out, r]; in the pages the rank comes first in both.
    """
    splits = model.group_splits(group.group)
    for m, update in group.updates.items():
        for page in range(pages_of_rank(update.rank)):
            weights.scales[group.layer, page, m] = update.scale
            first = page * RANK_PAGE
            ranks = min(RANK_PAGE, update.rank - first)
            yield _copy(update.a, files, first, ranks, weights.a[group.layer, page, m])
            if update.magnitude is None:
                columns = weights.b[group.layer, page, :, splits[m] : splits[m + 1]]
                yield _copy(update.b, files, first, ranks, columns, turned=True)


def _copy(
    tensor: StoredTensor,
    files: tuple[str, ...],
    first_rank: int,
    ranks: int,
    target: torch.Tensor,
    *,
    turned: bool = False,
) -> MatrixCopy:
    """Of some ranks of A, or of B, which is ``turned``, to a page's [16, columns] in the block."""
    width = tensor.shape[1]
    rank_step, column_step = (1, width) if turned else (width, 1)
    dtype = _DTYPES.index(tensor.dtype)
    item_bytes = tensor.nbytes // (tensor.shape[0] * width)
    return MatrixCopy(
        file=files.index(tensor.file),
        offset=tensor.offset + first_rank * rank_step * item_bytes,
        dtype=dtype,
        ranks=ranks,
        columns=target.shape[1],
        rank_step=rank_step,
        column_step=column_step,
        target=int(target.storage_offset()),
        target_step=target.stride(0),
    )
