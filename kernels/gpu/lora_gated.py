"""The expand half of gate and up, fused with SiLU of the gate times up.

Apart, the two would write the sums of [T, 2I] to memory and read them again: a third of what LoRA costs in a
prefill. Here the sums stay in registers, and only the activation is written. Rows that no adapter applies to
are activated by the same launch; which they are is a mask that the work list comes with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.gpu import linear as few_rows
from kernels.gpu import lora_gated_kernels
from kernels.gpu.activation import silu_mul
from kernels.gpu.launch import ceil_div, dependent_launch, num_processors, power_of_2
from kernels.gpu.lora import (
    ShrinkConfig,
    add_lora,
    lora_beside,
    lora_shrink,
    prepare,
    runs_beside,
    shrink_config,
)
from kernels.gpu.lora_tiles import FEW_ROWS, MANY_ROWS, has_many
from kernels.plans import RANK_PAGE, LoraPlan, LoraPool

MIN_ROWS = 512
"""Up to so many rows their sums stay in the cache, and the plain kernels are faster."""

_BASE_ROWS, _BASE_WIDTH = 64, 4096
"""The piece in which base rows are activated: some rows, some columns."""


@dataclass(frozen=True, slots=True)
class GatedConfig:
    """``block_n`` columns of gate and as many of up at once; ``fill`` pieces that the work is cut into.

    ``many_cost`` as in ``ExpandConfig``.
    """

    block_n: int = 128
    many_block_n: int = 64
    fill: int = 528
    num_warps: int = 4
    num_stages: int = 3
    per_processor: int = 4
    max_registers: int | None = None
    many_cost: int = 6


def silu_mul_add_lora(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    pool: LoraPool,
    plan: LoraPlan,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``kernels.lora.silu_mul_add_lora``. Few rows are activated apart, by less code, from the cache."""
    plan = plan if plan.tiles else prepare(plan, x.shape[0])
    if x.shape[0] <= few_rows.MAX_ROWS and runs_beside(x):
        # Of more rows silu_mul would read more than expand then saves.
        if weight is not None and few_rows.fits(x, weight):
            return silu_mul(*lora_beside(lambda: few_rows.linear(x, weight, leaves_room=True), x, pool, plan))
        return silu_mul(*lora_beside(lambda: product(x), x, pool, plan))
    if x.shape[0] <= MIN_ROWS:
        return silu_mul(add_lora(product, x, pool, plan))
    return lora_expand_silu_mul(lora_shrink(x, pool, plan), product(x), pool, plan)


def lora_expand_silu_mul(
    shrunk: torch.Tensor,
    gate_up: torch.Tensor,
    pool: LoraPool,
    plan: LoraPlan,
    config: GatedConfig | None = None,
    shrink: ShrinkConfig | None = None,
) -> torch.Tensor:
    """``silu(gate) * up`` [T, I] of ``gate_up + shrunk·Bᵀ``, whose sum is in float32 and is not kept.

    ``shrink`` is the configuration that ``lora_shrink`` ran with: it says how many splits hold values.
    """
    tiles = plan.tiles
    assert tiles is not None, "call prepare(plan, num_tokens) once a step"
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert tiles.adapted.shape[0] == num_tokens and pool.splits == (0, size, 2 * size)
    config = config or GatedConfig()
    shrink = shrink or shrink_config(2 * RANK_PAGE, pool.a.shape[3], num_tokens)
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    pdl = dependent_launch(gate_up)
    work = tiles.tiles.shape[0] * ceil_div(size, config.block_n)
    work += ceil_div(num_tokens, _BASE_ROWS) * ceil_div(size, _BASE_WIDTH)
    lora_gated_kernels.expand_silu_mul[(min(work, num_processors(gate_up) * config.per_processor),)](
        shrunk,
        pool.scales,
        pool.b,
        gate_up,
        out,
        tiles.tiles,
        tiles.counts,
        tiles.adapted,
        plan.rows,
        plan.segment_pages,
        num_tokens,
        pool.a.shape[3],
        shrink.fill,
        config.fill,
        config.many_cost,
        shrunk.stride(0),
        shrunk.stride(1),
        MAX_PAGES=plan.segment_pages.shape[1],
        RANK_ROWS=RANK_PAGE * power_of_2(plan.segment_pages.shape[1]),
        SIZE=size,
        FEW=FEW_ROWS,
        MANY=MANY_ROWS,
        HAS_MANY=has_many(num_tokens),
        BLOCK_N=config.block_n,
        MANY_BLOCK_N=config.many_block_n,
        BASE_ROWS=_BASE_ROWS,
        BASE_WIDTH=_BASE_WIDTH,
        BLOCK_K=shrink.block_k,
        MAX_SPLITS=shrink.max_splits,
        PDL=pdl,
        num_warps=config.num_warps,
        NUM_STAGES=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=pdl,
    )
    return out
