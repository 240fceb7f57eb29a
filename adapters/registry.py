"""Which names a tenant has, which version each is at, and which blobs anybody still needs: in Redis.

    loraplex:{adapters}:live:<tenant>               HASH  name → version that the bare name means
    loraplex:{adapters}:versions:<tenant>:<name>    HASH  version → record (JSON; never changed once written)
    loraplex:{adapters}:last:<tenant>               HASH  name → highest version ever given; outlives a delete
    loraplex:{adapters}:references                  HASH  digest in hex → how many versions, of all tenants,
    have it

Each verb is one script, so that it is atomic and one round trip; the braces keep the keys in one slot of a
Redis Cluster. Blobs are elsewhere: `adapters.lifecycle` keeps both in step.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from adapters.identity import check_name
from adapters.validation import AdapterSummary

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ROOT = "loraplex:{adapters}:"
_REFERENCES = _ROOT + "references"

# KEYS: live, versions, last, references. ARGV: name, record, digest. → the new version's number.
_ADD = """
local version = redis.call('HINCRBY', KEYS[3], ARGV[1], 1)
redis.call('HSET', KEYS[2], version, ARGV[2])
redis.call('HSET', KEYS[1], ARGV[1], version)
redis.call('HINCRBY', KEYS[4], ARGV[3], 1)
return version
"""

# KEYS: live, versions. ARGV: name, version or ''. → {version, record}, or nothing.
_RESOLVE = """
local version = ARGV[2]
if version == '' then version = redis.call('HGET', KEYS[1], ARGV[1]) end
local record = version and redis.call('HGET', KEYS[2], version)
if record then return {version, record} end
return {}
"""

# KEYS: live. ARGV: prefix of the tenant's versions keys. → {name, version, record, name, …}.
_LIST = """
local result, live = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #live, 2 do
    local record = redis.call('HGET', ARGV[1] .. live[i], live[i + 1])
    if record then
        for _, item in ipairs({live[i], live[i + 1], record}) do result[#result + 1] = item end
    end
end
return result
"""

# KEYS: live, versions. ARGV: name. → {live version, version, record, version, record, …}, or nothing.
_SHOW = """
local live = redis.call('HGET', KEYS[1], ARGV[1])
if not live then return {} end
local result = redis.call('HGETALL', KEYS[2])
table.insert(result, 1, live)
return result
"""

# KEYS: live, versions, references. ARGV: name. → {whether it was there, digests that nobody refers to now …}.
_DELETE = """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return {0} end
local result = {1}
for _, record in ipairs(redis.call('HVALS', KEYS[2])) do
    local digest = cjson.decode(record).digest
    if redis.call('HINCRBY', KEYS[3], digest, -1) <= 0 then
        redis.call('HDEL', KEYS[3], digest)
        result[#result + 1] = digest
    end
end
redis.call('DEL', KEYS[2])
return result
"""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable upload under a tenant's name."""

    tenant: str
    name: str
    version: int
    digest: bytes
    rank: int
    nbytes: int
    target_modules: tuple[str, ...]
    base_model: str | None
    created_at: int
    """Unix time in seconds."""

    @property
    def ref(self) -> str:
        """As a client writes it: ``sql@3``."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class AdapterHistory:
    """All versions of a name, oldest first, and the one that the bare name means."""

    live: AdapterVersion
    versions: tuple[AdapterVersion, ...]


class Registry:
    """The adapters of all tenants. Names are checked (`InvalidName`); tenants come from authentication."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._add = redis.register_script(_ADD)
        self._resolve = redis.register_script(_RESOLVE)
        self._list = redis.register_script(_LIST)
        self._show = redis.register_script(_SHOW)
        self._delete = redis.register_script(_DELETE)

    async def add_version(self, tenant: str, name: str, summary: AdapterSummary) -> AdapterVersion:
        """Gives the name a new version and makes it live. Its blob must be in the store already."""
        live, versions, last = _keys(tenant, name)
        record = json.dumps(
            {
                "digest": summary.digest.hex(),
                "rank": summary.rank,
                "nbytes": summary.nbytes,
                "target_modules": summary.target_modules,
                "base_model": summary.base_model,
                "created_at": int(time.time()),
            },
            separators=(",", ":"),
        )
        keys, args = [live, versions, last, _REFERENCES], [name, record, summary.digest.hex()]
        return _version(tenant, name, await self._add(keys=keys, args=args), record)

    async def resolve(self, tenant: str, name: str, version: int | None = None) -> AdapterVersion | None:
        """The version of the tenant's name (None: the live one), or None if there is none such."""
        live, versions, _ = _keys(tenant, name)
        args = [name, "" if version is None else str(version)]
        found = await self._resolve(keys=[live, versions], args=args)
        return _version(tenant, name, *found) if found else None

    async def list(self, tenant: str) -> Sequence[AdapterVersion]:
        """The live version of each of the tenant's names, by name."""
        flat = await self._list(keys=[_ROOT + f"live:{_checked(tenant)}"], args=[_versions_prefix(tenant)])
        found = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return sorted(
            (_version(tenant, _text(name), *rest) for name, *rest in found), key=lambda item: item.name
        )

    async def show(self, tenant: str, name: str) -> AdapterHistory | None:
        """All versions of the tenant's name, or None if there is no such name."""
        live, versions, _ = _keys(tenant, name)
        found = await self._show(keys=[live, versions], args=[name])
        if not found:
            return None
        pairs = zip(found[1::2], found[2::2], strict=True)
        history = sorted((_version(tenant, name, *pair) for pair in pairs), key=lambda item: item.version)
        return AdapterHistory(
            live=next(item for item in history if item.version == int(found[0])), versions=tuple(history)
        )

    async def delete(self, tenant: str, name: str) -> Sequence[bytes] | None:
        """Forgets a name with all its versions; their numbers are not given again.

        Returns the digests that no version of any tenant refers to any more: their blobs may go. None if
        there is no such name.
        """
        live, versions, _ = _keys(tenant, name)
        found, *digests = await self._delete(keys=[live, versions, _REFERENCES], args=[name])
        return [bytes.fromhex(_text(digest)) for digest in digests] if found else None

    async def is_referenced(self, digest: bytes) -> bool:
        """Whether any version of any tenant has this digest."""
        return bool(await self._redis.hexists(_REFERENCES, digest.hex()))


def _keys(tenant: str, name: str) -> tuple[str, str, str]:
    """The keys live, versions and last."""
    check_name(name)
    return (
        _ROOT + f"live:{_checked(tenant)}",
        _versions_prefix(tenant) + name,
        _ROOT + f"last:{tenant}",
    )


def _versions_prefix(tenant: str) -> str:
    return _ROOT + f"versions:{tenant}:"


def _checked(tenant: str) -> str:
    """A colon in a tenant's id would let its keys meet another's."""
    if _TENANT.fullmatch(tenant) is None:
        raise ValueError(f"{tenant!a} is no tenant id")
    return tenant


def _version(tenant: str, name: str, version: Any, record: str | bytes) -> AdapterVersion:
    values = json.loads(record)
    return AdapterVersion(
        tenant=tenant,
        name=name,
        version=int(version),
        digest=bytes.fromhex(values["digest"]),
        rank=values["rank"],
        nbytes=values["nbytes"],
        target_modules=tuple(values["target_modules"]),
        base_model=values["base_model"],
        created_at=values["created_at"],
    )


def _text(value: str | bytes) -> str:
    """Replies are text or bytes, as the client was made."""
    return value.decode() if isinstance(value, bytes) else value
