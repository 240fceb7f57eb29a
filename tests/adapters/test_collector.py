"""Blobs stay as long as any name of any tenant refers to them, and a while longer, whoever crosses whom."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from pathlib import Path

import pytest
from redis.asyncio import Redis

from adapters import lifecycle
from adapters.blob_store import MANIFEST_FILE, BlobStore, Trashed, is_intact, open_store
from adapters.collector import collect, note_orphans, tidy
from adapters.folder_store import FolderStore
from adapters.registry import AdapterNotFound, AdapterVersion, Registry
from adapters.registry.scripts import key
from adapters.s3_store import S3Store
from adapters.validation import AdapterSummary
from tests.s3_server import BUCKET


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"), tmp_path / "scratch")
    request.getfixturevalue("s3")
    return open_store(f"s3://{BUCKET}/x", tmp_path / "scratch")


@pytest.fixture
def registry(redis: Redis) -> Registry:
    return Registry(redis)


def summary_of(number: int) -> AdapterSummary:
    return AdapterSummary(bytes([number]) * 32, 4, 2, 100, "base/model", ("q_proj",))


async def upload(
    registry: Registry, store: BlobStore, name: str, number: int = 1, *, tenant: str = "acme"
) -> AdapterVersion:
    """Publishes blob `number`, whose content says which upload it came with."""
    with store.stage() as staging:
        (staging.path / "weights").write_bytes(bytes([number]))
        return await lifecycle.publish(
            registry, store, staging, tenant=tenant, name=name, summary=summary_of(number)
        )


async def delete(registry: Registry, store: BlobStore, name: str) -> None:
    await lifecycle.delete(registry, store, tenant="acme", name=name)


async def test_a_blob_goes_with_the_last_name_of_any_tenant_after_the_grace(
    registry: Registry, store: BlobStore
) -> None:
    version = await upload(registry, store, "sql")
    await upload(registry, store, "sql", tenant="globex")
    await delete(registry, store, "sql")
    assert await collect(registry, store, grace_s=0) == 0 and store.contains(version.digest)
    await lifecycle.delete(registry, store, tenant="globex", name="sql")
    assert await collect(registry, store, grace_s=60) == 0 and store.contains(version.digest)
    assert await collect(registry, store, grace_s=0) == 1 and not store.contains(version.digest)
    assert store.trashed() == [] and await collect(registry, store, grace_s=0) == 0


async def test_a_name_within_the_grace_keeps_the_blob(registry: Registry, store: BlobStore) -> None:
    version = await upload(registry, store, "old")
    await delete(registry, store, "old")
    await upload(registry, store, "new")
    assert await collect(registry, store, grace_s=0) == 0 and store.contains(version.digest)


async def test_a_blob_that_an_upload_relies_on_is_not_collected(registry: Registry, store: BlobStore) -> None:
    version = await upload(registry, store, "old")
    await delete(registry, store, "old")
    async with registry.references.reserved(version.digest):
        assert await collect(registry, store, grace_s=0) == 0
    assert await collect(registry, store, grace_s=0) == 1


async def test_an_upload_waits_for_the_collector_of_its_blob(registry: Registry, store: BlobStore) -> None:
    version = await upload(registry, store, "old")
    await delete(registry, store, "old")
    assert await registry.references.condemn(version.digest, 0)
    assert not await registry.references.condemn(version.digest, 0)
    uploading = asyncio.create_task(upload(registry, store, "new"))
    await asyncio.sleep(0.2)
    assert not uploading.done()
    trashed = store.withdraw(version.digest)
    assert trashed is not None
    trashed.purge()
    await registry.references.absolve(version.digest)
    await uploading
    assert store.contains(version.digest)


@pytest.mark.parametrize("is_registered", [True, False])
async def test_a_collector_that_was_stopped_for_long_takes_nothing_that_is_needed_now(
    registry: Registry, store: BlobStore, monkeypatch: pytest.MonkeyPatch, is_registered: bool
) -> None:
    version = await upload(registry, store, "old")
    await delete(registry, store, "old")
    withdraw, stopped, go_on = store.withdraw, threading.Event(), threading.Event()

    def late(digest: bytes) -> object:
        stopped.set()
        assert go_on.wait(60)
        return withdraw(digest)

    monkeypatch.setattr(store, "withdraw", late)
    collecting = asyncio.create_task(collect(registry, store, grace_s=0))
    assert await asyncio.to_thread(stopped.wait, 60)
    await registry.references._redis.hset(key("condemned"), version.digest.hex(), 1)  # as ten minutes would
    async with registry.references.reserved(version.digest):
        if is_registered:
            await upload(registry, store, "new")
        go_on.set()
        assert await collecting == 0
        assert store.contains(version.digest) and store.trashed() == []
    assert await collect(registry, store, grace_s=0) == (0 if is_registered else 1)


class _Killed(Exception):
    """A collector died in the middle of a removal."""

    def __init__(self, digest: bytes) -> None:
        super().__init__()
        self.digest = digest


async def test_uploads_deletes_and_collectors_that_cross_never_lose_a_blob(
    registry: Registry, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three collectors without any grace, of which some die in the middle, against six uploaders of three
    blobs. Whenever a name has a version, its blob is there; in the end nothing else is."""
    choices = random.Random(1)
    dies = itertools.cycle((True, False, False))
    withdraw = store.withdraw
    ended = asyncio.Event()
    holds: list[asyncio.Task[None]] = []  # of collectors that died

    def sometimes_dies(digest: bytes) -> object:
        trashed = withdraw(digest)
        if next(dies):  # the next collector finds the blob in the trash
            raise _Killed(digest)
        return trashed

    async def hold(digest: bytes) -> None:
        """Ends what holds the blob, as ten minutes would, in which others have long cleared the trash."""
        while digest in {trashed.digest for trashed in await asyncio.to_thread(store.trashed)}:
            await asyncio.sleep(0.01)
        await registry.references.absolve(digest)

    monkeypatch.setattr(store, "withdraw", sometimes_dies)

    async def user(number: int) -> None:
        name = f"n{number}"
        for _ in range(8):
            blob = choices.randrange(3)
            version = await upload(registry, store, name, blob)
            assert await asyncio.to_thread(store.contains, version.digest)
            await asyncio.sleep(choices.random() / 100)
            assert await asyncio.to_thread(store.contains, version.digest), "a registered blob is gone"
            if choices.random() < 0.7:
                await delete(registry, store, name)

    async def collector() -> None:
        while not ended.is_set():
            try:
                await tidy(registry, store, abandoned_after_s=3600, grace_s=0)
            except _Killed as killed:
                holds.append(asyncio.create_task(hold(killed.digest)))
            await asyncio.sleep(0.005)

    collectors = [asyncio.create_task(collector()) for _ in range(3)]
    try:
        async with asyncio.TaskGroup() as users:
            for number in range(6):
                users.create_task(user(number))
    finally:
        ended.set()
        await asyncio.gather(*collectors)
    monkeypatch.setattr(store, "withdraw", withdraw)
    names = await registry.list("acme")
    wanted = {version.digest for name in names for version in (await _versions(registry, name.name))}
    await tidy(registry, store, abandoned_after_s=3600, grace_s=0)
    await asyncio.gather(*holds)
    await tidy(registry, store, abandoned_after_s=3600, grace_s=0)
    assert set(store.digests()) == wanted and store.trashed() == []


async def _versions(registry: Registry, name: str) -> tuple[AdapterVersion, ...]:
    found = await registry.show("acme", name)
    if found is None:
        raise AdapterNotFound(name)
    return found.versions


async def test_an_upload_that_crashed_before_its_version_leaves_an_orphan(
    registry: Registry, store: BlobStore
) -> None:
    kept = await upload(registry, store, "kept", 1)
    with store.stage() as staging:
        staging.publish(bytes(32), {})
    assert await note_orphans(registry, store) == 1
    assert await note_orphans(registry, store) == 0
    assert await collect(registry, store, grace_s=60) == 0
    assert await collect(registry, store, grace_s=0) == 1
    assert list(store.digests()) == [kept.digest]


async def test_a_lost_redis_makes_no_orphans_of_what_records_name(
    registry: Registry, store: BlobStore, redis: Redis
) -> None:
    version = await upload(registry, store, "sql")
    await redis.flushall()
    assert await note_orphans(registry, store) == 0
    await tidy(registry, store, abandoned_after_s=0, grace_s=0)
    assert store.contains(version.digest)


async def test_what_a_collector_that_died_left_in_the_trash(registry: Registry, store: BlobStore) -> None:
    kept, gone = await upload(registry, store, "kept", 1), await upload(registry, store, "gone", 2)
    assert store.withdraw(kept.digest) is not None
    await delete(registry, store, "gone")
    assert store.withdraw(gone.digest) is not None
    await tidy(registry, store, abandoned_after_s=3600, grace_s=3600)
    assert list(store.digests()) == [kept.digest] and store.trashed() == []


async def test_a_manifest_that_cannot_be_read_keeps_nothing_else_in_the_store(
    registry: Registry, store: BlobStore
) -> None:
    damaged, gone = await upload(registry, store, "damaged", 1), await upload(registry, store, "gone", 2)
    if isinstance(store, FolderStore):
        (store.path(damaged.digest) / MANIFEST_FILE).write_bytes(b"{")
    elif isinstance(store, S3Store):
        [key] = [
            key
            for key, _ in store.objects.list_keys("sha256")
            if key.endswith(f"{damaged.digest.hex()}/{MANIFEST_FILE}")
        ]
        store.objects.put(key, b"{")
    for name in ("damaged", "gone"):
        await delete(registry, store, name)
    assert store.withdraw(damaged.digest) is not None  # by a collector that died
    await tidy(registry, store, abandoned_after_s=3600, grace_s=0)
    assert list(store.digests()) == [] and store.trashed() == []
    again = await upload(registry, store, "damaged", 1)
    assert is_intact(store, again.digest) and not store.contains(gone.digest)


async def test_what_cannot_be_removed_keeps_nothing_else_in_the_store(
    registry: Registry, store: BlobStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = await upload(registry, store, "stuck", 1)
    await upload(registry, store, "gone", 2)
    for name in ("stuck", "gone"):
        await delete(registry, store, name)
    trashed = store.withdraw(stuck.digest)
    assert trashed is not None
    purge = type(trashed).purge

    def purge_others(self: Trashed) -> None:
        if self.digest == stuck.digest:
            raise PermissionError("as for a folder of another user")
        purge(self)  # type: ignore[arg-type]

    monkeypatch.setattr(type(trashed), "purge", purge_others)
    await tidy(registry, store, abandoned_after_s=3600, grace_s=0)
    assert f"blob {stuck.digest.hex()[:12]} stays in the trash" in caplog.text
    assert list(store.digests()) == [] and [item.digest for item in store.trashed()] == [stuck.digest]
