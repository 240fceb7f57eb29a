"""How much of files and batches is kept of one tenant."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import pytest
from redis.asyncio import Redis

from gateway.accounts.windows import root_of
from gateway.api import batches as batches_api
from gateway.batches import files as files_module
from gateway.batches import store
from gateway.batches.batch import Status
from gateway.batches.files import Files, QuotaExceeded, TooManyFiles, new_file
from gateway.batches.store import Batches, TooManyBatches
from tests.gateway.batches.made import a_batch, begin, lines, wait_for
from tests.gateway.local_stack import LocalStack


async def test_of_batches_that_have_ended_the_last_stay_listed(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_ENDED", 2)
    async with Redis.from_url(valkey_url) as redis:
        batches, files = Batches(redis, lease_s=10), Files(redis)
        file = new_file("acme", "in.jsonl", "batch", 10)
        await files.add(file, most_bytes=None)
        leases = []
        for number in range(5):
            await batches.create(a_batch(f"batch_{number}", file.id))
            leases.append(await batches.claim(()))
        for lease in (leases[1], leases[2], leases[3], leases[0]):  # the oldest ends last
            assert lease is not None
            await batches.finish(lease, Status.FAILED, {}, [])
            await asyncio.sleep(0.002)
        page = await batches.page("acme", after=None, limit=10)
        assert {batch.id for batch in page.items} == {"batch_0", "batch_3", "batch_4"}
        for kept in ("batches", "batches:ended"):
            assert not {b"batch_1", b"batch_2"} & set(await redis.zrange(f"{root_of('acme')}:{kept}", 0, -1))
        assert await redis.exists(f"{root_of('acme')}:batch:batch_1") == 0
        assert 0 < await redis.ttl(f"{root_of('acme')}:batch:batch_0") <= store.KEPT_S


async def test_a_tenant_has_only_so_many_batches_that_have_not_ended(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_OPEN", 2)
    async with Redis.from_url(valkey_url) as redis:
        batches, files = Batches(redis, lease_s=10), Files(redis)
        for tenant in ("acme", "globex"):
            await files.add(replace(new_file(tenant, "a", "batch", 10), id="file-1"), most_bytes=None)
        for number in range(2):
            await batches.create(a_batch(f"batch_{number}", "file-1"))
        with pytest.raises(TooManyBatches):
            await batches.create(a_batch("batch_2", "file-1"))
        await batches.create(a_batch("batch_2", "file-1", "globex"))
        lease = await batches.claim(())
        assert lease is not None and lease.tenant == "acme"
        await batches.finish(lease, Status.FAILED, {}, [])
        await batches.create(a_batch("batch_2", "file-1"))


async def test_the_bytes_of_files_are_held_where_they_are_added(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        files = Files(redis)
        first, second = (new_file("acme", name, "batch", 10) for name in "ab")
        await files.add(first, most_bytes=19)
        with pytest.raises(QuotaExceeded) as refused:
            await files.add(second, most_bytes=19)
        assert refused.value.used == 10 and await files.of_tenant("acme") == [first.id]
        await files.add(second, most_bytes=20)
        assert await files.used_bytes("acme") == 20


async def test_the_number_of_files_is_held_where_they_are_added(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MAX_FILES", 1)
    async with Redis.from_url(valkey_url) as redis:
        files = Files(redis)
        await files.add(new_file("acme", "a", "batch", 10), most_bytes=None)
        with pytest.raises(TooManyFiles):
            await files.add(new_file("acme", "b", "batch", 10), most_bytes=None)
        assert (await files.count("acme"), await files.used_bytes("acme")) == (1, 10)
        await files.add(new_file("globex", "a", "batch", 10), most_bytes=None)


def test_the_number_of_files_is_limited(local_stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_FILES", 1)
    monkeypatch.setattr(batches_api, "MAX_FILES", 1)
    with local_stack.client(local_stack.add_tenant("acme")) as client:
        first = wait_for(client, begin(client, lines(1)), "completed")
        for refused in (
            lambda: client.files.create(file=("in.jsonl", lines(1)), purpose="batch"),
            lambda: client.batches.create(
                input_file_id=first.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.ConflictError, match="Delete files") as caught:
                refused()
            assert caught.value.code == "too_many_files"
        folder = local_stack.store / "files" / "acme"
        assert {path.name for path in folder.iterdir()} == {first.input_file_id, first.output_file_id}
        client.files.delete(first.output_file_id)
        client.files.delete(first.input_file_id)
        client.files.create(file=("in.jsonl", lines(1)), purpose="batch")
