"""The Triton kernel for vectors, interpreted on the CPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.gpu.lora_vectors import apply_vectors
from kernels.plans import GAIN_ROW, RANK_PAGE, SHIFT_ROW, LoraPool, RowVectors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has them compiled")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("out", [64, 1536, 1500])
def test_rows_are_scaled_and_shifted(out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(out)
    b = torch.full((4, RANK_PAGE, out), float("nan"), dtype=dtype)
    for row in (GAIN_ROW, SHIFT_ROW):
        b[1:, row] = torch.randn(3, out).to(dtype)
    pool = LoraPool(torch.zeros(0), b, torch.zeros(0), (0, out))
    vectors = RowVectors(torch.tensor([4, 0, 2]), torch.tensor([3, 1, 1]))
    got = torch.randn(6, out).to(dtype)
    got[1] = float("nan")
    want = got.clone()
    reference.apply_vectors(want, pool, vectors)
    apply_vectors(got, pool, vectors)
    torch.testing.assert_close(got, want, equal_nan=True)
