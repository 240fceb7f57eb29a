"""What an adapter has used of its limits goes along when it is renamed."""

from __future__ import annotations

from redis.asyncio import Redis

from gateway.accounts.windows import SHARED, root_of

_MOVE = (
    SHARED
    + """
-- KEYS: the account's root. ARGV: the subject as it was, and as it is.
for _, key_of in ipairs({window_key, leases_key}) do
    local old, new = key_of(KEYS[1], ARGV[1]), key_of(KEYS[1], ARGV[2])
    if redis.call('EXISTS', old) == 1 then redis.call('RENAME', old, new) end
end
-- Nobody else removes those that ran when the name changed: their ends look for them where they were.
redis.call('ZREMRANGEBYSCORE', leases_key(KEYS[1], ARGV[2]), '-inf', now_ms())
"""
)


async def move_use_of_adapter(redis: Redis, tenant_id: str, name: str, target: str) -> None:
    """Has the windows of an adapter, and its running requests, count for another name of it.

    Else a new name would have all of a limit again. A request that runs meanwhile gives back nothing, and
    counts as running until its lease ends. Raises redis' own errors.
    """
    script = redis.register_script(_MOVE)
    await script(keys=[root_of(tenant_id)], args=[f"adapter:{name}", f"adapter:{target}"])
