"""The Triton norm, activation and cache write, interpreted on the CPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.gpu.activation import silu_mul
from kernels.gpu.kv_write import rope_write_kv
from kernels.gpu.norm import rms_norm
from kernels.plans import AttentionPlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has them compiled")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 576), (2, 1000)])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(2, rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    summed, want_summed = residual.clone(), residual.clone()
    want = reference.rms_norm(x, weight, 1e-5, want_summed)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, summed), want)
    assert torch.equal(summed, want_summed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [16, 1536])
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    gate_up = (torch.randn(3, 2 * size) * 4).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (32, 4)])
def test_rope_write_kv(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(head_dim)
    slots = torch.tensor([37, -1, 0, 79])
    plan = AttentionPlan(
        query_starts=torch.tensor([0, 4], dtype=torch.int32),
        context_lens=torch.tensor([4], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slots=slots,
        positions=torch.tensor([5, 6, 0, 30]),
        max_query_len=4,
    )
    qkv = torch.randn(4, (num_heads + 2 * num_kv_heads) * head_dim)
    qkv[1] = float("nan")
    cos_sin = torch.randn(32, head_dim)
    caches = [torch.full((5, num_kv_heads, 16, head_dim), float("nan")) for _ in range(4)]
    got, want = qkv.clone(), qkv.clone()
    rope_write_kv(got, cos_sin, plan, caches[0], caches[1], num_heads=num_heads)
    reference.rope_write_kv(want, cos_sin, plan, caches[2], caches[3], num_heads=num_heads)
    torch.testing.assert_close(got, want, equal_nan=True)
    torch.testing.assert_close(caches[0], caches[2], equal_nan=True)
    assert torch.equal(caches[1].nan_to_num(), caches[3].nan_to_num())
    assert int(caches[1][:, :, :, 0].isnan().sum()) == (5 * 16 - 3) * num_kv_heads
