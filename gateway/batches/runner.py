"""Takes batches that nobody works on, some at once, and works on them for as long as the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress

from redis.exceptions import RedisError

from gateway import tasks
from gateway.batches.line_calls import LineCalls
from gateway.batches.store import LeaseLost
from gateway.batches.upkeep import Upkeep
from gateway.batches.work import BatchWork, Desk
from gateway.inner_calls import InnerCalls
from gateway.services import Services

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 8
MAX_OF_TENANT = 2
"""Batches that one gateway works on; others take the rest, or they wait."""
_TURN_S = 300.0
_LEAST_TURN_S = 5.0
"""How long a batch goes on before it rests for one that waits: while it gets on, and while it cannot."""
_POLL_S = 0.5
_AFTER_FAULT_S = 5.0
_CLOSE_S = 5.0


@asynccontextmanager
async def running_batches(services: Services, calls: InnerCalls) -> AsyncIterator[None]:
    """Works on batches, and tidies files up, while the block runs; on leaving, others may go on with them."""
    desk = Desk(
        services.batches, services.files, services.file_store, renew_every_s=services.settings.lease_s / 8
    )
    runner = BatchRunner(desk, LineCalls(calls, services.authenticator))
    upkeep = Upkeep(services.redis, services.files, services.file_store)
    upkeeping = tasks.start(upkeep.run(), "file-upkeep")
    runner.start()
    try:
        yield
    finally:
        await tasks.cancel(upkeeping)
        await runner.close()


class BatchRunner:
    """Claims batches and runs the work on each in a task."""

    def __init__(self, desk: Desk, calls: LineCalls) -> None:
        self._desk = desk
        self._calls = calls
        self._works: dict[asyncio.Task[None], BatchWork] = {}
        self._claiming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look for batches. Returns at once."""
        self._claiming = tasks.start(self._claim(), "batches")

    async def close(self) -> None:
        """Stops all work and gives the leases back; waits some seconds at most."""
        if self._claiming is not None:
            await tasks.cancel(self._claiming)
        for work in self._works.values():
            work.stop()
        if self._works:
            await asyncio.wait(self._works, timeout=_CLOSE_S)
            await tasks.cancel(*self._works)

    async def _claim(self) -> None:
        while True:
            with suppress(RedisError, OSError):  # who needs Redis says that it is away
                while len(self._works) < MAX_AT_ONCE:
                    counts = Counter(work.lease.tenant for work in self._works.values())
                    full = [tenant for tenant, count in counts.items() if count >= MAX_OF_TENANT]
                    lease = await self._desk.batches.claim(full)
                    if lease is None:
                        break
                    work = BatchWork(self._desk, lease, self._calls)
                    task = asyncio.create_task(self._run(work), name=f"batch {lease.batch_id}")
                    self._works[task] = work
                    task.add_done_callback(self._works.pop)
                await self._make_room()
            await asyncio.sleep(_POLL_S)

    async def _make_room(self) -> None:
        """Has a batch rest whose turn is over, if another waits for its place: first one that is stuck."""
        now = time.monotonic()
        staying = [work for work in self._works.values() if not work.is_leaving]
        due = [
            work for work in staying if now - work.began_at >= (_LEAST_TURN_S if work.is_stuck else _TURN_S)
        ]
        if not due:
            return
        waiting = await self._desk.batches.waiting()
        if _has_room(staying, waiting):  # for which somebody leaves already
            return
        for work in sorted(due, key=lambda work: (not work.is_stuck, work.began_at)):
            if _has_room([other for other in staying if other is not work], waiting):
                work.rest()
                return

    async def _run(self, work: BatchWork) -> None:
        batch_id = work.lease.batch_id
        try:
            await work.run()
        except LeaseLost:
            logger.warning("another gateway works on %s now", batch_id)
            return
        except (RedisError, OSError) as error:
            logger.warning("the batch %s pauses: %s", batch_id, error)
            await asyncio.sleep(_AFTER_FAULT_S)
        except Exception:
            logger.exception("the batch %s failed; it is tried again", batch_id)
            await asyncio.sleep(_AFTER_FAULT_S)
        with suppress(RedisError, OSError, LeaseLost):
            await self._desk.batches.give_back(work.lease)


def _has_room(works: Collection[BatchWork], waiting: Collection[str]) -> bool:
    """Whether, beside these, a batch of one of the tenants that wait could run here."""
    counts = Counter(work.lease.tenant for work in works)
    return len(works) < MAX_AT_ONCE and any(counts[tenant] < MAX_OF_TENANT for tenant in waiting)
