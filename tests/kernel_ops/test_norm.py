from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.norm import rms_norm

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 576), (3, 100), (130, 576), (7, 4096)])
def test_norm_matches_float64(rows: int, width: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("width", [576, 30])
def test_the_residual_takes_the_sum_and_the_norm_is_of_what_it_holds(
    width: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, width), (5, width), (width,)))
    total = (residual.float() + x.float()).to(dtype)
    out = rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    expected = reference.rms_norm(total.double(), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_row_has_the_same_bits_alone_and_beside_a_spoilt_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(400, 576).to(dtype), torch.randn(576).to(dtype)
    x[0] = float("nan")
    out = rms_norm(x, weight, 1e-5)
    assert out[0].isnan().all()
    for row in (1, 399):
        assert torch.equal(out[row], rms_norm(x[row : row + 1].clone(), weight, 1e-5)[0])
