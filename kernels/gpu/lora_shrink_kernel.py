"""Shrink of ``kernels.gpu.lora``; layouts are described there and in ``lora_tiles``."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import kernel, let_next_start, wait_for_inputs
from kernels.gpu.lora_pieces import split_of


@triton.jit
def _load_a(a, offsets, mask, k, size, EVEN_K: tl.constexpr):
    """[BLOCK_K, BLOCK_COLUMNS]: the live rank rows of all projections of a page, zeros for the others."""
    if EVEN_K:
        return tl.load(a + offsets[None, :] + k[:, None], mask[None, :], 0.0)
    return tl.load(a + offsets[None, :] + k[:, None], mask[None, :] & (k < size)[:, None], 0.0)


@triton.jit
def _load_x(x, row_offsets, row_mask, k, size, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(x + row_offsets[:, None] + k[None, :], row_mask[:, None], 0.0)
    return tl.load(x + row_offsets[:, None] + k[None, :], row_mask[:, None] & (k < size)[None, :], 0.0)


@triton.jit
def _shrink_unit(
    x,
    a,
    scales,
    v,
    rows,
    first,
    num_rows,
    page,
    page_and_live,
    start,
    end,
    size,
    x_stride,
    v_row_stride,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """``start`` to ``end`` along ``in``, for one tile under one page; ``v`` is the split's, at row 0."""
    i = tl.arange(0, TILE_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    row = tl.load(rows + first + i, i < num_rows, -1, eviction_policy="evict_last")
    row_mask = row >= 0
    x_offsets = row.to(tl.int64) * x_stride
    scale = tl.load(
        scales + page * (COLUMNS // 16) + column // 16, column < COLUMNS, 0.0, eviction_policy="evict_last"
    )
    a_mask = (column < COLUMNS) & (column % 16 <= page_and_live % 16)
    a_offsets = (page.to(tl.int64) * COLUMNS + column) * size
    k = start + tl.arange(0, BLOCK_K)
    # The first chunk of A, which no kernel of the step writes, travels while the kernel before drains.
    a_block = _load_a(a, a_offsets, a_mask, k, size, EVEN_K)
    wait_for_inputs(PDL)
    x_block = _load_x(x, x_offsets, row_mask, k, size, EVEN_K)
    acc = tl.dot(x_block, a_block, input_precision="ieee")
    # Where the adapter lacks a projection, its scale is 0 and the page may hold anything.
    has = scale != 0
    end = tl.where(tl.max(has.to(tl.int32)) > 0, end, start)
    for chunk in range(start + BLOCK_K, end, BLOCK_K):
        k = chunk + tl.arange(0, BLOCK_K)
        x_block = _load_x(x, x_offsets, row_mask, k, size, EVEN_K)
        a_block = _load_a(a, a_offsets, a_mask, k, size, EVEN_K)
        acc = tl.dot(x_block, a_block, acc, input_precision="ieee")
    offsets = (first + i).to(tl.int64)[:, None] * v_row_stride + column[None, :]
    mask = (i < num_rows)[:, None] & (column < COLUMNS)[None, :]
    acc = tl.where(has[None, :], acc * scale[None, :], 0.0)
    tl.store(v + (page_and_live // 16) * COLUMNS + offsets, acc, mask)


@kernel(do_not_specialize=["fill"])
def shrink(
    x,
    a,
    scales,
    v,
    units,
    counts,
    rows,
    size,
    fill,
    x_stride,
    v_split_stride,
    v_row_stride,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    HAS_MANY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MANY_BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    num_units = tl.load(counts + 1, eviction_policy="evict_last")
    splits, split_size = split_of(num_units, size, fill, BLOCK_K, MAX_SPLITS)
    for item in range(tl.program_id(0), num_units * splits, tl.num_programs(0)):
        split = item % splits
        unit = units + (item // splits) * 4
        first = tl.load(unit, eviction_policy="evict_last")
        num_rows = tl.load(unit + 1, eviction_policy="evict_last")
        page = tl.load(unit + 2, eviction_policy="evict_last")
        page_and_live = tl.load(unit + 3, eviction_policy="evict_last")
        start = split * split_size
        end = tl.minimum(start + split_size, size)
        target = v + split.to(tl.int64) * v_split_stride
        if (not HAS_MANY) | (num_rows <= FEW):
            _shrink_unit(
                x, a, scales, target, rows, first, num_rows, page, page_and_live, start, end, size, x_stride,
                v_row_stride, COLUMNS, BLOCK_COLUMNS, FEW, BLOCK_K, EVEN_K, PDL,
            )  # fmt: skip
        else:
            _shrink_unit(
                x, a, scales, target, rows, first, num_rows, page, page_and_live, start, end, size, x_stride,
                v_row_stride, COLUMNS, BLOCK_COLUMNS, MANY, MANY_BLOCK_K, EVEN_K, PDL,
            )  # fmt: skip
    wait_for_inputs(PDL)
