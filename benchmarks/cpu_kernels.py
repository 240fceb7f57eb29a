"""Times every kernel of a step on the CPU, at the shapes of SmolLM2-135M, over all its layers.

Each layer has its own weights, blocks and rank pages, so that caches are as cold as in a real step. Prints
one line per step shape, in milliseconds for the whole model, and writes them as JSON where ``--json`` says::

    python benchmarks/cpu_kernels.py --dtype bfloat16 --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from kernels.activation import silu_mul
from kernels.kv_write import rope_write_kv
from kernels.linear import PackedWeight, linear, pack_weight
from kernels.lora import apply_lora
from kernels.norm import rms_norm
from kernels.paged_attention import paged_attention
from kernels.plans import BLOCK_SIZE, RANK_PAGE, AttentionPlan, LoraPlan, LoraPool
from kernels.sampling import SamplingBatch, sample

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
GROUPS = {
    "qkv": (HIDDEN, (0, HIDDEN, HIDDEN + KV_HEADS * HEAD_DIM, QKV)),
    "o": (HIDDEN, (0, HIDDEN)),
    "gate_up": (HIDDEN, (0, FFN, 2 * FFN)),
    "down": (FFN, (0, HIDDEN)),
}


@dataclass(frozen=True)
class StepShape:
    """``sequences`` of ``queries`` tokens each that end at ``context``; every one with its own adapter, or
    ``adapters`` shared among them."""

    sequences: int
    queries: int
    context: int
    adapters: int = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries


SHAPES = (
    *(StepShape(1, 1, 190), StepShape(1, 1, 190, 1)),
    *(StepShape(16, 1, 190, n) for n in (0, 1, 4, 16)),
    *(StepShape(32, 1, 190), StepShape(16, 1, 1024), StepShape(1, 1, 8192)),
    *(StepShape(2, 128, 128), StepShape(1, 256, 256, 1), StepShape(1, 512, 2048)),
)


class Model:
    """Random weights of all layers, and the pool of rank pages of 16 rank-16 adapters."""

    def __init__(self, dtype: torch.dtype, *, adapters: int) -> None:
        self.dtype = dtype
        self.base = [
            {name: self._packed(splits[-1], width) for name, (width, splits) in GROUPS.items()}
            for _ in range(LAYERS)
        ]
        self.lm_head = self._packed(VOCAB, HIDDEN)
        self.norm = torch.ones(HIDDEN, dtype=dtype)
        self.pools = [
            {
                name: LoraPool(
                    self._random(adapters, len(splits) - 1, RANK_PAGE, width),
                    self._random(adapters, RANK_PAGE, splits[-1]),
                    torch.ones(adapters, len(splits) - 1),
                    splits,
                )
                for name, (width, splits) in GROUPS.items()
            }
            for _ in range(LAYERS)
        ]
        angles = torch.rand(8192, HEAD_DIM // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

    def _random(self, *shape: int) -> torch.Tensor:
        return (torch.randn(shape) * 0.02).to(self.dtype)

    def _packed(self, out_features: int, in_features: int) -> PackedWeight:
        return pack_weight(self._random(out_features, in_features))


def attention_plan(shape: StepShape) -> AttentionPlan:
    """Every sequence's blocks lie next to each other."""
    blocks = -(-shape.context // BLOCK_SIZE)
    tables = torch.arange(shape.sequences * blocks, dtype=torch.int32).view(shape.sequences, blocks)
    positions = torch.arange(shape.context - shape.queries, shape.context).repeat(shape.sequences, 1)
    slots = tables.long().gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionPlan(
        torch.arange(0, shape.tokens + 1, shape.queries, dtype=torch.int32),
        torch.full((shape.sequences,), shape.context, dtype=torch.int32),
        tables,
        slots.flatten(),
        positions.flatten(),
        shape.queries,
    )


def lora_plan(shape: StepShape) -> LoraPlan:
    group = shape.tokens // shape.adapters
    return LoraPlan(
        torch.arange(shape.tokens, dtype=torch.int32),
        torch.arange(0, shape.tokens + 1, group, dtype=torch.int32),
        torch.arange(shape.adapters, dtype=torch.int32)[:, None].contiguous(),
        torch.full((shape.adapters,), RANK_PAGE, dtype=torch.int32),
        shape.tokens,
        shape.adapters,
    )


def sampling_batch(rows: int, *, temperature: float, top_p: float) -> SamplingBatch:
    return SamplingBatch(
        torch.full((rows,), temperature),
        torch.zeros(rows, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.zeros(rows),
        torch.arange(rows),
        torch.full((rows,), 190),
    )


Operation = Callable[[], object]


def operations(model: Model, shape: StepShape) -> dict[str, Operation]:
    """Each operation of a step, over all layers."""
    tokens, dtype = shape.tokens, model.dtype
    hidden, residual = (torch.randn(tokens, HIDDEN).to(dtype) for _ in range(2))
    inputs = {name: torch.randn(tokens, width).to(dtype) for name, (width, _) in GROUPS.items()}
    outputs = {name: torch.randn(tokens, splits[-1]).to(dtype) for name, (_, splits) in GROUPS.items()}
    plan = attention_plan(shape)
    tile = (plan.block_tables.numel(), KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = [(torch.randn(tile).to(dtype), torch.randn(tile).to(dtype)) for _ in range(LAYERS)]
    logits = torch.randn(shape.sequences, VOCAB).to(dtype)
    greedy = sampling_batch(shape.sequences, temperature=0.0, top_p=1.0)
    drawn = sampling_batch(shape.sequences, temperature=1.0, top_p=1.0)
    nucleus = sampling_batch(shape.sequences, temperature=0.7, top_p=0.9)

    def base() -> None:
        for layer in model.base:
            for name, weight in layer.items():
                linear(inputs[name], weight)

    def norm() -> None:
        for _ in range(2 * LAYERS):
            rms_norm(hidden, model.norm, 1e-5, residual)

    def rope() -> None:
        for keys, values in caches:
            rope_write_kv(outputs["qkv"], model.cos_sin, plan, keys, values, num_heads=HEADS)

    def attention() -> None:
        for keys, values in caches:
            paged_attention(outputs["qkv"], keys, values, plan, num_heads=HEADS, scale=HEAD_DIM**-0.5)

    def activation() -> None:
        for _ in range(LAYERS):
            silu_mul(outputs["gate_up"])

    steps: dict[str, Operation] = {
        "base": base,
        "lm_head": lambda: linear(hidden[: shape.sequences], model.lm_head),
        "norm": norm,
        "rope_kv": rope,
        "attention": attention,
        "silu_mul": activation,
        "greedy": lambda: sample(logits, greedy),
        "sampled": lambda: sample(logits, drawn),
        "top_p": lambda: sample(logits, nucleus),
    }
    if shape.adapters:
        adapted = lora_plan(shape)

        def lora() -> None:
            for pools in model.pools:
                for name, pool in pools.items():
                    apply_lora(inputs[name], outputs[name], pool, adapted)

        steps["lora"] = lora
    return steps


def milliseconds(operation: Operation, *, seconds: float = 0.4) -> tuple[float, float]:
    """Smallest and median time of a call, over about ``seconds``."""
    operation()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        operation()
        times.append((time.perf_counter() - start) * 1000)
    return min(times), statistics.median(times)


NOT_SUMMED = ("sampled", "top_p")
"""A step samples in one way: the sum holds the greedy one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Model(getattr(torch, arguments.dtype), adapters=16)
    results = []
    names: list[str] = []
    for shape in SHAPES:
        times = {name: milliseconds(operation) for name, operation in operations(model, shape).items()}
        total = sum(least for name, (least, _) in times.items() if name not in NOT_SUMMED)
        results.append({"shape": asdict(shape), "total_ms": total, "ms": times})
        if not names:
            names = [*times, "lora"]
            sys.stdout.write(
                f"{'seqs x queries @ context, adapters':36}" + "".join(f"{n:>10}" for n in [*names, "sum"])
            )
        label = f"{shape.sequences:4} x {shape.queries:3} @ {shape.context:5}, {shape.adapters:2}"
        cells = "".join(f"{times[n][0]:10.2f}" if n in times else " " * 10 for n in names)
        sys.stdout.write(f"\n{label:36}{cells}{total:10.2f}")
        sys.stdout.flush()
    sys.stdout.write("\n")
    record = {
        "dtype": arguments.dtype,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "results": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
