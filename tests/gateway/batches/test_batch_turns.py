"""Who works on which batch, and for how long, when there are more than a gateway takes."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from redis.asyncio import Redis

from gateway.batches import runner
from gateway.batches.batch import Status
from gateway.batches.files import Files, new_file
from gateway.batches.store import Batches
from gateway.tenants import Tenants
from tests.gateway.batches.made import a_batch, begin, custom_ids, lines, wait_for
from tests.gateway.local_stack import LocalStack


async def test_tenants_take_turns_however_many_batches_they_have(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        batches, files = Batches(redis, lease_s=10), Files(redis)
        for tenant, count in (("acme", 4), ("globex", 1)):
            file = new_file(tenant, "in.jsonl", "batch", 10)
            await files.add(file, most_bytes=None)
            for number in range(count):
                await batches.create(a_batch(f"batch_{number}", file.id, tenant))
                await asyncio.sleep(0.002)
        assert await batches.waiting() == {"acme", "globex"}
        claimed: list[tuple[str, str]] = []
        while (lease := await batches.claim(())) is not None:
            claimed.append((lease.tenant, lease.batch_id))
            await asyncio.sleep(0.002)
        assert claimed[:2] == [("acme", "batch_0"), ("globex", "batch_0")]
        assert claimed[2:] == [("acme", f"batch_{number}") for number in range(1, 4)]
        assert await batches.waiting() == set()


def test_a_batch_that_cannot_go_on_makes_room(
    local_stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(runner, "_LEAST_TURN_S", 0.0)
    local_stack.engines[0].step_s = 0.01
    acme, globex = local_stack.add_tenant("acme"), local_stack.add_tenant("globex")

    async def suspend() -> None:
        async with Redis.from_url(local_stack.redis_url) as redis:
            await Tenants(redis).update("acme", {"suspended": True})

    async def status() -> Status:
        async with Redis.from_url(local_stack.redis_url) as redis:
            batch = await Batches(redis, lease_s=10).find("acme", held)
            assert batch is not None
            return batch.status

    with local_stack.client(acme) as client, local_stack.client(globex) as other:
        held = begin(client, lines(3000, max_tokens=60))
        wait_for(client, held, "in_progress")
        local_stack.call(suspend())
        wait_for(other, begin(other, lines(3)), "completed")
    assert local_stack.call(status()) is Status.IN_PROGRESS


def test_a_long_batch_rests_for_others_and_nothing_runs_anew(
    local_stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(runner, "_TURN_S", 0.2)
    monkeypatch.setattr(runner, "_POLL_S", 0.05)
    local_stack.engines[0].step_s = 0.01
    acme, globex = local_stack.add_tenant("acme"), local_stack.add_tenant("globex")
    with local_stack.client(acme) as client, local_stack.client(globex) as other:
        long = begin(client, lines(600, max_tokens=60))
        wait_for(client, long, "in_progress")
        wait_for(other, begin(other, lines(3)), "completed")
        counts = client.batches.retrieve(long).request_counts
        assert counts is not None and counts.completed < 600, "the other did not wait for its end"
        ended = wait_for(client, long, "completed")
        found = custom_ids(client, ended.output_file_id)
    assert Counter(found) == Counter(f"r{index}" for index in range(600))
    assert len(local_stack.engines[0].submits) == 603
