"""The two Triton kernels of ``kernels.gpu.lora``; layouts are described there and in ``lora_tiles``.

Beside the base products, which stream gigabytes through the L2 cache, nearly every load of a short kernel
misses. So chains of dependent loads are short, and what every layer reads again (the work list, the rows, the
scales) asks to be evicted last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import kernel, let_next_start, wait_for_inputs


@triton.jit
def split_of(num_units, size, fill, BLOCK_K: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """(splits, length of one) along ``in``: as many as bring ``num_units`` up to ``fill`` pieces of work."""
    chunks = tl.cdiv(size, BLOCK_K)
    wanted = tl.minimum(tl.maximum(fill // tl.maximum(num_units, 1), 1), MAX_SPLITS)
    chunks_per_split = tl.cdiv(chunks, wanted)
    return tl.cdiv(chunks, chunks_per_split), chunks_per_split * BLOCK_K


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
def one_row(v, offset, rank, splits, v_split_stride, MAX_SPLITS: tl.constexpr):
    """float32 [16]: the live splits of the row at ``offset``, summed; zeros above the live rank rows."""
    s = tl.arange(0, MAX_SPLITS)
    r = tl.arange(0, 16)
    pointers = v + s.to(tl.int64)[:, None] * v_split_stride + offset + r[None, :]
    return tl.sum(tl.load(pointers, (s < splits)[:, None] & (r < rank)[None, :], 0.0), 0)


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
    v_row = one_row(v, v_offset, rank, splits, v_split_stride, MAX_SPLITS)
    v_other = one_row(
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


@kernel(do_not_specialize=["fill", "expand_fill"])
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
    # An item is a tile and some columns of one projection: as many as make about expand_fill items.
    blocks = tl.cdiv(split_1 - split_0, BLOCK_N) + tl.cdiv(split_2 - split_1, BLOCK_N)
    blocks += tl.cdiv(split_3 - split_2, BLOCK_N)
    width = tl.maximum(tl.cdiv(num_tiles * blocks, expand_fill), 1) * BLOCK_N
    items = tl.cdiv(split_1 - split_0, width) + tl.cdiv(split_2 - split_1, width)
    items += tl.cdiv(split_3 - split_2, width)
    for item in range(tl.program_id(0), num_tiles * items, tl.num_programs(0)):
        tile = tiles + (item // items) * 5
        first = tl.load(tile, eviction_policy="evict_last")
        num_rows = tl.load(tile + 1, eviction_policy="evict_last")
        segment = tl.load(tile + 2, eviction_policy="evict_last")
        rank = tl.load(tile + 3, eviction_policy="evict_last")
        page = tl.load(tile + 4, eviction_policy="evict_last")
        projection, start, end = _columns_of(item % items, width, split_0, split_1, split_2, split_3)
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
