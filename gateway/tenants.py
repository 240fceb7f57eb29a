"""Tenants in Redis: the sole writer of these keys.

    loraplex:tenants            set of tenant ids
    loraplex:tenant:<id>        hash: name, weight, prefix_sharing, created, suspended, max_pinned_adapters,
                                and as JSON limits, adapter_limits (by adapter name), base_models ('' for all)
    loraplex:auth               channel: `tenant:<id>` and `key:<id>`, published with each change

Each write and its message are one Lua script, so that nobody
sees half of a change, or a change that was not pushed.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from redis.asyncio import Redis

from gateway.limits import (
    NO_LIMITS,
    RateLimits,
    TenantLimits,
    adapter_limits_from_json,
    adapter_limits_to_json,
    tenant_limits_from_json,
)

AUTH_CHANNEL = "loraplex:auth"
_INDEX = "loraplex:tenants"
_LONGEST_ID = 63

DEFAULT_PINS = 2

_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""
_UPDATE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PUBLISH', ARGV[2], 'tenant:' .. ARGV[1])
return 1
"""
_DELETE = """
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', ARGV[2], 'tenant:' .. ARGV[1])
return redis.call('DEL', KEYS[1])
"""


class PrefixSharing(StrEnum):
    """Who may share KV blocks of equal prefixes with a tenant."""

    PRIVATE = "private"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer. `created` is in Unix seconds; `weight` is
    its share of an engine when several have work waiting."""

    id: str
    name: str
    weight: float = 1.0
    prefix_sharing: PrefixSharing = PrefixSharing.PRIVATE
    created: int = 0
    suspended: bool = False
    max_pinned_adapters: int = DEFAULT_PINS
    """How many of its adapters engines keep resident, used or not."""
    limits: TenantLimits = NO_LIMITS
    adapter_limits: Mapping[str, RateLimits] = field(default_factory=dict)
    """Rates of single adapters, by their names in the tenant's name space."""
    base_models: frozenset[str] | None = None
    """The base models that it may use, alone and below its adapters; None for all."""


class TenantExists(Exception):
    """A tenant of this id is there already."""


def tenant_key(tenant_id: str) -> str:
    """The Redis key of a tenant's document."""
    return f"loraplex:tenant:{tenant_id}"


class Tenants:
    """Creates, reads, changes and deletes tenants. Methods raise redis' own errors when Redis is away."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._create = redis.register_script(_CREATE)
        self._update = redis.register_script(_UPDATE)
        self._delete = redis.register_script(_DELETE)

    async def create(
        self,
        name: str,
        *,
        tenant_id: str | None = None,
        weight: float = 1.0,
        prefix_sharing: PrefixSharing = PrefixSharing.PRIVATE,
        max_pinned_adapters: int = DEFAULT_PINS,
    ) -> Tenant:
        """Adds a tenant. Without an id it gets its name's, `acme-ltd` for 'Acme Ltd', or one that is made up
        when that is empty or taken. Raises TenantExists when the given id is taken.
        """
        made_up = f"t-{secrets.token_hex(6)}"
        for candidate in [tenant_id] if tenant_id else [_slug(name) or made_up, made_up]:
            tenant = Tenant(
                candidate,
                name,
                weight,
                prefix_sharing,
                created=int(time.time()),
                max_pinned_adapters=max_pinned_adapters,
            )
            if await self._create(
                keys=[tenant_key(candidate), _INDEX], args=[candidate, *_to_document(tenant)]
            ):
                return tenant
        raise TenantExists(tenant_id)

    async def get(self, tenant_id: str) -> Tenant | None:
        """Returns the tenant, or None when there is none of this id."""
        document = await read_document(self._redis, tenant_key(tenant_id))
        return _from_document(tenant_id, document) if document else None

    async def all(self) -> list[Tenant]:
        """Returns all tenants, oldest first."""
        documents = await read_documents(self._redis, _INDEX, tenant_key)
        found = [_from_document(tenant_id, document) for tenant_id, document in documents.items()]
        return sorted(found, key=lambda tenant: (tenant.created, tenant.id))

    async def update(self, tenant_id: str, changes: Mapping[str, str | float | bool]) -> Tenant | None:
        """Writes the given fields and tells every gateway. Returns
        the tenant after it, or None when there is none."""
        if changes:
            fields = _to_fields(changes)
            await self._update(keys=[tenant_key(tenant_id)], args=[tenant_id, AUTH_CHANNEL, *fields])
        return await self.get(tenant_id)

    async def delete(self, tenant_id: str) -> bool:
        """Removes the tenant's document, and nothing else of it. Returns whether there was one."""
        return bool(await self._delete(keys=[tenant_key(tenant_id), _INDEX], args=[tenant_id, AUTH_CHANNEL]))


def _slug(name: str) -> str:
    """Returns a name as an id: ASCII letters and digits, without accents, all else as single dashes."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return "-".join(re.findall("[a-z0-9]+", plain))[:_LONGEST_ID].rstrip("-")


def _to_fields(values: Mapping[str, str | float | bool]) -> list[str]:
    fields: list[str] = []
    for key, value in values.items():
        fields += [key, str(int(value)) if isinstance(value, bool) else str(value)]
    return fields


def _to_document(tenant: Tenant) -> list[str]:
    plain = {
        "name": tenant.name,
        "weight": tenant.weight,
        "prefix_sharing": tenant.prefix_sharing.value,
        "created": tenant.created,
        "suspended": tenant.suspended,
        "max_pinned_adapters": tenant.max_pinned_adapters,
        "limits": tenant.limits.to_json(),
        "adapter_limits": adapter_limits_to_json(tenant.adapter_limits),
        "base_models": "" if tenant.base_models is None else json.dumps(sorted(tenant.base_models)),
    }
    return _to_fields(plain)


def _from_document(tenant_id: str, fields: Mapping[str, str]) -> Tenant:
    return Tenant(
        id=tenant_id,
        name=fields["name"],
        weight=float(fields["weight"]),
        prefix_sharing=PrefixSharing(fields["prefix_sharing"]),
        created=int(fields["created"]),
        suspended=fields["suspended"] == "1",
        max_pinned_adapters=int(fields.get("max_pinned_adapters", DEFAULT_PINS)),
        limits=tenant_limits_from_json(fields.get("limits", "")),
        adapter_limits=adapter_limits_from_json(fields.get("adapter_limits", "")),
        base_models=frozenset(json.loads(bases)) if (bases := fields.get("base_models")) else None,
    )


async def read_document(redis: Redis, key: str) -> dict[str, str]:
    """Returns a hash as text; empty when the key is not there."""
    return _decoded(await redis.hgetall(key))


async def read_documents(redis: Redis, index: str, key_of: Callable[[str], str]) -> dict[str, dict[str, str]]:
    """Returns the hash of each member of a set, by member, without those deleted meanwhile."""
    members = sorted(_text(member) for member in await redis.smembers(index))
    async with redis.pipeline(transaction=False) as pipe:
        for member in members:
            pipe.hgetall(key_of(member))
        documents = await pipe.execute()
    found = zip(members, documents, strict=True)
    return {member: _decoded(document) for member, document in found if document}


def _decoded(document: Mapping[bytes | str, bytes | str]) -> dict[str, str]:
    return {_text(key): _text(value) for key, value in document.items()}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
