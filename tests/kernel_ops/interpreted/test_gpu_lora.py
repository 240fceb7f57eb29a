"""The Triton LoRA kernels, interpreted on the CPU, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels import reference
from kernels.gpu import lora, lora_gated, lora_tiles
from kernels.gpu.activation import silu_mul
from kernels.gpu.linear import Addend
from kernels.gpu.lora_gated import lora_expand_silu_mul, silu_mul_add_lora
from kernels.gpu.lora_tiles import make_tiles
from kernels.plans import LoraPlan, LoraPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has them compiled")

NUM_PAGES = 24


@pytest.fixture(
    params=[
        (0, 1024, {}),
        (128, 1024, {}),
        (0, 16, {}),
        (0, 64, {"fill": 6, "block_n": 32, "many_block_n": 16}),
    ],
    ids=["tiles of both sizes", "tiles of few rows", "one or two rows by vectors", "pieces of two lengths"],
)
def tile_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of work lists, whatever the number of rows, both ways with one or two, and pieces of all
    kinds."""
    all_few, row_block_n, changes = request.param
    choose = lora.expand_config
    monkeypatch.setattr(lora_tiles, "_ALL_FEW", all_few)
    monkeypatch.setattr(
        lora, "expand_config", lambda *of: replace(choose(*of), row_block_n=row_block_n, **changes)
    )
    monkeypatch.setattr(lora_gated, "GatedConfig", partial(lora_gated.GatedConfig, **changes))


def make_plan(segments: list[tuple[int, int]], num_tokens: int, max_pages: int, spare: int = 0) -> LoraPlan:
    """Segments of ``(rows, rank)`` over random tokens and pages, with ``spare`` padding rows and segments."""
    order, pages = torch.randperm(num_tokens), torch.randperm(NUM_PAGES).tolist()
    starts, table, ranks, total = [0], [], [], 0
    rows: list[int] = []
    for count, rank in segments:
        rows += sorted(order[total : total + count].tolist())
        total += count
        starts.append(total)
        owned = [pages.pop() for _ in range(-(-rank // 16))]
        table.append(owned + [-1] * (max_pages - len(owned)))
        ranks.append(rank)
    starts += [total] * spare
    table += [[-1] * max_pages] * spare
    ranks += [0] * spare
    return LoraPlan(
        rows=torch.tensor(rows + [-1] * spare, dtype=torch.int32),
        segment_starts=torch.tensor(starts, dtype=torch.int32),
        segment_pages=torch.tensor(table, dtype=torch.int32),
        segment_ranks=torch.tensor(ranks, dtype=torch.int32),
        num_rows=total,
        num_segments=len(ranks),
    )


def make_pool(plan: LoraPlan, size: int, outs: list[int], dtype: torch.dtype) -> LoraPool:
    """Random pages; whatever no live rank row owns is NaN."""
    splits = [0]
    for out in outs:
        splits.append(splits[-1] + out)
    a = torch.full((NUM_PAGES, len(outs), 16, size), float("nan"), dtype=dtype)
    b = torch.full((NUM_PAGES, 16, splits[-1]), float("nan"), dtype=dtype)
    scales = torch.rand(NUM_PAGES, len(outs)) + 0.5
    for pages, rank in zip(plan.segment_pages.tolist(), plan.segment_ranks.tolist(), strict=True):
        for p in range(-(-rank // 16)):
            live = min(16, rank - 16 * p)
            a[pages[p], :, :live] = torch.randn(len(outs), live, size).to(dtype) / size**0.5
            b[pages[p], :live] = torch.randn(live, splits[-1]).to(dtype)
    return LoraPool(a, b, scales, tuple(splits))


def expected(x: torch.Tensor, y: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> torch.Tensor:
    wide = LoraPool(pool.a.double(), pool.b.double(), pool.scales.double(), pool.splits)
    out = y.double()
    reference.lora_expand(reference.lora_shrink(x.double(), wide, plan), out, wide, plan)
    return out


def check(plan: LoraPlan, pool: LoraPool, num_tokens: int) -> None:
    dtype = pool.a.dtype
    x = torch.randn(num_tokens, pool.a.shape[3]).to(dtype)
    y = torch.randn(num_tokens, pool.splits[-1]).to(dtype)
    base = sorted(set(range(num_tokens)) - set(plan.rows.tolist()))
    x[base], y[base] = float("nan"), float("nan")
    out = y.clone()
    lora.apply_lora(x, out, pool, plan)
    want = expected(x, y, pool, plan)
    rows = plan.rows[plan.rows >= 0].long()
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out[rows].double(), want[rows], rtol=tolerance, atol=tolerance)
    assert out[base].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rank", [1, 8, 16, 24, 64, 128])
def test_one_row_of_each_rank(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    plan = make_plan([(1, rank)], num_tokens=1, max_pages=8)
    check(plan, make_pool(plan, 96, [48, 16, 16], dtype), num_tokens=1)


@pytest.mark.usefixtures("tile_sizes")
@pytest.mark.parametrize("outs", [[64], [48, 80], [64, 32, 32], [200, 72]])
def test_mixed_ranks_base_rows_padding_and_empty_segments(outs: list[int]) -> None:
    torch.manual_seed(len(outs))
    segments = [(1, 8), (0, 16), (17, 16), (3, 64), (33, 16), (35, 40), (2, 16)]
    plan = make_plan(segments, num_tokens=100, max_pages=4, spare=3)
    check(plan, make_pool(plan, 160, outs, torch.float16), num_tokens=100)


def test_input_long_enough_to_be_split_and_looped_over() -> None:
    torch.manual_seed(0)
    plan = make_plan([(2, 16), (1, 40)], num_tokens=4, max_pages=4)
    pool = make_pool(plan, 2200, [600], torch.float32)
    check(plan, pool, num_tokens=4)
    x, y = torch.randn(4, 2200), torch.zeros(4, 600)
    tiled = lora.prepare(plan, 4)
    config = lora.ShrinkConfig(block_k=128, max_splits=4, fill=6)
    shrunk = lora.lora_shrink(x, pool, tiled, config)
    lora.lora_expand(shrunk, y, pool, tiled, lora.ExpandConfig(128), config)
    want = expected(x, torch.zeros(4, 600), pool, plan)
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("tile_sizes")
def test_an_adapter_without_a_projection_leaves_its_columns_alone() -> None:
    torch.manual_seed(0)
    plan = make_plan([(2, 16), (3, 16)], num_tokens=5, max_pages=1)
    pool = make_pool(plan, 64, [32, 32, 32], torch.float32)
    page = int(plan.segment_pages[1, 0])
    pool.scales[page, 1] = 0
    pool.a[page, 1], pool.b[page, :, 32:64] = float("nan"), float("nan")
    check(plan, pool, num_tokens=5)


def test_work_list_counts_only_live_tiles_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_tiles, "_ALL_FEW", 64)
    plan = make_plan([(17, 24), (0, 16), (65, 8)], num_tokens=82, max_pages=4, spare=2)
    tiles = make_tiles(plan, 90)
    assert tiles.counts.tolist() == [4, 6, 2]
    first, second = plan.segment_pages[0, :2].tolist()
    third = int(plan.segment_pages[2, 0])
    want = [[17, 64, 2, 8, third], [81, 1, 2, 8, third], [0, 16, 0, 24, first], [16, 1, 0, 24, first]]
    assert tiles.tiles[:4].tolist() == want
    assert tiles.units[:2].tolist() == [[0, 16, first, 15], [0, 16, second, 16 + 7]]
    assert tiles.units[4].tolist() == [17, 64, third, 7]
    monkeypatch.setattr(lora_tiles, "_ALL_FEW", 90)
    tiles = make_tiles(plan, 90)
    assert tiles.counts.tolist() == [7, 9, 0]
    assert tiles.tiles[2:7, :2].tolist() == [[17, 16], [33, 16], [49, 16], [65, 16], [81, 1]]


@pytest.mark.usefixtures("tile_sizes")
def test_expand_alone_writes_the_rows_of_the_plan_and_no_others() -> None:
    """Also where the adapter lacks a projection: nobody adds what was there before."""
    torch.manual_seed(3)
    plan = make_plan([(2, 16), (33, 40), (3, 16)], num_tokens=41, max_pages=4, spare=2)
    pool = make_pool(plan, 64, [32, 48, 32], torch.float32)
    page = int(plan.segment_pages[2, 0])
    pool.scales[page, 1] = 0
    pool.a[page, 1], pool.b[page, :, 32:80] = float("nan"), float("nan")
    x, y = torch.randn(41, 64), torch.full((41, 112), float("nan"))
    tiled = lora.prepare(plan, 41)
    lora.lora_expand(lora.lora_shrink(x, pool, tiled), y, pool, tiled, adds=False)
    adapted = tiled.tiles.adapted.bool() if tiled.tiles else None
    assert (
        adapted is not None and sorted(plan.rows[plan.rows >= 0].tolist()) == adapted.nonzero()[:, 0].tolist()
    )
    want = expected(x, torch.zeros(41, 112), pool, plan)
    torch.testing.assert_close(y[adapted].double(), want[adapted], rtol=1e-5, atol=1e-5)
    assert y[~adapted].isnan().all()


def test_the_activation_of_a_sum() -> None:
    torch.manual_seed(4)
    gate_up, values = torch.randn(3, 2 * 1100).half(), torch.full((3, 2200), float("nan"))
    values[2] = torch.randn(2200)
    got = silu_mul(gate_up, Addend(values, torch.tensor([0, 0, 1], dtype=torch.int8)))
    want = gate_up.double()
    want[2] += values[2]
    torch.testing.assert_close(got.double(), reference.silu_mul(want), rtol=5e-3, atol=5e-3)


@pytest.mark.usefixtures("tile_sizes")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("segments", [[(1, 8)], [(1, 8), (0, 16), (17, 16), (3, 64), (33, 16), (35, 40)]])
def test_gate_and_up_with_their_activation(segments: list[tuple[int, int]], dtype: torch.dtype) -> None:
    torch.manual_seed(len(segments))
    plan = make_plan(segments, num_tokens=97, max_pages=4, spare=2)
    pool = make_pool(plan, 96, [144, 144], dtype)
    for segment, columns in ((-3, slice(144, None)), (min(2, len(segments) - 1), slice(None))):
        lacking = plan.segment_pages[segment]
        lacking = lacking[lacking >= 0].long()
        pool.scales[lacking, 1], pool.b[lacking, :, columns] = 0, float("nan")
        if columns.start is None:
            pool.scales[lacking, 0] = 0
    x, gate_up = torch.randn(97, 96).to(dtype), torch.randn(97, 288).to(dtype)
    want = expected(x, gate_up, pool, plan)
    plan = lora.prepare(plan, 97)
    got = lora_expand_silu_mul(lora.lora_shrink(x, pool, plan), gate_up, pool, plan)
    tolerance = 5e-3 if dtype == torch.float16 else 1e-4
    torch.testing.assert_close(got.double(), reference.silu_mul(want), rtol=tolerance, atol=tolerance)
    base = sorted(set(range(97)) - set(plan.rows.tolist()))
    assert torch.equal(got[base], silu_mul(gate_up[base]))


def test_a_step_of_many_tokens_activates_its_base_rows() -> None:
    torch.manual_seed(0)
    plan = make_plan([(600, 16), (2, 16)], num_tokens=700, max_pages=1)
    pool = make_pool(plan, 32, [80, 80], torch.float32)
    x, gate_up = torch.randn(700, 32), torch.randn(700, 160)
    want = reference.silu_mul(expected(x, gate_up, pool, plan))
    got = silu_mul_add_lora(lambda _: gate_up, x, pool, plan)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
