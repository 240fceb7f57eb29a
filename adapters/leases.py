"""Which engines live, where, and what they hold: written by engines each few seconds, read by gateways.

    loraplex:{engines}:index         SET of engine ids
    loraplex:{engines}:lease:<id>    one lease as JSON; expires on its own when the engine stops renewing it

The braces keep the keys in one slot of a Redis Cluster, which the script below needs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from redis.asyncio import Redis

_log = logging.getLogger(__name__)

_INDEX = "loraplex:{engines}:index"
_LEASE = "loraplex:{engines}:lease:"

# One round trip for all leases, dropping ids whose lease has expired.
_LIVE = """
local live = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local lease = redis.call('GET', ARGV[1] .. id)
    if lease then
        live[#live + 1] = lease
    else
        redis.call('SREM', KEYS[1], id)
    end
end
return live
"""


@dataclass(frozen=True, slots=True)
class EngineLease:
    """What an engine says of itself. Load figures are as old as the last renewal."""

    engine_id: str
    address: str
    """``host:port`` of its gRPC server, as gateways reach it."""
    model: str
    """The served model's name."""
    model_digest: bytes
    max_model_len: int
    residency: Mapping[str, str] = field(default_factory=dict)
    """Digest in hex → the fastest tier that holds the adapter: ``device``, ``host`` or ``disk``."""
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    draining: bool = False
    adapters: Mapping[str, float] = field(default_factory=dict)
    """How full the engine's memory for adapters is, and what has happened there and in its queue since its
    start, by name."""

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"model_digest": self.model_digest.hex()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: str | bytes) -> EngineLease:
        """Ignores fields it does not know. Raises ValueError, KeyError or TypeError for any other text."""
        values: dict[str, Any] = json.loads(raw)
        known: dict[str, Any] = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        known["model_digest"] = bytes.fromhex(values["model_digest"])
        return cls(**known)


class EngineLeases:
    """The leases in Redis. Every verb is atomic and one round trip."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._live = redis.register_script(_LIVE)

    async def publish(self, lease: EngineLease, ttl_s: float) -> None:
        """Writes or renews a lease for `ttl_s` seconds."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(_LEASE + lease.engine_id, lease.to_json(), px=max(1, round(ttl_s * 1000)))
            pipe.sadd(_INDEX, lease.engine_id)
            await pipe.execute()

    async def withdraw(self, engine_id: str) -> None:
        """Ends a lease now; one that is not there is no error."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(_LEASE + engine_id)
            pipe.srem(_INDEX, engine_id)
            await pipe.execute()

    async def live(self) -> list[EngineLease]:
        """All leases that have not expired, by engine id."""
        leases: list[EngineLease] = []
        for raw in await self._live(keys=[_INDEX], args=[_LEASE]):
            try:
                leases.append(EngineLease.from_json(raw))
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("ignoring an engine's lease that cannot be read: %r", error)
        return sorted(leases, key=lambda lease: lease.engine_id)
