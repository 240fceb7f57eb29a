from __future__ import annotations

import json

import pytest
from redis.asyncio import Redis

from adapters.registry import Registry
from adapters.registry.desired import desired_adapters
from adapters.registry.records import digests_of
from tests.adapters.registry.builders import ONE, THREE, TWO, meaning

_NOT_RESTORED = ("unrecorded", "unreferenced")


async def eventful(registry: Registry) -> None:
    """A name with everything that a name can have, one that was deleted, and one that was renamed."""
    for content in (ONE, TWO):
        await registry.add_version("acme", "sql", content, by="k")
    await registry.add_version("acme", "sql", THREE, promote=False)
    await registry.aliases.canary("acme", "sql", 3, 12.5)
    await registry.aliases.pin("acme", "sql", quota=1)
    await registry.grants.grant("acme", "sql", "globex")
    await registry.add_version("acme", "gone", ONE)
    await registry.delete("acme", "gone")
    await registry.add_version("acme", "old", ONE)
    await registry.rename("acme", "old", "new")


async def snapshot(redis: Redis) -> dict[str, object]:
    """All that Redis holds, but what only a change or a delete writes."""
    found: dict[str, object] = {}
    for key in sorted(await redis.keys()):
        name = (key.decode() if isinstance(key, bytes) else key).removeprefix("loraplex:{adapters}:")
        kind = await redis.type(key)
        if name in _NOT_RESTORED:
            continue
        match kind.decode() if isinstance(kind, bytes) else kind:
            case "hash":
                found[name] = await redis.hgetall(key)
            case "set":
                found[name] = await redis.smembers(key)
            case "list":
                events = await redis.lrange(key, 0, -1)
                found[name] = [json.loads(event) for event in events]
            case other:
                raise AssertionError(other)
    return found


async def records(registry: Registry) -> list[dict[str, object]]:
    """As the store has them: through JSON."""
    names = await registry.records.outdated()
    return [json.loads(json.dumps(await registry.records.export(*name))) for name in names]


async def test_a_redis_that_was_lost_is_rebuilt_exactly(registry: Registry, redis: Redis) -> None:
    await eventful(registry)
    before, copies = await snapshot(redis), await records(registry)
    assert {(copy["tenant"], copy["name"]) for copy in copies} == {
        ("acme", name) for name in ("sql", "gone", "old", "new")
    }
    await redis.flushall()
    assert [await registry.records.restore(copy) for copy in copies] == [True] * 4
    assert await snapshot(redis) == before
    assert await registry.records.outdated() == []
    assert [await registry.records.restore(copy) for copy in copies] == [False] * 4
    assert await snapshot(redis) == before
    assert (await desired_adapters(redis, [])).pinned == {TWO.digest}
    assert (await registry.add_version("acme", "gone", ONE)).version == 2
    await registry.rename("acme", "new", "old")


async def test_what_has_changed_since_the_record_stays(registry: Registry, redis: Redis) -> None:
    await registry.add_version("acme", "sql", ONE)
    copy = await registry.records.export("acme", "sql")
    await registry.add_version("acme", "sql", TWO)
    before = await snapshot(redis)
    assert not await registry.records.restore(copy)
    assert await snapshot(redis) == before


async def test_a_later_record_replaces_what_is_there(registry: Registry, redis: Redis) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("acme", "sql", TWO)
    later = await registry.records.export("acme", "sql")
    await redis.flushall()
    await registry.add_version("acme", "sql", THREE)
    assert await registry.records.restore(later)
    assert not await registry.references.is_needed(THREE.digest)
    assert await registry.references.unreferenced(0) == [THREE.digest]
    live = await meaning(registry, "acme", "sql")
    assert live is not None and (live.version, live.digest) == (2, TWO.digest)
    assert digests_of(later) == {ONE.digest, TWO.digest}


async def test_a_change_makes_the_record_outdated_until_its_last_state_is_written(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    assert await registry.records.outdated() == [("acme", "sql")]
    copy = await registry.records.export("acme", "sql")
    await registry.aliases.pin("acme", "sql", quota=1)
    assert not await registry.records.recorded("acme", "sql", copy["revision"])
    copy = await registry.records.export("acme", "sql")
    assert await registry.records.recorded("acme", "sql", copy["revision"])
    assert await registry.records.outdated() == []


async def test_what_is_no_record_is_refused(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    good = await registry.records.export("acme", "sql")
    for bad in ({**good, "format": 2}, {**good, "tenant": "a:b"}, {**good, "name": "../x"}):
        with pytest.raises(ValueError, match=r"record|tenant|name"):
            await registry.records.restore(bad)
    with pytest.raises(KeyError):
        await registry.records.restore({"format": 1})
