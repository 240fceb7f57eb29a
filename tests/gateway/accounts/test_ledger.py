"""The ledger's parts one by one: the writer's task, its journal on the disk, the renewer and the reaper."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.accounts import writer as writer_module
from gateway.accounts.entry import FIELDS, LedgerEntry, Outcome, Settlement
from gateway.accounts.journal import Journal, adopt
from gateway.accounts.ledger import open_ledger
from gateway.accounts.reaper import Reaper
from gateway.accounts.renew import Renewer
from gateway.accounts.settle import OPEN_TENANTS, REAP, USAGE_TENANTS, Kind, LedgerScript, Record
from gateway.accounts.writer import LedgerWriter
from gateway.redis_client import connect

NOTHING_LISTENS = "redis://127.0.0.1:1/0"
LEDGER, USAGE = "loraplex:{acme}:ledger", "loraplex:{acme}:usage:2026-11-29"


@pytest_asyncio.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    async with connect(valkey_url) as client:
        yield client


@pytest_asyncio.fixture
async def no_redis() -> AsyncIterator[Redis]:
    async with connect(NOTHING_LISTENS) as client:
        yield client


def entry(name: str, **fields: Any) -> LedgerEntry:
    return LedgerEntry(
        name, 1_795_990_000_000, "acme", "key-1", "sql@3", "sql", "3", "ab" * 32, "chat", **fields
    )


def end(output_tokens: int, outcome: Outcome = Outcome.COMPLETED) -> Settlement:
    return Settlement(outcome, 10, 4, output_tokens, 250, queue_ms=3, ttft_ms=20, engine="e1")


def progress(output_tokens: int) -> Callable[[], Settlement]:
    return lambda: end(output_tokens, Outcome.DISCONNECTED)


def record(number: int, name: str = "r", tokens: int = 0) -> Record:
    return Record(number, "acme", Kind.END, entry(name, output_tokens=tokens).to_wire())


def script(redis: Redis) -> LedgerScript:
    return LedgerScript(redis, lease_ms=10_000)


async def ledger_of(redis: Redis) -> list[LedgerEntry]:
    stream: Any = await redis.xrange(LEDGER)
    return [LedgerEntry.from_fields(fields) for _, fields in stream]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def all_written(writer: LedgerWriter) -> None:
    await until(lambda: not writer.waiting)


# ---- what Redis holds afterwards ----------------------------------------------------------------------


async def test_an_entry_has_its_fields_and_is_in_the_sums(redis: Redis, tmp_path: Path) -> None:
    first, second = entry("r1"), entry("r2")
    async with open_ledger(redis, journal=tmp_path, lease_s=10, days=1) as ledger:
        for each, settlement in ((first, end(5)), (second, end(2, Outcome.FAILED))):
            ledger.begin(each, progress(0), admitted=True)
            ledger.settle(each, settlement)
            ledger.settle(each, end(99))  # once is enough
        await all_written(ledger.writer)
    assert await ledger_of(redis) == [first, second]
    stream: Any = await redis.xrange(LEDGER)
    message = stream[0][1]
    assert tuple(name.decode() for name in message) == FIELDS
    assert (message[b"ttft_ms"], message[b"outcome"], message[b"engine"]) == (b"20", b"completed", b"e1")
    values: Any = await redis.hgetall(USAGE)  # type: ignore[misc]
    assert {name.decode().split("\x1f")[-1]: int(value) for name, value in values.items()} == {
        "requests": 2, "errors": 1, "input_tokens": 20, "cached_tokens": 8, "output_tokens": 7,
    }  # fmt: skip
    assert all(name.startswith(b"sql\x1fkey-1\x1f") for name in values)
    assert await redis.get("loraplex:{acme}:month:2026-11") == b"27"
    for tenants in (OPEN_TENANTS, USAGE_TENANTS):
        assert await redis.smembers(tenants) == {b"acme"}  # type: ignore[misc]
    assert not list(tmp_path.iterdir()), "nothing had to wait"


async def test_records_that_meet_share_a_round_trip(redis: Redis, tmp_path: Path) -> None:
    calls: list[int] = []
    all_there = asyncio.Event()

    class Slow(LedgerScript):
        async def apply(self, writer: str, records: Sequence[Record]) -> list[str]:
            calls.append(len(records))
            await all_there.wait()
            return await super().apply(writer, records)

    writer = LedgerWriter(Slow(redis, lease_ms=1000), tmp_path)
    writer.start()
    writer.end(entry("r0"))
    await until(lambda: bool(calls))
    for number in range(1, 100):
        writer.end(entry(f"r{number}"))
    all_there.set()
    await all_written(writer)
    await writer.close()
    assert calls == [1, 99]
    assert len(await ledger_of(redis)) == 100


async def test_an_urgent_end_does_not_wait_for_company(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_GATHER_S", 60.0)
    writer = LedgerWriter(script(redis), tmp_path)
    writer.start()
    writer.end(entry("r1"))
    await asyncio.sleep(0.05)
    assert not await ledger_of(redis)
    writer.end(entry("r2"), urgent=True)
    await until(lambda: not writer.waiting)
    assert len(await ledger_of(redis)) == 2
    await writer.close()


async def test_a_tenant_that_reapers_may_not_know_of_is_noted_at_once(redis: Redis, tmp_path: Path) -> None:
    async with open_ledger(redis, journal=tmp_path, lease_s=400, days=1) as ledger:
        ledger.begin(entry("r1"), progress(0), admitted=True)
        await all_written(ledger.writer)
        assert await redis.smembers(OPEN_TENANTS) == {b"acme"}  # type: ignore[misc]
        ledger.begin(entry("r2"), progress(0), admitted=True)
        assert ledger.writer.waiting == 0


async def test_a_redis_that_was_emptied_is_told_again_where_reapers_look(
    redis: Redis, tmp_path: Path
) -> None:
    async with open_ledger(redis, journal=tmp_path, lease_s=0.1, days=1) as ledger:
        ledger.begin(entry("r1"), progress(0), admitted=True)
        await all_written(ledger.writer)
        await redis.flushall()
        async with asyncio.timeout(60):
            while await redis.smembers(OPEN_TENANTS) != {b"acme"}:  # type: ignore[misc]
                await asyncio.sleep(0.01)


async def test_a_script_that_redis_has_forgotten_is_sent_again(redis: Redis, tmp_path: Path) -> None:
    assert await script(redis).apply("w", [record(1)]) == []
    await redis.script_flush()
    assert await script(redis).apply("w", [record(2, "other")]) == []
    assert [each.id for each in await ledger_of(redis)] == ["r", "other"]


async def test_a_record_that_cannot_be_applied_holds_up_no_other(
    redis: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await redis.set(USAGE, "not a hash")
    other = entry("r2")
    other.time += 86_400_000
    writer = LedgerWriter(script(redis), tmp_path)
    writer.start()
    writer.end(entry("r1"))
    writer.end(other)
    await all_written(writer)
    await writer.close()
    assert [each.id for each in await ledger_of(redis)] == ["r2"]
    (message,) = [line.message for line in caplog.records if line.levelno == logging.ERROR]
    assert "WRONGTYPE" in message and '"r1"' in message


# ---- Redis is away ------------------------------------------------------------------------------------


async def test_what_redis_does_not_take_is_on_disk_and_adopted_once(
    redis: Redis, no_redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 600.0)  # the disk has it long before
    async with open_ledger(no_redis, journal=tmp_path, lease_s=10, days=1) as ledger:
        ledger.begin(entry("unseen"), progress(0), admitted=False)
        for number in range(3):
            ledger.begin(entry(f"r{number}"), progress(0), admitted=True)
            ledger.settle(entry(f"r{number}", output_tokens=number), end(number))
        await until(lambda: sum(path.stat().st_size for path in tmp_path.iterdir()) > 0)
        assert not list(adopt(tmp_path)), "its writer lives"
        assert ledger.writer.waiting == 7, "nobody knows of this tenant yet, so each begin is a record"
    assert len(list(tmp_path.iterdir())) == 1
    async with (
        open_ledger(redis, journal=tmp_path, lease_s=10, days=1),
        open_ledger(redis, journal=tmp_path, lease_s=10, days=1),
    ):
        await until(lambda: not list(tmp_path.iterdir()))
    assert [each.output_tokens for each in await ledger_of(redis)] == [0, 1, 2]
    assert await redis.hkeys("loraplex:{acme}:progress") == [b"unseen"]  # type: ignore[misc]


async def test_the_journal_is_replayed_when_redis_is_back(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.1)
    away = True

    class Away(LedgerScript):
        async def apply(self, writer: str, records: Sequence[Record]) -> list[str]:
            if away:
                raise ConnectionError("away")
            return await super().apply(writer, records)

    writer = LedgerWriter(Away(redis, lease_ms=1000), tmp_path)
    writer.start()
    for number in range(600):
        writer.end(entry(f"r{number}"))
    await until(lambda: not writer._records and writer.waiting == 600)
    away = False
    await all_written(writer)
    appended: list[Sequence[Record]] = []
    monkeypatch.setattr(writer, "_append", appended.append)
    writer.end(entry("r600"))
    await all_written(writer)
    assert not appended, "from now on Redis has them at once"
    assert [each.id for each in await ledger_of(redis)] == [f"r{number}" for number in range(601)]
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]
    await writer.close()
    assert not list(tmp_path.iterdir())


async def test_without_redis_and_disk_memory_is_bounded_and_it_is_said_once(
    no_redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(writer_module, "_MAX_HELD", 5)
    blocked = tmp_path / "a file, no folder"
    blocked.touch()
    writer = LedgerWriter(script(no_redis), blocked)
    writer.start()
    for number in range(8):
        writer.end(entry(f"r{number}"))
        writer.progress(entry("other"))
        await asyncio.sleep(0.02)
    assert len(writer._records) == 5 and writer.dropped == 5
    await writer.close()
    said = [line.message for line in caplog.records if "cannot be written" in line.message]
    assert len(said) == 1 and str(blocked) in said[0]
    assert "records of the ledger are lost" in caplog.text


async def test_a_disk_that_was_full_gets_the_records_once_it_has_room(
    no_redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.01)
    blocked = tmp_path / "a file, no folder"
    blocked.touch()
    writer = LedgerWriter(script(no_redis), blocked)
    writer.start()
    writer.end(entry("r1"))
    await until(lambda: writer._disk_fails)
    blocked.unlink()
    await until(lambda: not writer._records)
    assert [len(path.read_bytes().splitlines()) for path in blocked.iterdir()] == [1]
    await writer.close()


async def test_who_stops_leaves_nothing_on_the_disk_that_redis_takes(redis: Redis, tmp_path: Path) -> None:
    writer = LedgerWriter(script(redis), tmp_path)
    writer.start()
    for number in range(3):
        writer.end(entry(f"r{number}"))
    await writer.close()
    assert [each.id for each in await ledger_of(redis)] == ["r0", "r1", "r2"]
    assert not list(tmp_path.iterdir())


async def test_who_stops_while_redis_hangs_leaves_its_records_on_the_disk(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_CLOSE_S", 0.1)

    class Hung(LedgerScript):
        async def apply(self, writer: str, records: Sequence[Record]) -> list[str]:
            await asyncio.sleep(600)
            return []

    writer = LedgerWriter(Hung(redis, lease_ms=1000), tmp_path)
    writer.start()
    writer.end(entry("r1"))
    await asyncio.sleep(0.05)
    await writer.close()
    assert [len(path.read_bytes().splitlines()) for path in tmp_path.iterdir()] == [1]


# ---- the journal --------------------------------------------------------------------------------------


def test_a_torn_line_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal.create(tmp_path, "w")
    journal.append([record(1), record(2)])
    journal.close()
    with (tmp_path / "w.journal").open("ab") as file:
        file.write(b'[3, "acme", "end", "[')
    (adopted,) = adopt(tmp_path)
    numbers = []
    while not adopted.empty:
        chunk = adopted.read()
        numbers += [each.number for each in chunk.records]
        adopted.forget(chunk)
    adopted.close()
    assert numbers == [1, 2] and "is broken" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_journal_that_was_emptied_is_written_from_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal.create(tmp_path, "w")
    journal.append([record(1)])
    journal.forget(journal.read())
    assert journal.empty
    journal.append([record(2)])
    journal.close()
    (adopted,) = adopt(tmp_path)
    assert [each.number for each in adopted.read().records] == [2] and not caplog.records
    adopted.close()


def test_a_journal_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took it for a dead writer's, and found nothing in it."""
    path, lock = tmp_path / "w.journal", fcntl.flock

    def late(descriptor: int, flags: int) -> None:
        monkeypatch.undo()
        path.unlink()
        lock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    journal = Journal.create(tmp_path, "w")
    journal.append([record(1)])
    assert path.stat().st_size
    journal.close()


def test_the_journal_of_a_writer_that_lives_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal.create(tmp_path, "w")
    journal.append([record(1)])
    assert not list(adopt(tmp_path)) and not caplog.records
    journal.close()


def test_a_journal_that_cannot_be_opened_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.journal").mkdir()
    Journal.create(tmp_path, "b")
    other = Journal.create(tmp_path, "c")
    other.append([record(1)])
    other.close()
    assert [journal.writer for journal in adopt(tmp_path)] == ["c"]
    assert "a.journal cannot be opened" in caplog.text


def test_a_line_longer_than_what_is_read_at_once_is_read_whole(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, "w")
    long = Record(1, "acme", Kind.END, "x" * 700_000)
    journal.append([long, record(2)])
    assert journal.read().records == [long, record(2)]
    journal.close()


def test_an_append_that_fails_half_way_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.create(tmp_path, "w")
    journal.append([record(1)])
    write = os.pwrite

    def fill_up(descriptor: int, data: bytes, offset: int) -> int:
        if len(data) < 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:-100], offset)

    monkeypatch.setattr(os, "pwrite", fill_up)
    with pytest.raises(OSError, match="No space left"):
        journal.append([record(2), record(3)])
    monkeypatch.undo()
    journal.append([record(4)])
    assert [each.number for each in journal.read().records] == [1, 4]
    journal.close()


# ---- gateways that die --------------------------------------------------------------------------------


async def test_a_running_request_is_recorded_and_its_lease_renewed(redis: Redis, tmp_path: Path) -> None:
    writer = LedgerWriter(script(redis), tmp_path)
    renewer = Renewer(writer, script(redis), every_s=0.02)
    running = entry("r")
    writer.start()
    renewer.start()
    renewer.add(running, progress(17))
    await until(lambda: writer._taken > 1)
    was_ms = time.time() * 1000
    await redis.zadd("loraplex:{acme}:leases", {"r": 1})
    async with asyncio.timeout(60):
        while (expiry := await redis.zscore("loraplex:{acme}:leases", "r")) == 1:
            await asyncio.sleep(0.01)
    assert expiry is not None and float(expiry) > was_ms + 9_000
    recorded: Any = await redis.hget("loraplex:{acme}:progress", "r")  # type: ignore[misc]
    assert b'"17"' in recorded
    assert renewer.remove(running) and not renewer.remove(running)
    await renewer.close()
    await writer.close()


async def test_a_reaper_settles_what_was_recorded_and_only_after_a_while(redis: Redis) -> None:
    wire = entry("r", input_tokens=10, output_tokens=6).to_wire()
    await LedgerScript(redis, lease_ms=1).apply("w", [Record(1, "acme", Kind.PROGRESS, wire)])
    first, second = (Reaper(redis, lease_s=0.4, days=1) for _ in range(2))
    started = time.monotonic()
    while not await ledger_of(redis):
        assert time.monotonic() - started < 60
        await first.round()
        await second.round()
        await asyncio.sleep(0.02)
    assert time.monotonic() - started > 0.4
    assert await ledger_of(redis) == [entry("r", input_tokens=10, output_tokens=6, outcome=Outcome.LOST)]
    assert not await redis.exists(
        "loraplex:{acme}:open", "loraplex:{acme}:progress", "loraplex:{acme}:leases"
    )


async def test_what_a_reaper_wrote_for_a_request_that_lives_is_taken_back(redis: Redis) -> None:
    apply = LedgerScript(redis, lease_ms=-60_000).apply
    reap = redis.register_script(REAP)

    async def steps(number: int, kind: Kind, tokens: int) -> list[int]:
        wire = entry("r", input_tokens=10, output_tokens=tokens).to_wire()
        assert await apply("w", [Record(number, "acme", kind, wire)]) == []
        seconds, _ = await redis.time()
        return await reap(keys=["loraplex:{acme}"], args=[seconds * 1000])

    for number, tokens in ((1, 4), (2, 6)):
        assert await steps(number, Kind.PROGRESS, tokens) == [1]
        assert [each.output_tokens for each in await ledger_of(redis)] == [tokens]
    assert await steps(3, Kind.END, 9) == [0]
    assert [each.output_tokens for each in await ledger_of(redis)] == [9]
    assert await redis.get("loraplex:{acme}:month:2026-11") == b"19"
    values: Any = await redis.hgetall(USAGE)  # type: ignore[misc]
    assert {name.decode().split("\x1f")[-1]: int(value) for name, value in values.items()} == {
        "requests": 1, "errors": 1, "input_tokens": 10, "output_tokens": 9,
    }  # fmt: skip


async def test_a_batch_that_is_sent_again_much_later_is_applied_once(redis: Redis) -> None:
    batch = [record(1, "r1", 3), record(2, "r2", 4)]
    assert await script(redis).apply("w", batch) == []
    await redis.delete("loraplex:{acme}:closed:r1", "loraplex:{acme}:closed:r2")  # as they expire
    assert await script(redis).apply("w", [*batch, record(3, "r3", 5)]) == []
    assert [each.output_tokens for each in await ledger_of(redis)] == [3, 4, 5]
    assert await script(redis).apply("other", [record(1, "r4", 6)]) == []
    assert len(await ledger_of(redis)) == 4


async def test_a_reaper_that_lost_redis_begins_to_wait_anew(redis: Redis, no_redis: Redis) -> None:
    reaper = Reaper(no_redis, lease_s=0.04, days=1)
    reaper._in_touch_since = 0.0
    reaper.start()
    await until(lambda: reaper._in_touch_since is None)
    await reaper.close()


@pytest.mark.parametrize("fault", [RedisError("busy"), OSError("no route"), TimeoutError()])
async def test_a_reaper_goes_on_after_a_round_that_failed(redis: Redis, fault: Exception) -> None:
    class Failing(Reaper):
        rounds = 0

        async def round(self) -> None:
            self.rounds += 1
            raise fault

    reaper = Failing(redis, lease_s=0.04, days=1)
    reaper.start()
    await until(lambda: reaper.rounds > 1)
    await reaper.close()


async def test_a_call_to_reap_that_hung_reaps_nothing(redis: Redis) -> None:
    wire = entry("r").to_wire()
    await LedgerScript(redis, lease_ms=-60_000).apply("w", [Record(1, "acme", Kind.PROGRESS, wire)])
    seconds, _ = await redis.time()
    reap = redis.register_script(REAP)
    assert await reap(keys=["loraplex:{acme}"], args=[(seconds - 5) * 1000]) == [0]
    assert await reap(keys=["loraplex:{acme}"], args=[seconds * 1000]) == [1]


async def test_a_lost_request_that_cannot_be_booked_holds_up_no_other(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    apply = LedgerScript(redis, lease_ms=-60_000).apply
    steps = [Record(n, "acme", Kind.PROGRESS, entry(f"r{n}").to_wire()) for n in (1, 2, 3)]
    assert await apply("w", steps) == []
    await redis.hset("loraplex:{acme}:progress", "r1", "not JSON")  # type: ignore[misc]
    reaper = Reaper(redis, lease_s=0.004, days=1)
    caplog.set_level(logging.INFO)
    for _ in range(3):
        await reaper.round()
        await asyncio.sleep(0.01)
    assert [each.id for each in await ledger_of(redis)] == ["r2", "r3"]
    assert await redis.zcard("loraplex:{acme}:leases") == 0
    (message,) = [line.message for line in caplog.records if line.levelno == logging.ERROR]
    assert message.endswith(" in r1") and "booked 3 requests as lost" in caplog.text


async def test_old_entries_and_writers_that_are_long_gone_are_forgotten(redis: Redis) -> None:
    day_ms = 86_400_000
    now = int(time.time() * 1000)
    await redis.sadd(USAGE_TENANTS, "acme")  # type: ignore[misc]
    for age in range(400, -1, -1):
        await redis.xadd(LEDGER, {"age": age}, id=f"{now - age * day_ms}-0")
    writers = {"old": f"7 {now - 31 * day_ms}", "new": f"8 {now - 29 * day_ms}"}
    await redis.hset("loraplex:{acme}:written", mapping=writers)  # type: ignore[misc]
    reaper = Reaper(redis, lease_s=0.004, days=200)
    await reaper.round()
    await asyncio.sleep(0.02)
    await reaper.round()
    assert 201 <= await redis.xlen(LEDGER) < 400  # Redis drops whole nodes of a stream
    assert await redis.hkeys("loraplex:{acme}:written") == [b"new"]  # type: ignore[misc]


async def test_reapers_look_no_more_where_a_tenant_has_been_idle_for_long(redis: Redis) -> None:
    now = int(time.time() * 1000)
    heard = {"busy": now - 60_000, "idle": now - 7_200_000, "runs": now - 7_200_000}
    for key in (OPEN_TENANTS, USAGE_TENANTS):
        await redis.sadd(key, *heard)  # type: ignore[misc]
    for tenant, at in heard.items():
        await redis.hset(f"loraplex:{{{tenant}}}:written", "w", f"7 {at}")  # type: ignore[misc]
    await redis.hset("loraplex:{busy}:written", "other", f"7 {now - 7_200_000}")  # type: ignore[misc]
    await redis.zadd("loraplex:{runs}:leases", {"r": now + 600_000})
    reaper = Reaper(redis, lease_s=0.004, days=200)
    await reaper.round()
    await asyncio.sleep(0.02)
    await reaper.round()
    assert await redis.smembers(OPEN_TENANTS) == {b"busy", b"runs"}  # type: ignore[misc]
    assert await redis.smembers(USAGE_TENANTS) == {b"busy", b"idle", b"runs"}  # type: ignore[misc]


async def test_many_running_requests_are_recorded_bit_by_bit(redis: Redis, tmp_path: Path) -> None:
    writer = LedgerWriter(script(redis), tmp_path)
    renewer = Renewer(writer, script(redis), every_s=60)
    running = [entry(f"r{number}") for number in range(250)]
    for each in running:
        renewer.add(each, progress(3))

    async def leave() -> None:
        renewer.remove(running[-1])

    leaving = asyncio.create_task(leave())  # gets its turn only if the renewer makes a pause
    await renewer.record()
    await leaving
    assert writer.waiting == 249
