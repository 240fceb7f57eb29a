"""The Triton kernel of ``kernels.gpu.lora_gated``; the work list is described in ``lora_tiles``."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.activation import gated
from kernels.gpu.launch import kernel, let_next_start, wait_for_inputs
from kernels.gpu.lora_pieces import halves, piece_of, split_of, sum_splits, widths_of


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
def _activate(gate_up, out, row, start, end, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of rows that no adapter changes; a row of -1 is none."""
    for block in range(start, end, WIDTH):
        n = block + tl.arange(0, WIDTH)
        mask = (row >= 0)[:, None] & (n < end)[None, :]
        pointers = gate_up + row[:, None] * (2 * SIZE) + n[None, :]
        gate = tl.load(pointers, mask, 0.0).to(tl.float32)
        up = tl.load(pointers + SIZE, mask, 0.0).to(tl.float32)
        tl.store(out + row[:, None] * SIZE + n[None, :], gated(gate, up).to(out.dtype.element_ty), mask)


@triton.jit
def _unchanged_tile(gate_up, out, rows, first, num_rows, start, end, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Columns of a tile whose adapter has neither projection."""
    wait_for_inputs(PDL)
    for top in range(0, num_rows, 4):
        i = top + tl.arange(0, 4)
        row = tl.load(rows + first + i, i < num_rows, -1, eviction_policy="evict_last").to(tl.int64)
        _activate(gate_up, out, row, start, end, SIZE, 2048)


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
    if tl.max(base.to(tl.int32), 0) > 0:
        wait_for_inputs(PDL)
        start = piece % pieces * BASE_WIDTH
        shown = tl.where(base, row, -1).to(tl.int64)
        end = tl.minimum(start + BASE_WIDTH, SIZE)
        _activate(gate_up, out, shown, start, end, SIZE, width)


@kernel(do_not_specialize=["num_tokens", "fill", "expand_fill", "many_cost"])
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
    many_cost,
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
    blocks = tl.cdiv(SIZE, BLOCK_N)
    num_many, many_width, few_width = widths_of(
        counts, num_tiles, blocks, expand_fill, many_cost, HAS_MANY, BLOCK_N
    )
    many_items = tl.cdiv(SIZE, many_width)
    few_items = tl.cdiv(SIZE, few_width)
    tile_items = num_many * many_items + (num_tiles - num_many) * few_items
    items = tile_items + tl.cdiv(num_tokens, BASE_ROWS) * tl.cdiv(SIZE, BASE_WIDTH)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if item >= tile_items:
            _base_columns(
                gate_up, out, adapted, num_tokens, item - tile_items, SIZE, BASE_ROWS, BASE_WIDTH, PDL
            )
        else:
            number, part, width = piece_of(
                item, num_many, many_items, many_width, few_items, few_width, HAS_MANY
            )
            tile = tiles + number * 5
            first = tl.load(tile, eviction_policy="evict_last")
            num_rows = tl.load(tile + 1, eviction_policy="evict_last")
            pages = segment_pages + tl.load(tile + 2, eviction_policy="evict_last") * MAX_PAGES
            rank = tl.load(tile + 3, eviction_policy="evict_last")
            page = tl.load(tile + 4, eviction_policy="evict_last")
            start = part * width
            end = tl.minimum(start + width, SIZE)
            few_rank_rows = (RANK_ROWS == 16) | (rank <= 16)
            few_rows = (not HAS_MANY) | (num_rows <= FEW)
            has = tl.load(scales + page * 2, eviction_policy="evict_last") != 0
            has = has | (tl.load(scales + page * 2 + 1, eviction_policy="evict_last") != 0)
            if not has:
                _unchanged_tile(gate_up, out, rows, first, num_rows, start, end, SIZE, PDL)
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
