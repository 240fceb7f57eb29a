"""The Triton kernel of ``kernels.gpu.lora_gated``; the work list is described in ``lora_tiles``."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.activation import gated
from kernels.gpu.launch import kernel, let_next_start, wait_for_inputs
from kernels.gpu.lora_kernels import halves, one_row, split_of, sum_splits


@triton.jit
def _add_product(high, low, b_block, sums):
    """``sums + v·Bᵀ`` in float32, for v as ``halves``; the sums are where the product accumulates."""
    acc = tl.dot(high, b_block, sums.to(tl.float32), input_precision="ieee")
    if b_block.dtype != tl.float32:
        acc = tl.dot(low, b_block, acc)
    return acc


@triton.jit
def _tile_columns(
    v,
    scales,
    b,
    gate_up,
    out,
    rows,
    pages,
    page,
    first,
    num_rows,
    rank,
    start,
    end,
    splits,
    v_split_stride,
    v_row_stride,
    SIZE: tl.constexpr,
    RANK_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns ``start`` to ``end`` of gate and of up, of one tile under an adapter of at most RANK_ROWS."""
    i = tl.arange(0, TILE_ROWS)
    r = tl.arange(0, RANK_ROWS)
    row = tl.load(rows + first + i, i < num_rows, -1, eviction_policy="evict_last").to(tl.int64)
    if RANK_ROWS == 16:
        b_offsets = (page.to(tl.int64) * 16 + r) * (2 * SIZE)
    else:
        own = tl.load(pages + r // 16, r < rank, 0, eviction_policy="evict_last").to(tl.int64)
        b_offsets = (own * 16 + r % 16) * (2 * SIZE)
    # Where the adapter lacks a projection its scale is 0, and its page may hold anything.
    gate_rank = tl.where(tl.load(scales + page * 2, eviction_policy="evict_last") != 0, rank, 0)
    up_rank = tl.where(tl.load(scales + page * 2 + 1, eviction_policy="evict_last") != 0, rank, 0)
    v_offsets = (first + i)[:, None] * v_row_stride + ((r // 16) * 32 + r % 16)[None, :]
    v_mask = (i < num_rows)[:, None] & (r // 16 * 16 < rank)[None, :]
    one_by_one: tl.constexpr = RANK_ROWS * TILE_ROWS > 256
    wait_for_inputs(PDL)
    shrunk = sum_splits(v, v_offsets, v_mask, splits, v_split_stride, MAX_SPLITS, one_by_one)
    gate_high, gate_low = halves(shrunk, b)
    shrunk = sum_splits(v + 16, v_offsets, v_mask, splits, v_split_stride, MAX_SPLITS, one_by_one)
    up_high, up_low = halves(shrunk, b)
    for block in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        n = block + tl.arange(0, BLOCK_N)
        inside = (n < end)[None, :]
        shown = (row >= 0)[:, None] & inside
        b_pointers = b + b_offsets[:, None] + n[None, :]
        pointers = gate_up + row[:, None] * (2 * SIZE) + n[None, :]
        gate_b = tl.load(b_pointers, (r < gate_rank)[:, None] & inside, 0.0)
        gate = _add_product(gate_high, gate_low, gate_b, tl.load(pointers, shown, 0.0))
        up_b = tl.load(b_pointers + SIZE, (r < up_rank)[:, None] & inside, 0.0)
        up = _add_product(up_high, up_low, up_b, tl.load(pointers + SIZE, shown, 0.0))
        tl.store(out + row[:, None] * SIZE + n[None, :], gated(gate, up).to(out.dtype.element_ty), shown)


@triton.jit
def _one_row_columns(
    v,
    scales,
    b,
    gate_up,
    out,
    rows,
    page,
    first,
    rank,
    start,
    end,
    splits,
    v_split_stride,
    v_row_stride,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_tile_columns`` for one row and one page: sums of vectors, in wide blocks of B."""
    r = tl.arange(0, 16)
    row = tl.load(rows + first, eviction_policy="evict_last").to(tl.int64)
    gate_rank = tl.where(tl.load(scales + page * 2, eviction_policy="evict_last") != 0, rank, 0)
    up_rank = tl.where(tl.load(scales + page * 2 + 1, eviction_policy="evict_last") != 0, rank, 0)
    b_offsets = (page.to(tl.int64) * 16 + r) * (2 * SIZE)
    v_offset = first * v_row_stride
    wait_for_inputs(PDL)
    v_gate = one_row(v, v_offset, gate_rank, splits, v_split_stride, MAX_SPLITS)
    v_up = one_row(v, v_offset + 16, up_rank, splits, v_split_stride, MAX_SPLITS)
    for block in range(start, end, BLOCK_N):
        n = block + tl.arange(0, BLOCK_N)
        inside = n < end
        b_pointers = b + b_offsets[:, None] + n[None, :]
        pointers = gate_up + row * (2 * SIZE) + n
        gate_b = tl.load(b_pointers, (r < gate_rank)[:, None] & inside[None, :], 0.0).to(tl.float32)
        gate = tl.load(pointers, inside, 0.0).to(tl.float32) + tl.sum(v_gate[:, None] * gate_b, 0)
        up_b = tl.load(b_pointers + SIZE, (r < up_rank)[:, None] & inside[None, :], 0.0).to(tl.float32)
        up = tl.load(pointers + SIZE, inside, 0.0).to(tl.float32) + tl.sum(v_up[:, None] * up_b, 0)
        tl.store(out + row * SIZE + n, gated(gate, up).to(out.dtype.element_ty), inside)


@triton.jit
def _base_columns(
    gate_up,
    out,
    adapted,
    num_tokens,
    piece,
    SIZE: tl.constexpr,
    BASE_ROWS: tl.constexpr,
    BASE_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows without an adapter among BASE_ROWS, BASE_WIDTH columns of them."""
    width: tl.constexpr = 8192 // BASE_ROWS
    pieces: tl.constexpr = (SIZE + BASE_WIDTH - 1) // BASE_WIDTH
    row = piece // pieces * BASE_ROWS + tl.arange(0, BASE_ROWS)
    base = tl.load(adapted + row, row < num_tokens, 1, eviction_policy="evict_last") == 0
    row = row.to(tl.int64)
    if tl.max(base.to(tl.int32), 0) > 0:
        wait_for_inputs(PDL)
        start = piece % pieces * BASE_WIDTH
        for block in range(start, tl.minimum(start + BASE_WIDTH, SIZE), width):
            n = block + tl.arange(0, width)
            mask = base[:, None] & (n < SIZE)[None, :]
            pointers = gate_up + row[:, None] * (2 * SIZE) + n[None, :]
            gate = tl.load(pointers, mask, 0.0).to(tl.float32)
            up = tl.load(pointers + SIZE, mask, 0.0).to(tl.float32)
            tl.store(out + row[:, None] * SIZE + n[None, :], gated(gate, up).to(out.dtype.element_ty), mask)


@kernel(do_not_specialize=["num_tokens", "fill", "expand_fill"])
def expand_silu_mul(
    v,
    scales,
    b,
    gate_up,
    out,
    tiles,
    counts,
    adapted,
    rows,
    segment_pages,
    num_tokens,
    in_size,
    fill,
    expand_fill,
    v_split_stride,
    v_row_stride,
    MAX_PAGES: tl.constexpr,
    RANK_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    HAS_MANY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MANY_BLOCK_N: tl.constexpr,
    ROW_BLOCK_N: tl.constexpr,
    BASE_ROWS: tl.constexpr,
    BASE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """First the tiles, each cut along its columns into what makes about expand_fill items; then base rows."""
    let_next_start(PDL)
    num_tiles = tl.load(counts, eviction_policy="evict_last")
    num_units = tl.load(counts + 1, eviction_policy="evict_last")
    splits, _ = split_of(num_units, in_size, fill, BLOCK_K, MAX_SPLITS)
    width = tl.maximum(tl.cdiv(num_tiles * tl.cdiv(SIZE, BLOCK_N), expand_fill), 1) * BLOCK_N
    parts = tl.cdiv(SIZE, width)
    tile_items = num_tiles * parts
    items = tile_items + tl.cdiv(num_tokens, BASE_ROWS) * tl.cdiv(SIZE, BASE_WIDTH)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if item >= tile_items:
            _base_columns(
                gate_up, out, adapted, num_tokens, item - tile_items, SIZE, BASE_ROWS, BASE_WIDTH, PDL
            )
        else:
            tile = tiles + (item // parts) * 5
            first = tl.load(tile, eviction_policy="evict_last")
            num_rows = tl.load(tile + 1, eviction_policy="evict_last")
            pages = segment_pages + tl.load(tile + 2, eviction_policy="evict_last") * MAX_PAGES
            rank = tl.load(tile + 3, eviction_policy="evict_last")
            page = tl.load(tile + 4, eviction_policy="evict_last")
            start = item % parts * width
            end = tl.minimum(start + width, SIZE)
            few_rank_rows = (RANK_ROWS == 16) | (rank <= 16)
            few_rows = (not HAS_MANY) | (num_rows <= FEW)
            if few_rank_rows & (num_rows == 1) & (2 * width > ROW_BLOCK_N) & (ROW_BLOCK_N > 0):
                if ROW_BLOCK_N > 0:
                    _one_row_columns(
                        v, scales, b, gate_up, out, rows, page, first, rank, start, end, splits,
                        v_split_stride, v_row_stride, SIZE, ROW_BLOCK_N, MAX_SPLITS, PDL,
                    )  # fmt: skip
            elif few_rank_rows & few_rows:
                _tile_columns(
                    v, scales, b, gate_up, out, rows, pages, page, first, num_rows, rank, start, end, splits,
                    v_split_stride, v_row_stride, SIZE, 16, FEW, BLOCK_N, MAX_SPLITS, NUM_STAGES, PDL,
                )  # fmt: skip
            elif few_rank_rows:
                _tile_columns(
                    v, scales, b, gate_up, out, rows, pages, page, first, num_rows, rank, start, end, splits,
                    v_split_stride, v_row_stride, SIZE, 16, MANY, MANY_BLOCK_N, MAX_SPLITS, NUM_STAGES, PDL,
                )  # fmt: skip
            elif few_rows:
                _tile_columns(
                    v, scales, b, gate_up, out, rows, pages, page, first, num_rows, rank, start, end, splits,
                    v_split_stride, v_row_stride, SIZE, RANK_ROWS, FEW, BLOCK_N // 2, MAX_SPLITS,
                    NUM_STAGES, PDL,
                )  # fmt: skip
            else:
                _tile_columns(
                    v, scales, b, gate_up, out, rows, pages, page, first, num_rows, rank, start, end, splits,
                    v_split_stride, v_row_stride, SIZE, RANK_ROWS, MANY, MANY_BLOCK_N // 2, MAX_SPLITS,
                    NUM_STAGES, PDL,
                )  # fmt: skip
    wait_for_inputs(PDL)
