"""Limits on calls that generate nothing: what manages adapters, keys and files, or makes tokens of text.

They are the same for every tenant, and far above what honest use comes to. They are there so that no tenant
keeps the gateways busy with work that no other limit counts, or fills Redis with the audit of its changes.
The operator's own calls are not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.accounts.headers import duration
from gateway.accounts.windows import SHARED, root_of
from gateway.errors import ApiError
from gateway.keys import NO_TENANT
from gateway.redis_health import RedisHealth

logger = logging.getLogger(__name__)

_MINUTE_MS, _DAY_MS = 60_000, 86_400_000


@dataclass(frozen=True, slots=True)
class CallLimit:
    """How many calls of a kind a tenant may make in a window."""

    name: str
    noun: str
    most: int
    window_ms: int


MANAGEMENT = CallLimit("management_calls_per_minute", "management calls per minute", 6_000, _MINUTE_MS)
CHANGES = CallLimit("changes_per_day", "changes to adapters and keys per day", 20_000, _DAY_MS)
FILE_CALLS = CallLimit("file_calls_per_minute", "calls per minute to files and batches", 6_000, _MINUTE_MS)
FILE_CHANGES = CallLimit("file_changes_per_day", "changes to files and batches per day", 20_000, _DAY_MS)
"""Apart from the first two: a key that may only infer must not keep the tenant from revoking it."""
TOKENIZATION = CallLimit(
    "tokenization_per_minute",
    "calls per minute that make tokens of text or the reverse",
    6_000,
    _MINUTE_MS,
)
"""A long body counts as several calls; see `tokenization_calls`."""

_BYTES_A_CALL = 4096

_TAKE = (
    SHARED
    + """
-- KEYS: the account's root. ARGV: a JSON list of limits, each a name, the limit, an amount, a window in ms.
-- Takes from all or from none. Replies with nothing, or with the place of the limit that refuses and the ms
-- until its window ends.
local now, key = now_ms(), window_key(KEYS[1], 'calls')
local limits, used, starts, longest = cjson.decode(ARGV[1]), {}, {}, 0
for index, limit in ipairs(limits) do
    local name, most, amount, window = unpack(limit)
    local held = redis.call('HMGET', key, name, name .. ':start')
    used[index], starts[index] = tonumber(held[1] or 0), tonumber(held[2] or 0)
    if now >= starts[index] + window or now < starts[index] - window then
        used[index], starts[index] = 0, now
    end
    if used[index] + amount > most then return {index, starts[index] + window - now} end
    longest = math.max(longest, window)
end
for index, limit in ipairs(limits) do
    local name, _, amount = unpack(limit)
    redis.call('HSET', key, name, used[index] + amount, name .. ':start', starts[index])
end
if redis.call('PTTL', key) < longest then redis.call('PEXPIRE', key, longest) end
return {}
"""
)


class CallLimits:
    """Counts such calls in Redis, so that any number of gateways count as one."""

    def __init__(
        self, redis: Redis, health: RedisHealth, on_refusal: Callable[[str, str, str], None]
    ) -> None:
        """`on_refusal` is called with the tenant, "", and the limit's name before each 429."""
        self._health = health
        self._take = redis.register_script(_TAKE)
        self._on_refusal = on_refusal

    async def take(self, tenant_id: str, limits: Sequence[CallLimit], amount: int = 1) -> None:
        """Counts a call as so many. Raises ApiError 429 when a limit is used up.

        While Redis is away, calls are let through: those that need it fail by themselves.
        """
        if tenant_id == NO_TENANT or self._health.is_away:
            return
        asked = orjson.dumps([[each.name, each.most, amount, each.window_ms] for each in limits])
        try:
            reply = await self._take(keys=[root_of(tenant_id)], args=[asked])
        except (RedisError, OSError) as error:
            self._health.failed()
            logger.debug("a call is not counted, since Redis is away: %s", error)
            return
        if reply:
            limit, wait_ms = limits[reply[0] - 1], reply[1]
            self._on_refusal(tenant_id, "", limit.name)
            raise _too_many(limit, wait_ms)


def tokenization_calls(body_bytes: int) -> int:
    """Returns as how many calls a body counts: one for each 4 KiB begun."""
    return max(1, -(-body_bytes // _BYTES_A_CALL))


def _too_many(limit: CallLimit, wait_ms: int) -> ApiError:
    return ApiError(
        429,
        f"Rate limit reached for the tenant: {limit.noun}. Limit {limit.most:,}. Please try again in "
        f"{duration(wait_ms)}.",
        type="requests",
        code="rate_limit_exceeded",
        param=limit.name,
        headers={"Retry-After": str(max(1, -(-wait_ms // 1000)))},
    )
