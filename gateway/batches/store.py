"""Batches in Redis: the sole writer of these keys.

    loraplex:{<tenant>}:batches                   ZSET    ids by when they were made, in ms
    loraplex:{<tenant>}:batches:open              SET     ids of those that have not ended
    loraplex:{<tenant>}:batches:ended             ZSET    ids of those that have, by when they did, in ms
    loraplex:{<tenant>}:batch:<id>                HASH    the batch, and `holder`: who works on it
    loraplex:{<tenant>}:batch:<id>:done           STRING  a bit for each line of the input that has a result
    loraplex:{<tenant>}:batch:<id>:results        HASH    results by line, until they are in the store
    loraplex:{<tenant>}:batch:<id>:segments       LIST    files of results in the store
    loraplex:batches                              ZSET    `<tenant> <id>` of those that have not ended, by
                                                          when their holder's lease ends, in ms
    loraplex:batches:turns                        ZSET    tenants by when a batch of theirs was last begun
                                                          with, in ms

A line's result and its bit are written by one script, so there is one for each, whoever was killed when.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from gateway.accounts.entry import as_text
from gateway.accounts.windows import root_of
from gateway.batches import scripts
from gateway.batches.batch import Batch, Status
from gateway.batches.files import StoredFile
from gateway.batches.pages import Page, ids_of, is_id, page_of

KEPT_S = 30 * 24 * 3600
"""How long a batch stays listed after its end."""
MAX_ENDED = 2_000
"""Batches of a tenant that have ended and stay listed: those that ended last."""
MAX_OPEN = 100
"""Batches of a tenant that have not ended."""
_MOST_WAITING = 1000
"""That are looked at, as in `claim`."""


class NoInputFile(Exception):
    """The file that a batch was to read is gone."""


class TooManyBatches(Exception):
    """The tenant has MAX_OPEN batches that have not ended."""


class LeaseLost(Exception):
    """Another holder works on the batch now."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a batch."""

    tenant: str
    batch_id: str
    token: str


class Batches:
    """Reads and changes the records. Methods raise redis' own errors when Redis is away, and those that take
    a lease LeaseLost.
    """

    def __init__(self, redis: Redis, *, lease_s: float) -> None:
        self._redis = redis
        self._lease_ms = int(lease_s * 1000)
        register = redis.register_script
        self._create, self._claim = register(scripts.CREATE), register(scripts.CLAIM)
        self._renew, self._give_back = register(scripts.RENEW), register(scripts.GIVE_BACK)
        self._move, self._record = register(scripts.MOVE), register(scripts.RECORD)
        self._spill, self._finish = register(scripts.SPILL), register(scripts.FINISH)
        self._cancel = register(scripts.CANCEL)

    # ---- for the API ------------------------------------------------------------------------------------

    async def create(self, batch: Batch) -> None:
        """Adds a batch, which whoever is free begins with. Raises NoInputFile, TooManyBatches."""
        done = await self._create(
            keys=[root_of(batch.tenant)],
            args=[
                *(batch.tenant, batch.id, int(time.time() * 1000), batch.input_file_id, MAX_OPEN),
                *batch.to_fields(),
            ],
        )
        if done == 0:
            raise NoInputFile
        if done < 0:
            raise TooManyBatches

    async def find(self, tenant: str, batch_id: str) -> Batch | None:
        """The tenant's batch, or None."""
        if not is_id(batch_id):
            return None
        found = await self._redis.hgetall(_key(tenant, batch_id))  # type: ignore[misc]
        return Batch.from_fields(found) if found else None

    async def page(self, tenant: str, *, after: str | None, limit: int) -> Page[Batch]:
        """Some of the tenant's batches, the newest first. Raises UnknownCursor."""
        key = f"{root_of(tenant)}:batches"
        await self._redis.zremrangebyscore(key, "-inf", (time.time() - 3 * KEPT_S) * 1000)
        return await page_of(
            self._redis,
            key,
            lambda batch_id: self.find(tenant, batch_id),
            after=after,
            limit=limit,
            newest_first=True,
        )

    async def cancel(self, tenant: str, batch_id: str) -> bool:
        """Has a batch end early. False: it has ended, or is about to."""
        return bool(await self._cancel(keys=[root_of(tenant)], args=[batch_id, int(time.time())]))

    # ---- for who works on them --------------------------------------------------------------------------

    async def claim(self, full: Collection[str]) -> Lease | None:
        """Takes a batch that nobody works on, of the tenant that waits longest; of none that is `full`."""
        token = secrets.token_hex(8)
        found = await self._claim(keys=[], args=[token, self._lease_ms, *full])
        if not found:
            return None
        tenant, _, batch_id = as_text(found).partition(" ")
        return Lease(tenant, batch_id, token)

    async def waiting(self) -> set[str]:
        """The tenants of batches that nobody works on."""
        seconds, micros = await self._redis.time()  # type: ignore[misc]
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        found: list[Any] = await self._redis.zrangebyscore(
            "loraplex:batches", "-inf", now_ms, start=0, num=_MOST_WAITING
        )
        return {as_text(member).partition(" ")[0] for member in found}

    async def renew(self, lease: Lease) -> Status:
        """Makes the lease last longer. Returns the batch's status."""
        return Status(as_text(await self._held(self._renew, lease, self._lease_ms, lease.tenant)))

    async def give_back(self, lease: Lease) -> None:
        """Ends the lease before its time."""
        await self._held(self._give_back, lease, lease.tenant)

    async def move(
        self, lease: Lease, status: Status, *, of: Sequence[Status], fields: Mapping[str, str | int]
    ) -> Status:
        """Takes a batch that is in one of the states `of` to another. Returns the state that it is in then,
        which is not `status` where it was in none of them.
        """
        now = {"status": status.value, f"{status.value}_at": int(time.time()), **fields}
        changes = [part for pair in now.items() for part in pair]
        return Status(as_text(await self._held(self._move, lease, f",{','.join(of)},", *changes)))

    async def record(self, lease: Lease, line: int, result: bytes, *, failed: bool) -> bool:
        """Keeps a line's result. False: it has one."""
        count = "failed" if failed else "completed"
        return bool(await self._held(self._record, lease, line, result, count))

    async def spill(self, lease: Lease, segment: str, lines: Sequence[int]) -> None:
        """Says that the results of lines are in a file of the store, and forgets them here."""
        await self._held(self._spill, lease, segment, *lines)

    async def finish(
        self,
        lease: Lease,
        status: Status,
        fields: Mapping[str, str | int],
        files: Sequence[StoredFile],
    ) -> None:
        """Ends a batch, and lists the files that came of it. What was kept for its work is forgotten."""
        now = time.time()
        changes = {"status": status.value, f"{status.value}_at": int(now), **fields}
        flat = [str(part) for pair in changes.items() for part in pair]
        listed = [
            {
                "id": file.id,
                "expires_at": file.expires_at,
                "bytes": file.bytes,
                "fields": [str(part) for part in file.to_fields()],
            }
            for file in files
        ]
        await self._held(
            *(self._finish, lease, lease.tenant, int(now * 1000), KEPT_S, json.dumps(flat)),
            *(json.dumps(listed), MAX_ENDED),
        )

    async def open_of(self, tenant: str) -> list[str]:
        """The ids of a tenant's batches that have not ended."""
        found: Any = await self._redis.smembers(f"{root_of(tenant)}:batches:open")  # type: ignore[misc]
        return sorted(as_text(batch_id) for batch_id in found)

    async def forget_tenant(self, tenant: str) -> None:
        """Removes all batches of a tenant, whatever their state."""
        root = root_of(tenant)
        for batch_id in await ids_of(self._redis, f"{root}:batches"):
            key = _key(tenant, batch_id)
            await self._redis.delete(key, f"{key}:done", f"{key}:results", f"{key}:segments")
            await self._redis.zrem("loraplex:batches", f"{tenant} {batch_id}")
        await self._redis.delete(f"{root}:batches", f"{root}:batches:open", f"{root}:batches:ended")
        await self._redis.zrem("loraplex:batches:turns", tenant)

    async def done(self, tenant: str, batch_id: str) -> bytes:
        """A bit for each line that has a result, the first byte's highest being line 0."""
        found: Any = await self._redis.get(f"{_key(tenant, batch_id)}:done")
        return found or b""

    async def results(self, tenant: str, batch_id: str) -> dict[int, bytes]:
        """The results by line that are not in the store yet."""
        found: Any = await self._redis.hgetall(f"{_key(tenant, batch_id)}:results")  # type: ignore[misc]
        return {int(line): result for line, result in found.items()}

    async def segments(self, tenant: str, batch_id: str) -> list[str]:
        """The names of the files of the store that hold the others."""
        found = await self._redis.lrange(f"{_key(tenant, batch_id)}:segments", 0, -1)  # type: ignore[misc]
        return [as_text(name) for name in found]

    async def _held(self, script: AsyncScript, lease: Lease, *args: str | int | bytes) -> Any:
        reply = await script(keys=[root_of(lease.tenant)], args=[lease.batch_id, lease.token, *args])
        if reply is None:
            raise LeaseLost
        return reply


def _key(tenant: str, batch_id: str) -> str:
    return f"{root_of(tenant)}:batch:{batch_id}"
