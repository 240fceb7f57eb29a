"""The Triton product of a few rows, interpreted on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import linear as gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has them compiled")


@pytest.mark.parametrize("rows", [1, 3, 16, 17])
@pytest.mark.parametrize(("size", "out"), [(128, 64), (640, 192), (384, 64)])
@pytest.mark.parametrize("leaves_room", [False, True])
def test_products_whole_and_in_parts(rows: int, size: int, out: int, leaves_room: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, size).half(), (torch.randn(out, size) / size**0.5).half()
    want = x.double() @ weight.double().t()
    torch.testing.assert_close(
        gpu.linear(x, weight, leaves_room=leaves_room).double(), want, rtol=2e-3, atol=2e-3
    )


def test_parts_are_joined_with_what_is_added_to_some_rows() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 640).half(), (torch.randn(192, 640) / 25).half()
    values = torch.full((3, 192), float("nan"))
    values[1] = torch.randn(192)
    parts = gpu.parts_of(x, weight)
    assert parts.shape[0] == gpu.num_parts(x, weight) == 4
    got = gpu.join(parts, x.dtype, gpu.Addend(values, torch.tensor([0, 1, 0], dtype=torch.int8)))
    want = x.double() @ weight.double().t()
    want[1] += values[1]
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)
