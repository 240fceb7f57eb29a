"""Tells gateways that this engine is here, and learns which adapters it should hold: both once a second.

The lease in Redis is renewed, and the desired state read beside it. So an engine that is new, or was cut off,
converges by itself: it brings what is pinned, and forgets what was deleted while it could not be told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection

from redis.asyncio import Redis
from redis.exceptions import RedisError

from adapters.leases import EngineLease, EngineLeases
from adapters.registry.desired import DesiredAdapters, desired_adapters

logger = logging.getLogger(__name__)

RENEW_SECONDS = 1.0
LEASE_SECONDS = 5.0
REDIS_TIMEOUT_SECONDS = 2.0
STOP_SECONDS = 2 * REDIS_TIMEOUT_SECONDS
"""How long a renewal under way may take to end: as long as to connect, and to be answered."""


class Registration:
    """Keeps the engine's lease alive from `start` to `stop`, through any outage of Redis.

    Args:
        make_lease: what to say now; asked before each renewal.
        on_desired: told after each renewal which adapters the engine should hold.
        on_disk: of which adapters its disk has copies, beside those of the lease.
    """

    def __init__(
        self,
        redis_url: str,
        make_lease: Callable[[], Awaitable[EngineLease]],
        on_desired: Callable[[DesiredAdapters], None],
        on_disk: Callable[[], Collection[bytes]],
    ) -> None:
        self._redis = Redis.from_url(
            redis_url, socket_timeout=REDIS_TIMEOUT_SECONDS, socket_connect_timeout=REDIS_TIMEOUT_SECONDS
        )
        self._leases = EngineLeases(self._redis)
        self._make_lease = make_lease
        self._on_desired = on_desired
        self._on_disk = on_disk
        self._engine_id = ""
        self._is_lost = False
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._renew_forever(), name="registration")

    async def stop(self) -> None:
        """Withdraws the lease, if Redis can be reached, and closes the connection.

        A renewal under way is let end: cancelled, the client may swallow that, and Redis may take in the
        renewal after the withdrawal.
        """
        self._stopping.set()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=STOP_SECONDS)
            for task in late:
                task.cancel()
        try:
            if self._engine_id:
                await self._leases.withdraw(self._engine_id)
        except (RedisError, OSError) as error:
            logger.warning("the lease could not be withdrawn and will expire: %s", error)
        finally:
            await self._redis.aclose()

    async def renew(self) -> None:
        """Publishes the lease once, and passes on what is desired. Failures are logged when they begin and
        when they end; meanwhile what was desired last stays so.
        """
        lease = await self._make_lease()
        try:
            await self._leases.publish(lease, LEASE_SECONDS)
            held = {bytes.fromhex(digest) for digest in lease.residency} | set(self._on_disk())
            self._on_desired(await desired_adapters(self._redis, held))
        except (RedisError, OSError) as error:
            if not self._is_lost:
                logger.warning(
                    "Redis is away (%s); requests under way go on, and it is tried each second", error
                )
            self._is_lost = True
            return
        self._engine_id = lease.engine_id
        if self._is_lost:
            logger.info("Redis is back; the lease is renewed")
        self._is_lost = False

    async def _renew_forever(self) -> None:
        while not self._stopping.is_set():
            try:
                await self.renew()
            except Exception:  # say, of what somebody else has written into Redis: the next may do
                logger.exception("the lease could not be renewed; it is tried again each second")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._stopping.wait()
