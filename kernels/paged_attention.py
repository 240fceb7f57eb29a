"""Causal attention of a ragged batch over the paged cache: decode, prefill and chunks in one call."""

from __future__ import annotations

import torch

from kernels import native, reference
from kernels.plans import AttentionPlan


def prepare(plan: AttentionPlan, *, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """The plan, with whatever the device's kernels derive from it. Call once a step, before the first layer.

    Without it every layer derives it again. Launches on the device of the plan, and may be captured.
    """
    if plan.context_lens.is_cuda:
        from kernels.gpu import paged_attention as gpu

        return gpu.prepare(plan, group=num_heads // num_kv_heads, dtype=dtype)
    return plan


def paged_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_heads: int,
    scale: float,
) -> torch.Tensor:
    """Attend from the q part of ``qkv`` to the cached keys and values of each row's own sequence.

    Keys and values of the step's own tokens must be in the cache already (``rope_write_kv``). What a block
    holds beyond its sequence's context is masked, never multiplied by zero.

    Args:
        qkv: [T, at least Hq * D], unit column stride; the first Hq * D columns are the rotated queries.
        k_cache, v_cache: one layer's [num_blocks, Hkv, 16, D]; Hq is a multiple of Hkv.
        plan: see ``AttentionPlan``.
        num_heads: Hq.
        scale: positive factor on the scores, usually 1 / sqrt(D).

    Returns:
        [T, Hq * D] in qkv's dtype. Rows that no sequence owns are zero on the CPU, undefined on a GPU.
    """
    if qkv.is_cuda:
        from kernels.gpu import paged_attention as gpu

        return gpu.paged_attention(qkv, k_cache, v_cache, plan, num_heads=num_heads, scale=scale)
    kernels = native.compiled(qkv.dtype)
    if kernels is None:
        return reference.paged_attention(qkv, k_cache, v_cache, plan, num_heads=num_heads, scale=scale)
    tokens, (_, num_kv_heads, _, head_dim) = qkv.shape[0], k_cache.shape
    num_seqs, max_blocks = plan.block_tables.shape
    out = torch.empty(tokens, num_heads * head_dim, dtype=qkv.dtype)
    status = kernels.paged_attention(
        *(out.data_ptr(), qkv.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
        *(plan.query_starts.data_ptr(), plan.context_lens.data_ptr(), plan.block_tables.data_ptr()),
        *(tokens, qkv.stride(0), num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, scale),
        torch.get_num_threads(),
    )
    if status != 0:
        raise MemoryError("no memory for the attention kernel's scratch")
    return out
