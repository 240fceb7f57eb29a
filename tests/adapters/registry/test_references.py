"""Uploads and collectors of one digest exclude each other."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from adapters.registry import Registry
from tests.adapters.registry.builders import ONE, THREE, TWO


async def test_what_nobody_refers_to_waits_for_its_grace(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("globex", "sql", ONE)
    await registry.delete("acme", "sql")
    assert await registry.references.unreferenced(0) == []
    assert not await registry.references.condemn(ONE.digest, 0)
    await registry.delete("globex", "sql")
    assert await registry.references.unreferenced(60) == []
    assert not await registry.references.condemn(ONE.digest, 60)
    assert await registry.references.unreferenced(0) == [ONE.digest]
    assert await registry.references.condemn(ONE.digest, 0)
    assert not await registry.references.condemn(ONE.digest, 0), "another collector has it"
    await registry.references.absolve(ONE.digest)
    assert await registry.references.unreferenced(0) == []


async def test_an_upload_keeps_collectors_away(registry: Registry) -> None:
    await registry.add_version("acme", "old", ONE)
    async with registry.references.reserved(ONE.digest):
        async with registry.references.reserved(ONE.digest):
            await registry.delete("acme", "old")
        assert not await registry.references.condemn(ONE.digest, 0)
        await registry.add_version("acme", "new", ONE)
    assert await registry.references.unreferenced(0) == []
    await registry.delete("acme", "new")
    assert await registry.references.condemn(ONE.digest, 0)


async def test_an_upload_waits_for_a_collector(registry: Registry) -> None:
    await registry.add_version("acme", "old", ONE)
    await registry.delete("acme", "old")
    assert await registry.references.condemn(ONE.digest, 0)
    entered = asyncio.Event()

    async def upload() -> None:
        async with registry.references.reserved(ONE.digest):
            entered.set()

    uploading = asyncio.create_task(upload())
    await asyncio.sleep(0.2)
    assert not entered.is_set()
    await registry.references.absolve(ONE.digest)
    async with asyncio.timeout(60):
        await uploading


async def test_an_upload_that_fails_leaves_its_blob_to_collectors(registry: Registry) -> None:
    with pytest.raises(OSError, match="full"):
        async with registry.references.reserved(ONE.digest):
            raise OSError("full")
    assert await registry.references.unreferenced(0) == [ONE.digest]
    assert await registry.references.condemn(ONE.digest, 0)


async def test_reservations_and_condemnations_end_by_themselves(registry: Registry, redis: Redis) -> None:
    async with registry.references.reserved(ONE.digest):
        key = f"loraplex:{{adapters}}:reserved:{ONE.digest.hex()}"
        assert 0 < await redis.ttl(key) <= 3600
        for upload in await redis.hkeys(key):
            await redis.hset(key, upload, "1")
        assert await registry.references.condemn(ONE.digest, 0)
    await redis.hset("loraplex:{adapters}:condemned", ONE.digest.hex(), "1")
    async with asyncio.timeout(20), registry.references.reserved(ONE.digest):
        pass


async def test_orphans_get_their_grace_from_when_they_are_found(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    found = [ONE.digest, TWO.digest, THREE.digest]
    assert await registry.references.unknown(found) == [TWO.digest, THREE.digest]
    await registry.references.note_orphans(found)
    assert await registry.references.unknown(found) == []
    await registry.references.note_orphans([])
    assert set(await registry.references.unreferenced(0)) == {TWO.digest, THREE.digest}
    assert await registry.references.unreferenced(60) == []
    await registry.add_version("acme", "sql", TWO)
    assert await registry.references.unreferenced(0) == [THREE.digest]
