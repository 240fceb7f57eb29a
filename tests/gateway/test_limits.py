"""Limits as values: what is a limit, and that JSON brings back what it was given."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.limits import (
    LARGEST_LIMIT,
    NO_LIMITS,
    NO_RATES,
    InvalidLimit,
    RateLimits,
    TenantLimits,
    adapter_limits_from_json,
    adapter_limits_to_json,
    rates_from_json,
    rates_from_mapping,
    tenant_limits_from_json,
    tenant_limits_from_mapping,
)


def test_json_brings_back_what_it_was_given() -> None:
    rates = RateLimits(requests_per_minute=1, output_tokens_per_minute=LARGEST_LIMIT)
    limits = TenantLimits(rates, tokens_per_month=0, adapter_bytes=7)
    assert rates_from_json(rates.to_json()) == rates
    assert tenant_limits_from_json(limits.to_json()) == limits
    by_adapter = {"sql": rates, "acme/json": RateLimits(concurrent_requests=2)}
    assert adapter_limits_from_json(adapter_limits_to_json(by_adapter)) == by_adapter
    assert adapter_limits_from_json(adapter_limits_to_json({"sql": NO_RATES})) == {}
    assert (rates_from_json(""), tenant_limits_from_json("")) == (NO_RATES, NO_LIMITS)
    assert adapter_limits_from_json("") == {}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"requests_per_minute": -1}, "requests_per_minute"),
        ({"requests_per_minute": True}, "requests_per_minute"),
        ({"concurrent_requests": 1.0}, "concurrent_requests"),
        ({"input_tokens_per_minute": "5"}, "input_tokens_per_minute"),
        ({"output_tokens_per_minute": LARGEST_LIMIT + 1}, "output_tokens_per_minute"),
        ({"adapters": -1}, "adapters"),
        ({"rpm": 5}, "rpm"),
    ],
)
def test_what_is_no_limit_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidLimit) as refusal:
        tenant_limits_from_mapping(values)
    assert refusal.value.name == name


def test_keys_and_adapters_have_rates_only() -> None:
    with pytest.raises(InvalidLimit, match="no limit 'tokens_per_month'"):
        rates_from_mapping({"tokens_per_month": 5})
