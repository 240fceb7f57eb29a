"""Rotary position embedding, and the write of keys and values into the paged cache."""

from __future__ import annotations

import torch

from kernels import native, reference
from kernels.plans import AttentionPlan


def rope_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    plan: AttentionPlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_heads: int,
) -> None:
    """Rotate q and k **in place** in ``qkv``, then write k and v to the cache at ``plan.slots``.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D], contiguous; a row is (q heads | k heads | v heads).
        cos_sin: [max_len, D] float32; a row is (cos of D/2 frequencies | sin of the same). Pairs are
            (i, i + D/2), as Hugging Face's ``rotate_half`` has them.
        plan: ``positions`` and ``slots`` are read. A row with slot -1 is left alone.
        k_cache, v_cache: one layer's [num_blocks, Hkv, 16, D].
        num_heads: Hq.
    """
    assert qkv.is_contiguous()
    if qkv.is_cuda:
        from kernels.gpu import kv_write as gpu

        return gpu.rope_write_kv(qkv, cos_sin, plan, k_cache, v_cache, num_heads=num_heads)
    kernels = native.compiled(qkv.dtype)
    if kernels is None:
        return reference.rope_write_kv(qkv, cos_sin, plan, k_cache, v_cache, num_heads=num_heads)
    kernels.rope_write_kv(
        *(qkv.data_ptr(), cos_sin.data_ptr(), plan.positions.data_ptr(), plan.slots.data_ptr()),
        *(k_cache.data_ptr(), v_cache.data_ptr()),
        *(qkv.shape[0], num_heads, k_cache.shape[1], k_cache.shape[3], torch.get_num_threads()),
    )
