"""Every kernel on a GPU: checked against float64, then timed beside its roofline.

    python -m benchmarks.gpu_kernels --out results.json

Times are medians of CUDA graph replays over all 32 layers of Llama-3.1-8B's shapes in bfloat16. Adapters
change their pages from replay to replay, so that they come from memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear as dense_linear
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import gpu_checks
from benchmarks.gpu_cases import (
    GROUPS,
    HEAD_DIM,
    HIDDEN,
    INTERMEDIATE,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    VOCAB,
    LoraCase,
    attention_plan,
    kv_caches,
    lora_case,
    make_pool,
)
from benchmarks.gpu_timing import copy_bandwidth, time_ms
from kernels.gpu import lora
from kernels.gpu.activation import silu_mul
from kernels.gpu.kv_write import rope_write_kv
from kernels.gpu.lora_gated import silu_mul_add_lora
from kernels.gpu.norm import rms_norm
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.sampling import sample
from kernels.linear import linear, pack_weight
from kernels.plans import LoraPool

MIXED = [8, 16, 32, 64] * 8
LORA_CASES: dict[str, tuple[list[int], int]] = {
    "1 adapter, 1 row": ([16], 1),
    "1, 32": ([16], 32),
    "8, 32": ([16] * 8, 32),
    "32, 32": ([16] * 32, 32),
    "32, 128": ([16] * 32, 128),
    "64, 128": ([16] * 64, 128),
    "64, 256": ([16] * 64, 256),
    "1, 256": ([16], 256),
    "8, 256": ([16] * 8, 256),
    "32, 128, ranks 8/16/32/64": (MIXED, 128),
}
TARGETS = {
    "1 adapter, 1 row": (0.7, 0.4),
    "8, 32": (0.9, 0.6),
    "32, 32": (1.5, 1.3),
    "64, 128": (2.6, 2.3),
    "64, 256": (3.0, 2.6),
}
"""Alone, and beside the base products."""


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class BaseProducts:
    """The dense products of a step, and SiLU·mul, into which LoRA's last half may be fused."""

    def __init__(self) -> None:
        def weight(size: int, out: int) -> torch.Tensor:
            return torch.randn(out, size, dtype=torch.bfloat16, device="cuda") / size**0.5

        self.layers = [
            {group: weight(size, sum(outs)) for group, (size, outs) in GROUPS.items()}
            for _ in range(NUM_LAYERS)
        ]
        self.head = weight(HIDDEN, VOCAB)

    def run(self, case: LoraCase, product: Product) -> None:
        for weights in self.layers:
            for group, weight in weights.items():
                self._activate(group, product(case.x[group], weight))
        product(case.x["o"], self.head)

    @staticmethod
    def _multiply(product: Product, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return product(x, weight)

    @staticmethod
    def _activate(group: str, y: torch.Tensor) -> torch.Tensor:
        return silu_mul(y) if group == "gate_up" else y

    def run_after(self, case: LoraCase, product: Product) -> None:
        """The base product, then LoRA on top."""
        plan = lora.prepare(case.plan, case.num_tokens)
        for weights, pools in zip(self.layers, case.pools, strict=True):
            for group, weight in weights.items():
                x = case.x[group]
                y = product(x, weight)
                lora.apply_lora(x, y, pools[group], plan)
                self._activate(group, y)
        product(case.x["o"], self.head)

    def run_beside(self, case: LoraCase, product: Product) -> None:
        """As the model does: beside the base product, as far as that goes."""
        plan = lora.prepare(case.plan, case.num_tokens)
        for weights, pools in zip(self.layers, case.pools, strict=True):
            for group, weight in weights.items():
                x, multiply = case.x[group], partial(self._multiply, product, weight)
                add = silu_mul_add_lora if group == "gate_up" else lora.add_lora
                add(multiply, x, pools[group], plan, weight if product is ours else None)
        product(case.x["o"], self.head)


def cublas(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return dense_linear(x, weight)


def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The model's product: of this project for few rows, cuBLAS's for more."""
    return linear(x, pack_weight(weight))


def attempt(work: Callable[[], object], case: LoraCase) -> float:
    """A time, or infinity for what the driver refuses to capture."""
    try:
        return time_ms(work, case.turn, repeats=15)
    except Exception as error:
        print("failed:", repr(error)[:300], flush=True)
        return float("inf")


def lora_tables(pools: list[dict[str, LoraPool]], bandwidth: float, report: dict) -> None:
    """``cublas`` and ``ours`` are the base products; the others what LoRA adds to them."""
    base = BaseProducts()
    names = ("floor", "alone", "reach", "cublas", "after", "beside", "reach", "ours", "beside")
    print(f"{'adapters, rows':28}" + "".join(f"{name:>8}" for name in names))
    for name, (ranks, num_rows) in LORA_CASES.items():
        case = lora_case(pools, ranks, num_rows)
        floor = case.adapter_bytes / bandwidth / 1e9
        alone = attempt(case.run, case)
        reach = TARGETS.get(name, (float("nan"),) * 2)
        dense = attempt(partial(base.run, case, cublas), case)
        after = attempt(partial(base.run_after, case, cublas), case) - dense
        beside = attempt(partial(base.run_beside, case, cublas), case) - dense
        own = attempt(partial(base.run, case, ours), case)
        own_beside = attempt(partial(base.run_beside, case, ours), case) - own
        report["lora"][name] = dict(
            floor=floor,
            alone=alone,
            cublas=dense,
            after=after,
            beside=beside,
            ours=own,
            beside_ours=own_beside,
        )
        figures = (floor, alone, reach[0], dense, after, beside, reach[1], own, own_beside)
        print(f"{name:28}" + "".join(f"{ms:8.2f}" for ms in figures), flush=True)


def prefill_attention_table(report: dict) -> None:
    """One layer; beside it torch's scaled_dot_product_attention on contiguous keys."""
    print(f"{'prefill attention, 1 layer':28} {'ms':>6} {'SDPA':>6}")
    for batch, length in [(64, 128), (16, 512), (4, 2048), (1, 8192)]:
        plan, num_blocks = attention_plan([length] * batch, [length] * batch)
        keys, values = kv_caches(num_blocks, 1)[0]
        qkv = torch.randn(batch * length, 6144, dtype=torch.bfloat16, device="cuda")
        ms = time_ms(
            partial(paged_attention, qkv, keys, values, plan, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5)
        )
        q = torch.randn(batch, NUM_HEADS, length, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        k, v = torch.randn(2, batch, NUM_KV_HEADS, length, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        sdpa = time_ms(partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True))
        report["prefill_attention"][f"{batch} x {length}"] = dict(ms=ms, sdpa=sdpa)
        print(f"{batch:5} x {length:<20} {ms:6.3f} {sdpa:6.3f}", flush=True)


def attention_table(bandwidth: float, report: dict) -> None:
    print(f"{'decode attention, 32 layers':28} {'floor':>6} {'ms':>6} {'FA3':>6}")
    for batch, context, flash in [
        (1, 576, None),
        (32, 576, 0.96),
        (128, 576, 3.06),
        (256, 576, 5.95),
        (4, 16384, None),
    ]:
        plan, num_blocks = attention_plan([1] * batch, [context] * batch)
        caches = kv_caches(num_blocks, NUM_LAYERS)
        qkv = torch.randn(batch, 6144, dtype=torch.bfloat16, device="cuda")

        def work(q=qkv, p=plan, c=caches) -> None:
            for k, v in c:
                paged_attention(q, k, v, p, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5)

        ms = time_ms(work)
        floor = batch * context * 131072 / bandwidth / 1e9
        report["decode_attention"][f"{batch} x {context}"] = dict(floor=floor, ms=ms, flash_attention_3=flash)
        print(f"{batch:5} x {context:<20} {floor:6.2f} {ms:6.2f} {flash or 0:6.2f}", flush=True)


def small_table(report: dict) -> None:
    print(
        f"{'32 layers, ms':28} {'norm':>7} {'rope+kv':>8} {'silu':>7} | one step: greedy, temperature, top-p"
    )
    for rows in (1, 32, 256):
        times = {name: time_ms(work) for name, work in small_works(rows).items()}
        report["small"][rows] = times
        print(f"{rows:4} rows {'':19}" + " ".join(f"{ms:7.3f}" for ms in times.values()), flush=True)


def small_works(rows: int) -> dict[str, Callable[[], object]]:
    """The kernels that are neither products nor attention, in all layers, and sampling once."""
    plan, num_blocks = attention_plan([1] * rows, [576] * rows)
    cache = kv_caches(num_blocks, 1)[0]
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    gate_up = torch.randn(rows, 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
    qkv = torch.randn(rows, 6144, dtype=torch.bfloat16, device="cuda")
    angles = torch.randn(1024, HEAD_DIM, device="cuda")
    logits = torch.randn(rows, VOCAB, dtype=torch.bfloat16, device="cuda")

    def rope() -> None:
        for _ in range(NUM_LAYERS):
            rope_write_kv(qkv, angles, plan, cache[0], cache[1], num_heads=NUM_HEADS)

    def draw(**values: float) -> Callable[[], object]:
        return lambda: sample(logits, gpu_checks.sampling_batch(rows, **values))

    return {
        "norm": lambda: [rms_norm(x, x[0], 1e-5, x) for _ in range(NUM_LAYERS)],
        "rope_kv": rope,
        "silu": lambda: [silu_mul(gate_up) for _ in range(NUM_LAYERS)],
        "greedy": draw(temperature=0.0),
        "temperature": draw(temperature=0.8),
        "top_p": draw(temperature=0.8, top_p=0.9),
    }


def prefill_table(pools: list[dict[str, LoraPool]], report: dict) -> None:
    print("8192 tokens, one layer, ms: base products; SiLU·mul; LoRA of 1, 8, 64 adapters, SiLU·mul in it")
    x = {g: torch.randn(8192, size, dtype=torch.bfloat16, device="cuda") for g, (size, _) in GROUPS.items()}
    weights = {g: torch.randn(sum(o), i, dtype=torch.bfloat16, device="cuda") for g, (i, o) in GROUPS.items()}
    dense = time_ms(lambda: [torch.mm(x[g], weights[g].t()) for g in GROUPS], repeats=10)
    gate_up = torch.randn(8192, 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
    silu = time_ms(lambda: silu_mul(gate_up), repeats=10)
    rows = {}
    for count in (1, 8, 64):
        case = lora_case(pools[:1], [16] * count, 8192)

        def work(case: LoraCase = case) -> None:
            plan = lora.prepare(case.plan, case.num_tokens)
            for group in ("qkv", "o", "down"):
                lora.apply_lora(case.x[group], case.y[group], pools[0][group], plan)
            silu_mul_add_lora(lambda _: case.y["gate_up"], case.x["gate_up"], pools[0]["gate_up"], plan)

        rows[count] = time_ms(work, case.turn, repeats=10)
    report["prefill_lora"] = dict(base=dense, silu=silu, **{str(k): v for k, v in rows.items()})
    print(f"  {dense:.3f} | {silu:.3f} | " + " ".join(f"{ms:.3f}" for ms in rows.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_kernels.json"))
    parser.add_argument("--only", choices=["lora", "prefill", "attention", "small"], help="one table alone")
    options = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(int(time.time()))
    tables = ("lora", "decode_attention", "prefill_attention", "small")
    report: dict = {"device": torch.cuda.get_device_name(), **{name: {} for name in tables}}
    report["errors"] = gpu_checks.run()
    report["copy_tb_s"] = bandwidth = copy_bandwidth()
    print(f"{report['device']}: copy {bandwidth:.2f} TB/s", flush=True)
    pools = [{g: make_pool(g, 64) for g in GROUPS} for _ in range(NUM_LAYERS)]
    parts = {
        "lora": lambda: lora_tables(pools, bandwidth, report),
        "prefill": lambda: prefill_table(pools, report),
        "attention": lambda: (attention_table(bandwidth, report), prefill_attention_table(report)),
        "small": lambda: small_table(report),
    }
    for name, part in parts.items():
        if options.only not in (None, name):
            continue
        part()
        options.out.write_text(json.dumps(report, indent=1))
        print(f"[{time.perf_counter() - started:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
