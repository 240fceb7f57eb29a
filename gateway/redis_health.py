"""Whether Redis answers: known to all who would otherwise find out one by one, each after a wait."""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway import tasks

_PAUSE_S = 0.25
_ANSWER_S = 0.5


class RedisHealth:
    """Who asks Redis in vain says so by `failed`; from then on it `is_away` until it answers a ping, which it
    is sent several times a second. Meanwhile a request does without it, or goes on with what is known.

    A Redis that refuses connections says so at once. One that hangs, or whose network drops packets, costs
    each call that tries it seconds. For one event loop; `close` ends what it began.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._is_away = False
        self._silent_since = 0.0  # time.monotonic(), while there is a probe
        self._probe: asyncio.Task[None] | None = None

    @property
    def is_away(self) -> bool:
        """Whether a call has failed, and none has been answered since."""
        return self._is_away

    @property
    def silent_s(self) -> float:
        """For how long it is known to have answered nothing; 0 while it answers."""
        return time.monotonic() - self._silent_since if self._probe is not None else 0.0

    def failed(self) -> None:
        """A call was not answered."""
        self._is_away = True
        self._watch()

    async def close(self) -> None:
        """Ends the pings."""
        if self._probe is not None:
            await tasks.cancel(self._probe)

    async def answers(self) -> bool:
        """Pings it, and says whether an answer came at once."""
        is_there = await self._ping(_ANSWER_S)
        if not is_there:
            self._watch()
        return is_there

    def _watch(self) -> None:
        if self._probe is None:
            self._silent_since = time.monotonic()
            self._probe = tasks.start(self._until_it_answers(), "probe of Redis")

    async def _until_it_answers(self) -> None:
        # For as long as the client gives any call: a Redis that is slow is not away. To break a ping off
        # would cost its connection, and a new one takes several answers more.
        while not await self._ping(None):
            await asyncio.sleep(_PAUSE_S)
        self._probe, self._is_away = None, False

    async def _ping(self, within_s: float | None) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._redis.ping()
        except (RedisError, OSError, TimeoutError):
            return False
        return True
