"""Tenants and keys as Redis documents."""

from __future__ import annotations

import hashlib
import re

import pytest
from redis.asyncio import Redis

from adapters.registry.scripts import text
from gateway import keys as keys_module
from gateway.keys import Keys, NoSuchKey, NoSuchTenant, id_of
from gateway.tenants import PrefixSharing, TenantExists, Tenants


async def test_a_tenant_is_created_changed_listed_and_deleted(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        tenants = Tenants(redis)
        acme = await tenants.create(
            "Acme Ltd", tenant_id="acme", weight=2.5, prefix_sharing=PrefixSharing.SHARED
        )
        other = await tenants.create("Other")
        assert await tenants.get("acme") == acme
        assert {tenant.id for tenant in await tenants.all()} == {"acme", other.id}
        changed = await tenants.update("acme", {"suspended": True, "name": "Acme GmbH"})
        assert changed is not None
        assert (changed.name, changed.suspended, changed.weight) == ("Acme GmbH", True, 2.5)
        assert await tenants.delete("acme")
        assert not await tenants.delete("acme")
        assert await tenants.get("acme") is None
        assert [tenant.id for tenant in await tenants.all()] == [other.id]


async def test_an_id_is_given_once_and_a_change_makes_no_tenant(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        tenants = Tenants(redis)
        await tenants.create("Acme", tenant_id="acme")
        with pytest.raises(TenantExists):
            await tenants.create("Impostor", tenant_id="acme")
        assert await tenants.update("nobody", {"name": "Nobody"}) is None
        assert [tenant.name for tenant in await tenants.all()] == ["Acme"]


@pytest.mark.parametrize(
    ("name", "tenant_id"),
    [
        ("acme", "acme"),
        ("Acme Ltd", "acme-ltd"),
        ("  -Müller & Söhne_2- ", "muller-sohne-2"),
        ("a" * 62 + " b", "a" * 62),
        ("日本", None),
        ("---", None),
    ],
)
async def test_a_name_gives_the_id_where_it_can(valkey_url: str, name: str, tenant_id: str | None) -> None:
    async with Redis.from_url(valkey_url) as redis:
        tenants = Tenants(redis)
        first, second = await tenants.create(name), await tenants.create(name)
        made_up = re.compile("t-[0-9a-f]{12}")
        assert first.id == tenant_id or (tenant_id is None and made_up.fullmatch(first.id))
        assert made_up.fullmatch(second.id), "the name's is taken"
        assert (await tenants.get(second.id)) == second


async def test_a_tenant_of_any_name_has_no_document_but_its_own(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        await Tenants(redis).create("Acme", tenant_id="acme")
        await Keys(redis).create("acme")
        assert await Tenants(redis).get("acme:keys") is None
        with pytest.raises(NoSuchTenant):
            await Keys(redis).create("acme:keys")


async def test_only_the_digest_of_a_key_is_stored(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        await Tenants(redis).create("Acme", tenant_id="acme")
        record, key = await Keys(redis).create("acme", note="ci")
        prefix, key_id, secret = key.split("_", 2)
        assert (prefix, key_id, id_of(key)) == ("lpx", record.id, record.id)
        assert len(secret) * 6 >= 192
        assert record.digest == hashlib.sha256(key.encode()).digest()
        for name in await redis.keys("*"):
            read = {"hash": redis.hgetall, "set": redis.smembers, "stream": redis.xrange}
            assert secret not in str(await read[text(await redis.type(name))](name))


async def test_keys_are_listed_and_revoked_within_their_tenant(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        tenants, keys = Tenants(redis), Keys(redis)
        for tenant_id in ("acme", "other"):
            await tenants.create(tenant_id, tenant_id=tenant_id)
        mine, _ = await keys.create("acme", scopes=["adapters"], expires_in=60)
        assert mine.expires == mine.created + 60
        assert await keys.of_tenant("acme") == [mine]
        assert await keys.of_tenant("other") == []
        assert not await keys.revoke("other", mine.id)
        assert await keys.get(mine.id) == mine
        assert await keys.revoke("acme", mine.id)
        assert not await keys.revoke("acme", mine.id)
        assert await keys.get(mine.id) is None


async def test_a_key_that_is_revoked_while_it_is_rotated_has_no_successor(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Redis.from_url(valkey_url) as redis:
        keys = Keys(redis)
        await Tenants(redis).create("Acme", tenant_id="acme")
        record, _ = await keys.create("acme")
        read = keys_module.read_document

        async def overtaken(client: Redis, name: str) -> dict[str, str]:
            found = await read(client, name)
            monkeypatch.undo()
            assert await keys.revoke("acme", record.id)
            return found

        monkeypatch.setattr(keys_module, "read_document", overtaken)
        with pytest.raises(NoSuchKey):
            await keys.rotate("acme", record.id)
        assert await keys.of_tenant("acme") == []


async def test_nothing_is_left_of_keys_that_were_rotated_or_revoked(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        keys = Keys(redis)
        await Tenants(redis).create("Acme", tenant_id="acme")
        first, _ = await keys.create("acme")
        second, _ = await keys.rotate("acme", first.id)
        found = [name async for name in redis.scan_iter("loraplex:key*")]
        assert sorted(found) == [f"loraplex:key:{second.id}".encode(), b"loraplex:keys:acme"]
        assert await redis.smembers("loraplex:keys:acme") == {second.id.encode()}  # type: ignore[misc]
        assert await keys.revoke("acme", second.id)
        assert [name async for name in redis.scan_iter("loraplex:key*")] == []


async def test_no_key_without_its_tenant(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        with pytest.raises(NoSuchTenant):
            await Keys(redis).create("nobody")
        assert await redis.keys("*") == []
