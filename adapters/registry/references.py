"""Which blobs somebody needs, and who may delete the others.

An upload and a collector exclude each other by digest, whatever the store can do atomically:

    upload      reserve ──▶ blob into the store ──▶ version refers to it ──▶ release
    collector   condemn ──▶ blob out of the store ──▶ absolve

`reserve` waits while a digest is condemned, and `condemn` refuses while it is reserved or referred to.
A reservation and a condemnation end by themselves when whoever made them is gone. A collector that was only
stopped meanwhile, and goes on, finds with `is_needed` what it has to put back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from adapters.registry.scripts import REFERENCES, UNREFERENCED, Script, text

_RESERVED_S = 3600
_CONDEMNED_S = 600
_RETRY_S = 0.05

# The note of when nobody referred to it is for an upload that ends before it registers its version.
_RESERVE = """
local digest, upload, seconds = unpack(ARGV)
local condemned = redis.call('HGET', at('condemned'), digest)
if condemned and tonumber(condemned) > now() then return 0 end
redis.call('HSET', at('reserved', digest), upload, now() + tonumber(seconds))
redis.call('EXPIRE', at('reserved', digest), seconds)
if redis.call('HEXISTS', at('references'), digest) == 0 then
    redis.call('ZADD', at('unreferenced'), 'NX', now(), digest)
end
return 1
"""

# Whether a version of any tenant has a digest, or an upload relies on its blob.
_NEEDED = """
local function is_needed(digest)
    if redis.call('HEXISTS', at('references'), digest) == 1 then return true end
    for _, until_when in ipairs(redis.call('HVALS', at('reserved', digest))) do
        if tonumber(until_when) > now() then return true end
    end
    return false
end
"""

_RELEASE = "return redis.call('HDEL', at('reserved', ARGV[1]), ARGV[2])"

_UNREFERENCED = "return redis.call('ZRANGEBYSCORE', at('unreferenced'), '-inf', now() - tonumber(ARGV[1]))"

_IS_NEEDED = _NEEDED + "return is_needed(ARGV[1]) and 1 or 0"

_CONDEMN = (
    _NEEDED
    + """
local digest, grace, seconds = unpack(ARGV)
if is_needed(digest) then return 0 end
local since = redis.call('ZSCORE', at('unreferenced'), digest)
if not since or tonumber(since) > now() - tonumber(grace) then return 0 end
local condemned = redis.call('HGET', at('condemned'), digest)
if condemned and tonumber(condemned) > now() then return 0 end
redis.call('HSET', at('condemned'), digest, now() + tonumber(seconds))
return 1
"""
)

_ABSOLVE = """
redis.call('HDEL', at('condemned'), ARGV[1])
redis.call('ZREM', at('unreferenced'), ARGV[1])
"""

_NOTE = """
for _, digest in ipairs(ARGV) do
    if redis.call('HEXISTS', at('references'), digest) == 0 then
        redis.call('ZADD', at('unreferenced'), 'NX', now(), digest)
    end
end
"""


class References:
    """The digests that versions of any tenant refer to, and the locks by digest."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._reserve = Script(redis, _RESERVE)
        self._release = Script(redis, _RELEASE)
        self._unreferenced = Script(redis, _UNREFERENCED)
        self._is_needed = Script(redis, _IS_NEEDED)
        self._condemn = Script(redis, _CONDEMN)
        self._absolve = Script(redis, _ABSOLVE)
        self._note = Script(redis, _NOTE)

    @asynccontextmanager
    async def reserved(self, digest: bytes) -> AsyncIterator[None]:
        """Keeps collectors from a blob while the block puts it into the store and registers a version of it.

        Waits for a collector that is deleting it just now.
        """
        upload = secrets.token_hex(8)
        while not await self._reserve(digest.hex(), upload, _RESERVED_S):
            await asyncio.sleep(_RETRY_S)
        try:
            yield
        finally:
            await self._release(digest.hex(), upload)

    async def unreferenced(self, grace_s: int) -> Sequence[bytes]:
        """The digests that nobody has referred to for `grace_s` seconds: candidates for `condemn`."""
        return [bytes.fromhex(text(digest)) for digest in await self._unreferenced(grace_s)]

    async def is_needed(self, digest: bytes) -> bool:
        """Whether any version of any tenant has this digest, or an upload relies on its blob now."""
        return bool(await self._is_needed(digest.hex()))

    async def condemn(self, digest: bytes, grace_s: int) -> bool:
        """Whether the caller, and nobody else, may delete the blob now. It calls `absolve` when it has.

        A caller that was stopped for long may do so later than that holds: what it has taken out of the store
        it asks `is_needed` about. Whoever comes after that brings a blob of its own.
        """
        return bool(await self._condemn(digest.hex(), grace_s, _CONDEMNED_S))

    async def absolve(self, digest: bytes) -> None:
        """Says that a condemned blob is gone, so that it may be uploaded again."""
        await self._absolve(digest.hex())

    async def unknown(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Those that nobody refers to, and whose grace has not begun."""
        if not digests:
            return []
        names = [digest.hex() for digest in digests]
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hmget(REFERENCES, names)
            pipeline.zmscore(UNREFERENCED, names)
            counts, since = await pipeline.execute()
        found = zip(digests, counts, since, strict=True)
        return [digest for digest, count, at in found if count is None and at is None]

    async def note_orphans(self, digests: Iterable[bytes]) -> None:
        """Begins the grace of blobs that the store holds and nobody refers to. Of others nothing changes."""
        found = [digest.hex() for digest in digests]
        if found:
            await self._note(*found)
