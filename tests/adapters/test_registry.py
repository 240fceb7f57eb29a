from __future__ import annotations

import asyncio
import hashlib
import time

import pytest
from redis.asyncio import Redis

from adapters.identity import InvalidName
from adapters.registry import Registry
from adapters.validation import AdapterSummary


def summary(content: str = "one") -> AdapterSummary:
    return AdapterSummary(
        digest=hashlib.sha256(content.encode()).digest(),
        rank=16,
        num_tensors=8,
        nbytes=1234,
        base_model="base/model",
        target_modules=("q_proj", "down_proj"),
    )


ONE, TWO = summary("one"), summary("two")


@pytest.fixture
def registry(redis: Redis) -> Registry:
    return Registry(redis)


async def test_an_upload_is_a_version_and_the_name_means_it(registry: Registry) -> None:
    begun = int(time.time())
    first = await registry.add_version("acme", "sql", ONE)
    assert (first.tenant, first.name, first.version, first.ref) == ("acme", "sql", 1, "sql@1")
    assert (first.digest, first.rank, first.nbytes) == (ONE.digest, 16, 1234)
    assert (first.target_modules, first.base_model) == (("q_proj", "down_proj"), "base/model")
    assert begun <= first.created_at <= time.time()
    second = await registry.add_version("acme", "sql", TWO)
    assert await registry.resolve("acme", "sql") == second
    assert await registry.resolve("acme", "sql", 1) == first
    assert await registry.resolve("acme", "sql", 2) == second
    assert await registry.resolve("acme", "sql", 3) is None
    history = await registry.show("acme", "sql")
    assert history is not None and history.live == second and history.versions == (first, second)


async def test_what_is_not_there(registry: Registry) -> None:
    assert await registry.resolve("acme", "sql") is None
    assert await registry.resolve("acme", "sql", 1) is None
    assert await registry.show("acme", "sql") is None
    assert await registry.list("acme") == []
    assert await registry.delete("acme", "sql") is None
    assert not await registry.is_referenced(ONE.digest)


async def test_two_tenants_of_one_name(registry: Registry) -> None:
    mine = await registry.add_version("acme", "sql", ONE)
    theirs = await registry.add_version("globex", "sql", TWO)
    assert await registry.resolve("acme", "sql") == mine
    assert await registry.resolve("globex", "sql") == theirs
    assert await registry.resolve("initech", "sql") is None
    assert await registry.delete("acme", "sql") == [ONE.digest]
    assert await registry.resolve("globex", "sql") == theirs
    assert await registry.list("globex") == [theirs]


async def test_lists_live_versions_by_name(registry: Registry) -> None:
    await registry.add_version("acme", "b", ONE)
    b = await registry.add_version("acme", "b", TWO)
    a = await registry.add_version("acme", "a", ONE)
    assert await registry.list("acme") == [a, b]


async def test_versions_are_in_the_order_of_numbers(registry: Registry) -> None:
    for number in range(11):
        await registry.add_version("acme", "sql", summary(str(number)))
    history = await registry.show("acme", "sql")
    assert history is not None and [item.version for item in history.versions] == list(range(1, 12))


async def test_a_number_is_never_given_twice(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("acme", "sql", ONE)
    await registry.delete("acme", "sql")
    assert await registry.resolve("acme", "sql", 1) is None
    assert (await registry.add_version("acme", "sql", TWO)).version == 3
    assert await registry.resolve("acme", "sql", 2) is None


async def test_delete_returns_what_nobody_refers_to(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("acme", "sql", TWO)
    await registry.add_version("acme", "other", TWO)
    await registry.add_version("globex", "x", summary("three"))
    assert await registry.delete("acme", "sql") == [ONE.digest]
    assert not await registry.is_referenced(ONE.digest)
    assert await registry.is_referenced(TWO.digest)
    assert await registry.delete("acme", "other") == [TWO.digest]
    assert await registry.delete("acme", "other") is None


async def test_uploads_at_once_yield_as_many_versions(registry: Registry) -> None:
    added = await asyncio.gather(*(registry.add_version("acme", "sql", summary(str(i))) for i in range(50)))
    assert sorted(item.version for item in added) == list(range(1, 51))
    for item in added:
        assert await registry.resolve("acme", "sql", item.version) == item


async def test_deletes_at_once_count_each_reference_once(registry: Registry) -> None:
    for name in ("a", "b", "c"):
        await registry.add_version("acme", name, ONE)
    freed = await asyncio.gather(*(registry.delete("acme", name) for name in "aabbcc"))
    assert sum(len(digests or ()) for digests in freed) == 1
    assert sum(digests is None for digests in freed) == 3


async def test_nothing_but_version_counters_stays_after_a_delete(registry: Registry, redis: Redis) -> None:
    await registry.add_version("acme", "sql", ONE)
    keys = {key.decode() if isinstance(key, bytes) else key for key in await redis.keys()}
    assert all(key.startswith("loraplex:{adapters}:") for key in keys)
    await registry.delete("acme", "sql")
    assert len(await redis.keys()) == 1


@pytest.mark.parametrize("name", ["", "../x", "a/b", "SQL", "sql:1", "é"])
async def test_names_are_checked_before_redis_sees_them(registry: Registry, name: str) -> None:
    for call in (
        registry.add_version("acme", name, ONE),
        registry.resolve("acme", name),
        registry.show("acme", name),
        registry.delete("acme", name),
    ):
        with pytest.raises(InvalidName):
            await call


async def test_a_tenant_cannot_reach_into_anothers_keys(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    for tenant in ("acme:sql", "", "*", "a\n"):
        with pytest.raises(ValueError, match="tenant"):
            await registry.resolve(tenant, "sql")
        with pytest.raises(ValueError, match="tenant"):
            await registry.list(tenant)
