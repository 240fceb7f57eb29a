"""Relative errors of every GPU kernel against float64, on fresh random data and with poisoned outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from benchmarks.gpu_cases import (
    GROUPS,
    NUM_HEADS,
    NUM_KV_HEADS,
    attention_plan,
    kv_caches,
    lora_case,
    make_pool,
    padded,
)
from benchmarks.gpu_timing import capture, relative_error
from kernels import reference
from kernels.gpu import linear as few_rows
from kernels.gpu import lora
from kernels.gpu.activation import silu_mul
from kernels.gpu.kv_write import rope_write_kv
from kernels.gpu.lora_gated import lora_expand_silu_mul
from kernels.gpu.norm import rms_norm
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.sampling import sample
from kernels.paged_attention import prepare
from kernels.plans import AttentionPlan, LoraPool
from kernels.sampling_batch import SamplingBatch

LIMIT = {torch.bfloat16: 4e-3, torch.float32: 2e-5}


@contextmanager
def poisoned() -> Iterator[None]:
    """``torch.empty`` yields NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run() -> dict[str, float]:
    """Checks everything; prints what is over its limit."""
    errors: dict[str, float] = {}
    with poisoned():
        for dtype in (torch.bfloat16, torch.float32):
            kind = str(dtype).removeprefix("torch.")
            for check in (_lora, _gated, _products, _attention, _elementwise):
                for name, error in check(dtype):
                    errors[f"{name} {kind}"] = error
                    if not error < LIMIT[dtype]:
                        print(f"ERROR {name} {kind}: {error:.2e}", flush=True)
        errors["sampling rows that differ"] = float(_sampling())
    worst = {kind: max(v for k, v in errors.items() if k.endswith(kind)) for kind in ("bfloat16", "float32")}
    print(
        f"{len(errors)} checks; largest errors {worst}; sampling {errors['sampling rows that differ']}",
        flush=True,
    )
    return errors


def _lora(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    batches = {
        "1 row": ([16], [1]),
        "mixed": ([8, 16, 64, 40, 16], [1, 20, 3, 9, 33]),
        "prefill": ([16, 64, 8], [700, 333, 1]),
        "one or two rows each": ([16, 8] * 32, [1, 2] * 32),
    }
    for group in GROUPS:
        pool = make_pool(group, 64, dtype)
        wide = LoraPool(pool.a.double(), pool.b.double(), pool.scales.double(), pool.splits)
        for name, (ranks, rows) in batches.items():
            case = lora_case([{g: pool for g in GROUPS}], ranks, sum(rows))
            x = case.x[group].to(dtype)
            want = torch.zeros(x.shape[0], pool.splits[-1], dtype=torch.float64, device="cuda")
            reference.lora_expand(reference.lora_shrink(x.double(), wide, case.plan), want, wide, case.plan)
            got = want.new_zeros(want.shape, dtype=dtype)
            lora.apply_lora(x, got, pool, case.plan)
            yield f"lora {group} {name}", relative_error(got, want)


def _gated(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Gate and up with their activation, base rows among them."""
    pool = make_pool("gate_up", 64, dtype)
    wide = LoraPool(pool.a.double(), pool.b.double(), pool.scales.double(), pool.splits)
    for name, (ranks, rows) in {
        "few": ([8, 16, 64], [1, 20, 3]),
        "many": ([16, 64, 8], [700, 333, 1]),
        "one row each": ([16, 8] * 32, [1] * 64),
    }.items():
        case = lora_case([{g: pool for g in GROUPS}], ranks, sum(rows))
        plan = case.plan
        plan = lora.prepare(replace(plan, rows=plan.rows * 2), 2 * sum(rows))
        x = torch.randn(2 * sum(rows), 4096, dtype=dtype, device="cuda")
        y = torch.randn(2 * sum(rows), pool.splits[-1], dtype=dtype, device="cuda")
        want = y.double()
        reference.lora_expand(reference.lora_shrink(x.double(), wide, plan), want, wide, plan)
        got = lora_expand_silu_mul(lora.lora_shrink(x, pool, plan), y, pool, plan)
        yield f"silu of lora {name}", relative_error(got, reference.silu_mul(want))


def _products(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    for group, (size, outs) in GROUPS.items():
        weight = torch.randn(sum(outs), size, dtype=dtype, device="cuda") / size**0.5
        for rows in (1, 7, 16, 32):
            x = torch.randn(rows, size, dtype=dtype, device="cuda")
            if dtype != torch.float32:
                assert few_rows.fits(x, weight)
                yield (
                    f"product {group} {rows} rows",
                    relative_error(few_rows.linear(x, weight), x.double() @ weight.double().t()),
                )


def _attention(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    batches = {
        "decode": ([1] * 40, list(range(1, 800, 20))),
        "decode in parts": ([1, 1, 1], [5000, 17, 1600]),
        "mixed": ([1, 200, 1, 64, 333], [600, 200, 17, 900, 1333]),
        "a prompt beside few decodes": ([1] * 28 + [228], [*range(5, 700, 25), 484]),
        "prompts beside many decodes": ([1] * 200 + [40, 3], [*range(1, 801, 4), 40, 515]),
    }
    for name, (queries, contexts) in batches.items():
        plan, num_blocks = attention_plan(queries, contexts)
        k, v = kv_caches(num_blocks, 1, dtype)[0]
        qkv = torch.randn(sum(queries), 6144, dtype=dtype, device="cuda")
        got = paged_attention(qkv, k, v, plan, num_heads=NUM_HEADS, scale=128**-0.5)
        want = reference.paged_attention(
            qkv.double(), k.double(), v.double(), plan, num_heads=NUM_HEADS, scale=128**-0.5
        )
        yield f"attention {name}", relative_error(got, want)
        angles = torch.randn(8192, 128, device="cuda")
        if max(queries) > 1:
            yield f"attention {name}, captured", _captured_attention(plan, torch.stack((k, v)), angles, dtype)
        caches, rotated = [k.double(), v.double()], qkv.double()
        rope_write_kv(qkv, angles, plan, k, v, num_heads=NUM_HEADS)
        reference.rope_write_kv(rotated, angles, plan, caches[0], caches[1], num_heads=NUM_HEADS)
        yield f"rope {name}", relative_error(qkv, rotated)
        yield f"kv write {name}", max(relative_error(k, caches[0]), relative_error(v, caches[1]))


def _captured_attention(
    plan: AttentionPlan, caches: torch.Tensor, angles: torch.Tensor, dtype: torch.dtype
) -> float:
    """The largest error of some layers in one graph, over one buffer of q, k, v, with room for more of all.

    Decode starts before prefill has ended: it must not before rope has, nor see what was there before.
    """
    num_tokens = plan.slots.shape[0]
    room = padded(plan, num_tokens=num_tokens + 300, num_seqs=256)
    layers = torch.randn(4, num_tokens + 300, 6144, dtype=dtype, device="cuda")
    layers[:, num_tokens:] = float("nan")
    qkv, (k, v) = torch.empty_like(layers[0]), caches.clone()
    outputs: list[torch.Tensor] = []

    def work() -> None:
        outputs.clear()
        prepared = prepare(room, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, dtype=dtype)
        for layer in layers:
            qkv.copy_(layer)
            rope_write_kv(qkv, angles, prepared, k, v, num_heads=NUM_HEADS)
            outputs.append(paged_attention(qkv, k, v, prepared, num_heads=NUM_HEADS, scale=128**-0.5))

    graph, wants = capture(work), []
    rotated_k, rotated_v = caches.clone()
    for layer in layers[:, :num_tokens].clone():
        reference.rope_write_kv(layer, angles, plan, rotated_k, rotated_v, num_heads=NUM_HEADS)
        wide = (layer.double(), rotated_k.double(), rotated_v.double())
        wants.append(reference.paged_attention(*wide, plan, num_heads=NUM_HEADS, scale=128**-0.5))
    errors = []
    for _ in range(3):
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        errors += [relative_error(got[:num_tokens], want) for got, want in zip(outputs, wants, strict=True)]
    return max(errors)


def _elementwise(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    x, residual = torch.randn(2, 77, 4096, dtype=dtype, device="cuda")
    weight = torch.randn(4096, dtype=dtype, device="cuda")
    summed = residual.double() + x.double()
    got = rms_norm(x, weight, 1e-5, residual)
    yield "residual", relative_error(residual, summed)
    yield "norm", relative_error(got, reference.rms_norm(residual.double(), weight.double(), 1e-5))
    gate_up = torch.randn(77, 28672, dtype=dtype, device="cuda") * 3
    yield "silu", relative_error(silu_mul(gate_up), reference.silu_mul(gate_up.double()))


def sampling_batch(rows: int, **values: float) -> SamplingBatch:
    def full(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), values.get(name, default), dtype=dtype, device="cuda")

    return SamplingBatch(
        temperature=full("temperature", 1.0),
        top_k=full("top_k", 0, torch.int32),
        top_p=full("top_p", 1.0),
        min_p=full("min_p", 0.0),
        seeds=full("seed", 12345, torch.int64) + torch.arange(rows, device="cuda"),
        positions=full("position", 77, torch.int64),
        all_greedy=values.get("temperature") == 0.0,
    )


def _sampling() -> int:
    """Rows, of 6 × 64, whose token differs from the reference's (rounding may decide a near tie)."""
    logits = (torch.randn(64, 128256, device="cuda") * 3).bfloat16()
    logits[3, 128255] = float("nan")
    differing = 0
    for values in (
        {"temperature": 0.0},
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 200, "top_p": 0.5},
    ):
        batch = replace(sampling_batch(64, **values), num_logprobs=5)
        got, want = sample(logits, batch), reference.sample(logits, batch)
        differing += int(((got.tokens != want.tokens) | (got.finite != want.finite)).sum())
        assert got.top_tokens is not None and want.top_tokens is not None
        differing += int((got.top_tokens != want.top_tokens).any(1)[want.finite].sum())
    return differing
