"""Causal attention over the paged cache: a kernel for sequences with one query, and one for all others.

Both treat the query heads that share a key head as rows of one tile, so that a cached key is read once
for all of them. *decode* takes one sequence and key head a program, or a part of its context where the
batch is small: then the parts leave unnormalised sums, and a third kernel joins them. How many parts
there are depends on the shapes of the plan alone, so a captured graph fits any context, and so do few
compiled kernels. *prefill* takes a tile of queries a program.

A step that may have both kinds of sequence launches both kernels, over a work list (``attention_work``). They
run at the same time: decode starts when all programs of prefill have seen what they wait for, so that it need
not wait itself, and it ends after prefill. Into how many parts a context is cut is then found on the device,
by how many sequences decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.gpu import attention_kernels
from kernels.gpu.attention_work import make_work
from kernels.gpu.launch import ceil_div, dependent_launch, num_processors, power_of_2
from kernels.plans import BLOCK_SIZE, AttentionPlan

_FEW_TOKENS = 2048
"""Up to so many, a captured step has far more room for tiles than tiles; as many programs as run at once then
walk the list. Beyond, a program for each tile lets the device balance them."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    block_n: int = 16
    num_warps: int = 1
    num_stages: int = 5
    programs_per_processor: int = 8
    """Programs that splitting aims at."""
    max_splits: int = 32
    max_mixed_splits: int = 8


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    max_registers: int | None = 128


def prepare(
    plan: AttentionPlan, *, group: int, dtype: torch.dtype, config: PrefillConfig | None = None
) -> AttentionPlan:
    """The plan with its work list, for ``group`` query heads a key head; call once a step.

    A step in which every sequence has one query needs none.
    """
    if plan.max_query_len <= 1 or plan.work is not None:
        return plan
    return replace(plan, work=make_work(plan, (config or _prefill_config(dtype)).block_m // group))


def _prefill_config(dtype: torch.dtype) -> PrefillConfig:
    return PrefillConfig(64, 32, 4, 3, None) if dtype == torch.float32 else PrefillConfig()


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
    decode = decode or DecodeConfig(block_n=32 if qkv.dtype == torch.float32 else 16)
    if plan.max_query_len <= 1:
        _decode(qkv, k_cache, v_cache, plan, out, num_heads, scale, decode)
        return out
    prefill = prefill or _prefill_config(qkv.dtype)
    plan = prepare(plan, group=num_heads // k_cache.shape[1], dtype=qkv.dtype, config=prefill)
    _prefill(qkv, k_cache, v_cache, plan, out, num_heads, scale, prefill)
    if plan.context_lens.shape[0] > 1:
        _decode(qkv, k_cache, v_cache, plan, out, num_heads, scale, decode)
    return out


@dataclass(frozen=True, slots=True)
class _Parts:
    """``rows`` × key heads × ``splits``: the programs of decode. Of a mixed step these are the most."""

    rows: int
    splits: int
    joined_rows: int
    """Most rows that are cut in parts."""


def _parts(plan: AttentionPlan, num_kv_heads: int, programs: int, config: DecodeConfig) -> _Parts:
    num_seqs = plan.context_lens.shape[0]
    if plan.work is None:
        wanted = max(1, programs // (num_seqs * num_kv_heads))
        splits = power_of_2(min(config.max_splits, wanted) + 1) // 2
        return _Parts(num_seqs, splits, num_seqs if splits > 1 else 0)
    # On the device: programs // (decodes * num_kv_heads), if that is more than one.
    joined = min(num_seqs, programs // (2 * num_kv_heads))
    return _Parts(num_seqs, config.max_mixed_splits if joined else 1, joined)


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
    programs = config.programs_per_processor * num_processors(qkv)
    cut = _parts(plan, num_kv_heads, programs, config)
    grid = (num_kv_heads, cut.rows, cut.splits)
    if plan.work is not None:
        grid = (num_kv_heads, min(cut.rows * cut.splits, max(cut.rows, programs // num_kv_heads)))
    group = num_heads // num_kv_heads
    block_d = power_of_2(head_dim)
    pdl = dependent_launch(qkv)
    work = plan.work
    parts = sums = out
    if cut.joined_rows:
        shape = (cut.joined_rows, num_heads, cut.splits)
        parts = torch.empty((*shape, block_d), dtype=torch.float32, device=qkv.device)
        sums = torch.empty((*shape, 2), dtype=torch.float32, device=qkv.device)
    common = {
        "decodes": plan.query_starts if work is None else work.decodes,
        "counts": plan.query_starts if work is None else work.counts,
        "query_starts": plan.query_starts,
        "programs": programs,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "SPLITS": cut.splits,
        "HAS_WORK": work is not None,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    attention_kernels.decode[grid](
        qkv,
        k_cache,
        v_cache,
        plan.block_tables,
        plan.context_lens,
        out=out,
        parts=parts,
        sums=sums,
        scale=scale,
        qkv_stride=qkv.stride(0),
        table_stride=plan.block_tables.stride(0),
        GROUP=group,
        BLOCK_M=max(16, power_of_2(group)),
        BLOCK_N=config.block_n,
        KV_BLOCK=BLOCK_SIZE,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **common,
    )
    if cut.joined_rows:
        attention_kernels.join[(num_heads, cut.joined_rows)](
            parts, sums, out=out, NUM_HEADS=num_heads, num_warps=1, **common
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
    work = plan.work
    assert work is not None, "call prepare first"
    group = num_heads // num_kv_heads
    assert work.tile_queries == config.block_m // group, "the list was made for tiles of another size"
    pdl = dependent_launch(qkv)
    programs, walks = work.tiles.shape[0], False
    at_once = ceil_div(2 * num_processors(qkv), num_kv_heads)
    if qkv.shape[0] <= _FEW_TOKENS and programs > at_once:
        programs, walks = at_once, True
    attention_kernels.prefill[(num_kv_heads, programs)](
        qkv,
        k_cache,
        v_cache,
        plan.block_tables,
        plan.context_lens,
        plan.query_starts,
        work.tiles,
        work.counts,
        out,
        scale,
        qkv.stride(0),
        plan.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_M=config.block_m,
        BLOCK_Q=work.tile_queries,
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_2(head_dim),
        BLOCK_N=config.block_n,
        KV_BLOCK=BLOCK_SIZE,
        WALKS=walks,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=pdl,
    )
