"""Causal attention over the paged cache: a kernel for sequences with one query, and one for all others.

Both treat the query heads that share a key head as rows of one tile, so that a cached key is read once
for all of them. *decode* takes one sequence and key head a program, or a part of its context where the
batch is small: then the parts leave unnormalised sums, and a third kernel joins them. How many parts
there are depends on the shapes of the plan and its host values alone, so a captured graph fits any
context up to the captured ``max_context_len``. *prefill* takes a block of queries a program.

A step that has both kinds of sequence launches both kernels; each passes over the other's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gpu import attention_kernels
from kernels.gpu.launch import ceil_div, dependent_launch, num_processors, power_of_2
from kernels.plans import BLOCK_SIZE, AttentionPlan


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    block_n: int = 16
    num_warps: int = 1
    num_stages: int = 5
    programs_per_processor: int = 8
    """Programs that splitting aims at."""
    max_splits: int = 32


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    max_registers: int | None = 128


def paged_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_heads: int,
    scale: float,
    decode: DecodeConfig | None = None,
    prefill: PrefillConfig | None = None,
) -> torch.Tensor:
    """See ``kernels.paged_attention.paged_attention``."""
    out = torch.empty((qkv.shape[0], num_heads * k_cache.shape[3]), dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0] == 0:
        return out
    narrow = qkv.dtype != torch.float32
    if plan.max_query_len > 1:
        config = prefill or (PrefillConfig() if narrow else PrefillConfig(64, 32, 4, 3, None))
        _prefill(qkv, k_cache, v_cache, plan, out, num_heads, scale, config)
    if plan.max_query_len <= 1 or plan.context_lens.shape[0] > 1:
        config = decode or (DecodeConfig() if narrow else DecodeConfig(block_n=32))
        _decode(qkv, k_cache, v_cache, plan, out, num_heads, scale, config)
    return out


def _decode(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor,
    num_heads: int,
    scale: float,
    config: DecodeConfig,
) -> None:
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    num_seqs = plan.context_lens.shape[0]
    wanted = config.programs_per_processor * num_processors(qkv) // (num_seqs * num_kv_heads)
    splits = max(1, min(config.max_splits, wanted, ceil_div(plan.max_context_len, config.block_n)))
    splits = power_of_2(splits + 1) // 2
    group = num_heads // num_kv_heads
    block_d = power_of_2(head_dim)
    pdl = dependent_launch(qkv)
    parts = sums = out
    if splits > 1:
        parts = torch.empty((num_seqs, num_heads, splits, block_d), dtype=torch.float32, device=qkv.device)
        sums = torch.empty((num_seqs, num_heads, splits, 2), dtype=torch.float32, device=qkv.device)
    attention_kernels.decode[(num_kv_heads, num_seqs, splits)](
        qkv,
        k_cache,
        v_cache,
        plan.block_tables,
        plan.context_lens,
        plan.query_starts,
        out,
        parts,
        sums,
        scale,
        qkv.stride(0),
        plan.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_M=max(16, power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_N=config.block_n,
        KV_BLOCK=BLOCK_SIZE,
        SPLITS=splits,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=pdl,
    )
    if splits > 1:
        attention_kernels.join[(num_seqs, num_heads)](
            parts,
            sums,
            plan.query_starts,
            out,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            SPLITS=splits,
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
        )


def _prefill(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor,
    num_heads: int,
    scale: float,
    config: PrefillConfig,
) -> None:
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    num_seqs = plan.context_lens.shape[0]
    group = num_heads // num_kv_heads
    block_q = config.block_m // group
    pdl = dependent_launch(qkv)
    attention_kernels.prefill[(num_kv_heads, qkv.shape[0] // block_q + num_seqs)](
        qkv,
        k_cache,
        v_cache,
        plan.block_tables,
        plan.context_lens,
        plan.query_starts,
        out,
        scale,
        qkv.stride(0),
        plan.block_tables.stride(0),
        num_seqs,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_M=config.block_m,
        BLOCK_Q=block_q,
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_2(head_dim),
        BLOCK_N=config.block_n,
        KV_BLOCK=BLOCK_SIZE,
        SKIP_SINGLE=num_seqs > 1,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=pdl,
    )
