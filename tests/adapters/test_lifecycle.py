"""Names and their records in the store, also when those who write records overtake each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from adapters import lifecycle
from adapters.folder_store import FolderStore
from adapters.registry import AdapterVersion, Registry
from adapters.validation import validate
from tests.adapters.files import SHAPE, tensors, write_adapter


class SlowStore(FolderStore):
    """Takes `delays` to write the next records, one each; no time for further ones."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.delays: list[float] = []

    def put_record(self, path: str, record: Mapping[str, Any]) -> None:
        if self.delays:
            time.sleep(self.delays.pop(0))
        super().put_record(path, record)


@pytest.fixture
def registry(redis: Redis) -> Registry:
    return Registry(redis)


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(tmp_path / "store")


async def upload(
    registry: Registry, store: FolderStore, name: str, *, seed: int = 0, promote: bool = True
) -> AdapterVersion:
    with store.stage() as staging:
        summary = validate(write_adapter(staging.path, weights=tensors(seed=seed)), SHAPE)
        return await lifecycle.publish(
            registry, store, staging, tenant="acme", name=name, summary=summary, promote=promote, by="k"
        )


async def is_recorded(registry: Registry, store: FolderStore, name: str) -> bool:
    records = dict(store.list_records("names"))
    return records.get(f"names/acme/{name}") == await registry.records.export("acme", name)


async def test_a_version_has_its_blob_and_its_name_a_record(registry: Registry, store: FolderStore) -> None:
    live = await upload(registry, store, "sql", seed=1)
    staged = await upload(registry, store, "sql", seed=2, promote=False)
    assert store.contains(live.digest) and store.contains(staged.digest)
    shown = await registry.show("acme", "sql")
    assert shown is not None and (shown.live, shown.newest) == (live, staged)
    assert [event.by for event in await registry.history("acme", "sql")] == ["k", "k"]
    assert await is_recorded(registry, store, "sql")


async def test_deleting_leaves_a_record_of_the_numbers_alone(registry: Registry, store: FolderStore) -> None:
    first, second = [await upload(registry, store, "sql", seed=seed) for seed in (1, 2)]
    assert await lifecycle.delete(registry, store, tenant="acme", name="sql", version=1) == [first.digest]
    assert await is_recorded(registry, store, "sql")
    assert await lifecycle.delete(registry, store, tenant="acme", name="sql") == [second.digest]
    [(_, record)] = store.list_records("names")
    assert (record["versions"], record["last"]) == ({}, 2)
    assert store.contains(first.digest) and store.contains(second.digest), "they stay for their grace"


async def test_a_rename_writes_both_records(registry: Registry, store: FolderStore) -> None:
    await upload(registry, store, "old")
    await lifecycle.rename(registry, store, tenant="acme", name="old", target="new")
    assert await is_recorded(registry, store, "old") and await is_recorded(registry, store, "new")


async def test_the_last_record_is_of_the_last_state(registry: Registry, store: SlowStore) -> None:
    """Four changes, each before the record of the one before is written, and the first writes last."""
    await upload(registry, store, "sql", seed=1)
    await upload(registry, store, "sql", seed=2)
    store.delays = [0.4, 0.3, 0.2, 0.1]

    async def change(number: int) -> None:
        await asyncio.sleep(0.02 * number)
        await registry.aliases.promote("acme", "sql", 1 + number % 2)
        await lifecycle.record(registry, store, "acme", "sql")

    await asyncio.gather(*map(change, range(4)))
    assert await is_recorded(registry, store, "sql")
    assert await registry.records.outdated() == []


async def test_what_a_crash_left_unwritten_is_written_later(registry: Registry, store: FolderStore) -> None:
    await upload(registry, store, "sql", seed=1)
    await registry.grants.grant("acme", "sql", "globex")
    assert not await is_recorded(registry, store, "sql")
    await lifecycle.write_records(registry, store)
    assert await is_recorded(registry, store, "sql")
    assert await registry.records.outdated() == []


async def test_nothing_of_a_tenant_that_is_gone_stays(registry: Registry, store: FolderStore) -> None:
    await upload(registry, store, "sql")
    await upload(registry, store, "gone")
    await lifecycle.delete(registry, store, tenant="acme", name="gone")
    await lifecycle.forget_tenant(registry, store, "acme")
    assert list(store.list_records("names")) == []
    assert await registry.list("acme") == [] and await registry.records.outdated() == []
