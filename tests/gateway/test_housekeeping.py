"""The gateway clears the store of what crashes left, from its start on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from redis.asyncio import Redis

from adapters.blob_store import BlobStore
from adapters.registry import Registry
from gateway.housekeeping import housekeeping
from gateway.redis_client import connect

DIGEST = b"\x01" * 32


async def test_what_crashes_left_is_gone_soon_after_the_start(valkey_url: str, tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    abandoned, deleted = store.stage(), store.stage()
    assert deleted.publish(DIGEST, {})
    assert store.withdraw(DIGEST) is not None
    os.utime(abandoned.path, (0, 0))
    async with Redis.from_url(valkey_url) as redis, housekeeping(Registry(redis), store), asyncio.timeout(5):
        while store.trashed() or abandoned.path.exists():
            await asyncio.sleep(0.01)


async def test_it_ends_at_once_also_while_redis_is_away(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.stage().publish(DIGEST, {})
    store.withdraw(DIGEST)
    async with connect("redis://127.0.0.1:1/0") as redis, asyncio.timeout(5):
        registry = Registry(redis)
        async with housekeeping(registry, store):
            await asyncio.sleep(0.2)
    assert [trashed.digest for trashed in store.trashed()] == [DIGEST]
