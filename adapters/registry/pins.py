"""Which adapters engines are asked to keep resident."""

from __future__ import annotations

from redis.asyncio import Redis

from adapters.registry.scripts import PINS, text


async def pinned_digests(redis: Redis) -> frozenset[bytes]:
    """The live versions of all names that tenants have pinned: one read of a small hash."""
    return frozenset(bytes.fromhex(text(digest)) for digest in await redis.hvals(PINS))
