"""What names of adapters mean: from memory for as long as Redis tells of every change, else from Redis.

A request would wait for this look-up before it could begin with anything else. A change is pushed before the
one who makes it has its answer, so whoever asks for a name after that gets the new meaning.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from adapters.loop_timeout import LoopTimeout
from adapters.model_ref import ModelRef
from adapters.registry import CHANGES_CHANNEL, Registry, Resolution
from gateway.redis_health import RedisHealth
from gateway.redis_push import RedisPush

_LOOKUP_TIMEOUT_S = 1.0
_MAX_AGE_S = 60.0
_MAX_KNOWN = _MAX_CHANGED = 10_000


@dataclass(frozen=True, slots=True)
class _Known:
    resolution: Resolution
    asked_at: float
    """`time.monotonic()` before Redis was asked."""


class KnownAdapters:
    """Resolves references, and remembers what they mean. When Redis is away, what it said last goes on, but
    for what it has since told to have changed.

    `start` begins to follow Redis' push and `close` ends it; without it, Redis is asked each time.
    """

    def __init__(self, redis: Redis, registry: Registry, health: RedisHealth) -> None:
        self._registry, self._health = registry, health
        self._push = RedisPush(redis, CHANGES_CHANNEL, self._on_change)
        self._known: OrderedDict[tuple[str, ModelRef], _Known] = OrderedDict()
        self._changed_at: OrderedDict[str, float] = OrderedDict()  # owner/name -> time.monotonic()
        self._forgot_at = float("-inf")  # the latest change that `_changed_at` has no room for any more

    async def start(self) -> None:
        """Returns at once, also while Redis is away."""
        await self._push.start()

    async def close(self) -> None:
        """Ends what `start` began."""
        await self._push.close()

    async def resolve(self, caller: str, ref: ModelRef) -> Resolution | None:
        """Returns what a reference means to the calling tenant, or None: there is none such, or none for it.

        Raises RedisError, OSError and TimeoutError where Redis is away and has not said it before.
        """
        key, name = (caller, ref), f"{ref.owner or caller}/{ref.name}"
        known = self._known.get(key)
        if known is not None and self._is_true(known, name):
            return known.resolution
        if known is not None and self._health.is_away and not self._has_changed(known, name):
            return known.resolution
        asked_at = time.monotonic()
        try:
            async with LoopTimeout(_LOOKUP_TIMEOUT_S):
                found = await self._registry.resolve(caller, ref)
        except (RedisError, OSError, TimeoutError):
            self._health.failed()
            if known is None or self._has_changed(known, name):
                raise
            return known.resolution
        self._known.pop(key, None)
        if found is not None:
            self._known[key] = _Known(found, asked_at)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return found

    def _is_true(self, known: _Known, name: str) -> bool:
        """Whether nothing can have changed since Redis said so."""
        since, asked_at = self._push.since, known.asked_at
        return (
            since is not None
            and asked_at > since
            and not self._has_changed(known, name)
            and time.monotonic() - asked_at < _MAX_AGE_S
        )

    def _has_changed(self, known: _Known, name: str) -> bool:
        """Whether Redis has told of a change, or of so many that this one may be among them."""
        return known.asked_at <= max(self._forgot_at, self._changed_at.get(name, 0.0))

    def _on_change(self, name: str) -> None:
        self._changed_at[name] = time.monotonic()
        self._changed_at.move_to_end(name)
        if len(self._changed_at) > _MAX_CHANGED:
            self._forgot_at = self._changed_at.popitem(last=False)[1]
