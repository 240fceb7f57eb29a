"""Into what pieces LoRA's kernels cut their work, and how those of ``x·Aᵀ`` are summed again.

Beside the base products, which stream gigabytes through the L2 cache, nearly every load of a short kernel
misses. So chains of dependent loads are short, and what every layer reads again (the work list, the rows, the
scales) asks to be evicted last.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_of(num_units, size, fill, BLOCK_K: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """(splits, length of one) along ``in``: as many as bring ``num_units`` up to ``fill`` pieces of work."""
    chunks = tl.cdiv(size, BLOCK_K)
    wanted = tl.minimum(tl.maximum(fill // tl.maximum(num_units, 1), 1), MAX_SPLITS)
    chunks_per_split = tl.cdiv(chunks, wanted)
    return tl.cdiv(chunks, chunks_per_split), chunks_per_split * BLOCK_K


@triton.jit
def widths_of(counts, num_tiles, blocks, fill, many_cost, HAS_MANY: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tiles of many rows, columns of a piece of these, columns of one of few), for tiles of so many blocks.

    So wide that about ``fill`` pieces in all take alike long; a tile of many rows costs ``many_cost`` others.
    """
    num_many = 0
    cost = tl.maximum(num_tiles, 1)
    if HAS_MANY:
        num_many = tl.load(counts + 2, eviction_policy="evict_last")
        cost += (many_cost - 1) * num_many
    many_width = tl.cdiv(blocks, tl.maximum(fill * many_cost // cost, 1)) * BLOCK_N
    return num_many, many_width, tl.cdiv(blocks, tl.maximum(fill // cost, 1)) * BLOCK_N


@triton.jit
def piece_of(item, num_many, many_items, many_width, items, width, HAS_MANY: tl.constexpr):
    """(tile, part of it, columns of a part), where tiles of many rows come first and have ``many_items``."""
    if HAS_MANY:
        past = item - num_many * many_items
        tile = tl.where(past < 0, item // many_items, num_many + past // items)
        part = tl.where(past < 0, item % many_items, past % items)
        return tile, part, tl.where(past < 0, many_width, width)
    return item // items, item % items, width


@triton.jit
def _four_splits(v, offsets, mask, group, splits, v_split_stride):
    s = group + tl.arange(0, 4)
    pointers = v + s.to(tl.int64)[:, None, None] * v_split_stride + offsets[None, :, :]
    return tl.sum(tl.load(pointers, (s < splits)[:, None, None] & mask[None, :, :], 0.0), 0)


@triton.jit
def sum_splits(v, offsets, mask, splits, v_split_stride, MAX_SPLITS: tl.constexpr, ONE_BY_ONE: tl.constexpr):
    """float32 [rows, rank rows]: the live splits, summed in an order that depends on nothing else.

    Many loads are in flight at once where the sum is small, and one at a time where registers forbid it.
    """
    if ONE_BY_ONE:
        total = tl.load(v + offsets, mask, 0.0)
        for s in range(1, splits):
            total += tl.load(v + s * v_split_stride + offsets, mask, 0.0)
    else:
        total = _four_splits(v, offsets, mask, 0, splits, v_split_stride)
        for group in tl.static_range(4, MAX_SPLITS, 4):
            total += _four_splits(v, offsets, mask, group, splits, v_split_stride)
    return total


@triton.jit
def halves(v, b):
    """v in float32 as the sum of two numbers of the type of b: the tensor cores then lose nothing of it."""
    high = v.to(b.dtype.element_ty)
    return high, (v - high.to(tl.float32)).to(b.dtype.element_ty)
