"""Admissions over a real Redis: what is told, what is remembered, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from redis.asyncio import Redis

from adapters.registry import AdapterVersion
from gateway.accounts import admission as admission_module
from gateway.accounts.admission import Admission, Admissions
from gateway.accounts.headers import duration
from gateway.auth import Principal
from gateway.errors import ApiError
from gateway.limits import RateLimits, TenantLimits
from gateway.redis_client import connect
from gateway.redis_health import RedisHealth
from gateway.resolve import ResolvedModel
from gateway.tenants import PrefixSharing
from protos.engine_pb2 import ModelInfo, Submit

BASE = ResolvedModel("base", ModelInfo(name="base"))
SQL_3 = AdapterVersion("acme", "sql", 3, b"\1" * 32, 8, 4, ("q_proj",), None, 0)
SQL = ResolvedModel("sql@3", BASE.info, SQL_3)
_ids = itertools.count()


def caller(
    rates: RateLimits | None = None, *, month: int | None = None, key: RateLimits | None = None
) -> Principal:
    return Principal(
        "acme", "k1", frozenset({"inference"}), PrefixSharing.PRIVATE, 1.0,
        TenantLimits(rates or RateLimits(), tokens_per_month=month), key or RateLimits(),
    )  # fmt: skip


def submit(prompt: int = 10, max_tokens: int = 20, choices: int = 1, **more: Any) -> Submit:
    return Submit(prompt_tokens=[1] * prompt, max_tokens=max_tokens, seeds=range(choices), **more)


class Gate:
    """Admissions as a handler uses them, and what was counted as refused."""

    def __init__(self, redis: Redis, *, window_ms: int = 60_000) -> None:
        self.rejected: list[tuple[str, str, str]] = []
        self.health = RedisHealth(redis)
        self.admissions = Admissions(
            redis,
            self.health,
            lease_ms=10_000,
            on_refusal=lambda *what: self.rejected.append(what),
            window_ms=window_ms,
        )

    async def admit(
        self,
        who: Principal,
        *submits: Submit,
        model: ResolvedModel = BASE,
        open_ended: bool = False,
        background: bool = False,
    ) -> Admission:
        return await self.admissions.admit(
            who, model, submits or [submit()], request_id=f"r{next(_ids)}", arrived_at=time.perf_counter(),
            route="chat", open_ended=open_ended, background=background,
        )  # fmt: skip


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    async with connect(valkey_url) as client:
        yield client


async def test_headers_tell_the_scarcest_limit_of_each_kind(redis: Redis) -> None:
    gate = Gate(redis)
    tenant = RateLimits(requests_per_minute=9, input_tokens_per_minute=100, output_tokens_per_minute=500)
    admission = await gate.admit(caller(tenant, key=RateLimits(requests_per_minute=2)), submit(10, 20))
    resets = {name: value for name, value in admission.headers().items() if "reset" in name}
    assert all(re.fullmatch(r"1m0s|5\d(\.\d+)?s", value) for value in resets.values())
    assert {name: value for name, value in admission.headers().items() if name not in resets} == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "90",
        "x-ratelimit-limit-input-tokens": "100",
        "x-ratelimit-remaining-input-tokens": "90",
        "x-ratelimit-limit-output-tokens": "500",
        "x-ratelimit-remaining-output-tokens": "480",
    }
    assert (await gate.admit(caller())).headers() == {}


@pytest.mark.parametrize(
    ("who", "kind", "words", "openai_type"),
    [
        (caller(RateLimits(requests_per_minute=1)), "requests_per_minute", "requests per minute", "requests"),
        (caller(RateLimits(input_tokens_per_minute=15)), "input_tokens_per_minute", "input tokens", "tokens"),
        (caller(RateLimits(output_tokens_per_minute=39)), "output_tokens_per_minute", "output", "tokens"),
        (caller(RateLimits(concurrent_requests=1)), "concurrent_requests", "concurrent", "requests"),
        (caller(month=59), "tokens_per_month", "tokens per month", "tokens"),
        (caller(key=RateLimits(requests_per_minute=1)), "requests_per_minute", "the key 'k1'", "requests"),
    ],
)
async def test_a_refusal_names_its_limit_and_takes_nothing(
    redis: Redis, who: Principal, kind: str, words: str, openai_type: str
) -> None:
    gate = Gate(redis)
    await gate.admit(who)
    before = await everything(redis)
    with pytest.raises(ApiError) as caught:
        await gate.admit(who)
    assert await everything(redis) == before
    error = caught.value
    assert (error.status, error.code, error.param, error.type) == (
        429, "rate_limit_exceeded", kind, openai_type,
    )  # fmt: skip
    assert words in error.message
    assert "Limit " in error.message and ", left " in error.message and ", requested " in error.message
    assert gate.rejected == [("acme", "", kind)]
    seconds = int((error.headers or {})["Retry-After"])
    longest = 31 * 86400 if kind == "tokens_per_month" else 60
    assert 1 <= seconds <= longest and (kind != "requests_per_minute" or seconds >= 50)


async def test_keys_adapters_and_tenants_have_windows_of_their_own(redis: Redis) -> None:
    gate, one = Gate(redis), RateLimits(requests_per_minute=1)
    acme = replace(caller(key=one), adapter_limits={"sql": one})
    await gate.admit(acme, model=SQL)
    with pytest.raises(ApiError, match="the key 'k1'"):
        await gate.admit(acme)
    other_key = replace(acme, key_id="k2")
    with pytest.raises(ApiError, match="the adapter 'sql'"):
        await gate.admit(other_key, model=SQL)
    with pytest.raises(ApiError, match="the adapter 'sql'"):
        gate.admissions.refuse_spent(other_key, "sql")
    gate.admissions.refuse_spent(other_key)
    await gate.admit(other_key)
    await gate.admit(replace(acme, tenant_id="globex"), model=SQL)
    assert gate.rejected[1:] == [("acme", "sql", "requests_per_minute")] * 2


async def test_one_limit_that_refuses_leaves_the_others_untouched(redis: Redis) -> None:
    gate = Gate(redis)
    who = caller(
        RateLimits(10, 1000, 1000, 5),
        month=10_000,
        key=RateLimits(requests_per_minute=5, concurrent_requests=1),
    )
    await gate.admit(who)
    before = await everything(redis)
    with pytest.raises(ApiError, match="concurrent requests"):
        await gate.admit(who)
    assert await everything(redis) == before


async def test_the_limit_that_lasts_longest_is_told(redis: Redis) -> None:
    gate = Gate(redis)
    who = caller(RateLimits(requests_per_minute=1, concurrent_requests=1), month=59)
    await gate.admit(who)
    with pytest.raises(ApiError) as caught:
        await gate.admit(who)
    assert caught.value.param == "tokens_per_month"


async def test_a_limit_that_a_request_would_just_fill_does_not_refuse_it(redis: Redis) -> None:
    gate, who = Gate(redis), caller(RateLimits(requests_per_minute=2, concurrent_requests=1))
    running = await gate.admit(who)
    with pytest.raises(ApiError) as caught:
        await gate.admit(who)
    assert caught.value.param == "concurrent_requests"
    await redis.zrem("loraplex:{acme}:leases", running.entry.id)
    gate.admissions.refuse_spent(who)
    await gate.admit(who)


@pytest.mark.parametrize(
    ("now", "end"),
    [
        ("2026-12-31T22:00", "2027-01-01"),
        ("2027-01-01T00:00", "2027-02-01"),
        ("2028-02-28T06:00", "2028-03-01"),
    ],
)
async def test_tokens_of_a_month_come_back_with_the_next_one(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, now: str, end: str
) -> None:
    times = [datetime.fromisoformat(each).replace(tzinfo=UTC).timestamp() for each in (now, end)]

    async def says(*_: object) -> bytes:
        return orjson.dumps([0, int(times[0] * 1000), 59, 0])

    gate = Gate(redis)
    monkeypatch.setattr(gate.admissions, "_ask", says)
    with pytest.raises(ApiError) as caught:
        await gate.admit(caller(month=59))
    assert int((caught.value.headers or {})["Retry-After"]) == times[1] - times[0]


async def test_a_request_is_booked_when_it_came(redis: Redis) -> None:
    admission = await Gate(redis).admissions.admit(
        caller(), BASE, [submit()], request_id="r", arrived_at=time.perf_counter() - 60, route="chat",
        open_ended=False,
    )  # fmt: skip
    assert 59_000 < time.time() * 1000 - admission.entry.time < 70_000


async def test_each_window_begins_with_its_own_first_use(redis: Redis) -> None:
    """And so they end one by one: requests first, then input, then output."""
    gate = Gate(redis)
    starts = {}
    for known in (1, 2, 3):
        values = [100, 1000, 1000][:known] + [None] * (3 - known)
        await gate.admit(caller(RateLimits(*values)))
        starts[known] = await window_starts(redis)
        await asyncio.sleep(0.1)
    first, second, third = starts[3].values()
    assert starts[3].keys() == {
        "requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute",
    }  # fmt: skip
    assert second >= first + 100 and third >= second + 100
    assert starts[1] == {"requests_per_minute": first}


async def test_what_is_counted_is_forgotten_in_time(redis: Redis) -> None:
    gate = Gate(redis, window_ms=60_000)
    who = caller(RateLimits(requests_per_minute=10), month=1000, key=RateLimits(input_tokens_per_minute=100))
    for _ in range(2):
        await gate.admit(who)
        keys = [key async for key in redis.scan_iter("loraplex:{acme}:[wm]*")]
        assert len(keys) == 3
        for key in keys:
            is_month = b":month:" in key
            assert 0 < await redis.ttl(key) <= (70 * 86400 if is_month else 60)


async def test_spent_requests_are_refused_from_memory_until_the_limit_changes(redis: Redis) -> None:
    gate, who = Gate(redis), caller(RateLimits(requests_per_minute=1))
    await gate.admit(who)
    gate.admissions.refuse_spent(who)  # nobody has said so yet
    with pytest.raises(ApiError):
        await gate.admit(who)
    await redis.flushall()  # as if to say: it does not ask again
    with pytest.raises(ApiError) as caught:
        gate.admissions.refuse_spent(who)
    headers = dict(caught.value.headers or {})
    assert 50 <= int(headers.pop("Retry-After")) <= 60
    assert headers.pop("x-ratelimit-reset-requests").startswith(("59", "1m0s", "58"))
    assert headers == {"x-ratelimit-limit-requests": "1", "x-ratelimit-remaining-requests": "0"}
    assert gate.rejected == [("acme", "", "requests_per_minute")] * 2
    gate.admissions.refuse_spent(caller(RateLimits(requests_per_minute=2)))


async def test_spent_requests_are_forgotten_when_their_window_is_over(redis: Redis) -> None:
    gate, who = Gate(redis, window_ms=100), caller(RateLimits(requests_per_minute=1))
    await gate.admit(who)
    with pytest.raises(ApiError):
        while True:  # a slow machine may need two windows
            await gate.admit(who)
    await asyncio.sleep(0.11)
    gate.admissions.refuse_spent(who)
    assert (await gate.admit(who)).admitted


async def test_what_is_remembered_of_limits_is_bounded(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MAX_SPENT", "_MAX_ROOMS"):
        monkeypatch.setattr(admission_module, name, 3)
    gate, who = Gate(redis, window_ms=100), caller(RateLimits(requests_per_minute=1, concurrent_requests=9))
    for number in range(12):
        tenant = replace(who, tenant_id=f"t{number}")
        with pytest.raises(ApiError):
            while True:
                await gate.admit(tenant)
        if number % 3 == 2:
            await asyncio.sleep(0.11)
    assert len(gate.admissions._spent) <= 3 and len(gate.admissions._rooms) <= 3


async def test_a_refusal_for_other_reasons_is_not_remembered(redis: Redis) -> None:
    gate, who = Gate(redis), caller(RateLimits(requests_per_minute=9, output_tokens_per_minute=20))
    await gate.admit(who)
    with pytest.raises(ApiError, match="output tokens"):
        await gate.admit(who)
    gate.admissions.refuse_spent(who)


async def test_background_work_leaves_half_of_each_limit(redis: Redis) -> None:
    gate = Gate(redis)
    for rates in (
        RateLimits(concurrent_requests=5),
        RateLimits(requests_per_minute=5),
        RateLimits(input_tokens_per_minute=50),
        RateLimits(output_tokens_per_minute=100),
    ):
        for who in (caller(rates), caller(key=rates)):
            await redis.flushdb()
            for _ in range(2):
                assert not (await gate.admit(who, background=True)).awaited
            with pytest.raises(ApiError) as refused:
                await gate.admit(who, background=True)
            assert refused.value.status == 429
            gate.admissions.refuse_spent(who)
            for _ in range(3):
                await gate.admit(who)
            with pytest.raises(ApiError):
                await gate.admit(who)


async def test_background_work_that_needs_more_than_half_runs_while_nothing_else_does(redis: Redis) -> None:
    gate, who = Gate(redis), caller(RateLimits(output_tokens_per_minute=30), month=60)
    await gate.admit(who, background=True)
    with pytest.raises(ApiError, match="output tokens"):
        await gate.admit(who, submit(1, 1), background=True)
    await redis.delete("loraplex:{acme}:window:tenant")
    await gate.admit(who, background=True)  # all of the month's tokens are for it, too


async def test_an_end_is_awaited_by_others_only_where_little_room_is_left(redis: Redis) -> None:
    gate = Gate(redis)
    who = caller(RateLimits(concurrent_requests=4), key=RateLimits(concurrent_requests=100))
    first = await gate.admit(who)
    assert not first.awaited
    second = await gate.admit(who)
    assert first.awaited and second.awaited, "what is known of a limit is known of all that run"
    assert not (await gate.admit(caller())).awaited


async def test_an_answer_without_a_length_reserves_a_part_of_the_limit(redis: Redis) -> None:
    """So the next one is admitted too, while the first runs."""
    gate, who = Gate(redis), caller(RateLimits(output_tokens_per_minute=400))
    open_ended = [submit(10, 2000, choices=2), submit(10, 30, choices=1)]
    await gate.admit(who, *open_ended, open_ended=True)
    assert [each.max_tokens for each in open_ended] == [33, 30]
    window = await redis.hgetall("loraplex:{acme}:window:tenant")  # type: ignore[misc]
    assert window[b"output_tokens_per_minute"] == b"96"
    for _ in range(3):
        await gate.admit(who, submit(10, 2000), open_ended=True)
    with pytest.raises(ApiError, match="output tokens per minute"):
        await gate.admit(who, submit(10, 2000), open_ended=True)


async def test_the_scarcer_of_a_minutes_and_a_months_tokens_bounds_it(redis: Redis) -> None:
    """The month counts the prompt as well."""
    for most, month, bound in ((400, 210, 50), (100, 210, 25), (None, 210, 50)):
        open_ended = submit(10, 2000)
        who = caller(RateLimits(output_tokens_per_minute=most), month=month)
        await Gate(redis).admit(replace(who, tenant_id=f"t{most}"), open_ended, open_ended=True)
        assert open_ended.max_tokens == bound


@pytest.mark.parametrize(
    ("who", "asked", "open_ended", "numbers"),
    [
        (
            caller(RateLimits(input_tokens_per_minute=9)),
            submit(10),
            True,
            ("10 input tokens", "at most 9", "Shorten the prompt"),
        ),
        (
            caller(RateLimits(output_tokens_per_minute=39)),
            submit(1, 20, 2),
            False,
            ("40 output", "39 output"),
        ),
        (caller(RateLimits(output_tokens_per_minute=1)), submit(1, 20, 2), True, ("2 output", "at most 1 ")),
        (
            caller(RateLimits(output_tokens_per_minute=9)),
            submit(1, 20, min_tokens=10),
            True,
            ("10 out", "9 out"),
        ),
        (caller(month=29), submit(10, 20), False, ("30 tokens", "29 tokens per month")),
    ],
)
async def test_what_a_limit_can_never_hold_is_refused_for_good(
    redis: Redis, who: Principal, asked: Submit, open_ended: bool, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ApiError) as caught:
        await Gate(redis).admit(who, asked, open_ended=open_ended)
    assert (caught.value.status, caught.value.code) == (400, "request_exceeds_limit")
    assert all(number in caught.value.message for number in numbers), caught.value.message
    assert await everything(redis) == {}


async def test_while_redis_is_away_all_are_admitted_and_only_some_ask() -> None:
    async with connect("redis://127.0.0.1:1/0") as redis:
        gate, who = Gate(redis), caller(RateLimits(requests_per_minute=1))
        asked: list[object] = []
        ask = gate.admissions._ask

        async def counted(*call: Any) -> Any:
            asked.append(call)
            return await ask(*call)

        gate.admissions._ask = counted  # type: ignore[assignment]
        admitted = [await gate.admit(who) for _ in range(200)]
        assert not any(each.admitted for each in admitted)
        assert 1 <= len(asked) < 100


async def test_that_limits_are_not_held_is_said_once_and_that_they_are_again(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object) -> bytes:
        raise OSError("no route to host")

    gate, who = Gate(redis), caller(RateLimits(requests_per_minute=9))
    caplog.set_level("WARNING", "gateway.accounts.admission")
    for _ in range(2):
        monkeypatch.setattr(gate.admissions, "_ask", refuse)
        admitted = await asyncio.gather(*(gate.admit(who) for _ in range(3)))
        assert not any(each.admitted for each in admitted)
        monkeypatch.undo()
        async with asyncio.timeout(30):
            while gate.health.is_away:
                await asyncio.sleep(0.01)
        for _ in range(2):
            assert (await gate.admit(who)).admitted
    said = [line.message.split(" while")[0] for line in caplog.records]
    assert said == ["limits are not held", "limits are held again"] * 2


async def test_no_request_tries_whether_redis_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Redis that hangs: to try takes seconds."""
    async with silent_server() as url, connect(url) as redis:
        gate, who = Gate(redis), caller(RateLimits(requests_per_minute=1))
        gate.health.failed()
        monkeypatch.setattr(gate.admissions, "_ask", lambda *_: pytest.fail("a request waits for Redis"))
        async with asyncio.timeout(30):
            for _ in range(20):
                assert not (await gate.admit(who)).admitted
                await asyncio.sleep(0.1)  # pings go unanswered meanwhile
        await gate.health.close()


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Takes connections, and says nothing. Yields its URL."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


async def test_limits_hold_again_when_redis_is_back(valkey_url: str) -> None:
    async with connect(valkey_url) as redis, connect("redis://127.0.0.1:1/0") as away:
        gate, who = Gate(redis), caller(RateLimits(requests_per_minute=1))
        pool, redis.connection_pool = redis.connection_pool, away.connection_pool
        assert not (await gate.admit(who)).admitted
        redis.connection_pool = pool
        deadline = time.monotonic() + 20
        while not (await gate.admit(who)).admitted:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="requests per minute"):
            await gate.admit(who)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"),
        (12, "12ms"),
        (1000, "1s"),
        (1200, "1.2s"),
        (59_999, "59.999s"),
        (60_000, "1m0s"),
        (360_500, "6m0.5s"),
    ],
)
def test_times_are_written_as_openai_writes_them(ms: int, text: str) -> None:
    assert duration(ms) == text


async def everything(redis: Redis) -> dict[bytes, bytes]:
    """All that Redis holds of accounts, as it would be dumped."""
    found = {}
    for key in await redis.keys("loraplex:{*"):
        found[key] = await redis.dump(key)
    return found


async def window_starts(redis: Redis) -> dict[str, int]:
    found: dict[bytes, bytes] = await redis.hgetall("loraplex:{acme}:window:tenant")  # type: ignore[assignment,misc]
    window = {name.decode(): int(value) for name, value in found.items()}
    return {name.removesuffix(":start"): at for name, at in window.items() if name.endswith(":start")}
