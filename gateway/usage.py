"""What tenants have used: sums by day, adapter and key, and single requests, as the ledger keeps them.

`Use` is the finest sum that there is. `summarise` makes an answer's rows of them, and the total of the rows.
Costs come in before anything is summed up, since prices depend on tenant and adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date, timedelta
from decimal import Decimal, localcontext
from typing import Any, Literal, get_args

from redis.asyncio import Redis

from gateway.accounts.settle import SEPARATOR, USAGE_TENANTS
from gateway.accounts.windows import root_of
from gateway.prices import EXACT, PriceList

GroupBy = Literal["day", "tenant", "adapter", "key"]
GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)

_HASHES_A_BATCH = 200


@dataclass(frozen=True, slots=True)
class Counts:
    """What can be summed up. Cached tokens are part of the input; errors are part of the requests."""

    requests: int = 0
    errors: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in COUNTS))


COUNTS = tuple(field.name for field in fields(Counts))


@dataclass(frozen=True, slots=True)
class Use:
    """What was used on a UTC day, of arrival, by a tenant with a key for an adapter ("": the base model)."""

    day: str
    tenant: str
    adapter: str
    key: str
    counts: Counts


@dataclass(frozen=True, slots=True)
class UsageRow:
    """A row of an answer: the values that it is grouped by, its sums, and their cost if there are prices."""

    group: tuple[str, ...]
    counts: Counts
    cost: Decimal | None = None


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """Rows in order of their groups, and what they add up to."""

    group_by: tuple[GroupBy, ...]
    rows: tuple[UsageRow, ...]
    total: UsageRow
    currency: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a row's values."""
        return (*self.group_by, *COUNTS, *(("cost", "currency") if self.currency else ()))

    def values(self, row: UsageRow) -> tuple[str | int, ...]:
        """Returns a row's values, in the order of `columns`; costs in plain decimal digits."""
        cost = () if row.cost is None or self.currency is None else (plain(row.cost), self.currency)
        return (*row.group, *(getattr(row.counts, name) for name in COUNTS), *cost)

    def objects(self) -> list[dict[str, Any]]:
        """Returns the rows as JSON objects."""
        return [dict(zip(self.columns, self.values(row), strict=True)) for row in self.rows]

    def total_object(self) -> dict[str, Any]:
        """Returns the total as a JSON object."""
        return dict(zip(self.columns[len(self.group_by) :], self.values(self.total), strict=True))


def summarise(uses: Iterable[Use], group_by: Sequence[GroupBy], prices: PriceList | None) -> UsageSummary:
    """Groups uses by the given columns, each of them once and in the order of GROUPS."""
    columns: tuple[GroupBy, ...] = tuple(name for name in GROUPS if name in group_by)
    sums: dict[tuple[str, ...], tuple[Counts, Decimal]] = {}
    with localcontext(EXACT):
        for use in uses:
            group = tuple(getattr(use, name) for name in columns)
            counts, cost = sums.get(group, (Counts(), Decimal(0)))
            sums[group] = (counts + use.counts, cost + (_cost(use, prices) if prices else 0))
        total_cost = sum((cost for _, cost in sums.values()), Decimal(0))
    rows = tuple(
        UsageRow(group, counts, cost if prices else None) for group, (counts, cost) in sorted(sums.items())
    )
    total = sum((row.counts for row in rows), Counts())
    currency = prices.currency if prices else None
    return UsageSummary(columns, rows, UsageRow((), total, total_cost if prices else None), currency)


def _cost(use: Use, prices: PriceList) -> Decimal:
    counts = use.counts
    return prices.price(use.tenant, use.adapter).cost(
        input_tokens=counts.input_tokens,
        cached_tokens=counts.cached_tokens,
        output_tokens=counts.output_tokens,
    )


def plain(amount: Decimal) -> str:
    """Returns an amount with at least two decimals and no more than it needs, never as 1E+3."""
    whole, _, decimals = f"{amount:f}".partition(".")
    return f"{whole}.{decimals.rstrip('0').ljust(2, '0')}"


def days_of(since: date, until: date) -> list[date]:
    """Returns all days from one to the other, both included."""
    return [since + timedelta(days=offset) for offset in range((until - since).days + 1)]


class UsageReader:
    """Reads sums from Redis. Writes nothing."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def tenants(self) -> list[str]:
        """Returns all tenants that have used anything, deleted ones too. Raises as Redis does."""
        return sorted(_text(member) for member in await self._redis.smembers(USAGE_TENANTS))

    async def uses(self, tenants: Sequence[str], days: Sequence[date]) -> list[Use]:
        """Returns what these tenants used on these days, with a round trip for each 200 of both.

        What is read is taken apart in a thread: a tenant with thousands of adapters has very many sums.
        """
        wanted = [(tenant, day.isoformat()) for tenant in tenants for day in days]
        uses: list[Use] = []
        for start in range(0, len(wanted), _HASHES_A_BATCH):
            batch = wanted[start : start + _HASHES_A_BATCH]
            async with self._redis.pipeline(transaction=False) as pipe:
                for tenant, day in batch:
                    pipe.hgetall(f"{root_of(tenant)}:usage:{day}")
                uses += await asyncio.to_thread(_uses_of, batch, await pipe.execute())
        return uses


def _uses_of(
    batch: Sequence[tuple[str, str]], hashes: Sequence[Mapping[bytes | str, bytes | str]]
) -> list[Use]:
    pairs = zip(batch, hashes, strict=True)
    return [use for (tenant, day), found in pairs for use in _uses(tenant, day, found)]


def _uses(tenant: str, day: str, found: Mapping[bytes | str, bytes | str]) -> Iterator[Use]:
    """Yields what one day's hash says: its fields are adapter, key and the name of a count."""
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for field, value in found.items():
        adapter, key, name = _text(field).split(SEPARATOR)
        if name in COUNTS:
            sums.setdefault((adapter, key), {})[name] = int(value)
    for (adapter, key), counts in sums.items():
        if any(counts.values()):  # what was taken back again leaves zeros
            yield Use(day, tenant, adapter, key, Counts(**counts))


def use_of(row: Mapping[str, Any]) -> Use:
    """Returns the use that a row of JSON says, which is grouped by all columns or some; others become ""."""
    counts = Counts(**{name: int(row[name]) for name in COUNTS})
    return Use(*(str(row.get(name, "")) for name in GROUPS), counts=counts)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
