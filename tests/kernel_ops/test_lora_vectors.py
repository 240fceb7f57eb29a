"""Outputs scaled and shifted by the vectors in an adapter's last page."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import reference
from kernels.linear import pack_weight, unpack_weight
from kernels.lora import apply_vectors
from kernels.plans import GAIN_ROW, RANK_PAGE, SHIFT_ROW, LoraPool, RowVectors

NUM_PAGES = 5


def make_pool(out: int, dtype: torch.dtype) -> LoraPool:
    """Pages that hold vectors, and NaN in everything else; page 0 holds NaN alone."""
    b = torch.full((NUM_PAGES, RANK_PAGE, out), float("nan"), dtype=dtype)
    b[1:, GAIN_ROW] = torch.randn(NUM_PAGES - 1, out).to(dtype)
    b[1:, SHIFT_ROW] = torch.randn(NUM_PAGES - 1, out).to(dtype)
    return LoraPool(torch.zeros(0), b, torch.zeros(0), (0, out))


@pytest.mark.parametrize("out", [1, 16, 960, 1531])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_named_rows_are_scaled_and_shifted_and_no_others(
    out: int, num_threads: int, dtype: torch.dtype, tolerance: float, threads: Callable[[int], None]
) -> None:
    threads(num_threads)
    torch.manual_seed(out)
    pool, y = make_pool(out, dtype), torch.randn(40, out).to(dtype)
    vectors = RowVectors(torch.tensor([3, 39, 0, 17, 18]), torch.tensor([4, 1, 1, 3, 2]))
    y[1] = float("nan")
    expected = y.double()
    for row, page in zip(vectors.rows.tolist(), vectors.pages.tolist(), strict=True):
        gain, shift = pool.b[page, GAIN_ROW].double(), pool.b[page, SHIFT_ROW].double()
        expected[row] = expected[row] * (1 + gain) + shift
    by_reference = y.clone()
    reference.apply_vectors(by_reference, pool, vectors)
    apply_vectors(y, pool, vectors)
    for got in (y, by_reference):
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)
        others = [row for row in range(40) if row not in vectors.rows.tolist()]
        assert torch.equal(got[others].double().nan_to_num(9), expected[others].nan_to_num(9))


def test_a_weight_comes_back_from_its_layout_as_it_was(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 33).to(dtype)
    assert torch.equal(unpack_weight(pack_weight(weight)), weight)
