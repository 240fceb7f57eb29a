"""LoRA over grouped rows and rank pages: ``y += (scale · x·Aᵀ)·Bᵀ`` for each row under its own adapter.

Two launches for a group of projections that share their input, whatever the number of adapters:

*shrink* multiplies each tile of rows by one rank page of all projections of the group at once (so ``x`` is
read once), cut along ``in`` into as many splits as fill the device when the live work is little. It leaves
scaled partial sums in float32. *expand* sums the splits in a fixed order (no atomics: results do not depend
on timing), multiplies by Bᵀ and adds to ``y``.

Both run a fixed number of programs over a work list whose length is read from the device: a captured graph
serves any number of adapters, and dead work costs nothing. Each page is read once per tile of rows, live rank
rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

from kernels.gpu import linear as few_rows
from kernels.gpu import lora_expand_kernel, lora_shrink_kernel
from kernels.gpu.launch import ceil_div, dependent_launch, num_processors, power_of_2
from kernels.gpu.linear import Addend
from kernels.gpu.lora_tiles import FEW_ROWS, MANY_ROWS, has_many, make_tiles
from kernels.plans import RANK_PAGE, LoraPlan, LoraPool, LoraTiles

T = TypeVar("T")
U = TypeVar("U")

_FORK_ROWS = 128
"""Rows up to which it pays to run shrink beside the base product; at 256 it did not."""
_PROMPT_TOKENS = 512
"""A step of more is of prompts: there is work enough for all processors, whatever is cut."""


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """``fill``: programs that splitting aims at; ``per_processor``: programs launched per multiprocessor.

    ``many_block_k`` is for tiles of many rows, and divides ``block_k``.
    """

    block_k: int
    max_splits: int
    many_block_k: int = 64
    fill: int = 528
    num_warps: int = 4
    num_stages: int = 3
    per_processor: int = 4
    max_registers: int | None = 128


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """``fill``: pieces that the work is cut into, roughly; the rest as above.

    ``many_cost``: what a tile of many rows costs, where one of few costs 1. ``row_block_n``: for tiles of one
    or two rows where a piece has half as many columns; 0: none.
    """

    block_n: int
    many_block_n: int = 64
    fill: int = 528
    num_warps: int = 4
    num_stages: int = 3
    per_processor: int = 4
    max_registers: int | None = 128
    many_cost: int = 6
    row_block_n: int = 0


def prepare(plan: LoraPlan, num_tokens: int) -> LoraPlan:
    """The plan with its work list; call once a step, before the first layer."""
    return plan if plan.num_rows == 0 else replace(plan, tiles=make_tiles(plan, num_tokens))


def apply_lora(x: torch.Tensor, y: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> None:
    """Adds the adapters' part of one group of projections to ``y``, in place.

    Args:
        x: [T, in], rows contiguous.
        y: [T, out], rows contiguous; rows that no adapter applies to are neither read nor written.
    """
    if plan.num_rows:
        plan = plan if plan.tiles else prepare(plan, x.shape[0])
        lora_expand(lora_shrink(x, pool, plan), y, pool, plan)


def add_lora(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    pool: LoraPool,
    plan: LoraPlan,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``kernels.lora.add_lora``.

    In a graph of few rows shrink runs beside the base product, which is launched first and leaves room for
    it. If the product comes in parts, which a kernel has yet to join, so does expand: that kernel adds both.
    """
    plan = plan if plan.tiles else prepare(plan, x.shape[0])
    if not runs_beside(x):
        y = product(x)
        lora_expand(lora_shrink(x, pool, plan), y, pool, plan)
        return y
    if weight is not None and few_rows.fits(x, weight) and few_rows.num_parts(x, weight) > 1:
        parts, addend = lora_beside(lambda: few_rows.parts_of(x, weight, leaves_room=True), x, pool, plan)
        return few_rows.join(parts, x.dtype, addend)
    y, shrunk = _beside(lambda: product(x), lambda: lora_shrink(x, pool, plan), x.device)
    lora_expand(shrunk, y, pool, plan)
    return y


def runs_beside(x: torch.Tensor) -> bool:
    """Whether LoRA of these rows runs on a second stream: in a graph of few rows."""
    return x.is_cuda and x.shape[0] <= _FORK_ROWS and torch.cuda.is_current_stream_capturing()


def lora_beside(
    product: Callable[[], torch.Tensor], x: torch.Tensor, pool: LoraPool, plan: LoraPlan
) -> tuple[torch.Tensor, Addend]:
    """What ``product`` launches, and beside it all of LoRA, for whoever works on the product next to add.

    For few rows: shrink then keeps little on its way, and so finds room beside the product.
    """
    config = _config_beside(pool)

    def alone() -> Addend:
        values = torch.empty((x.shape[0], pool.splits[-1]), dtype=torch.float32, device=x.device)
        lora_expand(lora_shrink(x, pool, plan, config), values, pool, plan, shrink=config, adds=False)
        return Addend(values, _tiles_of(plan).adapted)

    return _beside(product, alone, x.device)


def _beside(first: Callable[[], T], second: Callable[[], U], device: torch.device) -> tuple[T, U]:
    """Launches ``first`` here and then ``second`` on a stream of its own; what follows waits for both."""
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    result = first()
    with torch.cuda.stream(side):
        other = second()
    main.wait_stream(side)
    return result, other


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def lora_shrink(
    x: torch.Tensor, pool: LoraPool, plan: LoraPlan, config: ShrinkConfig | None = None
) -> torch.Tensor:
    """``scale · x·Aᵀ`` of every row of the plan, as partial sums for ``lora_expand``.

    Returns:
        float32 [splits, R, P, M, 16]; only the splits and rank rows that are live hold values.
    """
    tiles = _tiles_of(plan)
    _, num_projections, _, size = pool.a.shape
    columns = num_projections * RANK_PAGE
    config = config or shrink_config(columns, size, x.shape[0])
    v = torch.empty(
        (config.max_splits, plan.rows.shape[0], plan.segment_pages.shape[1], num_projections, RANK_PAGE),
        dtype=torch.float32,
        device=x.device,
    )
    pdl = dependent_launch(x)
    grid = min(tiles.units.shape[0] * config.max_splits, num_processors(x) * config.per_processor)
    lora_shrink_kernel.shrink[(grid,)](
        x,
        pool.a,
        pool.scales,
        v,
        tiles.units,
        tiles.counts,
        plan.rows,
        size,
        config.fill,
        x.stride(0),
        v.stride(0),
        v.stride(1),
        COLUMNS=columns,
        BLOCK_COLUMNS=power_of_2(columns),
        FEW=FEW_ROWS,
        MANY=MANY_ROWS,
        HAS_MANY=has_many(x.shape[0]),
        BLOCK_K=config.block_k,
        MANY_BLOCK_K=config.many_block_k,
        EVEN_K=size % config.block_k == 0,
        MAX_SPLITS=config.max_splits,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=pdl,
    )
    return v


def lora_expand(
    shrunk: torch.Tensor,
    y: torch.Tensor,
    pool: LoraPool,
    plan: LoraPlan,
    config: ExpandConfig | None = None,
    shrink: ShrinkConfig | None = None,
    *,
    adds: bool = True,
) -> None:
    """Adds ``shrunk·Bᵀ`` to the rows of ``y`` that the plan names, in place; or else only writes it there.

    ``shrink`` is the configuration that ``lora_shrink`` ran with: it says how many splits hold values.
    """
    tiles = _tiles_of(plan)
    config = config or expand_config(pool.splits[-1], plan.segment_pages.shape[1], y.shape[0])
    shrink = shrink or shrink_config(shrunk.shape[3] * RANK_PAGE, pool.a.shape[3], y.shape[0])
    sizes = [end - start for start, end in pairwise(pool.splits)]
    num_blocks = sum(ceil_div(size, config.block_n) for size in sizes)
    offsets = (*pool.splits, *[pool.splits[-1]] * (4 - len(pool.splits)))
    pdl = dependent_launch(y)
    grid = min(tiles.tiles.shape[0] * num_blocks, num_processors(y) * config.per_processor)
    lora_expand_kernel.expand[(grid,)](
        shrunk,
        pool.scales,
        pool.b,
        y,
        tiles.tiles,
        tiles.counts,
        plan.rows,
        plan.segment_pages,
        pool.a.shape[3],
        shrink.fill,
        config.fill,
        config.many_cost,
        y.stride(0),
        shrunk.stride(0),
        shrunk.stride(1),
        *offsets,
        MAX_PAGES=plan.segment_pages.shape[1],
        RANK_ROWS=RANK_PAGE * power_of_2(plan.segment_pages.shape[1]),
        PROJECTIONS=len(sizes),
        OUT=pool.splits[-1],
        FEW=FEW_ROWS,
        MANY=MANY_ROWS,
        HAS_MANY=has_many(y.shape[0]),
        BLOCK_N=config.block_n,
        MANY_BLOCK_N=config.many_block_n,
        ROW_BLOCK_N=config.row_block_n,
        EVEN_N=all(size % config.block_n == 0 for size in sizes),
        ADDS=adds,
        BLOCK_K=shrink.block_k,
        MAX_SPLITS=shrink.max_splits,
        PDL=pdl,
        num_warps=config.num_warps,
        NUM_STAGES=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=pdl,
    )


def shrink_config(columns: int, size: int, num_tokens: int) -> ShrinkConfig:
    """The choice for ``columns`` (16 times the projections) of ``size``, in steps of ``num_tokens``."""
    is_of_prompts = num_tokens > _PROMPT_TOKENS
    # Whole units of 64 rows take long beside those of one; four parts of each are soon done.
    max_splits, fill = (4, 1056) if is_of_prompts else (16, 528)
    if columns == 16 and size <= 8192 and is_of_prompts:
        return ShrinkConfig(256, max_splits, 64, fill, num_stages=3)
    if columns == 16:
        return ShrinkConfig(256, max_splits, 128, fill, num_stages=2 if size <= 8192 else 3)
    return ShrinkConfig(256 if columns == 32 else 128, max_splits, 64, fill, num_stages=2)


def _config_beside(pool: LoraPool) -> ShrinkConfig:
    columns = pool.a.shape[1] * RANK_PAGE
    return ShrinkConfig(128, 16, 64, num_stages=3 if columns <= 32 else 2)


def expand_config(out: int, num_pages: int, num_tokens: int) -> ExpandConfig:
    """The choice for ``out`` columns in all, adapters of up to ``num_pages``, and steps of ``num_tokens``.

    Adapters of many pages may stand beside those of one, whose pieces take less time: hence smaller ones.
    """
    is_of_prompts = num_tokens > _PROMPT_TOKENS
    fill = 528 if out >= 16384 or is_of_prompts else 264
    return ExpandConfig(
        128, fill=fill if num_pages == 1 else 2 * fill, row_block_n=0 if is_of_prompts else 1024
    )


def _tiles_of(plan: LoraPlan) -> LoraTiles:
    assert plan.tiles is not None, "call prepare(plan, num_tokens) once a step"
    return plan.tiles
