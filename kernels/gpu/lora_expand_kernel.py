"""Expand of ``kernels.gpu.lora``; layouts are described there and in ``lora_tiles``."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import kernel, let_next_start, wait_for_inputs
from kernels.gpu.lora_pieces import halves, piece_of, split_of, sum_splits, widths_of


@triton.jit
def _b_block(b, offsets, n, end, rank, RANK_ROWS: tl.constexpr, EVEN_N: tl.constexpr):
    """[RANK_ROWS, columns n] of Bᵀ, zeros above the live rank rows."""
    mask = (tl.arange(0, RANK_ROWS) < rank)[:, None]
    if not EVEN_N:
        mask = mask & (n < end)[None, :]
    return tl.load(b + offsets[:, None] + n[None, :], mask, 0.0)


@triton.jit
def _y_block(y, offsets, row, n, end, EVEN_N: tl.constexpr, ADDS: tl.constexpr):
    """(pointers, mask, values) of columns n of the tile's rows; values are 0 where none are added to."""
    mask = (row >= 0)[:, None]
    if not EVEN_N:
        mask = mask & (n < end)[None, :]
    pointers = y + offsets[:, None] + n[None, :]
    if ADDS:
        return pointers, mask, tl.load(pointers, mask, 0.0)
    return pointers, mask, tl.zeros(pointers.shape, y.dtype.element_ty)


@triton.jit
def _add_product(high, low, b_block, y_block):
    """``y + v·Bᵀ`` in float32, for v as ``halves``."""
    acc = tl.dot(high, b_block, input_precision="ieee")
    if b_block.dtype != tl.float32:
        acc = tl.dot(low, b_block, acc)
    return y_block.to(tl.float32) + acc


@triton.jit
def _expand_two_rows(
    v,
    b,
    y,
    rows,
    page,
    first,
    num_rows,
    rank,
    projection,
    start,
    end,
    splits,
    y_stride,
    v_split_stride,
    v_row_stride,
    COLUMNS: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADDS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_expand_columns`` for one or two rows and one page: sums of vectors, in wide blocks of B."""
    r = tl.arange(0, 16)
    row = tl.load(rows + first, eviction_policy="evict_last").to(tl.int64)
    other = tl.load(rows + first + 1, num_rows > 1, 0, eviction_policy="evict_last").to(tl.int64)
    b_offsets = (page.to(tl.int64) * 16 + r) * OUT
    v_offset = first * v_row_stride + projection * 16
    wait_for_inputs(PDL)
    v_row = _sum_of_row(v, v_offset, rank, splits, v_split_stride, MAX_SPLITS)
    v_other = _sum_of_row(
        v, v_offset + v_row_stride, tl.where(num_rows > 1, rank, 0), splits, v_split_stride, MAX_SPLITS
    )
    for block in range(start, end, BLOCK_N):
        n = block + tl.arange(0, BLOCK_N)
        inside = n < end
        b_block = tl.load(b + b_offsets[:, None] + n[None, :], (r < rank)[:, None] & inside[None, :], 0.0)
        b_block = b_block.to(tl.float32)
        _add_row(y + row * y_stride + n, tl.sum(v_row[:, None] * b_block, 0), inside, ADDS)
        both = inside & (num_rows > 1)
        _add_row(y + other * y_stride + n, tl.sum(v_other[:, None] * b_block, 0), both, ADDS)


@triton.jit
def _sum_of_row(v, offset, rank, splits, v_split_stride, MAX_SPLITS: tl.constexpr):
    """float32 [16]: ``sum_splits`` of the row at ``offset``; zeros above the live rank rows."""
    s = tl.arange(0, MAX_SPLITS)
    r = tl.arange(0, 16)
    pointers = v + s.to(tl.int64)[:, None] * v_split_stride + offset + r[None, :]
    return tl.sum(tl.load(pointers, (s < splits)[:, None] & (r < rank)[None, :], 0.0), 0)


@triton.jit
def _add_row(pointers, values, mask, ADDS: tl.constexpr):
    if ADDS:
        values += tl.load(pointers, mask, 0.0).to(tl.float32)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask)


@triton.jit
def _expand_columns(
    v,
    b,
    y,
    rows,
    pages,
    page,
    first,
    num_rows,
    rank,
    projection,
    start,
    end,
    splits,
    y_stride,
    v_split_stride,
    v_row_stride,
    COLUMNS: tl.constexpr,
    OUT: tl.constexpr,
    RANK_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    ADDS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns ``start`` to ``end`` of one tile, for an adapter of at most RANK_ROWS rank rows."""
    i = tl.arange(0, TILE_ROWS)
    r = tl.arange(0, RANK_ROWS)
    row = tl.load(rows + first + i, i < num_rows, -1, eviction_policy="evict_last")
    if RANK_ROWS == 16:
        b_offsets = (page.to(tl.int64) * 16 + r) * OUT
    else:
        own = tl.load(pages + r // 16, r < rank, 0, eviction_policy="evict_last").to(tl.int64)
        b_offsets = (own * 16 + r % 16) * OUT
    y_offsets = row.to(tl.int64) * y_stride
    v_offsets = (first + i)[:, None] * v_row_stride + ((r // 16) * COLUMNS + projection * 16 + r % 16)[
        None, :
    ]
    v_mask = (i < num_rows)[:, None] & (r // 16 * 16 < rank)[None, :]
    if RANK_ROWS * TILE_ROWS <= 256:
        # The first block of B, which no kernel of the step writes, travels while the kernel before drains.
        n = start + tl.arange(0, BLOCK_N)
        b_block = _b_block(b, b_offsets, n, end, rank, RANK_ROWS, EVEN_N)
        wait_for_inputs(PDL)
        pointers, mask, y_block = _y_block(y, y_offsets, row, n, end, EVEN_N, ADDS)
        high, low = halves(sum_splits(v, v_offsets, v_mask, splits, v_split_stride, MAX_SPLITS, False), b)
        tl.store(pointers, _add_product(high, low, b_block, y_block).to(y_block.dtype), mask)
        start += BLOCK_N
    else:
        wait_for_inputs(PDL)
        high, low = halves(sum_splits(v, v_offsets, v_mask, splits, v_split_stride, MAX_SPLITS, True), b)
    for block in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        n = block + tl.arange(0, BLOCK_N)
        b_block = _b_block(b, b_offsets, n, end, rank, RANK_ROWS, EVEN_N)
        pointers, mask, y_block = _y_block(y, y_offsets, row, n, end, EVEN_N, ADDS)
        tl.store(pointers, _add_product(high, low, b_block, y_block).to(y_block.dtype), mask)


@triton.jit
def _columns_of(part, width, split_0, split_1, split_2, split_3):
    """(projection, first column, end) of the ``part``-th piece, of at most ``width`` columns."""
    items_0 = tl.cdiv(split_1 - split_0, width)
    items_1 = items_0 + tl.cdiv(split_2 - split_1, width)
    projection = (part >= items_0).to(tl.int32) + (part >= items_1).to(tl.int32)
    start = split_0 + part * width
    end = split_1
    if part >= items_1:
        start = split_2 + (part - items_1) * width
        end = split_3
    elif part >= items_0:
        start = split_1 + (part - items_0) * width
        end = split_2
    return projection, start, tl.minimum(start + width, end)


@triton.jit
def _items_of(width, split_0, split_1, split_2, split_3):
    """Pieces of at most ``width`` columns, none of which spans two projections."""
    items = tl.cdiv(split_1 - split_0, width) + tl.cdiv(split_2 - split_1, width)
    return items + tl.cdiv(split_3 - split_2, width)


@kernel(do_not_specialize=["fill", "expand_fill", "many_cost"])
def expand(
    v,
    scales,
    b,
    y,
    tiles,
    counts,
    rows,
    segment_pages,
    size,
    fill,
    expand_fill,
    many_cost,
    y_stride,
    v_split_stride,
    v_row_stride,
    split_0,
    split_1,
    split_2,
    split_3,
    MAX_PAGES: tl.constexpr,
    RANK_ROWS: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    OUT: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    HAS_MANY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MANY_BLOCK_N: tl.constexpr,
    ROW_BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    num_tiles = tl.load(counts, eviction_policy="evict_last")
    splits, _ = split_of(tl.load(counts + 1, eviction_policy="evict_last"), size, fill, BLOCK_K, MAX_SPLITS)
    # An item is a tile and some columns of one projection; tiles of many rows come first.
    blocks = tl.cdiv(split_1 - split_0, BLOCK_N) + tl.cdiv(split_2 - split_1, BLOCK_N)
    blocks += tl.cdiv(split_3 - split_2, BLOCK_N)
    num_many, many_width, few_width = widths_of(
        counts, num_tiles, blocks, expand_fill, many_cost, HAS_MANY, BLOCK_N
    )
    many_items = _items_of(many_width, split_0, split_1, split_2, split_3)
    few_items = _items_of(few_width, split_0, split_1, split_2, split_3)
    num_items = num_many * many_items + (num_tiles - num_many) * few_items
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        number, part, width = piece_of(item, num_many, many_items, many_width, few_items, few_width, HAS_MANY)
        tile = tiles + number * 5
        first = tl.load(tile, eviction_policy="evict_last")
        num_rows = tl.load(tile + 1, eviction_policy="evict_last")
        segment = tl.load(tile + 2, eviction_policy="evict_last")
        rank = tl.load(tile + 3, eviction_policy="evict_last")
        page = tl.load(tile + 4, eviction_policy="evict_last")
        projection, start, end = _columns_of(part, width, split_0, split_1, split_2, split_3)
        pages = segment_pages + segment * MAX_PAGES
        # An adapter that lacks the projection adds nothing, and its page may hold anything.
        has = tl.load(scales + page * PROJECTIONS + projection, eviction_policy="evict_last") != 0
        if not ADDS:
            rank = tl.where(has, rank, 0)
        if has | (not ADDS):
            few_rank_rows = (RANK_ROWS == 16) | (rank <= 16)
            few_rows = (not HAS_MANY) | (num_rows <= FEW)
            if few_rank_rows & (num_rows <= 2) & (2 * width > ROW_BLOCK_N) & (ROW_BLOCK_N > 0):
                if ROW_BLOCK_N > 0:
                    _expand_two_rows(
                        v, b, y, rows, page, first, num_rows, rank, projection, start, end, splits,
                        y_stride, v_split_stride, v_row_stride, PROJECTIONS * 16, OUT, ROW_BLOCK_N, ADDS,
                        MAX_SPLITS, PDL,
                    )  # fmt: skip
            elif few_rank_rows & few_rows:
                _expand_columns(
                    v, b, y, rows, pages, page, first, num_rows, rank, projection, start, end, splits,
                    y_stride, v_split_stride, v_row_stride, PROJECTIONS * 16, OUT, 16, FEW,
                    BLOCK_N, EVEN_N, ADDS, MAX_SPLITS, NUM_STAGES, PDL,
                )  # fmt: skip
            elif few_rank_rows:
                _expand_columns(
                    v, b, y, rows, pages, page, first, num_rows, rank, projection, start, end, splits,
                    y_stride, v_split_stride, v_row_stride, PROJECTIONS * 16, OUT, 16, MANY,
                    MANY_BLOCK_N, EVEN_N, ADDS, MAX_SPLITS, NUM_STAGES, PDL,
                )  # fmt: skip
            elif few_rows:
                _expand_columns(
                    v, b, y, rows, pages, page, first, num_rows, rank, projection, start, end, splits,
                    y_stride, v_split_stride, v_row_stride, PROJECTIONS * 16, OUT, RANK_ROWS, FEW,
                    BLOCK_N // 2, EVEN_N, ADDS, MAX_SPLITS, NUM_STAGES, PDL,
                )  # fmt: skip
            else:
                _expand_columns(
                    v, b, y, rows, pages, page, first, num_rows, rank, projection, start, end, splits,
                    y_stride, v_split_stride, v_row_stride, PROJECTIONS * 16, OUT, RANK_ROWS, MANY,
                    MANY_BLOCK_N // 2, EVEN_N, ADDS, MAX_SPLITS, NUM_STAGES, PDL,
                )  # fmt: skip
    wait_for_inputs(PDL)
