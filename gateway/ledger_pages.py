"""Reads the ledger itself: a tenant's single requests, the latest first, page by page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis

from gateway.accounts.entry import LedgerEntry
from gateway.accounts.windows import root_of

_MESSAGES_A_READ = 200
_MAX_READS = 20

_Message = tuple[bytes | str, dict[str | bytes, str | bytes]]


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """An entry, and where in the ledger it is: `<ms since 1970 when it was recorded>-<number>`."""

    position: str
    entry: LedgerEntry

    @property
    def recorded_ms(self) -> int:
        """When it came into the ledger, by Redis' clock."""
        return int(self.position.partition("-")[0])


@dataclass(frozen=True, slots=True)
class LedgerPage:
    """Some requests. `cursor` is where the next page begins; None: there is none."""

    requests: tuple[RecordedRequest, ...]
    cursor: str | None


async def read_page(
    redis: Redis,
    tenant: str,
    *,
    since_ms: int | None,
    until_ms: int | None,
    cursor: str | None,
    limit: int,
    wanted: Callable[[LedgerEntry], bool],
) -> LedgerPage:
    """Returns up to `limit` wanted entries recorded from `since_ms` on and before `until_ms`.

    Looks at some thousand entries at most, so a page may have fewer, or none, and yet not be the last. Raises
    as Redis does.
    """
    latest = f"({cursor}" if cursor else f"({until_ms}-0" if until_ms is not None else "+"
    oldest = str(since_ms) if since_ms is not None else "-"
    stream = f"{root_of(tenant)}:ledger"
    found: list[RecordedRequest] = []
    for _ in range(_MAX_READS):
        answer = await redis.xrevrange(stream, latest, oldest, count=_MESSAGES_A_READ)
        messages = cast(list[_Message], answer)
        for raw_position, values in messages:
            position = raw_position.decode() if isinstance(raw_position, bytes) else raw_position
            entry = LedgerEntry.from_fields(values)
            latest = f"({position}"
            if wanted(entry):
                found.append(RecordedRequest(position, entry))
                if len(found) == limit:
                    return LedgerPage(tuple(found), position)
        if len(messages) < _MESSAGES_A_READ:
            return LedgerPage(tuple(found), None)
    return LedgerPage(tuple(found), latest[1:])
