from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import reference
from kernels.kv_write import rope_write_kv
from kernels.paged_attention import paged_attention
from kernels.plans import BLOCK_SIZE

CaseBuilder = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("poisoned_memory")

MIXED = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 190), (1, 700), (3, 3), (20, 90), (64, 64), (70, 200)]
SHAPES = [(9, 3, 64), (1, 1, 64), (8, 1, 128), (6, 3, 96), (4, 2, 8), (10, 2, 80), (50, 1, 16)]


def attend(case: Any) -> torch.Tensor:
    rope_write_kv(case.qkv, case.cos_sin, case.plan, case.k_cache, case.v_cache, num_heads=case.heads.query)
    return _attention(case)


def _attention(case: Any) -> torch.Tensor:
    return paged_attention(
        case.qkv, case.k_cache, case.v_cache, case.plan, num_heads=case.heads.query, scale=case.scale
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mixed_batch_matches_float64(
    shape: tuple[int, int, int], attention_case: CaseBuilder, dtype: torch.dtype, tolerance: float
) -> None:
    """Decodes, whole prompts and chunks that continue a context; stale tails and other blocks hold NaN."""
    case = attention_case(shape, MIXED, dtype=dtype, padding=3)
    out = attend(case)
    qkv, k_cache, v_cache = case.qkv.double(), case.k_cache.double(), case.v_cache.double()
    expected = reference.paged_attention(
        qkv, k_cache, v_cache, case.plan, num_heads=case.heads.query, scale=case.scale
    )
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert not out[-3:].any(), "padding rows are zero"


def test_the_reference_is_torch_s_own_attention(attention_case: CaseBuilder) -> None:
    case = attention_case((9, 3, 64), [(40, 40)])
    out = attend(case).view(40, 9, 64)
    heads = case.qkv.view(40, 15, 64).transpose(0, 1)
    q, k, v = heads[:9], heads[9:12], heads[12:]
    expected = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    torch.testing.assert_close(out, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_queries_may_be_rows_of_a_wider_tensor(attention_case: CaseBuilder, dtype: torch.dtype) -> None:
    case = attention_case((9, 3, 64), [(1, 30), (4, 40)], dtype=dtype)
    expected = attend(case)
    wide = torch.full((5, case.qkv.shape[1] + 13), float("nan"), dtype=dtype)
    wide[:, : case.qkv.shape[1]] = case.qkv
    assert torch.equal(_attention(dataclasses.replace(case, qkv=wide)), expected)


@pytest.mark.parametrize("row", range(len(MIXED)))
def test_a_sequence_has_the_same_bits_alone(
    row: int, attention_case: CaseBuilder, dtype: torch.dtype
) -> None:
    case = attention_case((9, 3, 64), MIXED, dtype=dtype)
    together = attend(case)
    first, last = case.plan.query_starts[row : row + 2].tolist()
    plan = dataclasses.replace(
        case.plan,
        query_starts=torch.tensor([0, last - first], dtype=torch.int32),
        context_lens=case.plan.context_lens[row : row + 1].clone(),
        block_tables=case.plan.block_tables[row : row + 1].clone(),
    )
    alone = _attention(dataclasses.replace(case, qkv=case.qkv[first:last].clone(), plan=plan))
    assert torch.equal(together[first:last], alone)


def test_bits_do_not_depend_on_the_number_of_threads(
    attention_case: CaseBuilder, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    case = attention_case((9, 3, 64), [*MIXED, (1, 3000)], dtype=dtype)
    threads(1)
    alone = attend(case)
    threads(3)
    assert torch.equal(_attention(case), alone)


def test_a_spoilt_sequence_spoils_no_other(attention_case: CaseBuilder, dtype: torch.dtype) -> None:
    rows = [(1, 100), (30, 60), (1, 600)]
    clean = attend(attention_case((9, 3, 64), rows, dtype=dtype))
    case = attention_case((9, 3, 64), rows, dtype=dtype)
    case.qkv[1:31] = float("nan")
    out = attend(case)
    assert out[1:31].isnan().all()
    assert torch.equal(out[:1], clean[:1]) and torch.equal(out[31:], clean[31:])


@pytest.mark.parametrize("spoilt", [70, 71])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_spoilt_token_spoils_none_before_it(
    spoilt: int, poison: float, attention_case: CaseBuilder, dtype: torch.dtype
) -> None:
    """Its value is weighed with zero by earlier rows of the chunk, whose blocks another request may share."""
    rows = [(40, 80)]
    clean = attend(attention_case((9, 3, 64), rows, dtype=dtype))
    case = attention_case((9, 3, 64), rows, dtype=dtype)
    rope_write_kv(case.qkv, case.cos_sin, case.plan, case.k_cache, case.v_cache, num_heads=9)
    block, offset = int(case.plan.block_tables[0, spoilt // BLOCK_SIZE]), spoilt % BLOCK_SIZE
    case.k_cache[block, :, offset] = poison
    case.v_cache[block, :, offset] = poison
    out, first = _attention(case), spoilt - 40
    assert torch.equal(out[:first], clean[:first])
    assert out[first:].isnan().any(dim=1).all()
