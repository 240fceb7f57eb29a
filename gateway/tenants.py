"""Tenants in Redis: the sole writer of these keys.

    loraplex:tenants            set of tenant ids
    loraplex:tenants:retired    set of the ids of those that were deleted, which are not given again
    loraplex:tenant:<id>        hash: name, weight, prefix_sharing, created, suspended, max_pinned_adapters,
                                and as JSON limits, adapter_limits (by adapter name), base_models ('' for all)
    loraplex:auth               channel: `tenant:<id>` and `key:<id>`, published with each change

Each write, its message and its entry in the audit are one Lua script, so that nobody sees half of a change,
or one that was not pushed or not noted.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypedDict

from redis.asyncio import Redis

from gateway.audit import APPEND, AUDIT_STREAM, GATEWAY, Actor, Change
from gateway.limits import (
    NO_LIMITS,
    NO_RATES,
    InvalidLimit,
    RateLimits,
    TenantLimits,
    adapter_limits_from_json,
    adapter_limits_to_json,
    rates_from_mapping,
    tenant_limits_from_json,
    tenant_limits_from_mapping,
)

AUTH_CHANNEL = "loraplex:auth"
_INDEX = "loraplex:tenants"
_RETIRED = "loraplex:tenants:retired"
_LONGEST_ID = 63

DEFAULT_PINS = 2
MOST_ADAPTER_LIMITS = 1000

_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
if redis.call('SISMEMBER', KEYS[4], ARGV[1]) == 1 then return -1 end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('SADD', KEYS[2], ARGV[1])
append_audit(KEYS[3], ARGV[2])
return 1
"""
# ARGV[4]: the fields that are about to change, as they were when the change was made up.
_UPDATE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
for field, value in pairs(cjson.decode(ARGV[4])) do
    if (redis.call('HGET', KEYS[1], field) or '') ~= value then return 0 end
end
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
redis.call('PUBLISH', ARGV[2], 'tenant:' .. ARGV[1])
append_audit(KEYS[2], ARGV[3])
return 1
"""
_DELETE = """
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', ARGV[2], 'tenant:' .. ARGV[1])
if redis.call('DEL', KEYS[1]) == 0 then return 0 end
redis.call('SADD', KEYS[4], ARGV[1])
append_audit(KEYS[3], ARGV[3])
return 1
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
    """Rates of single adapters, as the tenant names them: `sql`, and `acme/sql` for a granted one."""
    base_models: frozenset[str] | None = None
    """The base models that it may use, alone and below its adapters; None for all."""


class TenantChanges(TypedDict, total=False):
    """What to change of a tenant; what is absent stays.

    Of `limits` only those named change, and None unsets one; None in place of them all unsets all. The same
    goes for `adapter_limits`, which name adapters first.
    """

    name: str
    weight: float
    prefix_sharing: PrefixSharing
    max_pinned_adapters: int
    suspended: bool
    limits: Mapping[str, int | None] | None
    adapter_limits: Mapping[str, Mapping[str, int | None] | None] | None
    base_models: Collection[str] | None


class TenantExists(Exception):
    """A tenant of this id is there already."""


class TenantRetired(Exception):
    """A tenant of this id was there. Its ledger and audit stay, and are nobody else's to see."""


def tenant_key(tenant_id: str) -> str:
    """The Redis key of a tenant's document."""
    return f"loraplex:tenant:{tenant_id}"


class Tenants:
    """Creates, reads, changes and deletes tenants. `by` goes into the audit, with what was changed.

    Methods raise redis' own errors when Redis is away.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._create = redis.register_script(APPEND + _CREATE)
        self._update = redis.register_script(APPEND + _UPDATE)
        self._delete = redis.register_script(APPEND + _DELETE)

    async def create(
        self,
        name: str,
        *,
        tenant_id: str | None = None,
        weight: float = 1.0,
        prefix_sharing: PrefixSharing = PrefixSharing.PRIVATE,
        max_pinned_adapters: int = DEFAULT_PINS,
        limits: TenantLimits = NO_LIMITS,
        base_models: Collection[str] | None = None,
        by: Actor = GATEWAY,
    ) -> Tenant:
        """Adds a tenant. Without an id it gets its name's, `acme-ltd` for 'Acme Ltd', or one that is made up
        when that is empty, taken or retired. Raises TenantExists when the given id is taken, TenantRetired
        when it was a deleted tenant's.
        """
        created, made_up = 0, f"t-{secrets.token_hex(6)}"
        for candidate in [tenant_id] if tenant_id else [id_made_of(name) or made_up, made_up]:
            tenant = Tenant(
                candidate,
                name,
                weight,
                prefix_sharing,
                created=int(time.time()),
                max_pinned_adapters=max_pinned_adapters,
                limits=limits,
                base_models=None if base_models is None else frozenset(base_models),
            )
            fields = [item for pair in _to_document(tenant).items() for item in pair]
            entry = Change("tenant.create", candidate, candidate, {}, describe(tenant)).to_entry(by)
            redis_keys = [tenant_key(candidate), _INDEX, AUDIT_STREAM, _RETIRED]
            created = await self._create(keys=redis_keys, args=[candidate, entry, *fields])
            if created == 1:
                return tenant
        raise TenantRetired(tenant_id) if created == -1 else TenantExists(tenant_id)

    async def get(self, tenant_id: str) -> Tenant | None:
        """Returns the tenant, or None when there is none of this id."""
        document = await read_document(self._redis, tenant_key(tenant_id))
        return from_document(tenant_id, document) if document else None

    async def is_retired(self, tenant_id: str) -> bool:
        """Whether a tenant of this id was there, and is deleted."""
        return bool(await self._redis.sismember(_RETIRED, tenant_id))

    async def all(self) -> list[Tenant]:
        """Returns all tenants, oldest first."""
        documents = await read_documents(self._redis, _INDEX, tenant_key)
        found = [from_document(tenant_id, document) for tenant_id, document in documents.items()]
        return sorted(found, key=lambda tenant: (tenant.created, tenant.id))

    async def update(self, tenant_id: str, changes: TenantChanges, *, by: Actor = GATEWAY) -> Tenant | None:
        """Makes the changes and tells every gateway. Returns the tenant after it, or None when there is none.

        Changes of the same tenant at once are all made, one after the other. Raises InvalidLimit.
        """
        while True:
            document = await read_document(self._redis, tenant_key(tenant_id))
            if not document:
                return None
            before = from_document(tenant_id, document)
            after = _changed(before, changes)
            if after == before:
                return before
            if await self._replace(document, before, after, by):
                return after

    async def move_adapter_limits(
        self, tenant_id: str, name: str, target: str, *, by: Actor = GATEWAY
    ) -> None:
        """Has an adapter's limits hold for another name of it. Where that has some, the lower ones hold."""
        tenant = await self.get(tenant_id)
        rates = tenant.adapter_limits.get(name) if tenant is not None else None
        if tenant is None or rates is None:
            return
        there = tenant.adapter_limits.get(target, NO_RATES).that_are_set()
        lower = {kind: min(most, there.get(kind, most)) for kind, most in rates.that_are_set().items()}
        await self.update(tenant_id, {"adapter_limits": {name: None, target: {**there, **lower}}}, by=by)

    async def _replace(self, document: Mapping[str, str], before: Tenant, after: Tenant, by: Actor) -> bool:
        """Writes what differs. False: somebody else was faster, and has changed the same or deleted it."""
        old, new = _to_document(before), _to_document(after)
        names = [name for name in new if new[name] != old[name]]
        expected = {name: document.get(name, "") for name in names}
        entry = Change(_action_of(names, after), after.id, after.id, describe(before), describe(after))
        fields = [item for name in names for item in (name, new[name])]
        return bool(
            await self._update(
                keys=[tenant_key(after.id), AUDIT_STREAM],
                args=[after.id, AUTH_CHANNEL, entry.to_entry(by), json.dumps(expected), *fields],
            )
        )

    async def delete(self, tenant_id: str, *, by: Actor = GATEWAY) -> bool:
        """Removes the tenant's document, and nothing else of it; its id is retired.

        Returns whether there was one.
        """
        tenant = await self.get(tenant_id)
        if tenant is None:
            return False
        entry = Change("tenant.delete", tenant_id, tenant_id, describe(tenant), {}).to_entry(by)
        redis_keys = [tenant_key(tenant_id), _INDEX, AUDIT_STREAM, _RETIRED]
        return bool(await self._delete(keys=redis_keys, args=[tenant_id, AUTH_CHANNEL, entry]))


def describe(tenant: Tenant) -> dict[str, Any]:
    """Returns what can be changed of a tenant, as JSON has it; limits that are not set are left out."""
    return {
        "name": tenant.name,
        "weight": tenant.weight,
        "prefix_sharing": tenant.prefix_sharing.value,
        "max_pinned_adapters": tenant.max_pinned_adapters,
        "suspended": tenant.suspended,
        "limits": tenant.limits.that_are_set(),
        "adapter_limits": {name: rates.that_are_set() for name, rates in tenant.adapter_limits.items()},
        "base_models": None if tenant.base_models is None else sorted(tenant.base_models),
    }


def _changed(tenant: Tenant, changes: TenantChanges) -> Tenant:
    """Returns the tenant with the changes made. Raises InvalidLimit."""
    values: dict[str, Any] = dict(changes)
    if "limits" in changes:
        given = changes["limits"]
        old = tenant.limits.that_are_set() if given is not None else {}
        values["limits"] = tenant_limits_from_mapping({**old, **(given or {})})
    if "adapter_limits" in changes:
        given_rates = changes["adapter_limits"]
        rates = dict(tenant.adapter_limits) if given_rates is not None else {}
        for name, some in (given_rates or {}).items():
            kept = rates.get(name, NO_RATES).that_are_set() if some is not None else {}
            rates[name] = rates_from_mapping({**kept, **(some or {})})
        rates = {name: some for name, some in rates.items() if some != NO_RATES}
        if len(rates) > MOST_ADAPTER_LIMITS:
            message = (
                f"At most {MOST_ADAPTER_LIMITS} adapters of a tenant have limits of their own. Unset some."
            )
            raise InvalidLimit("adapter_limits", message)
        values["adapter_limits"] = rates
    if "base_models" in changes:
        names = changes["base_models"]
        values["base_models"] = None if names is None else frozenset(names)
    return replace(tenant, **values)


def _action_of(names: Sequence[str], after: Tenant) -> str:
    """What the audit calls a change of these fields."""
    if list(names) != ["suspended"]:
        return "tenant.update"
    return "tenant.suspend" if after.suspended else "tenant.resume"


def id_made_of(name: str) -> str:
    """Returns a name as an id: ASCII letters and digits, without accents, all else as single dashes; empty
    for a name that has none of them.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return "-".join(re.findall("[a-z0-9]+", plain))[:_LONGEST_ID].rstrip("-")


def _to_document(tenant: Tenant) -> dict[str, str]:
    return {
        "name": tenant.name,
        "weight": str(tenant.weight),
        "prefix_sharing": tenant.prefix_sharing.value,
        "created": str(tenant.created),
        "suspended": str(int(tenant.suspended)),
        "max_pinned_adapters": str(tenant.max_pinned_adapters),
        "limits": tenant.limits.to_json(),
        "adapter_limits": adapter_limits_to_json(tenant.adapter_limits),
        "base_models": "" if tenant.base_models is None else json.dumps(sorted(tenant.base_models)),
    }


def from_document(tenant_id: str, fields: Mapping[str, str]) -> Tenant:
    """Returns the tenant of a hash as it is stored; one written before a field was is read without."""
    bases = fields.get("base_models")
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
        base_models=frozenset(json.loads(bases)) if bases else None,
    )


async def read_document(redis: Redis, key: str) -> dict[str, str]:
    """Returns a hash as text; empty when the key is not there."""
    return _decoded(await redis.hgetall(key))


async def read_documents(redis: Redis, index: str, key_of: Callable[[str], str]) -> dict[str, dict[str, str]]:
    """Returns the hash of each member of a set, by member, without those deleted meanwhile."""
    members = sorted(text(member) for member in await redis.smembers(index))
    async with redis.pipeline(transaction=False) as pipe:
        for member in members:
            pipe.hgetall(key_of(member))
        documents = await pipe.execute()
    found = zip(members, documents, strict=True)
    return {member: _decoded(document) for member, document in found if document}


def _decoded(document: Mapping[bytes | str, bytes | str]) -> dict[str, str]:
    return {text(key): text(value) for key, value in document.items()}


def text(value: bytes | str) -> str:
    """Replies are text or bytes, as the client was made."""
    return value.decode() if isinstance(value, bytes) else value
