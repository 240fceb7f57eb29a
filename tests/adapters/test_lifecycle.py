"""The registry and the store together, also when uploads and deletes of one digest cross."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from adapters import lifecycle
from adapters.blob_store import BlobStore
from adapters.registry import AdapterVersion, Registry
from adapters.validation import AdapterSummary, validate
from tests.adapters.files import SHAPE, write_adapter


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "store")


@pytest.fixture
def registry(redis: Redis) -> Registry:
    return Registry(redis)


async def upload(registry: Registry, store: BlobStore, tenant: str, name: str) -> AdapterVersion:
    with store.stage() as staging:
        summary = validate(write_adapter(staging.path), SHAPE)
        return await lifecycle.publish(registry, store, staging, tenant=tenant, name=name, summary=summary)


async def test_one_blob_for_all_names_and_gone_with_the_last(registry: Registry, store: BlobStore) -> None:
    version = await upload(registry, store, "acme", "sql")
    await upload(registry, store, "globex", "sql")
    assert store.manifest(version.digest)["digest"] == version.digest.hex()
    assert await lifecycle.delete(registry, store, tenant="acme", name="sql")
    assert store.contains(version.digest)
    assert not await lifecycle.delete(registry, store, tenant="acme", name="sql")
    assert await lifecycle.delete(registry, store, tenant="globex", name="sql")
    assert not store.contains(version.digest) and store.trashed() == []


async def test_a_delete_between_publishing_and_registering(
    registry: Registry, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload finds the blob there; a delete takes it before the upload's name refers to it."""
    await upload(registry, store, "acme", "old")
    add = registry.add_version

    async def delete_then_add(tenant: str, name: str, summary: AdapterSummary) -> AdapterVersion:
        await lifecycle.delete(registry, store, tenant="acme", name="old")
        assert not store.contains(summary.digest)
        return await add(tenant, name, summary)

    monkeypatch.setattr(registry, "add_version", delete_then_add)
    version = await upload(registry, store, "acme", "new")
    assert store.contains(version.digest)


async def test_an_upload_between_unregistering_and_deleting(
    registry: Registry, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delete was told that nobody refers to the blob; an upload that found it there now does."""
    await upload(registry, store, "acme", "old")
    withdraw: Callable[[bytes], object] = store.withdraw
    loop = asyncio.get_running_loop()

    def upload_then_withdraw(digest: bytes) -> object:
        asyncio.run_coroutine_threadsafe(upload(registry, store, "acme", "new"), loop).result(10)
        return withdraw(digest)

    monkeypatch.setattr(store, "withdraw", upload_then_withdraw)
    await lifecycle.delete(registry, store, tenant="acme", name="old")
    version = await registry.resolve("acme", "new")
    assert version is not None and store.contains(version.digest) and store.trashed() == []


async def test_uploads_and_deletes_at_random_never_lose_a_blob(registry: Registry, store: BlobStore) -> None:
    choices = random.Random(7)

    async def client(number: int) -> None:
        for _ in range(12):
            if choices.random() < 0.5:
                await upload(registry, store, "acme", f"n{number}")
            else:
                await lifecycle.delete(registry, store, tenant="acme", name=f"n{number}")

    await asyncio.gather(*(client(number) for number in range(6)))
    live = await registry.list("acme")
    with store.stage() as staging:
        digest = validate(write_adapter(staging.path), SHAPE).digest
    assert store.contains(digest) == bool(live) == await registry.is_referenced(digest)
    assert store.trashed() == []


async def test_tidies_what_crashes_left(registry: Registry, store: BlobStore) -> None:
    kept = await upload(registry, store, "acme", "kept")
    assert store.withdraw(kept.digest) is not None
    store.stage()
    await lifecycle.tidy(registry, store, older_than_s=3600)
    assert store.contains(kept.digest) and store.trashed() == []
    await registry.delete("acme", "kept")
    assert store.withdraw(kept.digest) is not None
    await lifecycle.tidy(registry, store, older_than_s=-1)
    assert not store.contains(kept.digest) and store.trashed() == []
