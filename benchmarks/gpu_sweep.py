"""Tries the kernels' tile configurations on a GPU and prints the best of each shape.

The winners are what ``kernels/gpu`` ships as fixed choices; nothing is tuned at run time. Each LoRA
configuration is checked against float64 first, since a compiler may err on some of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
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
from kernels.gpu.paged_attention import DecodeConfig, PrefillConfig, paged_attention
from kernels.plans import AttentionPlan, LoraPool

Table = dict[str, dict[str, float]]

CASES = {
    "1,1": (1, 1),
    "8,32": (8, 32),
    "32,32": (32, 32),
    "64,128": (64, 128),
    "64,256": (64, 256),
    "1,256": (1, 256),
    "8,256": (8, 256),
}
PREFILL_CASES = {"1,8192": (1, 8192), "64,8192": (64, 8192)}


def shrink_configs(columns: int) -> list[ShrinkConfig]:
    blocks = {
        16: ((256, 128), (512, 128), (1024, 128)),
        32: ((256, 64), (256, 128)),
        48: ((128, 64), (256, 64)),
    }
    return [
        ShrinkConfig(block_k, 16, many, fill, 4, stages, per, registers)
        for block_k, many in blocks[columns]
        for stages in (2, 3)
        for registers in (None, 128)
        for fill, per in ((264, 4), (528, 4))
    ]


def expand_configs() -> list[ExpandConfig]:
    return [
        ExpandConfig(block_n, many, fill, 4, stages, per, registers)
        for block_n, many, stages in ((128, 64, 3), (256, 64, 2), (256, 64, 3), (256, 128, 2))
        for registers in (None, 128)
        for fill, per in ((264, 4), (528, 4), (1056, 4))
    ]


def run_shrink(case: LoraCase, group: str, config: ShrinkConfig) -> None:
    plan = lora.prepare(case.plan, case.num_tokens)
    for pools in case.pools:
        lora.lora_shrink(case.x[group], pools[group], plan, config)


def run_expand(
    case: LoraCase, group: str, shrunk: torch.Tensor, shrink: ShrinkConfig, config: ExpandConfig
) -> None:
    plan = lora.prepare(case.plan, case.num_tokens)
    for pools in case.pools:
        lora.lora_expand(shrunk, case.y[group], pools[group], plan, config, shrink)


def sweep_group(
    cases: dict[str, LoraCase],
    group: str,
    shrinks: list[ShrinkConfig],
    expands: list[ExpandConfig],
) -> tuple[Table, Table]:
    shrink_table: Table = {}
    expand_table: Table = {}
    for config in shrinks:
        shrink_table[str(config)] = {
            name: attempt(partial(run_shrink, case, group, config), case.turn) for name, case in cases.items()
        }
    for config in expands:
        row = expand_table[str(config)] = {}
        for name, case in cases.items():
            plan = lora.prepare(case.plan, case.num_tokens)
            shrunk = lora.lora_shrink(case.x[group], case.pools[0][group], plan, shrinks[0])
            row[name] = attempt(partial(run_expand, case, group, shrunk, shrinks[0], config), case.turn)
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
    cases = {name: lora_case(pools, [16] * n, rows, width) for name, (n, rows) in CASES.items()}
    for group, (_, outs) in GROUPS.items():
        tables = sweep_group(cases, group, shrink_configs(len(outs) * 16), expand_configs())
        report[f"{group} width {width}"] = tables
        print_best(f"{group} shrink width {width}", tables[0], 4)
        print_best(f"{group} expand width {width}", tables[1], 4)


def sweep_lora_prefill(report: dict) -> None:
    pools = [{g: make_pool(g, 64) for g in GROUPS}]
    cases = {name: lora_case(pools, [16] * n, rows, 4) for name, (n, rows) in PREFILL_CASES.items()}
    for group, (_, outs) in GROUPS.items():
        shrinks = [replace(config, max_splits=4) for config in shrink_configs(len(outs) * 16)]
        tables = sweep_group(cases, group, shrinks, expand_configs())
        report[f"{group} prefill"] = tables
        print_best(f"{group} shrink prefill, 1 layer", tables[0], 2)
        print_best(f"{group} expand prefill, 1 layer", tables[1], 2)


def sweep_decode(report: dict) -> None:
    batches = {f"{rows}x576": (rows, 576) for rows in (1, 8, 32, 128, 256)} | {"4x8k": (4, 8192)}
    made = {}
    for name, (batch, context) in batches.items():
        plan, num_blocks = attention_plan([1] * batch, [context] * batch)
        qkv = torch.randn(batch, 6144, dtype=torch.bfloat16, device="cuda")
        made[name] = (qkv, plan, kv_caches(num_blocks, 4 if batch > 8 else NUM_LAYERS))

    def work(
        qkv: torch.Tensor, plan: AttentionPlan, caches: list[torch.Tensor], config: DecodeConfig
    ) -> None:
        for k, v in caches:
            paged_attention(qkv, k, v, plan, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5, decode=config)

    rows: Table = {}
    for block_n, warps, stages, per in [
        (16, 1, 4, 8), (16, 1, 5, 8), (16, 1, 6, 8), (16, 1, 8, 8), (16, 1, 5, 16), (16, 2, 6, 8),
        (32, 4, 6, 4), (32, 2, 4, 8), (32, 1, 4, 8), (64, 4, 2, 4),
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
    for block_m, block_n, warps, stages, registers in [
        (128, 64, 8, 3, 128), (128, 64, 8, 2, 128), (128, 64, 8, 3, None), (128, 32, 8, 3, 128),
        (128, 32, 4, 3, None), (64, 32, 4, 3, 128), (64, 64, 4, 3, 168), (128, 128, 8, 2, None),
    ]:  # fmt: skip
        config = PrefillConfig(block_m, block_n, warps, stages, registers)

        def work(
            qkv: torch.Tensor, plan: AttentionPlan, cache: torch.Tensor, config: PrefillConfig = config
        ) -> None:
            paged_attention(
                qkv, cache[0], cache[1], plan, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5, prefill=config
            )

        rows[str(config)] = {name: attempt(partial(work, *args)) for name, args in made.items()}
    report["prefill"] = rows
    print_best("prefill attention, 1 layer", rows, 5)


def check_configs() -> None:
    """Errors of every configuration that is swept, against float64."""
    found: list[tuple[float, str]] = []
    ranks, rows = [8, 16, 64, 40, 16, 24], [1, 20, 3, 9, 133, 70]
    for group, (_, outs) in GROUPS.items():
        pool = make_pool(group, 16)
        case = lora_case([{g: pool for g in GROUPS}], ranks, sum(rows))
        wide = LoraPool(pool.a.double(), pool.b.double(), pool.scales.double(), pool.splits)
        want = torch.zeros_like(case.y[group], dtype=torch.float64)
        shrunk = reference.lora_shrink(case.x[group].double(), wide, case.plan)
        reference.lora_expand(shrunk, want, wide, case.plan)
        plan = lora.prepare(case.plan, case.num_tokens)
        shrinks, expands = shrink_configs(len(outs) * 16), expand_configs()
        for i in range(max(len(shrinks), len(expands))):
            shrink, expand = shrinks[i % len(shrinks)], expands[i % len(expands)]
            y = torch.zeros_like(case.y[group])
            partials = lora.lora_shrink(case.x[group], pool, plan, shrink)
            lora.lora_expand(partials, y, pool, plan, expand, shrink)
            error = relative_error(y, want)
            found.append((error if error == error else 1e9, f"{group} {shrink} {expand}"))
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
