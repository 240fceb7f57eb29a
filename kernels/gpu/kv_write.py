"""Rotary embedding of q and k, and the write of k and v into the paged cache, in one pass over qkv."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.gpu.launch import ceil_div, dependent_launch, kernel, let_next_start, power_of_2, wait_for_inputs
from kernels.plans import BLOCK_SIZE, AttentionPlan

_HEADS = 16


def rope_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    plan: AttentionPlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_heads: int,
) -> None:
    """See ``kernels.kv_write.rope_write_kv``."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    pdl = dependent_launch(qkv)
    _rope_write_kv[(qkv.shape[0], ceil_div(num_heads + 2 * num_kv_heads, _HEADS))](
        qkv,
        cos_sin,
        plan.positions,
        plan.slots,
        k_cache,
        v_cache,
        qkv.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=power_of_2(head_dim // 2),
        KV_BLOCK=BLOCK_SIZE,
        HEADS=_HEADS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@kernel
def _rope_write_kv(
    qkv,
    cos_sin,
    positions,
    slots,
    k_cache,
    v_cache,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, HEADS heads of it; a head is held as its two halves."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        d = tl.arange(0, BLOCK_HALF)
        mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (d < HALF)[None, :]
        angle = cos_sin + tl.load(positions + token) * 2 * HALF + d
        cos = tl.load(angle, d < HALF, 0.0)[None, :]
        sin = tl.load(angle + HALF, d < HALF, 0.0)[None, :]
        source = qkv + token * qkv_stride + head[:, None] * (2 * HALF) + d[None, :]
        wait_for_inputs(PDL)
        low = tl.load(source, mask, 0.0)
        high = tl.load(source + HALF, mask, 0.0)
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        is_v = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        new_low = tl.where(is_v, low, (wide_low * cos - wide_high * sin).to(low.dtype))
        new_high = tl.where(is_v, high, (wide_high * cos + wide_low * sin).to(low.dtype))
        tl.store(source, new_low, mask & (is_v == 0))
        tl.store(source + HALF, new_high, mask & (is_v == 0))
        kv_head = tl.maximum(head - NUM_HEADS, 0) % NUM_KV_HEADS
        target = ((slot // KV_BLOCK) * NUM_KV_HEADS + kv_head) * KV_BLOCK + slot % KV_BLOCK
        offsets = target[:, None] * (2 * HALF) + d[None, :]
        is_k = (head >= NUM_HEADS)[:, None] & (is_v == 0)
        tl.store(k_cache + offsets, new_low, mask & is_k)
        tl.store(k_cache + offsets + HALF, new_high, mask & is_k)
        tl.store(v_cache + offsets, new_low, mask & is_v)
        tl.store(v_cache + offsets + HALF, new_high, mask & is_v)
    wait_for_inputs(PDL)
