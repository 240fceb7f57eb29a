"""Tries the kernels' tile configurations on a GPU and prints the best of each shape.

The winners are what ``kernels/gpu`` ships as fixed choices; nothing is tuned at run time. Each LoRA configuration
is checked against float64 first, since a compiler may err on some of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_cases import (
    GROUPS,
    HEAD_DIM,
    NUM_HEADS,
    NUM_LAYERS,
    LoraCase,
    attention_plan,
    kv_caches,
    lora_case,
    make_pool,
)
from benchmarks.gpu_timing import relative_error, time_ms
from kernels import reference
from kernels.gpu import lora
from kernels.gpu.lora import ExpandConfig, ShrinkConfig
from kernels.gpu.lora_tiles import FEW_ROWS, make_tiles
from kernels.gpu.paged_attention import DecodeConfig, PrefillConfig, paged_attention
from kernels.plans import LoraPlan, LoraPool

Table = dict[str, dict[str, float]]

DECODE_CASES = {"1,1": (1, 1), "8,32": (8, 32), "32,32": (32, 32), "64,128": (64, 128), "64,256": (64, 256)}
PREFILL_CASES = {"1,8192": (1, 8192), "64,8192": (64, 8192)}


def decode_shrinks(columns: int) -> list[ShrinkConfig]:
    blocks = {16: (256, 1024), 32: (256, 512), 48: (128, 256)}[columns]
    return [
        ShrinkConfig(block_k, 16, fill, 4, stages, per)
        for block_k in blocks
        for stages in (2, 3)
        for fill, per in ((264, 4), (528, 4), (528, 8))
    ]


def decode_expands() -> list[ExpandConfig]:
    return [
        ExpandConfig(block_n, fill, 4, stages, per)
        for block_n, stages in ((128, 3), (128, 4), (256, 2), (256, 3))
        for fill, per in ((264, 4), (528, 4), (1056, 4), (1056, 8), (2112, 8))
    ]


def prefill_shrinks(columns: int) -> list[ShrinkConfig]:
    return [
        ShrinkConfig(block_k, splits, 264, warps, stages, 4)
        for block_k, warps, stages in ((64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3), (64, 8, 4))
        for splits in (4,)
    ]


def prefill_expands() -> list[ExpandConfig]:
    return [
        ExpandConfig(block_n, fill, warps, stages, per)
        for block_n, warps, stages in ((64, 4, 2), (128, 8, 2), (128, 4, 2), (128, 8, 3))
        for fill, per in ((1056, 4), (2112, 8), (8448, 8))
    ]


def tiled(plan: LoraPlan, tile_rows: int) -> LoraPlan:
    return replace(plan, tiles=make_tiles(plan, tile_rows))


def run_shrink(case: LoraCase, group: str, tile_rows: int, config: ShrinkConfig) -> None:
    plan = tiled(case.plan, tile_rows)
    for pools in case.pools:
        lora.lora_shrink(case.x[group], pools[group], plan, config)


def run_expand(
    case: LoraCase,
    group: str,
    tile_rows: int,
    shrunk: torch.Tensor,
    shrink: ShrinkConfig,
    config: ExpandConfig,
) -> None:
    plan = tiled(case.plan, tile_rows)
    for pools in case.pools:
        lora.lora_expand(shrunk, case.y[group], pools[group], plan, config, shrink)


def sweep_group(
    cases: dict[str, LoraCase],
    group: str,
    tile_rows: int,
    shrinks: Iterable[ShrinkConfig],
    expands: Iterable[ExpandConfig],
) -> tuple[Table, Table]:
    shrink_table: Table = {}
    expand_table: Table = {}
    shrinks = list(shrinks)
    for config in shrinks:
        shrink_table[str(config)] = {
            name: attempt(partial(run_shrink, case, group, tile_rows, config), case.turn)
            for name, case in cases.items()
        }
    for config in expands:
        row = expand_table[str(config)] = {}
        for name, case in cases.items():
            shrunk = lora.lora_shrink(
                case.x[group], case.pools[0][group], tiled(case.plan, tile_rows), shrinks[0]
            )
            work = partial(run_expand, case, group, tile_rows, shrunk, shrinks[0], config)
            row[name] = attempt(work, case.turn)
    return shrink_table, expand_table


def attempt(work: Callable[[], object], before: Callable[[int], object] | None = None) -> float:
    """Milliseconds, or infinity for a configuration that the device cannot run."""
    try:
        return time_ms(work, before, repeats=9)
    except Exception as error:
        print("failed:", repr(error)[:200], flush=True)
        return float("inf")


def print_best(title: str, rows: Table, count: int = 3) -> None:
    names = list(next(iter(rows.values())))
    best = {name: min(row[name] for row in rows.values()) for name in names}
    order = sorted(rows, key=lambda key: sum(rows[key][name] / best[name] for name in names))
    print(f"{title}: best {' '.join(f'{name}={best[name]:.3f}' for name in names)}")
    for key in order[:count]:
        print(f"  {' '.join(f'{rows[key][name]:.3f}' for name in names)}  {key}", flush=True)


def sweep_lora(report: dict, width: int) -> None:
    pools = [{g: make_pool(g, 64) for g in GROUPS} for _ in range(NUM_LAYERS)]
    cases = {name: lora_case(pools, [16] * n, rows, width) for name, (n, rows) in DECODE_CASES.items()}
    for group, (_, outs) in GROUPS.items():
        shrinks = decode_shrinks(len(outs) * 16) if width == 1 else decode_shrinks(len(outs) * 16)[:1]
        tables = sweep_group(cases, group, FEW_ROWS, shrinks, decode_expands())
        report[f"{group} width {width}"] = tables
        print_best(f"{group} shrink width {width}", tables[0], 4 if width == 1 else 1)
        print_best(f"{group} expand width {width}", tables[1], 4)


def sweep_lora_prefill(report: dict) -> None:
    pools = [{g: make_pool(g, 64) for g in GROUPS}]
    cases = {name: lora_case(pools, [16] * n, rows, 4) for name, (n, rows) in PREFILL_CASES.items()}
    for tile_rows in (64, 128):
        for group, (_, outs) in GROUPS.items():
            tables = sweep_group(cases, group, tile_rows, prefill_shrinks(len(outs) * 16), prefill_expands())
            report[f"{group} prefill {tile_rows}"] = tables
            print_best(f"{group} shrink prefill {tile_rows}, 1 layer", tables[0], 2)
            print_best(f"{group} expand prefill {tile_rows}, 1 layer", tables[1], 2)


def sweep_decode(report: dict) -> None:
    batches = {
        "1": (1, 576),
        "8": (8, 576),
        "32": (32, 576),
        "128": (128, 576),
        "256": (256, 576),
        "4x8k": (4, 8192),
    }
    made = {}
    for name, (batch, context) in batches.items():
        plan, num_blocks = attention_plan([1] * batch, [context] * batch)
        qkv = torch.randn(batch, 6144, dtype=torch.bfloat16, device="cuda")
        made[name] = (qkv, plan, kv_caches(num_blocks, 4 if batch > 8 else NUM_LAYERS))

    def work(qkv: torch.Tensor, plan, caches: list[torch.Tensor], config: DecodeConfig) -> None:
        for k, v in caches:
            paged_attention(qkv, k, v, plan, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5, decode=config)

    rows: Table = {}
    for block_n, warps, stages, per in [
        (16, 1, 5, 8), (16, 1, 4, 8), (16, 1, 6, 8), (16, 1, 8, 8), (16, 1, 5, 16), (16, 2, 6, 8), (32, 4, 6, 4),
        (32, 2, 4, 8), (32, 1, 4, 8), (64, 4, 2, 4),
    ]:  # fmt: skip
        config = DecodeConfig(block_n, warps, stages, per)
        rows[str(config)] = {
            name: attempt(partial(work, *args, config)) * NUM_LAYERS / len(args[2])
            for name, args in made.items()
        }
    report["decode"] = rows
    print_best("decode attention, 32 layers", rows, 6)
    for name in made:
        key = min(rows, key=lambda k, n=name: rows[k][n])
        print(f"  best at {name}: {rows[key][name]:.3f} {key}")


def sweep_prefill(report: dict) -> None:
    batches = {
        "16x512": ([512] * 16, [512] * 16),
        "1x8192": ([8192], [8192]),
        "4x2048@4096": ([2048] * 4, [4096] * 4),
    }
    rows: Table = {}
    made = {}
    for name, (queries, contexts) in batches.items():
        plan, num_blocks = attention_plan(queries, contexts)
        qkv = torch.randn(sum(queries), 6144, dtype=torch.bfloat16, device="cuda")
        made[name] = (qkv, plan, kv_caches(num_blocks, 1)[0])
    for block_m, block_n, warps, stages in [
        (128, 32, 4, 3), (128, 32, 4, 2), (128, 32, 4, 4), (128, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 2), (128, 32, 8, 3),
        (128, 16, 4, 4),
    ]:  # fmt: skip
        config = PrefillConfig(block_m, block_n, warps, stages)

        def work(qkv: torch.Tensor, plan, cache: torch.Tensor, config=config) -> None:
            paged_attention(qkv, *cache, plan, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5, prefill=config)

        rows[str(config)] = {name: attempt(partial(work, *args)) for name, args in made.items()}
    report["prefill"] = rows
    print_best("prefill attention, 1 layer", rows, 5)


def check_configs() -> None:
    """Errors of every configuration that is swept, against float64."""
    found: list[tuple[float, str]] = []
    ranks, rows = [8, 16, 64, 40, 16], [1, 20, 3, 9, 133]
    for group, (_, outs) in GROUPS.items():
        pool = make_pool(group, 16)
        case = lora_case([{g: pool for g in GROUPS}], ranks, sum(rows))
        wide = LoraPool(pool.a.double(), pool.b.double(), pool.scales.double(), pool.splits)
        want = torch.zeros_like(case.y[group], dtype=torch.float64)
        shrunk = reference.lora_shrink(case.x[group].double(), wide, case.plan)
        reference.lora_expand(shrunk, want, wide, case.plan)
        columns = len(outs) * 16
        for tile_rows, shrinks, expands in (
            (FEW_ROWS, decode_shrinks(columns), decode_expands()),
            (64, prefill_shrinks(columns), prefill_expands()),
            (128, prefill_shrinks(columns), prefill_expands()),
        ):
            plan = tiled(case.plan, tile_rows)
            for i in range(max(len(shrinks), len(expands))):
                shrink, expand = shrinks[i % len(shrinks)], expands[i % len(expands)]
                y = torch.zeros_like(case.y[group])
                partials = lora.lora_shrink(case.x[group], pool, plan, shrink)
                lora.lora_expand(partials, y, pool, plan, expand, shrink)
                error = relative_error(y, want)
                found.append((error if error == error else 1e9, f"{group} {tile_rows} {shrink} {expand}"))
    found.sort(reverse=True)
    print(f"largest errors of {len(found)} swept LoRA configurations:")
    for error, name in found[:2]:
        print(f"  {error:.2e} {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts: dict[str, Callable[[dict], None]] = {
        "check": lambda report: check_configs(),
        "decode": sweep_decode,
        "prefill": sweep_prefill,
        "lora": partial(sweep_lora, width=1),
        "lora4": partial(sweep_lora, width=4),
        "lora_prefill": sweep_lora_prefill,
    }
    parser.add_argument("what", nargs="*", choices=list(parts), default=list(parts))
    parser.add_argument("--out", type=Path, default=Path("gpu_sweep.json"))
    options = parser.parse_args()
    report: dict = {"device": torch.cuda.get_device_name()}
    started = time.perf_counter()
    for what in options.what:
        parts[what](report)
        print(f"[{what}: {time.perf_counter() - started:.0f} s since start]", flush=True)
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
