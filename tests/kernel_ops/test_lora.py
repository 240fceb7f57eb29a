from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.lora import add_lora, apply_lora, lora_expand, lora_shrink, silu_mul_add_lora
from kernels.plans import LoraPlan

CaseBuilder = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("poisoned_memory")

RANKS = [1, 4, 8, 15, 16, 17, 24, 32, 40, 64]
WIDTHS = [(576, [576, 192, 192]), (576, [1536, 1536]), (1536, [576]), (50, [20, 7]), (8, [3])]


def _expected(case: Any) -> torch.Tensor:
    pool = dataclasses.replace(
        case.pool, a=case.pool.a.double(), b=case.pool.b.double(), scales=case.pool.scales.double()
    )
    y = case.y.double()
    reference.lora_expand(reference.lora_shrink(case.x.double(), pool, case.plan), y, pool, case.plan)
    return y


def _mixed(lora_case: CaseBuilder, dtype: torch.dtype, widths: tuple[int, list[int]] = WIDTHS[0]) -> Any:
    """Every rank on three scattered rows each, one segment empty, and every fourth row of the base."""
    groups = [[4 * n, 4 * n + 2, 4 * n + 1] for n in range(len(RANKS))]
    adapters = [*zip(RANKS, groups, strict=True), (16, [])]
    return lora_case(adapters, in_features=widths[0], outputs=widths[1], tokens=4 * len(RANKS), dtype=dtype)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_mixed_ranks_match_float64_and_base_rows_are_untouched(
    widths: tuple[int, list[int]], lora_case: CaseBuilder, dtype: torch.dtype, tolerance: float
) -> None:
    """Pages of nobody, ranks above the live ones and their scales hold NaN."""
    case = _mixed(lora_case, dtype, widths)
    expected, before = _expected(case), case.y.clone()
    case.x[3::4] = float("nan")
    apply_lora(case.x, case.y, case.pool, case.plan)
    torch.testing.assert_close(case.y.double(), expected, atol=10 * tolerance, rtol=tolerance)
    assert torch.equal(case.y[3::4], before[3::4])


def test_the_reference_is_the_textbook_product(lora_case: CaseBuilder) -> None:
    case = lora_case([(24, [1])], in_features=30, outputs=[10, 5], tokens=2)
    pages, scales = case.plan.segment_pages[0].tolist(), case.pool.scales
    y, x = case.y[1].clone(), case.x[1]
    for columns, m in ((slice(0, 10), 0), (slice(10, 15), 1)):
        for page, live in zip(pages, (16, 8), strict=True):
            b = case.pool.b[page, :live, columns]
            y[columns] += scales[page, m] * (b.T @ (case.pool.a[page, m, :live] @ x))
    apply_lora(case.x, case.y, case.pool, case.plan)
    torch.testing.assert_close(case.y[1], y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64, 65, 200])
def test_segments_of_any_length_match_float64(
    rows: int, lora_case: CaseBuilder, dtype: torch.dtype, tolerance: float
) -> None:
    adapters = [(16, list(range(rows))), (40, [rows])]
    case = lora_case(adapters, in_features=576, outputs=[576, 192], tokens=rows + 2, dtype=dtype)
    expected = _expected(case)
    apply_lora(case.x, case.y, case.pool, case.plan)
    torch.testing.assert_close(case.y.double(), expected, atol=10 * tolerance, rtol=tolerance)


def test_shrink_then_expand_is_apply(lora_case: CaseBuilder, dtype: torch.dtype) -> None:
    case, other = _mixed(lora_case, dtype), _mixed(lora_case, dtype)
    apply_lora(case.x, case.y, case.pool, case.plan)
    lora_expand(lora_shrink(other.x, other.pool, other.plan), other.y, other.pool, other.plan)
    assert torch.equal(case.y, other.y)


def test_a_projection_without_adapter_is_not_read(lora_case: CaseBuilder, dtype: torch.dtype) -> None:
    case = lora_case([(20, [0, 1])], in_features=576, outputs=[576, 192, 192], tokens=2, dtype=dtype)
    case.pool.scales[:, 1] = 0
    case.pool.a[:, 1] = float("nan")
    case.pool.b[:, :, 576:768] = float("nan")
    before = case.y.clone()
    apply_lora(case.x, case.y, case.pool, case.plan)
    assert torch.equal(case.y[:, 576:768], before[:, 576:768])
    assert not case.y.isnan().any()
    assert (case.y[:, 768:] != before[:, 768:]).any()


def _segment(plan: LoraPlan, n: int) -> LoraPlan:
    first, last = plan.segment_starts[n : n + 2].tolist()
    return LoraPlan(
        plan.rows[first:last].clone(),
        torch.tensor([0, last - first], dtype=torch.int32),
        plan.segment_pages[n : n + 1].clone(),
        plan.segment_ranks[n : n + 1].clone(),
        last - first,
        1,
        last - first,
    )


@pytest.mark.parametrize("n", range(len(RANKS)))
def test_a_row_has_the_same_bits_whoever_is_beside_it(
    n: int, lora_case: CaseBuilder, dtype: torch.dtype
) -> None:
    case, other = _mixed(lora_case, dtype), _mixed(lora_case, dtype)
    apply_lora(case.x, case.y, case.pool, case.plan)
    plan = _segment(other.plan, n)
    apply_lora(other.x, other.y, other.pool, plan)
    rows = plan.rows.long()
    assert torch.equal(case.y[rows], other.y[rows])
    single = _mixed(lora_case, dtype)
    one = dataclasses.replace(plan, rows=plan.rows[1:2].clone(), segment_starts=torch.tensor([0, 1]).int())
    apply_lora(single.x, single.y, single.pool, dataclasses.replace(one, num_rows=1))
    assert torch.equal(case.y[rows[1]], single.y[rows[1]])


def test_bits_do_not_depend_on_the_number_of_threads(
    lora_case: CaseBuilder, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    results = []
    for count in (1, 2, 3):
        threads(count)
        case = _mixed(lora_case, dtype)
        apply_lora(case.x, case.y, case.pool, case.plan)
        results.append(case.y)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_an_adapter_that_overflows_spoils_only_its_own_rows(
    lora_case: CaseBuilder, dtype: torch.dtype
) -> None:
    case, clean = _mixed(lora_case, dtype), _mixed(lora_case, dtype)
    apply_lora(clean.x, clean.y, clean.pool, clean.plan)
    case.pool.a[case.plan.segment_pages[6, 0].long(), :, :8] = 1e38
    case.x[case.plan.rows[18:21].long()] = 1e38
    apply_lora(case.x, case.y, case.pool, case.plan)
    spoilt = torch.zeros(len(case.y), dtype=torch.bool)
    spoilt[case.plan.rows[18:21].long()] = True
    assert not case.y[spoilt].isfinite().any()
    assert torch.equal(case.y[~spoilt], clean.y[~spoilt])


def test_a_plan_without_rows_does_nothing(lora_case: CaseBuilder, dtype: torch.dtype) -> None:
    case = lora_case([(16, [])], in_features=576, outputs=[576], tokens=3, dtype=dtype)
    before = case.y.clone()
    apply_lora(case.x, case.y, case.pool, case.plan)
    assert torch.equal(case.y, before)


def test_adding_to_a_base_product_is_the_product_and_then_the_adapters(lora_case: CaseBuilder) -> None:
    case = lora_case([(8, [4, 1]), (16, [0, 6, 2])], in_features=32, outputs=[48, 48], tokens=7)
    want = case.y.clone()
    apply_lora(case.x, want, case.pool, case.plan)

    def product(x: torch.Tensor) -> torch.Tensor:
        assert x is case.x
        return case.y.clone()

    assert torch.equal(add_lora(product, case.x, case.pool, case.plan), want)
    got = silu_mul_add_lora(product, case.x, case.pool, case.plan)
    torch.testing.assert_close(got, reference.silu_mul(want))
