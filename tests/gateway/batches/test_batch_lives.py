"""What becomes of batches when gateways are killed, time is over, keys are revoked, and results are many."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from adapters.file_store import FolderFiles
from gateway.accounts.windows import root_of
from gateway.batches import upkeep as upkeep_module
from gateway.batches import work
from gateway.batches.batch import Batch, Status
from gateway.batches.files import Files, new_file
from gateway.batches.lines import check_lines
from gateway.batches.store import Batches, Lease, LeaseLost
from gateway.batches.upkeep import Upkeep
from gateway.keys import Keys
from gateway.tenants import Tenants
from tests.gateway.batches.made import a_batch, begin, custom_ids, lines, wait_for
from tests.gateway.control_plane import control_plane
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.local_stack import LocalStack, wait_until
from tests.ports import reserve_port

ROOT = Path(__file__).parents[3]


# ---- kill -9 --------------------------------------------------------------------------------------------


@contextmanager
def running(engine: FakeEngine) -> Iterator[None]:
    """The engine, on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(engine.start(), loop).result(10)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def gateway_process(redis_url: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = reserve_port()
    settings = {
        "LORAPLEX_REDIS_URL": redis_url,
        "LORAPLEX_STORE": str(folder / "store"),
        "LORAPLEX_JOURNAL": str(folder / "journal"),
        "LORAPLEX_LEASE_S": "10",
        "LORAPLEX_PORT": str(port),
        "LORAPLEX_OPERATOR_KEY": "operator-key-of-the-tests-own",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "gateway"],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _is_ready(url), "the gateway is ready", 30)
        yield process, url
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def new_key(redis_url: str, tenant: str) -> str:
    async def make() -> str:
        async with Redis.from_url(redis_url) as redis:
            await Tenants(redis).create(tenant, tenant_id=tenant)
            return (await Keys(redis).create(tenant))[1]

    return asyncio.run(make())


def test_another_gateway_goes_on_with_the_batch_of_one_that_is_killed(
    valkey_url: str, tmp_path: Path
) -> None:
    engine = FakeEngine("engine-1", valkey_url, rests_after=2 * work.LINES_AT_ONCE)
    count, key = 400, new_key(valkey_url, "acme")
    with running(engine), BlockingRedis.from_url(valkey_url) as redis:
        with gateway_process(valkey_url, tmp_path) as (process, url):
            client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            batch_id = begin(client, lines(count, max_tokens=30))
            done = f"{root_of('acme')}:batch:{batch_id}:done"
            wait_until(lambda: redis.bitcount(done) >= 40, "some lines are done")
            process.kill()
            process.wait()
        engine.rests_after = None
        redis.zadd("loraplex:batches", {f"acme {batch_id}": 1})  # as if its lease were over
        finished = {index for index in range(count) if redis.getbit(done, index + 1)}
        assert 40 <= len(finished) < count
        with gateway_process(valkey_url, tmp_path) as (_, url):
            client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            ended = wait_for(client, batch_id, "completed")
            found = custom_ids(client, ended.output_file_id, ended.error_file_id)
    assert Counter(found) == Counter(f"r{index}" for index in range(count))
    assert ended.request_counts.completed == count
    ran = Counter(bytes(submit.prompt_tokens).decode("latin1") for submit in engine.submits)
    again = [index for index in range(count) if ran[_prompt(f"r{index}")] > 1]
    assert len(engine.submits) <= count + work.LINES_AT_ONCE
    assert not finished & set(again), "what was finished does not run again"


def _prompt(text: str) -> str:
    """A prompt's tokens, which are bytes here, as the fake engine gets them."""
    from tests.gateway.fake_engine import make_tokenizer

    return bytes(make_tokenizer().encode(text).ids).decode("latin1")


# ---- one gateway ----------------------------------------------------------------------------------------


def test_results_that_are_many_move_to_the_store(
    local_stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "SPILL_LINES", 8)
    monkeypatch.setattr(work, "LINES_AT_ONCE", 8)
    spilled: list[int] = []
    original = Batches.spill

    async def spill(self: Batches, lease: Any, segment: str, numbers: Any) -> None:
        spilled.append(len(numbers))
        await original(self, lease, segment, numbers)

    monkeypatch.setattr(Batches, "spill", spill)
    with local_stack.client(local_stack.add_tenant("acme")) as client:
        ended = wait_for(client, begin(client, lines(100)), "completed")
        found = custom_ids(client, ended.output_file_id)
    assert Counter(found) == Counter(f"r{index}" for index in range(100))
    assert len(spilled) >= 3 and sum(spilled) <= 100
    folder, kept = local_stack.store / "files" / "acme", {ended.input_file_id, ended.output_file_id}
    wait_until(lambda: {path.name for path in folder.iterdir()} == kept, "nothing else is left in the store")
    with BlockingRedis.from_url(local_stack.redis_url) as redis:
        assert list(redis.scan_iter(f"{root_of('acme')}:batch:*:*")) == []
        assert redis.zcard("loraplex:batches") == redis.scard(f"{root_of('acme')}:batches:open") == 0


def test_what_is_not_done_in_time_is_said_to_be(local_stack: LocalStack) -> None:
    local_stack.engines[0].holds_at = 10
    with local_stack.client(local_stack.add_tenant("acme")) as client:
        file = client.files.create(
            file=("in.jsonl", lines(1) + lines(40, max_tokens=1900).replace(b'"r0"', b'"r40"')),
            purpose="batch",
        )

        async def create() -> str:
            async with Redis.from_url(local_stack.redis_url) as redis:
                now = int(time.time())
                (key,) = await Keys(redis).of_tenant("acme")
                batch = Batch(
                    tenant="acme",
                    id="batch_" + "0" * 24,
                    key=key.id,
                    endpoint="/v1/completions",
                    input_file_id=file.id,
                    completion_window="1h",
                    created_at=now,
                    expires_at=now + 6,
                    output_kept_s=3600,
                )
                await Batches(redis, lease_s=10).create(batch)
                return batch.id

        ended = wait_for(client, local_stack.call(create()), "expired")
        output = custom_ids(client, ended.output_file_id)
        failed = client.files.content(ended.error_file_id).text.splitlines()
    assert output == ["r0"] and len(failed) == 40
    assert {json.loads(text)["error"]["code"] for text in failed} == {"batch_expired"}
    assert (ended.request_counts.completed, ended.request_counts.failed) == (1, 40)


def test_a_batch_ends_with_the_key_that_made_it(local_stack: LocalStack) -> None:
    local_stack.add_tenant("acme")

    async def second_key() -> tuple[str, str]:
        async with Redis.from_url(local_stack.redis_url) as redis:
            record, key = await Keys(redis).create("acme")
            return record.id, key

    async def revoke(key_id: str) -> None:
        async with Redis.from_url(local_stack.redis_url) as redis:
            assert await Keys(redis).revoke("acme", key_id)

    key_id, key = local_stack.call(second_key())
    _, other_key = local_stack.call(second_key())
    local_stack.engines[0].rests_after = 2 * work.LINES_AT_ONCE
    with local_stack.client(key) as client, local_stack.client(other_key) as other:
        batch_id = begin(client, lines(2000, max_tokens=60))
        wait_until(
            lambda: other.batches.retrieve(batch_id).request_counts.completed > 0,  # type: ignore[union-attr]
            "it has begun",
        )
        local_stack.call(revoke(key_id))
        local_stack.engines[0].rests_after = None
        ended = wait_for(other, batch_id, "failed")
        found = custom_ids(other, ended.output_file_id, ended.error_file_id)
    assert [fault.code for fault in ended.errors.data] == ["invalid_api_key"]
    assert Counter(found) == Counter(f"r{index}" for index in range(2000))


def test_limits_hold_and_the_batch_waits_for_them(local_stack: LocalStack) -> None:
    key = local_stack.add_tenant("acme")

    async def limit(most: int) -> None:
        async with Redis.from_url(local_stack.redis_url) as redis:
            await Tenants(redis).update("acme", {"limits": {"requests_per_minute": most}})

    local_stack.call(limit(5))
    with local_stack.client(key) as client:
        batch_id = begin(client, lines(12))
        wait_until(
            lambda: client.batches.retrieve(batch_id).request_counts.completed == 2,  # type: ignore[union-attr]
            "its half of the limit is used up",
        )
        for _ in range(3):
            client.completions.create(model=MODEL, prompt="now", max_tokens=1)
        assert len(local_stack.engines[0].submits) == 5
        assert client.batches.retrieve(batch_id).request_counts.failed == 0  # type: ignore[union-attr]
        assert client.batches.cancel(batch_id).status == "cancelling"
        wait_for(client, batch_id, "cancelled")


# ---- the parts ------------------------------------------------------------------------------------------


async def test_a_holder_whose_lease_is_over_changes_nothing(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        batches, files = Batches(redis, lease_s=10), Files(redis)
        file = new_file("acme", "in.jsonl", "batch", 10)
        await files.add(file, most_bytes=None)
        await batches.create(a_batch("batch_1", file.id))
        first = await batches.claim(())
        assert first is not None and await batches.claim(()) is None
        await batches.move(first, Status.IN_PROGRESS, of=(Status.VALIDATING,), fields={"total": 2})
        assert await batches.record(first, 1, b"+one", failed=False)
        assert not await batches.record(first, 1, b"+again", failed=False)
        await redis.zadd("loraplex:batches", {"acme batch_1": 1})  # as if it were over
        assert await batches.claim({"acme"}) is None, "enough of this tenant runs here"
        second = await batches.claim(())
        assert second is not None and second.token != first.token
        for attempt in (
            batches.renew(first),
            batches.record(first, 2, b"+two", failed=False),
            batches.spill(first, "acme/results", [1]),
            batches.move(first, Status.FINALIZING, of=(Status.IN_PROGRESS,), fields={}),
            batches.finish(first, Status.COMPLETED, {}, []),
            batches.give_back(first),
        ):
            with pytest.raises(LeaseLost):
                await attempt
        assert await batches.results("acme", "batch_1") == {1: b"+one"}
        found = await batches.find("acme", "batch_1")
        assert found is not None and (found.completed, found.status) == (1, Status.IN_PROGRESS)
        await batches.give_back(second)
        assert await batches.claim(()) is not None


async def test_a_gateway_whose_clock_is_wrong_removes_nothing(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Redis.from_url(valkey_url) as redis:
        files = Files(redis)
        kept = new_file("acme", "a", "batch", 10, kept_s=3600)
        await files.add(kept, most_bytes=None)
        wrong = time.time() + 30 * 24 * 3600
        monkeypatch.setattr(time, "time", lambda: wrong)
        assert await Upkeep(redis, files, FolderFiles(tmp_path)).remove_expired() == 0
        assert await files.find("acme", kept.id, even_expired=True) == kept


async def test_upkeep_removes_what_is_over_and_what_nobody_knows(valkey_url: str, tmp_path: Path) -> None:
    store = FolderFiles(tmp_path / "files")
    source = tmp_path / "source"
    source.write_bytes(b"x" * 10)
    async with Redis.from_url(valkey_url) as redis:
        files = Files(redis)
        over, kept = (new_file("acme", "a", "batch", 10, kept_s=seconds) for seconds in (-1, 100))
        for file in (over, kept):
            store.put(file.name, source)
            await files.add(file, most_bytes=None)
        for name in ("acme/file-unknown", "acme/results.batch_gone.ab.10"):
            store.put(name, source)
        assert await files.find("acme", over.id) is None
        upkeep = Upkeep(redis, files, store)
        assert await upkeep.remove_expired() == 1
        assert await upkeep.remove_orphans(older_than_s=3600) == 0
        assert await upkeep.remove_orphans(older_than_s=-1) == 2
        assert [name for name, _ in store.names()] == [kept.name]
        assert await files.used_bytes("acme") == 10


async def test_a_batch_that_is_given_back_comes_after_those_that_wait(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        batches, files = Batches(redis, lease_s=10), Files(redis)
        file = new_file("acme", "in.jsonl", "batch", 10)
        await files.add(file, most_bytes=None)
        for number in (1, 2):
            await batches.create(a_batch(f"batch_{number}", file.id))
            await asyncio.sleep(0.002)
        claimed: list[str] = []
        for _ in range(3):
            lease = await batches.claim(())
            assert lease is not None
            claimed.append(lease.batch_id)
            await batches.give_back(lease)
            with pytest.raises(LeaseLost):
                await batches.renew(lease)
            await asyncio.sleep(0.002)
        assert claimed == ["batch_1", "batch_2", "batch_1"]


async def test_a_call_that_redis_gets_twice_counts_once(valkey_url: str) -> None:
    """Its client sends one again whose reply was lost."""
    async with Redis.from_url(valkey_url) as redis:
        batches, files = Batches(redis, lease_s=10), Files(redis)
        file = new_file("acme", "in.jsonl", "batch", 10)
        for _ in range(2):
            await files.add(file, most_bytes=15)
            await batches.create(a_batch("batch_1", file.id))
        assert await files.used_bytes("acme") == 10
        lease = await batches.claim(())
        assert lease is not None
        for _ in range(2):
            await batches.record(lease, 1, b"+one", failed=False)
            await batches.spill(lease, "acme/results", [1])
        assert await batches.segments("acme", "batch_1") == ["acme/results"]
        found = await batches.find("acme", "batch_1")
        assert found is not None and found.completed == 1
        await batches.finish(lease, Status.COMPLETED, {}, [])
        assert await files.remove("acme", file.id), "it is in use once only"


async def _claimed(redis: Redis, batches: Batches) -> Lease:
    """A lease on the only batch, `batch_1` of acme."""
    file = new_file("acme", "in.jsonl", "batch", 10)
    await Files(redis).add(file, most_bytes=None)
    await batches.create(a_batch("batch_1", file.id))
    lease = await batches.claim(())
    assert lease is not None
    return lease


async def test_a_lease_that_is_renewed_goes_on(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        batches = Batches(redis, lease_s=600)
        lease = await _claimed(redis, batches)
        await redis.zadd("loraplex:batches", {"acme batch_1": 1})  # as if it were over
        assert await batches.renew(lease) is Status.VALIDATING
        assert await batches.claim(()) is None


async def test_a_batch_that_is_being_cancelled_moves_nowhere_else(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        batches = Batches(redis, lease_s=10)
        lease = await _claimed(redis, batches)
        assert await batches.cancel("acme", "batch_1")
        for status, of in (
            (Status.IN_PROGRESS, Status.VALIDATING),
            (Status.FINALIZING, Status.IN_PROGRESS),
        ):
            assert await batches.move(lease, status, of=(of,), fields={}) is Status.CANCELLING
        found = await batches.find("acme", "batch_1")
        assert found is not None and found.status is Status.CANCELLING


async def test_a_batch_that_is_gone_is_looked_for_once(valkey_url: str) -> None:
    """Or those that are gone would some day be all that is looked at."""
    async with Redis.from_url(valkey_url) as redis:
        await redis.zadd("loraplex:batches", {"acme batch_1": 1, "acme batch_2": 2})
        assert await Batches(redis, lease_s=10).claim(()) is None
        assert await redis.zcard("loraplex:batches") == 0


async def test_any_number_of_results_moves_at_once(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        batches = Batches(redis, lease_s=10)
        lease = await _claimed(redis, batches)
        await redis.hset(f"{root_of('acme')}:batch:batch_1:results", mapping={"9000": "+a", "9001": "+b"})  # type: ignore[misc]
        await batches.spill(lease, "acme/results", range(9001))
        assert await batches.results("acme", "batch_1") == {9001: b"+b"}
        assert await batches.segments("acme", "batch_1") == ["acme/results"]


async def test_files_in_use_do_not_keep_others(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep_module, "_AT_ONCE", 2)
    store = FolderFiles(tmp_path / "files")
    async with Redis.from_url(valkey_url) as redis:
        files, batches = Files(redis), Batches(redis, lease_s=10)
        over = [new_file("acme", "a", "batch", 10, kept_s=-9 + number) for number in range(5)]
        for number, file in enumerate(over):
            await files.add(file, most_bytes=None)
            if number < 3:
                await batches.create(a_batch(f"batch_{number}", file.id))
        assert await Upkeep(redis, files, store).remove_expired() == 2
        assert set(await files.of_tenant("acme")) == {file.id for file in over[:3]}


def test_lines_are_found_across_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.batches import lines as module

    monkeypatch.setattr(module, "_PIECE_BYTES", 7)
    store, source = FolderFiles(tmp_path / "files"), tmp_path / "source"
    source.write_bytes(lines(3) + b"\n  \n" + lines(1).rstrip())
    store.put("acme/a", source)
    count, faults = check_lines(store, "acme/a", source.stat().st_size, "/v1/completions")
    assert count == 4 and [(fault["line"], fault["code"]) for fault in faults] == [(6, "duplicate_custom_id")]
    monkeypatch.setattr(module, "_MAX_NUMBER", 4)
    _, faults = check_lines(store, "acme/a", source.stat().st_size, "/v1/completions")
    assert [(fault["line"], fault["code"]) for fault in faults] == [(5, "too_many_lines")]
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 20)
    _, faults = check_lines(store, "acme/a", source.stat().st_size, "/v1/completions")
    assert [(fault["line"], fault["code"]) for fault in faults] == [(1, "line_too_long")]


async def test_what_a_tenant_has_goes_with_it(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        await plane.tenant("acme")
        services = plane.services
        source = tmp_path / "source"
        source.write_bytes(lines(1))
        file = new_file("acme", "in.jsonl", "batch", source.stat().st_size)
        services.file_store.put(file.name, source)
        await services.files.add(file, most_bytes=None)
        now = int(time.time())
        await services.batches.create(
            Batch("acme", "batch_1", "key", "/v1/completions", file.id, "1h", now, now + 3600)
        )
        assert (await plane.admin("DELETE", "/tenants/acme")).status_code == 200
        assert await services.files.find("acme", file.id) is None
        assert await services.batches.find("acme", "batch_1") is None
        assert list(services.file_store.names()) == []
        assert await services.batches.claim(()) is None
