"""Who did what to tenants, keys, limits and adapters: a Redis stream that is only ever appended to.

    loraplex:audit      STREAM  action, tenant, object, key, by, address, before, after (JSON objects)

It holds a million entries, some 400 MB; then the oldest go. How many one tenant makes is bounded by the day
(`gateway.accounts.calls`), so it takes the most eager one weeks to push others' out.

An entry's time is that of its stream id, on Redis' clock. A change of a tenant or a key and its entry are one
script (`gateway/tenants.py` and `gateway/keys.py` run `APPEND` in theirs); a change of an adapter is noted by
`gateway/api/audited.py`. No entry ever holds a key, or a digest of one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway import tasks

AUDIT_STREAM = "loraplex:audit"

MOST_ENTRIES = 1_000_000

APPEND = f"""
local function append_audit(stream, entry)
    redis.call('XADD', stream, 'MAXLEN', '~', {MOST_ENTRIES}, '*', unpack(cjson.decode(entry)))
end
"""
"""Lua for scripts that make a change: `entry` is what `Change.to_entry` returns."""

_CHUNK = 500
_MOST_READ = 20_000
_DAY_MS = 86_400_000
_TRIM_EVERY_S = 3600.0


@dataclass(frozen=True, slots=True)
class Actor:
    """Whose request made a change: the key, its tenant (empty: the operator), and the client's address."""

    key_id: str
    tenant_id: str
    address: str


GATEWAY = Actor("gateway", "", "")
"""What no request asked for."""


@dataclass(frozen=True, slots=True)
class Change:
    """What was done: `action` to the `object` of a tenant, and its values before and after that differ."""

    action: str
    """As in `tenant.update`, `key.rotate`, `adapter.promote`."""
    tenant_id: str
    object: str
    """Id of the tenant or the key, or the adapter's name."""
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    def to_entry(self, actor: Actor) -> str:
        """Returns the stream's fields and values as a JSON list, for `APPEND`."""
        before, after = differences(self.before, self.after)
        fields = {
            "action": self.action,
            "tenant": self.tenant_id,
            "object": self.object,
            "key": actor.key_id,
            "by": actor.tenant_id,
            "address": actor.address,
            "before": json.dumps(before),
            "after": json.dumps(after),
        }
        return json.dumps([item for pair in fields.items() for item in pair])


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit. `id` is its place in the stream, `time_ms` since the Unix epoch."""

    id: str
    time_ms: int
    actor: Actor
    change: Change


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """Which entries are asked for, the latest first. Times are Unix milliseconds, both included.

    `action` is a whole one, or `adapter.` and the like for all that begin so.
    """

    since_ms: int | None = None
    until_ms: int | None = None
    tenant_id: str | None = None
    action: str | None = None
    limit: int = 100
    before_id: str | None = None
    """Only entries older than this one."""

    def takes(self, change: Change) -> bool:
        """Whether the entry is one of those, its time apart."""
        if self.tenant_id is not None and change.tenant_id != self.tenant_id:
            return False
        if self.action is None:
            return True
        by_kind = self.action.endswith(".") and change.action.startswith(self.action)
        return by_kind or change.action == self.action


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Some entries, and the `before_id` that goes on from there; None when there are no more."""

    entries: Sequence[AuditEntry]
    next: str | None


class Audit:
    """Reads the audit, and appends what is no script's own. Raises redis' own errors when Redis is away."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def append(self, change: Change, actor: Actor) -> None:
        """Appends one entry."""
        flat = json.loads(change.to_entry(actor))
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        await self._redis.xadd(AUDIT_STREAM, fields, maxlen=MOST_ENTRIES, approximate=True)

    async def page(self, query: AuditQuery) -> AuditPage:
        """Returns the next entries of a query.

        One call reads a bounded part of the stream: a page with few entries, even none, may have a next.
        """
        found: list[AuditEntry] = []
        at = query.before_id
        for _ in range(_MOST_READ // _CHUNK):
            newest, oldest = _newest(query.until_ms, at), str(query.since_ms or "-")
            rows: Any = await self._redis.xrevrange(AUDIT_STREAM, max=newest, min=oldest, count=_CHUNK)
            for entry in map(_read, rows):
                at = entry.id
                if query.takes(entry.change):
                    found.append(entry)
                    if len(found) == query.limit:
                        return AuditPage(found, at)
            if len(rows) < _CHUNK:
                return AuditPage(found, None)
        return AuditPage(found, at)

    async def trim(self, keep_days: int) -> None:
        """Removes entries older than that many days, on Redis' clock: a gateway's may be wrong by months."""
        seconds, micros = await self._redis.time()
        oldest_ms = seconds * 1000 + micros // 1000 - keep_days * _DAY_MS
        await self._redis.xtrim(AUDIT_STREAM, minid=str(oldest_ms), approximate=False)


@asynccontextmanager
async def trimming(audit: Audit, keep_days: int | None) -> AsyncIterator[None]:
    """Removes entries older than that many days while the block runs; None: none. Waits for nothing."""
    if keep_days is None:
        yield
        return
    task = tasks.start(_trim_now_and_then(audit, keep_days), "audit-trimming")
    try:
        yield
    finally:
        await tasks.cancel(task)


async def _trim_now_and_then(audit: Audit, keep_days: int) -> None:
    while True:
        with suppress(RedisError, OSError):  # who needs Redis says that it is away
            await audit.trim(keep_days)
        await asyncio.sleep(_TRIM_EVERY_S)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns of both only what differs, flat: `{"limits": {"adapters": 3}}` is `{"limits.adapters": 3}`."""
    old, new = _flat(before), _flat(after)
    return (
        {name: value for name, value in old.items() if name not in new or new[name] != value},
        {name: value for name, value in new.items() if name not in old or old[name] != value},
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _newest(until_ms: int | None, before_id: str | None) -> str:
    """The newest id that is asked for, as XREVRANGE has it."""
    if before_id is not None and (until_ms is None or int(before_id.partition("-")[0]) <= until_ms):
        return f"({before_id}"
    return "+" if until_ms is None else str(until_ms)


def _read(row: tuple[bytes | str, Mapping[bytes | str, bytes | str]]) -> AuditEntry:
    entry_id, values = _text(row[0]), {_text(key): _text(value) for key, value in row[1].items()}
    return AuditEntry(
        id=entry_id,
        time_ms=int(entry_id.partition("-")[0]),
        actor=Actor(values["key"], values["by"], values["address"]),
        change=Change(
            values["action"],
            values["tenant"],
            values["object"],
            json.loads(values["before"]),
            json.loads(values["after"]),
        ),
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
