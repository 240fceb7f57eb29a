"""The Triton kernels of ``kernels.gpu.paged_attention``."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import kernel, let_next_start, wait_for_inputs

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q,
    k_cache,
    v_cache,
    block_table,
    kv_head,
    visible,
    start,
    end,
    scale,
    maximum,
    total,
    acc,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    """Online softmax of q [rows, BLOCK_D] over keys ``start`` to ``end``; row i sees those below visible[i].

    ``maximum``, ``total`` and ``acc`` are what earlier keys left: the largest score, in powers of two, and
    the sums above it. They are returned with these keys added.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    for first in range(start, end, BLOCK_N):
        token = first + n
        block = tl.load(block_table + token // KV_BLOCK, token < end, -1)
        live = block >= 0
        row = ((block.to(tl.int64) * NUM_KV_HEADS + kv_head) * KV_BLOCK + token % KV_BLOCK) * HEAD_DIM
        mask = live[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (d < HEAD_DIM)[None, :]
        # What lies beyond the context is not read at all, so nothing stale can come through.
        k = tl.load(k_cache + row[:, None] + d[None, :], mask, 0.0)
        # Scaled here, not with the exponential as below: ptxas then gives the loads of decode more registers.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where(live[None, :] & (token[None, :] < visible[:, None]), scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_cache + row[:, None] + d[None, :], mask, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def _attend_all(
    q,
    k_cache,
    v_cache,
    block_table,
    kv_head,
    end,
    scale,
    BLOCK_M: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    """``_attend`` from key 0 to ``end``, a multiple of BLOCK_N, where every row sees all of them."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)[None, :]
    factor = scale * LOG2_E
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(0, end, BLOCK_N):
        token = first + n
        block = tl.load(block_table + token // KV_BLOCK).to(tl.int64)
        row = ((block * NUM_KV_HEADS + kv_head) * KV_BLOCK + token % KV_BLOCK) * HEAD_DIM
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_cache + row[:, None] + d)
        else:
            k = tl.load(k_cache + row[:, None] + d, d < HEAD_DIM, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        if HEAD_DIM == BLOCK_D:
            v = tl.load(v_cache + row[:, None] + d)
        else:
            v = tl.load(v_cache + row[:, None] + d, d < HEAD_DIM, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def _mixed_part(item, counts, programs, NUM_KV_HEADS: tl.constexpr, SPLITS: tl.constexpr):
    """(row, part, number of parts) of the ``item``-th piece of decode in a mixed step; live ones first."""
    wanted = programs // (tl.maximum(tl.load(counts), 1) * NUM_KV_HEADS)
    splits = tl.minimum(tl.maximum(wanted, 1), SPLITS)
    return item // splits, item % splits, splits


@kernel(do_not_specialize=["table_stride"])
def decode(
    qkv,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    query_starts,
    decodes,
    counts,
    out,
    parts,
    sums,
    programs,
    scale,
    qkv_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WORK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of one sequence's context, for the query heads of a key head.

    In a mixed step it starts when all programs of prefill have waited for what precedes both, and reads what
    that wrote past the first cache, which may hold what was there before. Only the end waits, for prefill.
    """
    let_next_start(PDL)
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    if HAS_WORK:
        row, split, splits = _mixed_part(row, counts, programs, NUM_KV_HEADS, SPLITS)
        live = row < tl.load(counts)
        seq = tl.load(decodes + row, live, 0)
        query = tl.load(query_starts + seq)
        context = tl.load(context_lens + seq)
    else:
        split, splits, seq = tl.program_id(2), SPLITS, row
        query = tl.load(query_starts + seq)
        context = tl.load(context_lens + seq)
        live = (tl.load(query_starts + seq + 1) - query == 1) & (context > 0)
    if live:
        size = tl.cdiv(tl.cdiv(context, BLOCK_N), splits) * BLOCK_N
        start = split * size
        end = tl.minimum(start + size, context)
        g = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + g
        mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
        if not HAS_WORK:
            wait_for_inputs(PDL)
        source = qkv + query.to(tl.int64) * qkv_stride + head[:, None] * HEAD_DIM + d[None, :]
        q = tl.load(source, mask, 0.0, cache_modifier=".cg" if HAS_WORK else "")
        maximum, total, acc = _attend(
            q,
            k_cache,
            v_cache,
            block_tables + seq.to(tl.int64) * table_stride,
            kv_head,
            tl.zeros((BLOCK_M,), tl.int32) + context,
            start,
            end,
            scale,
            tl.full((BLOCK_M,), float("-inf"), tl.float32),
            tl.zeros((BLOCK_M,), tl.float32),
            tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            KV_BLOCK,
        )
        if splits == 1:
            target = out + (query.to(tl.int64) * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + d[None, :]
            tl.store(target, (acc / total[:, None]).to(q.dtype), mask)
        else:
            part = (row.to(tl.int64) * NUM_KV_HEADS * GROUP + head) * SPLITS + split
            tl.store(parts + part[:, None] * BLOCK_D + d[None, :], acc, (g < GROUP)[:, None])
            tl.store(sums + part * 2, maximum, g < GROUP)
            tl.store(sums + part * 2 + 1, total, g < GROUP)
    # One program that waits holds up the end of all; others that have nothing to do make room.
    if HAS_WORK:
        if live | (tl.program_id(1) + kv_head == 0):
            wait_for_inputs(PDL)
    else:
        wait_for_inputs(PDL)


@kernel
def join(
    parts,
    sums,
    query_starts,
    decodes,
    counts,
    out,
    programs,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WORK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins the parts of one sequence and head."""
    let_next_start(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1)
    if HAS_WORK:
        _, _, splits = _mixed_part(row, counts, programs, NUM_KV_HEADS, SPLITS)
        live = (splits > 1) & (row < tl.load(counts))
        seq = tl.load(decodes + row, live, 0)
        query = tl.load(query_starts + seq)
    else:
        splits, seq = SPLITS, row
        query = tl.load(query_starts + seq)
        live = tl.load(query_starts + seq + 1) - query == 1
    if live:
        s = tl.arange(0, SPLITS)
        d = tl.arange(0, BLOCK_D)
        part = (row.to(tl.int64) * NUM_HEADS + head) * SPLITS + s
        wait_for_inputs(PDL)
        maximum = tl.load(sums + part * 2, s < splits, float("-inf"))
        total = tl.load(sums + part * 2 + 1, s < splits, 0.0)
        acc = tl.load(parts + part[:, None] * BLOCK_D + d[None, :], (s < splits)[:, None], 0.0)
        weight = tl.exp2(maximum - tl.max(maximum, 0))
        result = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
        target = out + (query.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + d
        tl.store(target, result.to(out.dtype.element_ty), d < HEAD_DIM)
    if HAS_WORK:
        if live | (head + row == 0):
            wait_for_inputs(PDL)
    else:
        wait_for_inputs(PDL)


@triton.jit
def _attend_tile(
    qkv,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    query_starts,
    tile,
    out,
    scale,
    qkv_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_Q queries of one sequence, all GROUP heads of each: row i is query i // GROUP, head i % GROUP."""
    kv_head = tl.program_id(0)
    seq = tl.load(tile)
    first = tl.load(tile + 1)
    query_start = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - query_start
    context = tl.load(context_lens + seq)
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = first + i // GROUP
    head = kv_head * GROUP + i % GROUP
    in_block = (i // GROUP < BLOCK_Q) & (query < count)
    mask = in_block[:, None] & (d < HEAD_DIM)[None, :]
    token = (query_start + query).to(tl.int64)
    before = context - count + first
    wait_for_inputs(PDL)
    q = tl.load(qkv + token[:, None] * qkv_stride + head[:, None] * HEAD_DIM + d[None, :], mask, 0.0)
    table = block_tables + seq.to(tl.int64) * table_stride
    # What every row sees, then what some do.
    common = (before + 1) // BLOCK_N * BLOCK_N
    maximum, total, acc = _attend_all(
        q, k_cache, v_cache, table, kv_head, common, scale,
        BLOCK_M, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_N, KV_BLOCK,
    )  # fmt: skip
    visible = tl.where(in_block, before + i // GROUP + 1, 0)
    end = tl.minimum(before + BLOCK_Q, context)
    _, total, acc = _attend(
        q, k_cache, v_cache, table, kv_head, visible, common, end, scale, maximum, total, acc,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_N, KV_BLOCK,
    )  # fmt: skip
    target = out + (token * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + d[None, :]
    total = tl.where(in_block, total, 1.0)
    tl.store(target, (acc / total[:, None]).to(q.dtype), mask)


@kernel(do_not_specialize=["table_stride"])
def prefill(
    qkv,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    query_starts,
    tiles,
    counts,
    out,
    scale,
    qkv_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    WALKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile a program; where there is room for far more tiles than there are, each walks the list."""
    # In this order: decode, which may start next, relies on it.
    wait_for_inputs(PDL)
    let_next_start(PDL)
    num_tiles = tl.load(counts + 1)
    # Late tiles see most keys; the longest work goes first.
    last = tiles + (num_tiles - 1) * 2
    if WALKS:
        for item in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
            _attend_tile(
                qkv, k_cache, v_cache, block_tables, context_lens, query_starts, last - item * 2, out,
                scale, qkv_stride, table_stride, NUM_KV_HEADS, GROUP, BLOCK_M, BLOCK_Q, HEAD_DIM, BLOCK_D,
                BLOCK_N, KV_BLOCK, PDL,
            )  # fmt: skip
    elif tl.program_id(1) < num_tiles:
        _attend_tile(
            qkv, k_cache, v_cache, block_tables, context_lens, query_starts, last - tl.program_id(1) * 2, out,
            scale, qkv_stride, table_stride, NUM_KV_HEADS, GROUP, BLOCK_M, BLOCK_Q, HEAD_DIM, BLOCK_D,
            BLOCK_N, KV_BLOCK, PDL,
        )  # fmt: skip
    wait_for_inputs(PDL)
