"""What a tenant, one of its keys or one of its adapters may use; None is always 'no limit'.

These are values only: they are stored by gateway/tenants.py and gateway/keys.py, taken at admission by
gateway/accounts, and those on adapters are held by the registry. As JSON a limit that is not set is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

LARGEST_LIMIT = 10**14 - 1
"""Counts up to here are exact in a Redis script, whose numbers are doubles printed with 14 digits."""


class InvalidLimit(ValueError):
    """A limit that cannot hold. The message is for whoever set it; `name` is the limit's."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def _check(values: Mapping[str, object], *, least: int) -> None:
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST_LIMIT:
            raise InvalidLimit(
                name,
                f"The limit '{name}' is a whole number from {least} to {LARGEST_LIMIT}, or null for none.",
            )


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits on traffic: of a tenant, of a key, or of one adapter of a tenant. Raises InvalidLimit.

    Each has a window of its own. At least 1: whoever shall send nothing is suspended or has the key revoked.
    """

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        _check(asdict(self), least=1)

    def to_mapping(self) -> dict[str, int | None]:
        """Returns all limits by name, with None for those that are not set."""
        return asdict(self)

    def that_are_set(self) -> dict[str, int]:
        """Returns the limits that there are, by name."""
        return _set_only(self.to_mapping())

    def to_json(self) -> str:
        """Returns the limits that are set as a JSON object; `rates_from_json` turns it back."""
        return json.dumps(self.that_are_set())


RATE_NAMES = tuple(field.name for field in fields(RateLimits))
NO_RATES = RateLimits()


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """All limits of a tenant but the number of its pins. Raises InvalidLimit.

    `tokens_per_month` counts input and output together in a UTC month. `adapters` counts names, and
    `adapter_bytes` the files of distinct digests; `pinned_pages` are 16 ranks each of what is pinned, and
    `file_bytes` is what batches read and write. All hold at upload, or when something is pinned, and say
    nothing of what is there.
    """

    rates: RateLimits = NO_RATES
    tokens_per_month: int | None = None
    adapters: int | None = None
    adapter_bytes: int | None = None
    pinned_pages: int | None = None
    file_bytes: int | None = None

    def __post_init__(self) -> None:
        totals = {name: value for name, value in asdict(self).items() if name != "rates"}
        _check(totals, least=0)

    def to_mapping(self) -> dict[str, int | None]:
        """Returns all limits by name, flat, with None for those that are not set."""
        return {**self.rates.to_mapping(), **{name: getattr(self, name) for name in _TOTAL_NAMES}}

    def that_are_set(self) -> dict[str, int]:
        """Returns the limits that there are, by name, flat."""
        return _set_only(self.to_mapping())

    def to_json(self) -> str:
        """Returns the limits that are set as a flat JSON object; `tenant_limits_from_json` turns it back."""
        return json.dumps(self.that_are_set())


_TOTAL_NAMES = tuple(field.name for field in fields(TenantLimits) if field.name != "rates")
TENANT_LIMIT_NAMES = (*RATE_NAMES, *_TOTAL_NAMES)
NO_LIMITS = TenantLimits()


def rates_from_mapping(values: Mapping[str, Any]) -> RateLimits:
    """Returns rates from values by name; absent and None mean no limit. Raises InvalidLimit."""
    _check_names(values, RATE_NAMES)
    return RateLimits(**values)


def tenant_limits_from_mapping(values: Mapping[str, Any]) -> TenantLimits:
    """Returns a tenant's limits from flat values by name. Raises InvalidLimit."""
    _check_names(values, TENANT_LIMIT_NAMES)
    rates = {name: value for name, value in values.items() if name in RATE_NAMES}
    totals = {name: value for name, value in values.items() if name in _TOTAL_NAMES}
    return TenantLimits(RateLimits(**rates), **totals)


def rates_from_json(text: str) -> RateLimits:
    """Returns the rates of a stored JSON object; the empty text is no limits. Raises InvalidLimit."""
    return rates_from_mapping(_load(text))


def tenant_limits_from_json(text: str) -> TenantLimits:
    """Returns the limits of a stored JSON object; the empty text is no limits. Raises InvalidLimit."""
    return tenant_limits_from_mapping(_load(text))


def adapter_limits_to_json(limits: Mapping[str, RateLimits]) -> str:
    """Returns rates by adapter name as JSON, without those that limit nothing."""
    some = {name: rates.that_are_set() for name, rates in sorted(limits.items())}
    return json.dumps({name: rates for name, rates in some.items() if rates})


def adapter_limits_from_json(text: str) -> dict[str, RateLimits]:
    """Returns the stored rates by adapter name; the empty text is none. Raises InvalidLimit."""
    return {name: rates_from_mapping(values) for name, values in _load(text).items()}


def _load(text: str) -> dict[str, Any]:
    return json.loads(text) if text else {}


def _set_only(values: Mapping[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def _check_names(values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            raise InvalidLimit(name, f"There is no limit '{name}'. Limits are {', '.join(known)}.")
