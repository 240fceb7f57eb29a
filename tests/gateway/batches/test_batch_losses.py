"""Batches whose input, results or key are gone from where they were."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from adapters.blob_store import StoreUnavailable
from adapters.file_store import FolderFiles
from gateway.batches import work
from gateway.batches.batch import Status
from gateway.batches.files import Files, StoredFile, new_file
from gateway.batches.lines import Line
from gateway.batches.store import Batches, Lease
from gateway.batches.work import BatchWork, Desk
from gateway.inner_calls import InnerAnswer
from gateway.keys import Keys
from gateway.tenants import Tenants
from tests.gateway.batches.made import a_batch, begin, custom_ids, lines, wait_for
from tests.gateway.local_stack import LocalStack


class Losing:
    """A batch of three lines, the first of which is answered, and the desk of who works on it."""

    def __init__(self, redis: Redis, folder: Path) -> None:
        self.desk = Desk(Batches(redis, lease_s=10), Files(redis), FolderFiles(folder / "files"), 10.0)
        self._source = folder / "source"
        self._source.write_bytes(lines(3))

    async def begin(self) -> tuple[StoredFile, Lease]:
        file = new_file("acme", "in.jsonl", "batch", self._source.stat().st_size)
        self.desk.store.put(file.name, self._source)
        await self.desk.files.add(file, most_bytes=None)
        await self.desk.batches.create(a_batch("batch_1", file.id))
        lease = await self.desk.batches.claim(())
        assert lease is not None
        return file, lease

    async def answer(self, lease: Lease, *numbers: int) -> None:
        await self.desk.batches.move(lease, Status.IN_PROGRESS, of=(Status.VALIDATING,), fields={"total": 3})
        for number in numbers:
            result = b'+{"custom_id":"r%d"}' % (number - 1)
            await self.desk.batches.record(lease, number, result, failed=False)

    async def work(self, lease: Lease, calls: object = None) -> dict[str, Any]:
        """The batch that has ended."""
        await BatchWork(self.desk, lease, cast(Any, calls)).run()
        found = await self.desk.batches.find("acme", "batch_1")
        assert found is not None and found.has_ended
        assert await self.desk.batches.claim(()) is None
        return found.to_dict()

    async def content(self, file_id: str) -> list[str]:
        file = await self.desk.files.find("acme", file_id, even_expired=True)
        assert file is not None
        text = self.desk.store.read(file.name, 0, file.bytes).decode()
        return [json.loads(line)["custom_id"] for line in text.splitlines()]


@pytest.mark.parametrize("lost", ["bytes", "record"])
@pytest.mark.parametrize("state", ["validating", "in_progress", "cancelling", "finalizing"])
async def test_a_batch_ends_though_its_input_is_gone(
    valkey_url: str, tmp_path: Path, state: str, lost: str
) -> None:
    async with Redis.from_url(valkey_url) as redis:
        losing = Losing(redis, tmp_path)
        file, lease = await losing.begin()
        if state != "validating":
            await losing.answer(lease, 1)
        if state == "cancelling":
            assert await losing.desk.batches.cancel("acme", "batch_1")
        if state == "finalizing":  # since its time is over
            await losing.desk.batches.move(lease, Status.FINALIZING, of=(Status.IN_PROGRESS,), fields={})
        if lost == "record":
            await losing.desk.files.remove("acme", file.id, even_in_use=True)
        losing.desk.store.delete(file.name)
        ended = await losing.work(lease)
        states = {"cancelling": "cancelled", "finalizing": "expired"}
        assert ended["status"] == states.get(state, "failed")
        if ended["status"] == "failed":
            (fault,) = ended["errors"]["data"]
            assert (fault["code"], fault["param"]) == ("file_not_found", "input_file_id")
        if state == "validating":
            assert ended["output_file_id"] is None
        else:
            assert await losing.content(ended["output_file_id"]) == ["r0"]
            assert ended["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


@pytest.mark.parametrize("state", ["validating", "in_progress", "finalizing"])
async def test_a_batch_waits_while_the_stores_volume_is_gone(
    valkey_url: str, tmp_path: Path, state: str
) -> None:
    async with Redis.from_url(valkey_url) as redis:
        losing = Losing(redis, tmp_path)
        _, lease = await losing.begin()
        if state != "validating":
            await losing.answer(lease, 1)
        if state == "finalizing":
            await losing.desk.batches.move(lease, Status.FINALIZING, of=(Status.IN_PROGRESS,), fields={})
        (tmp_path / "files").rename(tmp_path / "elsewhere")
        with pytest.raises(StoreUnavailable):  # who works on it tries again later
            await losing.work(lease)
        found = await losing.desk.batches.find("acme", "batch_1")
        assert found is not None and found.status == state


async def test_a_batch_whose_results_are_gone_fails_with_the_others(valkey_url: str, tmp_path: Path) -> None:
    async with Redis.from_url(valkey_url) as redis:
        losing = Losing(redis, tmp_path)
        _, lease = await losing.begin()
        await losing.answer(lease, 1, 2, 3)
        await losing.desk.batches.spill(lease, "acme/results.batch_1.aa.40", [1, 2])
        ended = await losing.work(lease)
        assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "results_lost")
        assert await losing.content(ended["output_file_id"]) == ["r2"]


async def test_a_bug_that_a_line_meets_is_its_own_failure(valkey_url: str, tmp_path: Path) -> None:
    class Calls:
        async def answer(self, _: object, line: Line, __: object) -> InnerAnswer:
            if line.custom_id == "r1":
                raise TypeError("a bug")
            return InnerAnswer(200, b"{}", {}, "req_1")

    async with Redis.from_url(valkey_url) as redis:
        losing = Losing(redis, tmp_path)
        _, lease = await losing.begin()
        ended = await asyncio.wait_for(losing.work(lease, Calls()), 60)
        assert (ended["status"], ended["request_counts"]["failed"]) == ("completed", 1)
        assert sorted(await losing.content(ended["output_file_id"])) == ["r0", "r2"]
        assert await losing.content(ended["error_file_id"]) == ["r1"]


async def test_what_gathered_in_earlier_turns_moves_to_the_store_as_well(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "SPILL_LINES", 3)
    spilled: list[int] = []
    original = Batches.spill

    async def spill(self: Batches, lease: Lease, segment: str, numbers: Sequence[int]) -> None:
        spilled.extend(numbers)
        await original(self, lease, segment, numbers)

    monkeypatch.setattr(Batches, "spill", spill)

    class Calls:
        async def answer(self, *_: object) -> InnerAnswer:
            return InnerAnswer(200, b"{}", {}, "req_1")

    async with Redis.from_url(valkey_url) as redis:
        losing = Losing(redis, tmp_path)
        _, lease = await losing.begin()
        await losing.answer(lease, 1, 2)
        ended = await losing.work(lease, Calls())
        assert sorted(spilled) == [1, 2, 3] and ended["status"] == "completed"
        assert sorted(await losing.content(ended["output_file_id"])) == ["r0", "r1", "r2"]


def test_a_batch_goes_on_with_the_key_that_replaced_its_own(local_stack: LocalStack) -> None:
    local_stack.add_tenant("acme")
    local_stack.engines[0].rests_after = 2 * work.LINES_AT_ONCE

    async def new_key() -> tuple[str, str]:
        async with Redis.from_url(local_stack.redis_url) as redis:
            record, key = await Keys(redis).create("acme")
            return record.id, key

    async def rotate(key_id: str, grace_s: int) -> tuple[str, str]:
        async with Redis.from_url(local_stack.redis_url) as redis:
            record, key = await Keys(redis).rotate("acme", key_id, grace_s=grace_s)
            return record.id, key

    key_id, key = local_stack.call(new_key())
    with local_stack.client(key) as client:
        batch_id = begin(client, lines(600, max_tokens=60))
        wait_for(client, batch_id, "in_progress")
    second_id, _ = local_stack.call(rotate(key_id, 1))
    _, third = local_stack.call(rotate(second_id, 0))
    with local_stack.client(third) as client:
        counts = client.batches.retrieve(batch_id).request_counts
        assert counts is not None and counts.completed < 400, "most of it is still to do"
        local_stack.engines[0].rests_after = None
        ended = wait_for(client, batch_id, "completed")
        assert len(custom_ids(client, ended.output_file_id)) == 600


async def test_what_replaced_a_key_is_known_for_as_long_as_a_batch_may_take(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        await Tenants(redis).create("acme", tenant_id="acme")
        keys = Keys(redis)
        old, _ = await keys.create("acme")
        week_s = 7 * 24 * 3600
        new, _ = await keys.rotate("acme", old.id, grace_s=week_s)
        assert await keys.replacement(old.id) == new.id and await keys.replacement(new.id) is None
        assert 2 * week_s < await redis.ttl(f"loraplex:replaced:{old.id}") < 3 * week_s
