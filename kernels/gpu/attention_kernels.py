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


@kernel(do_not_specialize=["table_stride"])
def decode(
    qkv,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    query_starts,
    out,
    parts,
    sums,
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
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    query = tl.load(query_starts + seq)
    context = tl.load(context_lens + seq)
    if (tl.load(query_starts + seq + 1) - query == 1) & (context > 0):
        size = tl.cdiv(tl.cdiv(context, BLOCK_N), SPLITS) * BLOCK_N
        start = split * size
        end = tl.minimum(start + size, context)
        g = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + g
        mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
        wait_for_inputs(PDL)
        q = tl.load(qkv + query.to(tl.int64) * qkv_stride + head[:, None] * HEAD_DIM + d[None, :], mask, 0.0)
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
        if SPLITS == 1:
            target = out + (query.to(tl.int64) * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + d[None, :]
            tl.store(target, (acc / total[:, None]).to(q.dtype), mask)
        else:
            part = ((seq.to(tl.int64) * NUM_KV_HEADS * GROUP) + head) * SPLITS + split
            tl.store(parts + part[:, None] * BLOCK_D + d[None, :], acc, (g < GROUP)[:, None])
            tl.store(sums + part * 2, maximum, g < GROUP)
            tl.store(sums + part * 2 + 1, total, g < GROUP)
    wait_for_inputs(PDL)


@kernel
def join(
    parts,
    sums,
    query_starts,
    out,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins the parts of one sequence and head."""
    let_next_start(PDL)
    seq = tl.program_id(0)
    head = tl.program_id(1)
    query = tl.load(query_starts + seq)
    if tl.load(query_starts + seq + 1) - query == 1:
        s = tl.arange(0, SPLITS)
        d = tl.arange(0, BLOCK_D)
        part = (seq.to(tl.int64) * NUM_HEADS + head) * SPLITS + s
        wait_for_inputs(PDL)
        maximum = tl.load(sums + part * 2)
        total = tl.load(sums + part * 2 + 1)
        acc = tl.load(parts + part[:, None] * BLOCK_D + d[None, :])
        weight = tl.exp2(maximum - tl.max(maximum, 0))
        result = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
        target = out + (query.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + d
        tl.store(target, result.to(out.dtype.element_ty), d < HEAD_DIM)
    wait_for_inputs(PDL)


@triton.jit
def _sequence_of(block, query_starts, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that query block ``block`` belongs to, when sequence s is given its first at
    ``query_starts[s] // BLOCK_Q + s``: room enough for a ragged last block each."""
    found = 0
    for chunk in range(0, num_seqs, 64):
        s = chunk + tl.arange(0, 64)
        first = tl.load(query_starts + s, s < num_seqs, 0) // BLOCK_Q + s
        found += tl.sum(((s < num_seqs) & (first <= block)).to(tl.int32), 0)
    return found - 1


@kernel(do_not_specialize=["num_seqs", "table_stride"])
def prefill(
    qkv,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    query_starts,
    out,
    scale,
    qkv_stride,
    table_stride,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_Q queries of one sequence, all GROUP heads of each: row i is query i // GROUP, head i % GROUP."""
    let_next_start(PDL)
    kv_head = tl.program_id(0)
    # Late blocks see most keys; the longest work goes first.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = _sequence_of(block, query_starts, num_seqs, BLOCK_Q)
    query_start = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - query_start
    first = (block - (query_start // BLOCK_Q + seq)) * BLOCK_Q
    context = tl.load(context_lens + seq)
    wanted = (first < count) & (context > 0)
    if SKIP_SINGLE:
        wanted = wanted & (count > 1)
    if wanted:
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
    wait_for_inputs(PDL)
