"""The engine's lease: published, renewed, withdrawn, and what is said when Redis is away."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest
from redis.asyncio import Redis

from adapters.leases import EngineLease, EngineLeases
from adapters.registry.desired import DesiredAdapters
from adapters.registry.scripts import PINS, REFERENCES
from engine import registration as registration_module
from engine.registration import Registration
from tests.ports import reserve_port


def lease(running: int = 0) -> EngineLease:
    return EngineLease(
        "127.0.0.1:1", "127.0.0.1:1", "model", b"m" * 32, 512, {"ab": "device"}, running=running
    )


def ignore(desired: DesiredAdapters) -> None:
    """Stands for an engine that need not know what it should hold."""


async def live(url: str) -> list[EngineLease]:
    async with Redis.from_url(url) as redis:
        return await EngineLeases(redis).live()


async def test_the_lease_is_renewed_and_withdrawn(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "RENEW_SECONDS", 0.01)
    count = 0

    async def make_lease() -> EngineLease:
        nonlocal count
        count += 1
        return lease(running=count)

    registration = Registration(valkey_url, make_lease, ignore, tuple)
    registration.start()
    async with asyncio.timeout(60):
        while count < 3:
            await asyncio.sleep(0.01)
    (found,) = await live(valkey_url)
    assert found.running >= 2 and found.residency == {"ab": "device"}
    await registration.stop()
    assert await live(valkey_url) == []


async def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends(
    valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine.registration")

    async def make_lease() -> EngineLease:
        return lease()

    closed = f"redis://127.0.0.1:{reserve_port()}/0"
    registration = Registration(closed, make_lease, ignore, tuple)
    for _ in range(3):
        await registration.renew()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Redis is away" in caplog.text
    await registration._redis.aclose()
    registration._redis = Redis.from_url(valkey_url)
    registration._leases = EngineLeases(registration._redis)
    for _ in range(3):
        await registration.renew()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "Redis is back" in caplog.text
    assert len(await live(valkey_url)) == 1
    await registration.stop()


async def test_what_somebody_broke_in_redis_does_not_end_the_renewals(
    valkey_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration_module, "RENEW_SECONDS", 0.01)
    told: list[DesiredAdapters] = []

    async def make_lease() -> EngineLease:
        return lease()

    async with Redis.from_url(valkey_url) as redis, asyncio.timeout(60):
        await redis.hset(PINS, "acme/sql", "not hexadecimal")  # type: ignore[misc]
        registration = Registration(valkey_url, make_lease, told.append, tuple)
        registration.start()
        while "it is tried again" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not told
        await redis.delete(PINS)
        while not told:
            await asyncio.sleep(0.01)
        await registration.stop()
    assert await live(valkey_url) == []


async def test_stopping_without_redis_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def make_lease() -> EngineLease:
        return lease()

    closed = f"redis://127.0.0.1:{reserve_port()}/0"
    registration = Registration(closed, make_lease, ignore, tuple)
    registration.start()
    await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        await registration.stop()


async def test_a_stop_at_any_moment_of_a_renewal_withdraws_and_ends(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration_module, "RENEW_SECONDS", 0.0002)

    async def make_lease() -> EngineLease:
        return lease()

    async with asyncio.timeout(120):
        for moment in range(60):
            registration = Registration(valkey_url, make_lease, ignore, tuple)
            registration.start()
            await asyncio.sleep(0.003 + moment * 0.0001)
            await registration.stop()
            assert await live(valkey_url) == []


async def test_what_is_desired_is_told_with_each_renewal(valkey_url: str) -> None:
    pinned, kept, gone, left_on_disk = (bytes([number]) * 32 for number in range(4))
    on_disk = [kept, left_on_disk]
    told: list[DesiredAdapters] = []

    async def make_lease() -> EngineLease:
        return dataclasses.replace(lease(), residency={kept.hex(): "device", gone.hex(): "host"})

    registration = Registration(valkey_url, make_lease, told.append, lambda: on_disk)
    async with Redis.from_url(valkey_url) as redis:
        await redis.delete(PINS, REFERENCES)
        await registration.renew()
        assert told[-1] == DesiredAdapters(frozenset(), frozenset()), "an empty Redis knows nothing"
        await redis.hset(PINS, mapping={"acme/sql": pinned.hex(), "acme/law": pinned.hex()})
        await redis.hset(REFERENCES, mapping={kept.hex(): 2, pinned.hex(): 1})
        await registration.renew()
        assert told[-1] == DesiredAdapters(frozenset({pinned}), frozenset({gone, left_on_disk}))
        await redis.delete(PINS, REFERENCES)
    await registration.stop()
