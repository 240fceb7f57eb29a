"""A tenant has no more names and bytes than it may, however many upload at once."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from adapters.registry import AdapterConflict, Quota, Registry
from adapters.registry.scripts import MOST_VERSIONS
from tests.adapters.registry.builders import ONE, THREE, TWO, summary


async def refusal(registry: Registry, name: str, content: str, quota: Quota) -> AdapterConflict | None:
    """Adds a version; returns why not."""
    try:
        await registry.add_version("acme", name, summary(content), quota=quota)
    except AdapterConflict as conflict:
        return conflict
    return None


async def test_of_many_uploads_at_once_on_several_gateways_as_many_pass_as_fit(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as here, Redis.from_url(valkey_url) as there:
        registries = [Registry(here), Registry(there)]
        quota = Quota(names=5, nbytes=1000)
        refused = await asyncio.gather(
            *(refusal(registries[n % 2], f"name-{n}", f"content-{n}", quota) for n in range(40))
        )
        assert refused.count(None) == 5
        assert {each.code for each in refused if each} == {"adapter_quota_exceeded"}
        quota = Quota(nbytes=12 * 10)
        refused = await asyncio.gather(
            *(refusal(registries[n % 2], f"name-{n}", f"content-{n}".ljust(12), quota) for n in range(50, 99))
        )
        used = await registries[0].bytes_of("acme")
        assert refused.count(None) == (used - 5 * len("content-0")) // 12 > 0
        assert 12 * 9 < used <= 12 * 10
        assert {each.code for each in refused if each} == {"adapter_bytes_quota_exceeded"}


async def test_a_version_more_of_a_name_and_a_digest_that_is_there_need_no_room(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    full = Quota(names=1, nbytes=len("one"))
    await registry.add_version("acme", "sql", ONE, quota=full)
    with pytest.raises(AdapterConflict, match=r"3 of the 3 bytes.*takes 5 more.*Delete"):
        await registry.add_version("acme", "sql", THREE, quota=full)
    with pytest.raises(AdapterConflict, match=r"has 1 adapters and may have 1.*Delete"):
        await registry.add_version("acme", "json", ONE, quota=full)
    shown = await registry.show("acme", "sql")
    assert shown is not None and [version.version for version in shown.versions] == [1, 2]


async def test_a_name_has_no_more_versions_than_can_be_read_at_once(registry: Registry, redis: Redis) -> None:
    await registry.add_version("acme", "sql", ONE)
    versions = {f"old-{number}": "{}" for number in range(MOST_VERSIONS - 1)}
    await redis.hset("loraplex:{adapters}:versions:acme:sql", mapping=versions)  # type: ignore[misc]
    with pytest.raises(AdapterConflict, match=r"has 10,000 versions.*Delete") as caught:
        await registry.add_version("acme", "sql", ONE)
    assert caught.value.code == "too_many_versions"
    await registry.add_version("acme", "json", ONE)


async def test_what_is_deleted_makes_room_and_another_tenant_takes_none(registry: Registry) -> None:
    await registry.add_version("globex", "sql", TWO)
    quota = Quota(names=1, nbytes=3)
    await registry.add_version("acme", "sql", ONE, quota=quota)
    await registry.delete("acme", "sql")
    await registry.add_version("acme", "json", TWO, quota=quota)
    await registry.add_version("globex", "json", ONE)


async def test_room_is_told_before_anything_is_sent(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.check_room("acme", "sql", 7, Quota(names=1, nbytes=10))
    with pytest.raises(AdapterConflict) as too_large:
        await registry.check_room("acme", "sql", 8, Quota(names=1, nbytes=10))
    assert too_large.value.code == "adapter_bytes_quota_exceeded"
    with pytest.raises(AdapterConflict) as too_many:
        await registry.check_room("acme", "json", 0, Quota(names=1))
    assert too_many.value.code == "adapter_quota_exceeded"
    assert [item.name for item in await registry.list("acme")] == ["sql"]
