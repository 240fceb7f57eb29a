from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from adapters.script_batches import ScriptBatches

ECHO = "if ARGV[1] == 'bad' then return redis.error_reply('bad argument') end return ARGV[1]"


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey_url, decode_responses=True)
    yield client
    await client.aclose()


def _batches(redis: Redis) -> tuple[ScriptBatches, list[int]]:
    """The batches, and the sizes of their round trips."""
    batches, sizes = ScriptBatches(redis, redis.register_script(ECHO)), []
    replies = batches._replies

    async def counted(calls: Any) -> Any:
        sizes.append(len(calls))
        return await replies(calls)

    batches._replies = counted
    return batches, sizes


async def test_who_asks_during_a_round_trip_shares_the_next(redis: Redis) -> None:
    batches, sizes = _batches(redis)

    async def ask(n: int) -> str:
        await asyncio.sleep(0)
        return await batches([], [str(n)])

    assert await asyncio.gather(*(ask(n) for n in range(40))) == [str(n) for n in range(40)]
    assert len(sizes) <= 3, "forty callers at once need two round trips, not forty"


async def test_a_call_is_one_round_trip(redis: Redis) -> None:
    batches, _ = _batches(redis)
    await batches([], ["first"])
    before = await redis.info("commandstats")
    assert await batches([], ["second"]) == "second"
    after = await redis.info("commandstats")
    calls = {name: stats["calls"] - before.get(name, {"calls": 0})["calls"] for name, stats in after.items()}
    assert {name: count for name, count in calls.items() if count and name != "cmdstat_info"} == {
        "cmdstat_evalsha": 1
    }


async def test_a_script_that_redis_has_lost_is_sent_again(redis: Redis) -> None:
    batches, _ = _batches(redis)
    await batches([], ["first"])
    await redis.script_flush()
    assert await asyncio.gather(*(batches([], [str(n)]) for n in range(3))) == ["0", "1", "2"]


async def test_each_caller_gets_its_own_error(redis: Redis) -> None:
    batches, _ = _batches(redis)
    first, bad, last = await asyncio.gather(
        *(batches([], [argument]) for argument in ("one", "bad", "two")), return_exceptions=True
    )
    assert (first, last) == ("one", "two")
    assert isinstance(bad, ResponseError)


async def test_a_caller_that_leaves_costs_the_others_nothing(redis: Redis) -> None:
    batches, _ = _batches(redis)
    leaver, stayer = (asyncio.create_task(batches([], [name])) for name in ("leaver", "stayer"))
    await asyncio.sleep(0)
    leaver.cancel()
    assert await stayer == "stayer"
    assert await batches([], ["later"]) == "later"


async def test_an_outage_reaches_every_caller_and_passes(redis: Redis, unused_tcp_port: int) -> None:
    away = Redis(port=unused_tcp_port)
    batches, _ = _batches(away)
    answers = await asyncio.gather(*(batches([], [str(n)]) for n in range(3)), return_exceptions=True)
    assert all(isinstance(answer, RedisConnectionError) for answer in answers)
    batches._redis, batches._script = redis, redis.register_script(ECHO)
    assert await batches([], ["back"]) == "back"
    await away.aclose()
