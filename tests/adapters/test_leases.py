from __future__ import annotations

import asyncio
import dataclasses
import json
import logging

import pytest
from redis.asyncio import Redis

from adapters.leases import EngineLease, EngineLeases

LEASE = EngineLease(
    engine_id="engine-1",
    address="127.0.0.1:50051",
    model="smollm2",
    model_digest=bytes(range(32)),
    max_model_len=2048,
    residency={"ab" * 32: "device"},
    running=3,
    waiting=2,
    free_blocks=100,
    draining=True,
)
OTHER = EngineLease("engine-2", "127.0.0.1:50052", "smollm2", bytes(32), 2048)


@pytest.fixture
def leases(redis: Redis) -> EngineLeases:
    return EngineLeases(redis)


async def test_what_is_published_is_live(leases: EngineLeases) -> None:
    assert await leases.live() == []
    await leases.publish(OTHER, 10)
    await leases.publish(LEASE, 10)
    assert await leases.live() == [LEASE, OTHER]


async def test_a_renewal_replaces_what_was_said(leases: EngineLeases) -> None:
    await leases.publish(LEASE, 10)
    renewed = dataclasses.replace(LEASE, running=0, residency={})
    await leases.publish(renewed, 10)
    assert await leases.live() == [renewed]


async def test_a_lease_ends_on_its_own(leases: EngineLeases, redis: Redis) -> None:
    await leases.publish(LEASE, 0.05)
    await leases.publish(OTHER, 10)
    await asyncio.sleep(0.15)
    assert await leases.live() == [OTHER]
    assert await redis.scard("loraplex:{engines}:index") == 1


async def test_a_withdrawn_lease_is_gone_at_once(leases: EngineLeases, redis: Redis) -> None:
    await leases.publish(LEASE, 10)
    await leases.withdraw("engine-1")
    await leases.withdraw("engine-1")
    assert await leases.live() == []
    assert await redis.keys() == []


async def test_fields_of_newer_engines_are_ignored(leases: EngineLeases, redis: Redis) -> None:
    await leases.publish(LEASE, 10)
    newer = json.loads(LEASE.to_json()) | {"temperature_of_device": 61}
    await redis.set("loraplex:{engines}:lease:engine-1", json.dumps(newer))
    assert await leases.live() == [LEASE]


@pytest.mark.parametrize("raw", ["", "[]", "{}", '{"model_digest": "x"}', '{"model_digest": "00"}', "null"])
async def test_what_is_no_lease_is_left_out_and_logged(
    leases: EngineLeases, redis: Redis, raw: str, caplog: pytest.LogCaptureFixture
) -> None:
    await leases.publish(LEASE, 10)
    await leases.publish(OTHER, 10)
    await redis.set("loraplex:{engines}:lease:engine-1", raw)
    with caplog.at_level(logging.WARNING):
        assert await leases.live() == [OTHER]
    assert "cannot be read" in caplog.text
