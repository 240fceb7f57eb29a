"""Which files tenants keep: the sole writer of these keys. What is in them lies in the store.

    loraplex:{<tenant>}:files         ZSET    ids by when they were made, in ms
    loraplex:{<tenant>}:file:<id>     HASH    filename, purpose, bytes, created_at, expires_at (s), users
    loraplex:{<tenant>}:file_bytes    STRING  what all of them take
    loraplex:files                    ZSET    `<tenant> <id>` by expires_at

A file's bytes are in the store before it is listed here, under its own id, which is given out once only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gateway.accounts.entry import as_text
from gateway.accounts.windows import root_of
from gateway.batches.pages import Page, ids_of, is_id, page_of

ALL_FILES = "loraplex:files"
MAX_FILES = 10_000
"""Files of a tenant; what batches write may be beyond."""
KEPT_S = 30 * 24 * 3600
"""How long a file is kept that says nothing else."""

ADD_FILE = """
-- Adds a file, unless it is there. `root` is its tenant's; `fields` are those of its hash.
local function add_file(root, tenant, id, created_ms, expires_at, bytes, fields)
    local file = root .. ':file:' .. id
    if redis.call('EXISTS', file) == 1 then return end
    redis.call('HSET', file, unpack(fields))
    redis.call('ZADD', root .. ':files', created_ms, id)
    redis.call('INCRBY', root .. ':file_bytes', bytes)
    redis.call('ZADD', 'loraplex:files', expires_at, tenant .. ' ' .. id)
end
"""
"""Goes before scripts that add files."""

_ADD = (
    ADD_FILE
    + """
-- KEYS: the tenant's root. ARGV: tenant, id, created_ms, expires_at, bytes, the most that all may take or '',
-- how many there may be, the fields of its hash. Replies with what the others take by now; -1 when it was
-- added, -2 when there are too many.
-- A client of Redis repeats a call whose connection broke: the file's own bytes are no reason to refuse it.
if redis.call('EXISTS', KEYS[1] .. ':file:' .. ARGV[2]) == 1 then return -1 end
if redis.call('ZCARD', KEYS[1] .. ':files') >= tonumber(ARGV[7]) then return -2 end
local used = tonumber(redis.call('GET', KEYS[1] .. ':file_bytes') or 0)
if ARGV[6] ~= '' and used + ARGV[5] > tonumber(ARGV[6]) then return used end
add_file(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], {unpack(ARGV, 8)})
return -1
"""
)
_REMOVE = """
-- KEYS: the tenant's root. ARGV: tenant, id, whether it goes even if it is in use.
-- Replies with 1: it is gone now; 0: it is in use; -1: there was none.
local file = KEYS[1] .. ':file:' .. ARGV[2]
redis.call('ZREM', 'loraplex:files', ARGV[1] .. ' ' .. ARGV[2])
local found = redis.call('HMGET', file, 'bytes', 'users', 'expires_at')
if not found[1] then return -1 end
if tonumber(found[2]) > 0 and ARGV[3] == '0' then
    redis.call('ZADD', 'loraplex:files', found[3], ARGV[1] .. ' ' .. ARGV[2])
    return 0
end
redis.call('DEL', file)
redis.call('ZREM', KEYS[1] .. ':files', ARGV[2])
redis.call('DECRBY', KEYS[1] .. ':file_bytes', found[1])
return 1
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file. Times are Unix times in seconds."""

    tenant: str
    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    @property
    def name(self) -> str:
        """What the store knows it by."""
        return f"{self.tenant}/{self.id}"

    def to_fields(self) -> list[str | int]:
        """Its hash in Redis, flat."""
        return [
            *("filename", self.filename, "purpose", self.purpose, "bytes", self.bytes),
            *("created_at", self.created_at, "expires_at", self.expires_at, "users", 0),
        ]

    def to_dict(self) -> dict[str, object]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileInUse(Exception):
    """A batch that has not ended reads it."""


class TooManyFiles(Exception):
    """The tenant has MAX_FILES files."""


class QuotaExceeded(Exception):
    """The tenant's files would take more than they may. `used`: what they take without this one."""

    def __init__(self, used: int) -> None:
        super().__init__(f"{used} bytes are taken")
        self.used = used


def new_file(tenant: str, filename: str, purpose: str, nbytes: int, kept_s: int = KEPT_S) -> StoredFile:
    """A file of now, with an id that nobody has."""
    now = int(time.time())
    return StoredFile(tenant, f"file-{secrets.token_hex(12)}", filename, purpose, nbytes, now, now + kept_s)


class Files:
    """Reads and changes the records. Methods raise redis' own errors when Redis is away."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._add = redis.register_script(_ADD)
        self._remove = redis.register_script(_REMOVE)

    async def add(self, file: StoredFile, *, most_bytes: int | None) -> None:
        """Lists a file whose bytes are in the store. Raises QuotaExceeded, TooManyFiles."""
        used = await self._add(
            keys=[root_of(file.tenant)],
            args=[
                *(file.tenant, file.id, int(time.time() * 1000), file.expires_at, file.bytes),
                *("" if most_bytes is None else most_bytes, MAX_FILES, *file.to_fields()),
            ],
        )
        if used == -2:
            raise TooManyFiles
        if used >= 0:
            raise QuotaExceeded(used)

    async def find(self, tenant: str, file_id: str, *, even_expired: bool = False) -> StoredFile | None:
        """The tenant's file; None when there is none, or its time is over."""
        if not is_id(file_id):
            return None
        found = await self._redis.hgetall(f"{root_of(tenant)}:file:{file_id}")  # type: ignore[misc]
        if not found:
            return None
        file = _file_of(tenant, file_id, found)
        return file if even_expired or file.expires_at > time.time() else None

    async def page(
        self, tenant: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None = None
    ) -> Page[StoredFile]:
        """Some of the tenant's files, of all purposes or of one. Raises UnknownCursor."""

        async def find(file_id: str) -> StoredFile | None:
            file = await self.find(tenant, file_id)
            return file if file and purpose in (None, file.purpose) else None

        return await page_of(
            self._redis,
            f"{root_of(tenant)}:files",
            find,
            after=after,
            limit=limit,
            newest_first=newest_first,
        )

    async def used_bytes(self, tenant: str) -> int:
        """What all of the tenant's files take."""
        return int(await self._redis.get(f"{root_of(tenant)}:file_bytes") or 0)

    async def count(self, tenant: str) -> int:
        """How many files the tenant has."""
        return int(await self._redis.zcard(f"{root_of(tenant)}:files"))

    async def remove(self, tenant: str, file_id: str, *, even_in_use: bool = False) -> bool:
        """Takes a file off the list; its bytes are the caller's to delete. False: there was none.

        Raises FileInUse.
        """
        done = await self._remove(keys=[root_of(tenant)], args=[tenant, file_id, int(even_in_use)])
        if done == 0:
            raise FileInUse
        return done == 1

    async def expired(self, most: int, *, after: int = 0) -> Sequence[tuple[str, str]]:
        """Files whose time is over, as tenant and id, the longest first: at most so many, behind the first
        `after` of them. By Redis' clock: a gateway's may be wrong, and what is removed is gone.
        """
        seconds, _ = await self._redis.time()
        found: list[Any] = await self._redis.zrangebyscore(ALL_FILES, "-inf", seconds, start=after, num=most)
        return [_pair(member) for member in found]

    async def of_tenant(self, tenant: str) -> Sequence[str]:
        """The ids of all files of a tenant."""
        return await ids_of(self._redis, f"{root_of(tenant)}:files")

    async def exists(self, tenant: str, file_id: str) -> bool:
        """Whether it is listed, though its time may be over."""
        return bool(await self._redis.exists(f"{root_of(tenant)}:file:{file_id}"))


def _pair(member: bytes | str) -> tuple[str, str]:
    tenant, _, file_id = as_text(member).partition(" ")
    return tenant, file_id


def _file_of(tenant: str, file_id: str, found: Mapping[bytes | str, bytes | str]) -> StoredFile:
    text = {as_text(name): as_text(value) for name, value in found.items()}
    return StoredFile(
        tenant,
        file_id,
        text["filename"],
        text["purpose"],
        int(text["bytes"]),
        int(text["created_at"]),
        int(text["expires_at"]),
    )
