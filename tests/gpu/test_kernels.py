"""The Triton kernels, compiled, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from benchmarks import gpu_checks
from benchmarks.gpu_cases import make_lora_plan, make_pool
from benchmarks.gpu_timing import capture, relative_error
from kernels import reference
from kernels.gpu import lora
from kernels.gpu.lora_gated import silu_mul_add_lora
from kernels.linear import linear, pack_weight
from kernels.plans import LoraPlan, LoraPool

pytestmark = pytest.mark.gpu

ROWS, SEGMENTS, PAGES = 64, 64, 4


def test_every_kernel_is_within_rounding_of_float64() -> None:
    errors = gpu_checks.run()
    for dtype, limit in gpu_checks.LIMIT.items():
        kind = str(dtype).removeprefix("torch.")
        late = {name: error for name, error in errors.items() if name.endswith(kind) and not error < limit}
        assert not late
    assert errors["sampling rows that differ"] <= 2


def buffers() -> LoraPlan:
    """A plan with room for ROWS rows and SEGMENTS adapters, all of it padding."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device="cuda")

    plan = LoraPlan(
        rows=empty(ROWS),
        segment_starts=empty(SEGMENTS + 1),
        segment_pages=empty(SEGMENTS, PAGES),
        segment_ranks=empty(SEGMENTS),
        num_rows=ROWS,
        num_segments=SEGMENTS,
    )
    fill(plan, make_lora_plan([16], [1], PAGES))
    return plan


def fill(static: LoraPlan, plan: LoraPlan) -> None:
    """Writes a smaller plan over the static one; what is left over becomes padding."""
    static.rows.fill_(-1)
    static.rows[: plan.num_rows] = plan.rows
    static.segment_starts.fill_(plan.num_rows)
    static.segment_starts[: plan.num_segments + 1] = plan.segment_starts
    static.segment_pages.fill_(-1)
    static.segment_pages[: plan.num_segments] = plan.segment_pages
    static.segment_ranks.zero_()
    static.segment_ranks[: plan.num_segments] = plan.segment_ranks


@pytest.mark.parametrize(("rows", "in_parts"), [(16, True), (16, False), (32, True), (64, True)])
def test_lora_beside_the_base_product_in_a_graph(rows: int, in_parts: bool) -> None:
    """Base products of all kinds, each product's inputs being the results before."""
    groups = ["o", "qkv", "o", "gate_up", "down"]
    pools = [make_pool(group, 70) for group in groups]
    weights = [torch.randn(p.splits[-1], p.a.shape[3], dtype=torch.bfloat16, device="cuda") for p in pools]
    for weight in weights:
        weight /= weight.shape[1] ** 0.5
    static = buffers()
    x = torch.randn(ROWS, 4096, dtype=torch.bfloat16, device="cuda")[:rows]
    plan = LoraPlan(
        rows=static.rows[:rows],
        segment_starts=static.segment_starts,
        segment_pages=static.segment_pages,
        segment_ranks=static.segment_ranks,
        num_rows=rows,
        num_segments=SEGMENTS,
    )

    def chain() -> torch.Tensor:
        tiled, y = lora.prepare(plan, rows), x
        for group, pool, weight in zip(groups, pools, weights, strict=True):
            y, product = y[:, : weight.shape[1]].contiguous(), partial(linear, packed=pack_weight(weight))
            if group == "gate_up":
                y = silu_mul_add_lora(product, y, pool, tiled, weight if in_parts else None)
            else:
                y = lora.add_lora(product, y, pool, tiled, weight if in_parts else None)
        return y

    kept: list[torch.Tensor] = []
    graph = capture(lambda: kept.append(chain()))
    for count in (1, 3, 16):
        fill(
            static,
            make_lora_plan([(16, 8, 64, 40)[n % 4] for n in range(count)], [rows // count] * count, PAGES),
        )
        graph.replay()
        want = x.double()
        for group, pool, weight in zip(groups, pools, weights, strict=True):
            wide = LoraPool(pool.a.double(), pool.b.double(), pool.scales.double(), pool.splits)
            y = want[:, : weight.shape[1]].contiguous()
            want = y @ weight.double().t()
            reference.lora_expand(reference.lora_shrink(y, wide, plan), want, wide, plan)
            want = reference.silu_mul(want) if group == "gate_up" else want
        assert relative_error(kept[-1], want) < 1e-2
        first = kept[-1].clone()
        graph.replay()
        assert torch.equal(kept[-1], first)


@pytest.mark.parametrize("group", ["qkv", "down"])
def test_one_graph_serves_any_number_of_adapters(group: str) -> None:
    pool = make_pool(group, 150)
    wide = LoraPool(pool.a.double(), pool.b.double(), pool.scales.double(), pool.splits)
    x = torch.randn(ROWS, pool.a.shape[3], dtype=torch.bfloat16, device="cuda")
    y = torch.zeros(ROWS, pool.splits[-1], dtype=torch.bfloat16, device="cuda")
    static = buffers()
    graph = capture(lambda: lora.apply_lora(x, y, pool, lora.prepare(static, ROWS)))
    for count, each in ((1, 5), (4, 2), (8, 8), (2, 32), (64, 1), (1, 64), (3, 1)):
        ranks = [(16, 8, 64, 40)[n % 4] for n in range(count)]
        plan = make_lora_plan(ranks, [each] * count, PAGES)
        fill(static, replace(plan, rows=plan.rows.flip(0)))
        y.fill_(0)
        graph.replay()
        first = y.clone()
        y.fill_(0)
        graph.replay()
        assert torch.equal(y, first)
        want = torch.zeros_like(y, dtype=torch.float64)
        flipped = replace(plan, rows=plan.rows.flip(0))
        reference.lora_expand(reference.lora_shrink(x.double(), wide, flipped), want, wide, flipped)
        assert relative_error(y, want) < 4e-3
        assert not y[plan.num_rows :].any()
