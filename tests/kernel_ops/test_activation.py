from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.activation import silu_mul

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (16, 1536), (40, 700)])
def test_silu_mul_matches_float64(rows: int, width: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    expected = reference.silu_mul(gate_up.double())
    torch.testing.assert_close(silu_mul(gate_up).double(), expected, atol=tolerance, rtol=tolerance)


def test_extreme_gates_neither_overflow_nor_hide_nan(dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, 90.0, 200.0, 1e30, float("nan"), 0.0], dtype=dtype)
    out = silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    assert torch.equal(out[3:6], gate[3:6])
    assert (out[:3].abs() < 1e-7).all()
    assert out[6].isnan() and out[7] == 0
