"""A Redis that was lost is rebuilt from the store: the same names, versions, aliases, grants, and answers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from adapters import lifecycle
from adapters.blob_store import BlobStore, StoreUnavailable, open_store
from adapters.cli import main
from adapters.registry import AdapterConflict, Registry
from adapters.reindex import reindex
from adapters.store_identity import STORE_KEY, check_identity
from adapters.validation import AdapterSummary
from tests.gateway.local_stack import LocalStack, wait_until
from tests.s3_server import BUCKET, S3Server


async def publish(registry: Registry, store: BlobStore, tenant: str, name: str, number: int) -> None:
    with store.stage() as staging:
        (staging.path / "weights").write_bytes(bytes([number]))
        summary = AdapterSummary(bytes([number]) * 32, 8, 4, 1000, None, ("q_proj",), (5, 6))
        await lifecycle.publish(registry, store, staging, tenant=tenant, name=name, summary=summary)


async def fill(registry: Registry, store: BlobStore) -> None:
    """Three versions of which the second is live and the third a canary, a grant, and a deleted name."""
    for number in (1, 2, 3):
        await publish(registry, store, "acme", "sql", number)
    await registry.aliases.promote("acme", "sql", 2)
    await registry.aliases.canary("acme", "sql", 3, 10)
    await registry.grants.grant("acme", "sql", "globex")
    await lifecycle.record(registry, store, "acme", "sql")
    await publish(registry, store, "acme", "gone", 4)
    await lifecycle.delete(registry, store, tenant="acme", name="gone")
    await publish(registry, store, "globex", "sql", 1)


async def dump(redis: Redis) -> dict[str, object]:
    """All that Redis knows of names, in a form to compare."""
    registry = Registry(redis)
    names = {
        tenant: [
            (await registry.show(tenant, name.name), await registry.history(tenant, name.name))
            for name in await registry.list(tenant)
        ]
        for tenant in ("acme", "globex")
    }
    keys = ("bytes", "references", "last:acme", "last:globex", "holdings:acme", "granted:globex")
    raw = {}
    for key in keys:
        full = f"loraplex:{{adapters}}:{key}"
        kind = await redis.type(full)
        raw[key] = await (redis.smembers(full) if kind == b"set" else redis.hgetall(full))
    return {"names": names, **raw}


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return open_store(str(tmp_path / "store"), tmp_path)


async def test_what_the_store_knows_comes_back(valkey_url: str, store: BlobStore) -> None:
    async with Redis.from_url(valkey_url) as redis:
        registry = Registry(redis)
        await fill(registry, store)
        before = await dump(redis)
        assert len(before["references"]) == 3  # type: ignore[arg-type]
        await redis.flushall()
        result = await reindex(registry, store)
        assert (result.restored, result.current, result.faults) == (3, 0, [])
        assert await dump(redis) == before
        again = await reindex(registry, store)
        assert (again.restored, again.current) == (0, 3)
        assert await dump(redis) == before
        await publish(registry, store, "acme", "gone", 5)
        version = (await registry.list("acme"))[0]
        assert (version.name, version.newest.version) == ("gone", 2)  # numbers are not given again


async def test_an_upload_before_the_reindex_costs_no_version(valkey_url: str, store: BlobStore) -> None:
    async with Redis.from_url(valkey_url) as redis:
        registry = Registry(redis)
        await fill(registry, store)
        await redis.flushall()
        await publish(registry, store, "acme", "sql", 5)
        shown = await registry.show("acme", "sql")
        assert shown is not None and [version.version for version in shown.versions] == [1, 2, 3, 4]
        assert shown.live == shown.newest and shown.grants == ("globex",)
        await redis.flushall()
        await reindex(registry, store)
        assert await registry.show("acme", "sql") == shown


async def test_no_name_takes_the_record_of_one_that_redis_has_lost(valkey_url: str, store: BlobStore) -> None:
    async with Redis.from_url(valkey_url) as redis:
        registry = Registry(redis)
        await fill(registry, store)
        await redis.flushall()
        await publish(registry, store, "acme", "new", 5)
        with pytest.raises(AdapterConflict, match="There is an adapter 'sql' already"):
            await lifecycle.rename(registry, store, tenant="acme", name="new", target="sql")
        store.put_record("names/acme/odd", {"format": 99, "versions": {}})
        with pytest.raises(StoreUnavailable, match="names/acme/odd"):
            await publish(registry, store, "acme", "odd", 6)


async def test_what_redis_has_is_not_overwritten(valkey_url: str, store: BlobStore) -> None:
    async with Redis.from_url(valkey_url) as redis:
        registry = Registry(redis)
        await fill(registry, store)
        await registry.aliases.promote("acme", "sql", 3)
        before = await dump(redis)
        assert (await reindex(registry, store)).restored == 0
        assert await dump(redis) == before


async def test_faults_are_told_and_the_rest_comes_back(
    valkey_url: str, store: BlobStore, tmp_path: Path
) -> None:
    async with Redis.from_url(valkey_url) as redis:
        registry = Registry(redis)
        await fill(registry, store)
        await redis.flushall()
        store.put_record("names/acme/odd", {"format": 99, "versions": {}})
        store.put_record("names/acme/none", {})
        (tmp_path / "store" / "records" / "names" / "acme" / "torn.json").write_text('{"format": 1, "ver')
        trashed = store.withdraw(bytes([2]) * 32)
        assert trashed is not None
        result = await reindex(registry, store)
        assert result.restored == 3 and len(result.faults) == 4
        told = "\n".join(result.faults)
        assert "names/acme/odd" in told and "names/acme/none" in told and "02" * 32 in told
        assert "The record names/acme/torn cannot be read: it is damaged." in result.faults


def test_requests_are_served_after_the_command(
    local_stack: LocalStack, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(local_stack.store), local_stack.store)

    async def lose_redis() -> None:
        async with Redis.from_url(valkey_url) as redis:
            await check_identity(redis, store, "here")
            await fill(Registry(redis), store)
            await redis.flushall()

    local_stack.call(lose_redis())
    key = local_stack.add_tenant("acme")
    with pytest.raises(SystemExit) as ended:
        main(["reindex", "--redis-url", valkey_url, "--store", str(local_stack.store), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"restored": 3, "current": 0, "faults": []}
    local_stack.wait_ready()
    client = local_stack.client(key)
    served: list[str] = []

    def is_served() -> bool:
        answer = client.chat.completions.create(
            model="sql@2", messages=[{"role": "user", "content": "hello"}], max_tokens=4
        )
        served.append(answer.model)
        return True

    wait_until(is_served, "a request is served")
    assert served[-1] == "sql@2"


@pytest.mark.parametrize(
    ("options", "says", "code"),
    [
        (["--redis-url", "nonsense"], "cannot be used", 2),
        (["--store", "ftp://x"], "s3://bucket/prefix", 2),
        (["--redis-url", "redis://127.0.0.1:1/0"], "Cannot reach Redis", 3),
        (["--store", "/proc/store"], "folder /proc/store is not there. Is its volume mounted?", 1),
    ],
)
def test_what_is_in_the_way_is_said(
    options: list[str],
    says: str,
    code: int,
    tmp_path: Path,
    valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    defaults = ["--redis-url", valkey_url, "--store", str(tmp_path / "store")]
    with pytest.raises(SystemExit) as ended:
        main(["reindex", *defaults, *options])
    assert ended.value.code == code
    assert says in capsys.readouterr().err


async def command(redis_url: str, location: str) -> tuple[int | None, str]:
    """Runs `adapters reindex`. Returns its exit code and what it says of a failure."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from adapters.cli import main; main()"),
        *("reindex", "--redis-url", redis_url, "--store", location),
        stderr=asyncio.subprocess.PIPE,
    )
    said = (await process.communicate())[1].decode()
    return process.returncode, said


async def test_a_store_that_is_not_there_is_refused_and_not_made(valkey_url: str, tmp_path: Path) -> None:
    code, said = await command(valkey_url, str(tmp_path / "stoer"))
    assert code == 1 and said.startswith("error: ") and f"{tmp_path}/stoer is not there" in said
    assert list(tmp_path.iterdir()) == []
    code, said = await command(valkey_url, str(tmp_path))
    assert code == 1 and f"{tmp_path}/records is not there" in said
    assert list(tmp_path.iterdir()) == [], "nothing is made in a folder that is no store"


async def test_only_a_store_that_gateways_have_used_with_this_redis_is_taken(
    valkey_url: str, store: BlobStore, tmp_path: Path
) -> None:
    location = str(tmp_path / "store")
    async with Redis.from_url(valkey_url) as redis:
        code, said = await command(valkey_url, location)
        assert (code, said.count("\n")) == (1, 1) and "No gateway has used the store" in said
        assert not await redis.exists(STORE_KEY) and store.read_record("store") is None
        await check_identity(redis, store, location)
        await fill(Registry(redis), store)
        await redis.flushall()
        await redis.set(STORE_KEY, "of another store")
        code, said = await command(valkey_url, location)
        assert (code, said.count("\n")) == (1, 1)
        assert "does not belong to this Redis: it belongs to another" in said
        assert [key async for key in redis.scan_iter()] == [STORE_KEY.encode()]
        await redis.delete(STORE_KEY)
        assert await command(valkey_url, location) == (0, "")
        assert len(await Registry(redis).list("acme")) == 1


async def test_a_prefix_that_no_gateway_has_used_is_refused(valkey_url: str, s3: S3Server) -> None:
    code, said = await command(valkey_url, f"s3://{BUCKET}/tow")
    assert code == 1 and f"No gateway has used the store 's3://{BUCKET}/tow' yet" in said
