from __future__ import annotations

import pytest
import torch

from kernels.linear import linear, pack_weight


@pytest.mark.parametrize("rows", [1, 2, 16, 33, 300])
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (7, 20), (3072, 576)])
def test_products_match_float64(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(dtype)
    x = torch.randn(rows, in_features).to(dtype)
    expected = x.double() @ weight.double().T
    got = linear(x, pack_weight(weight))
    assert got.shape == (rows, out_features) and got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_spoilt_row_spoils_no_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = pack_weight(torch.randn(960, 576).to(dtype))
    x = torch.randn(16, 576).to(dtype)
    clean = linear(x, packed)
    x[3] = float("nan")
    out = linear(x, packed)
    assert out[3].isnan().all()
    assert torch.equal(out[:3], clean[:3]) and torch.equal(out[4:], clean[4:])
