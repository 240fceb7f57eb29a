from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels import reference
from kernels.kv_write import rope_write_kv

CaseBuilder = Callable[..., Any]
ROWS = [(1, 1), (1, 17), (5, 21), (40, 40)]
PADDING = 3


@pytest.fixture(params=[(9, 3, 64), (2, 1, 8), (4, 4, 96), (8, 1, 128)], ids=str)
def case(request: pytest.FixtureRequest, attention_case: CaseBuilder, dtype: torch.dtype) -> Any:
    return attention_case(request.param, ROWS, dtype=dtype, padding=PADDING)


def _write(case: Any, qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    rope_write_kv(qkv, case.cos_sin, case.plan, k_cache, v_cache, num_heads=case.heads.query)


def test_keys_and_values_land_in_their_slots_and_nowhere_else(case: Any, tolerance: float) -> None:
    qkv, keys, values = (t.double() for t in (case.qkv, case.k_cache, case.v_cache))
    reference.rope_write_kv(qkv, case.cos_sin, case.plan, keys, values, num_heads=case.heads.query)
    _write(case, case.qkv, case.k_cache, case.v_cache)
    for got, expected in ((case.qkv, qkv), (case.k_cache, keys), (case.v_cache, values)):
        # NaN stands wherever nothing was to be written: in padding rows and in other slots.
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def test_rotation_is_transformers_own(case: Any, tolerance: float) -> None:
    heads, live = case.heads, sum(queries for queries, _ in ROWS)
    before = case.qkv[:live].double().view(1, live, -1, heads.dim).transpose(1, 2)
    q, k = before[:, : heads.query], before[:, heads.query : heads.query + heads.kv]
    cos, sin = case.cos_sin[case.plan.positions[:live]].double().chunk(2, dim=1)
    expected = apply_rotary_pos_emb(q, k, torch.cat((cos, cos), 1)[None], torch.cat((sin, sin), 1)[None])
    _write(case, case.qkv, case.k_cache, case.v_cache)
    after = case.qkv[:live].double().view(1, live, -1, heads.dim).transpose(1, 2)
    rotated = after[:, : heads.query], after[:, heads.query : heads.query + heads.kv]
    for got, wanted in zip(rotated, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def test_a_step_of_padding_alone_writes_nothing(case: Any) -> None:
    case.plan.slots.fill_(-1)
    qkv = case.qkv.clone()
    keys, values = torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache)
    _write(case, case.qkv, keys, values)
    assert torch.equal(case.qkv.nan_to_num(), qkv.nan_to_num())
    assert not keys.any() and not values.any()
