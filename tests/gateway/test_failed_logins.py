"""Guessing keys gets slower and then 429; a right key does not notice, wherever it comes from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway import auth, failed_logins, redis_push
from gateway.auth import Authenticator
from gateway.errors import ApiError
from gateway.failed_logins import FailedLogins
from gateway.keys import Keys
from gateway.redis_client import connect
from gateway.redis_health import RedisHealth
from gateway.tenants import Tenants
from tests.gateway.control_plane import control_plane


class Waits:
    """Stands for the clock: it moves when somebody waits, and notes for how long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.delays: list[float] = []
        monkeypatch.setattr(failed_logins.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.now += seconds


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


async def penalties(logins: FailedLogins, address: str, count: int) -> list[int]:
    """Fails so many times; returns the seconds of `Retry-After` of each 429."""
    refused: list[int] = []
    for _ in range(count):
        try:
            await logins.penalise(address)
        except ApiError as error:
            assert (error.status, error.code) == (429, "too_many_failed_authentications")
            assert error.headers is not None
            refused.append(int(error.headers["Retry-After"]))
    return refused


async def test_the_first_failures_are_free_then_answers_wait_longer_and_longer_then_429(waits: Waits) -> None:
    logins = FailedLogins(clock=lambda: waits.now)
    assert await penalties(logins, "192.0.2.1", 10) == [] and waits.delays == []
    assert await penalties(logins, "192.0.2.1", 30) == []
    assert waits.delays == sorted(waits.delays) and waits.delays[0] < 0.1 < 1 < waits.delays[-1] <= 2
    refused = await penalties(logins, "192.0.2.1", 200)
    assert refused and refused[-1] > 100, "the more it tries, the longer it takes"
    assert refused[-1] <= 126, "but not for ever"
    waits.delays.clear()
    assert await penalties(logins, "192.0.2.2", 10) == [] and waits.delays == [], "others do not notice"
    waits.now += refused[-1]
    assert await penalties(logins, "192.0.2.1", 1) == [] and len(waits.delays) == 1, "Retry-After is true"
    waits.now += 600
    waits.delays.clear()
    assert await penalties(logins, "192.0.2.1", 10) == [] and waits.delays == [], "all is forgotten"


async def test_many_addresses_together_are_slowed_too_in_bounded_memory(waits: Waits) -> None:
    logins = FailedLogins(clock=lambda: waits.now, most_addresses=50)
    for n in range(1200):
        await logins.penalise(f"192.0.{n // 250}.{n % 250}")
    assert logins.remembered() == 50
    assert waits.delays, "one failure of each"


async def test_who_failed_longest_ago_is_forgotten_first(waits: Waits) -> None:
    logins = FailedLogins(clock=lambda: waits.now, most_addresses=3)
    assert await penalties(logins, "192.0.2.1", 10) == []
    for other in ("192.0.2.2", "192.0.2.3", "192.0.2.1", "192.0.2.4", "192.0.2.5"):
        await logins.penalise(other)
    assert len(waits.delays) == 1, "its eleventh"
    await logins.penalise("192.0.2.1")
    assert len(waits.delays) == 2


async def test_an_ipv6_network_is_one_address(waits: Waits) -> None:
    logins = FailedLogins(clock=lambda: waits.now)
    for n in range(20):
        await logins.penalise(f"2001:db8::{n:x}")
    assert len(waits.delays) == 10 and logins.remembered() == 1
    await logins.penalise("2001:db8:0:1::1")
    assert len(waits.delays) == 10


async def test_only_so_many_answers_of_an_address_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logins, over = FailedLogins(), asyncio.Event()
    await penalties(logins, "192.0.2.1", 10)
    sleep = asyncio.sleep
    monkeypatch.setattr(failed_logins.asyncio, "sleep", lambda _: over.wait())
    tries = [asyncio.create_task(penalties(logins, "192.0.2.1", 1)) for _ in range(20)]
    await sleep(0.01)
    assert [task.done() for task in tries].count(False) == 8
    over.set()
    assert [bool(refused) for refused in await asyncio.gather(*tries)].count(True) == 12
    assert await penalties(logins, "192.0.2.1", 1) == [], "who has waited makes room"


async def test_a_right_key_passes_at_once_beside_many_wrong_ones(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        known, late = await plane.tenant("acme"), await plane.tenant("acme")
        get = plane.client.get
        assert (await get("/v1/adapters", headers=known)).status_code == 200
        guess = {"Authorization": known["Authorization"][:-4] + "AAAA"}
        before = (await plane.services.redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
        guesses = await asyncio.gather(*(get("/v1/adapters", headers=guess) for _ in range(100)))
        asked = (await plane.services.redis.info("commandstats"))["cmdstat_evalsha"]["calls"] - before
        assert {answer.status_code for answer in guesses} == {401, 429}
        assert all(answer.headers["retry-after"] for answer in guesses if answer.status_code == 429)
        assert asked < 10, "a known id is judged from memory"
        for headers in (known, late):  # the latter was never seen here before
            assert (await get("/v1/adapters", headers=headers)).status_code == 200
        # And the client who has mistyped it gets 401 again when it is over, not 429.
        assert [answer.status_code for answer in guesses].count(401) >= 10


async def followed(authenticator: Authenticator) -> None:
    """Waits until Redis pushes changes to it."""
    async with asyncio.timeout(60):
        while authenticator._push.since is None:
            await asyncio.sleep(0.01)


async def test_made_up_ids_cost_redis_little(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_push, "_HEARTBEAT_S", 600.0)  # which are round trips, too
    monkeypatch.setattr(auth, "_UNKNOWN_CACHE_S", 600.0)
    async with connect(valkey_url) as redis:
        await Tenants(redis).create("Acme", tenant_id="acme")
        authenticator = Authenticator(redis, RedisHealth(redis), operator_key=None, cache_s=60, grace_s=60)
        await authenticator.start()
        await followed(authenticator)

        async def status(key: str, address: str) -> int:
            try:
                await authenticator.authenticate(f"Bearer {key}", address)
            except ApiError as error:
                return error.status
            return 200

        async def round_trips() -> int:
            return (await redis.info("stats"))["total_reads_processed"]

        try:
            same = f"lpx_{'0' * 12}_{'x' * 43}"
            assert await status(same, "192.0.2.9") == 401
            before = await round_trips()
            for n in range(9):
                assert await status(same[:-1] + str(n), "192.0.2.9") == 401
            assert await round_trips() - before < 6, "an id that is not there is remembered"
            before = await round_trips()
            keys = [f"lpx_{n:012x}_{'x' * 43}" for n in range(1, 301)]
            await asyncio.gather(*(status(key, f"192.0.3.{n % 250}") for n, key in enumerate(keys)))
            assert await round_trips() - before < 60, "look-ups that meet share a round trip"
            assert len(authenticator._unknown) <= 301
        finally:
            await authenticator.close()


@pytest.mark.parametrize("how", ["created", "rotated"])
async def test_a_new_key_whose_id_was_asked_for_in_vain_works_at_once(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(auth, "_UNKNOWN_CACHE_S", 600.0)
    async with connect(valkey_url) as redis:
        await Tenants(redis).create("Acme", tenant_id="acme")
        old, _ = await Keys(redis).create("acme")
        monkeypatch.setattr("gateway.keys.secrets.token_hex", lambda _: "0" * 12)
        authenticator = Authenticator(redis, RedisHealth(redis), operator_key=None, cache_s=60, grace_s=60)
        await authenticator.start()
        try:
            await followed(authenticator)
            with pytest.raises(ApiError, match="not valid"):
                await authenticator.authenticate(f"Bearer lpx_{'0' * 12}_{'x' * 43}", "192.0.2.1")
            made = Keys(redis).create("acme") if how == "created" else Keys(redis).rotate("acme", old.id)
            _, key = await made
            async with asyncio.timeout(60):  # much less than it is remembered for, so Redis has pushed it
                while "0" * 12 in authenticator._unknown:
                    await asyncio.sleep(0.01)
            assert (await authenticator.authenticate(f"Bearer {key}", "192.0.2.2")).tenant_id == "acme"
        finally:
            await authenticator.close()


async def test_nor_is_it_remembered_for_long_where_redis_pushes_nothing(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(valkey_url) as redis:
        await Tenants(redis).create("Acme", tenant_id="acme")
        monkeypatch.setattr("gateway.keys.secrets.token_hex", lambda _: "0" * 12)
        authenticator = Authenticator(redis, RedisHealth(redis), operator_key=None, cache_s=60, grace_s=60)
        with pytest.raises(ApiError, match="not valid"):
            await authenticator.authenticate(f"Bearer lpx_{'0' * 12}_{'x' * 43}")
        _, key = await Keys(redis).create("acme")
        await asyncio.sleep(0.5)
        assert (await authenticator.authenticate(f"Bearer {key}")).tenant_id == "acme"
