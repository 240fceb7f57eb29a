"""Settles what gateways left behind that died, and keeps the ledger to its age."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from adapters.script_batches import ScriptBatches
from gateway import tasks
from gateway.accounts.entry import as_text
from gateway.accounts.settle import OPEN_TENANTS, REAP, USAGE_TENANTS
from gateway.accounts.windows import root_of

logger = logging.getLogger(__name__)

_TURN = "loraplex:reaper"
_TRIM_TURN = "loraplex:reaper:trim"
_TRIM_EVERY_S = 3600
_DAY_MS = 86_400_000
_FORGET_WRITERS_DAYS = 30
_IDLE_MS = 3_600_000


class Reaper:
    """One of the gateways at a time looks for leases that have run out, and settles their requests.

    While Redis was away nobody could renew a lease. So one that could not reach Redis, or has just started,
    waits for longer than a lease lasts.
    """

    def __init__(self, redis: Redis, *, lease_s: float, days: int) -> None:
        """`days`: how long entries are kept."""
        self._redis = redis
        self._reap = ScriptBatches(redis, redis.register_script(REAP))
        self._every_s = lease_s / 4
        self._patience_s = lease_s + self._every_s
        self._days = days
        self._in_touch_since: float | None = None  # time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the task."""
        self._task = tasks.start(self._run(), "ledger-reaper")

    async def close(self) -> None:
        """Ends the task."""
        if self._task is not None:
            await tasks.cancel(self._task)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.round()
            except (RedisError, OSError) as error:
                self._in_touch_since = None
                logger.debug("the reaper cannot reach Redis: %s", error)

    async def round(self) -> None:
        """Reaps and trims, where it is this gateway's turn. Raises RedisError and OSError."""
        seconds, micros = await self._redis.time()
        now, now_ms = time.monotonic(), seconds * 1000 + micros // 1000
        if self._in_touch_since is None:
            self._in_touch_since = now
        if now - self._in_touch_since < self._patience_s:
            return
        if not await self._redis.set(_TURN, "taken", nx=True, px=int(self._every_s * 1000)):
            return
        tenants = await self._members(OPEN_TENANTS)
        replies = await asyncio.gather(*(self._reap([root_of(tenant)], [str(now_ms)]) for tenant in tenants))
        if count := sum(reply[0] for reply in replies):
            logger.info("booked %d requests as lost, whose gateways are gone", count)
        for fault in (fault for _, *faults in replies for fault in faults):
            logger.error("the ledger cannot take a lost request: %s", as_text(fault))
        if await self._redis.set(_TRIM_TURN, "taken", nx=True, ex=_TRIM_EVERY_S):
            for tenant in await self._members(USAGE_TENANTS):
                await self._trim(tenant, now_ms)

    async def _trim(self, tenant: str, now_ms: int) -> None:
        """Drops entries that are too old, what is known of writers that have been gone for long, and the
        tenant from where reapers look if it has been idle for so long that no gateway takes it for noted.
        """
        oldest = max(0, now_ms - self._days * _DAY_MS)
        await self._redis.xtrim(f"{root_of(tenant)}:ledger", minid=f"{oldest}-0", approximate=True)
        written = f"{root_of(tenant)}:written"
        values: dict[Any, Any] = await cast(Awaitable[dict[Any, Any]], self._redis.hgetall(written))
        heard = {writer: int(value.split()[1]) for writer, value in values.items()}
        gone = [writer for writer, at in heard.items() if at < now_ms - _FORGET_WRITERS_DAYS * _DAY_MS]
        if gone:
            await cast(Awaitable[int], self._redis.hdel(written, *gone))
        idle = max(heard.values(), default=0) < now_ms - _IDLE_MS
        if idle and not await self._redis.exists(f"{root_of(tenant)}:leases"):
            await cast(Awaitable[int], self._redis.srem(OPEN_TENANTS, tenant))

    async def _members(self, key: str) -> list[str]:
        members = await cast(Awaitable[set[Any]], self._redis.smembers(key))
        return sorted(as_text(member) for member in members)
