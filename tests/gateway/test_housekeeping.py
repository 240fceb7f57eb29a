"""The gateway clears the store of what crashes left, from its start on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from adapters.collector import tidy
from adapters.folder_store import FolderStore
from adapters.registry import Registry
from adapters.registry.scripts import UNREFERENCED
from gateway import housekeeping as module
from gateway.housekeeping import housekeeping
from gateway.redis_client import connect
from gateway.upload_sessions import ExpectedFile, UploadOptions, UploadSessions

DIGEST = b"\x01" * 32


async def test_what_crashes_left_is_gone_soon_after_the_start(valkey_url: str, tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    sessions = UploadSessions(store.scratch, 1)
    abandoned, deleted = store.stage(), store.stage()
    assert deleted.publish(DIGEST, {})
    assert store.withdraw(DIGEST) is not None
    deleted.discard()
    os.utime(abandoned.path, (0, 0))
    session = sessions.open("acme", UploadOptions("sql"), [ExpectedFile("adapter_config.json", 1, "0" * 64)])
    os.utime(session.folder.parent, (0, 0))
    async with (
        Redis.from_url(valkey_url) as redis,
        housekeeping(Registry(redis), store, sessions, grace_s=3600),
        asyncio.timeout(60),
    ):
        while store.trashed() or abandoned.path.exists() or session.folder.exists():
            await asyncio.sleep(0.01)


async def test_what_an_upload_left_before_it_was_registered_goes_after_the_grace(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0

    async def counted(*args: Any, **more: Any) -> None:
        nonlocal rounds
        await tidy(*args, **more)
        rounds += 1

    monkeypatch.setattr(module, "_EVERY_S", 0.02)
    monkeypatch.setattr(module, "tidy", counted)
    store = FolderStore(tmp_path)
    with store.stage() as staging:
        assert staging.publish(DIGEST, {})
    async with (
        Redis.from_url(valkey_url) as redis,
        housekeeping(Registry(redis), store, UploadSessions(store.scratch, 1), grace_s=3600),
        asyncio.timeout(60),
    ):
        while await redis.zscore(UNREFERENCED, DIGEST.hex()) is None or rounds < 5:
            await asyncio.sleep(0.01)
        assert store.contains(DIGEST)
        await redis.zincrby(UNREFERENCED, -3601, DIGEST.hex())  # as if it had begun an hour ago
        while store.contains(DIGEST):
            await asyncio.sleep(0.01)


async def test_what_others_put_into_the_store_keeps_nobody_from_tidying_it(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_EVERY_S", 0.02)
    store = FolderStore(tmp_path)
    (tmp_path / "sha256" / "lost+found" / "#1234").mkdir(parents=True)
    (tmp_path / "trash" / ".snapshot").mkdir()
    broken = tmp_path / "records" / "names" / "acme" / "sql.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("no JSON")
    orphan = store.stage()
    assert orphan.publish(DIGEST, {})  # so that records are read
    async with (
        Redis.from_url(valkey_url) as redis,
        housekeeping(Registry(redis), store, UploadSessions(store.scratch, 1), grace_s=3600),
        asyncio.timeout(60),
    ):
        while "is tried again" not in caplog.text:
            await asyncio.sleep(0.01)
        broken.unlink()
        os.utime(orphan.path, (0, 0))
        while orphan.path.exists():
            await asyncio.sleep(0.01)
    assert store.contains(DIGEST) and list(store.digests()) == [DIGEST]


async def test_it_ends_at_once_also_while_redis_is_away(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.stage().publish(DIGEST, {})
    store.withdraw(DIGEST)
    async with connect("redis://127.0.0.1:1/0") as redis, asyncio.timeout(60):
        registry = Registry(redis)
        async with housekeeping(registry, store, UploadSessions(store.scratch, 1), grace_s=3600):
            await asyncio.sleep(0.2)
    assert [trashed.digest for trashed in store.trashed()] == [DIGEST]
