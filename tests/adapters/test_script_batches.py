from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from adapters.redis_wire import RedisWire
from adapters.script_batches import ScriptBatches

ECHO = "if ARGV[1] == 'bad' then return redis.error_reply('bad argument') end return ARGV[1]"


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey_url, decode_responses=True)
    yield client
    await client.aclose()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all round trips."""
    sizes: list[int] = []
    ask = RedisWire.ask

    def counted(wire: RedisWire, commands: Sequence[Any]) -> None:
        sizes.append(len(commands))
        ask(wire, commands)

    monkeypatch.setattr(RedisWire, "ask", counted)
    return sizes


def _batches(redis: Redis, script: str = ECHO) -> ScriptBatches:
    return ScriptBatches(redis, redis.register_script(script))


async def _calls_of(redis: Redis) -> dict[str, int]:
    stats = await redis.info("commandstats")
    return {name: each["calls"] for name, each in stats.items() if name != "cmdstat_info"}


async def test_who_asks_during_a_round_trip_shares_the_next(redis: Redis, sizes: list[int]) -> None:
    batches = _batches(redis)

    async def ask(n: int) -> str:
        await asyncio.sleep(0)
        return await batches([], [str(n)])

    assert await asyncio.gather(*(ask(n) for n in range(40))) == [str(n) for n in range(40)]
    assert len(sizes) <= 3, "forty callers at once need two round trips, not forty"


async def test_a_call_is_one_round_trip(redis: Redis) -> None:
    batches = _batches(redis)
    await batches([], ["first"])
    before = await _calls_of(redis)
    assert await batches([], ["second"]) == "second"
    after = await _calls_of(redis)
    assert {
        name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)
    } == {"cmdstat_evalsha": 1}


async def test_a_script_that_redis_has_lost_is_sent_again(redis: Redis) -> None:
    batches = _batches(redis)
    await batches([], ["first"])
    await redis.script_flush()
    assert await asyncio.gather(*(batches([], [str(n)]) for n in range(3))) == ["0", "1", "2"]


async def test_each_caller_gets_its_own_error(redis: Redis) -> None:
    batches = _batches(redis)
    first, bad, last = await asyncio.gather(
        *(batches([], [argument]) for argument in ("one", "bad", "two")), return_exceptions=True
    )
    assert (first, last) == ("one", "two")
    assert isinstance(bad, ResponseError)


async def test_a_caller_that_leaves_costs_the_others_nothing(redis: Redis) -> None:
    batches = _batches(redis)
    leaver, stayer = (asyncio.ensure_future(batches([], [name])) for name in ("leaver", "stayer"))
    await asyncio.sleep(0)
    leaver.cancel()
    assert await stayer == "stayer"
    assert await batches([], ["later"]) == "later"


async def test_an_outage_reaches_every_caller_and_passes(redis: Redis, unused_tcp_port: int) -> None:
    away = Redis(port=unused_tcp_port)
    batches = _batches(away)
    answers = await asyncio.gather(*(batches([], [str(n)]) for n in range(3)), return_exceptions=True)
    assert all(isinstance(answer, RedisConnectionError) for answer in answers)
    batches._redis, batches._script = redis, redis.register_script(ECHO)
    assert await batches([], ["back"]) == "back"
    await away.aclose()


async def test_what_was_under_way_when_a_connection_broke_is_asked_again(redis: Redis) -> None:
    batches = _batches(redis, "redis.call('INCR', 'asked') return ARGV[1]")
    assert await batches([], ["before"]) == "before"
    await redis.set("asked", 0)
    answers = asyncio.gather(*(batches([], [str(n)]) for n in range(3)))
    await asyncio.sleep(0)
    assert batches._wire is not None
    batches._wire._transport.abort()
    assert await answers == ["0", "1", "2"]
    assert int(await redis.get("asked") or 0) >= 3


async def test_a_connection_that_redis_has_closed_is_replaced(redis: Redis) -> None:
    batches = _batches(redis)
    await batches([], ["before"])
    await redis.client_kill_filter(_type="normal", skipme=True)
    assert await batches([], ["after"]) == "after"


async def test_a_silent_redis_is_not_waited_for(redis: Redis, valkey_url: str) -> None:
    hasty = Redis.from_url(valkey_url, socket_timeout=1)
    batches = _batches(hasty)
    assert await batches([], ["before"]) == b"before"
    await redis.client_pause(2500)
    answers = await asyncio.gather(*(batches([], [str(n)]) for n in range(2)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [RedisTimeoutError] * 2
    await redis.client_unpause()
    assert await batches([], ["after"]) == b"after"
    await hasty.aclose()


async def test_a_busy_loop_is_no_silence(redis: Redis, valkey_url: str) -> None:
    hasty = Redis.from_url(valkey_url, socket_timeout=0.5)
    batches = _batches(hasty)
    await batches([], ["first"])
    answer = asyncio.ensure_future(batches([], ["second"]))
    await asyncio.sleep(0)
    time.sleep(0.8)
    assert await answer == b"second"
    await hasty.aclose()


async def test_closing_the_client_ends_its_connection(valkey_url: str) -> None:
    client = Redis.from_url(valkey_url, socket_connect_timeout=30)
    batches = _batches(client)
    await batches([], ["first"])
    async with asyncio.timeout(60):
        await client.aclose()
    assert batches._wire is not None
    assert not batches._wire.open
