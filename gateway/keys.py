"""API keys in Redis: the sole writer of these keys.

    loraplex:key:<id>               hash: digest, tenant, scopes, created, expires, note, limits (JSON)
    loraplex:keys:<tenant>          set of the tenant's key ids
    loraplex:replaced:<id>          the id of the key that a rotated one was replaced by; goes after some days

A key reads `lpx_<id>_<secret>`. The secret has 256 random bits; only the SHA-256 of the whole key is stored,
so a slow password hash would add nothing. The key itself is returned once, by `create` or `rotate`, and is
in no log and no error. The operator's key, when the gateway made it, is the document of id `operator`; it
belongs to no tenant. Each write, its message on the channel and its entry in the audit are one script.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gateway.audit import APPEND, AUDIT_STREAM, GATEWAY, Actor, Change
from gateway.limits import NO_RATES, RateLimits, rates_from_json
from gateway.tenants import AUTH_CHANNEL, read_document, read_documents, tenant_key

DEFAULT_SCOPES = frozenset({"inference", "adapters"})
OPERATOR_ID = "operator"
NO_TENANT = ""
_REPLACED_S = 8 * 24 * 3600
"""For how long after its end it is known what replaced a key: longer than a batch that it made may take."""

_KEY = re.compile(r"lpx_([a-z0-9]{1,32})_[A-Za-z0-9_-]{32,128}")

# The message is for gateways that have just been asked for a key of this id, and remember that there is none.
_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[3], unpack(ARGV, 4))
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PUBLISH', ARGV[2], 'key:' .. ARGV[1])
append_audit(KEYS[4], ARGV[3])
return 1
"""
_CREATE_OPERATOR = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
append_audit(KEYS[2], ARGV[1])
return 1
"""
# The old key goes at once, or expires; what it was must still hold, since the new one is made from that.
_ROTATE = """
local old, new, stops, channel, entry, expected, known_s = unpack(ARGV, 1, 7)
for field, value in pairs(cjson.decode(expected)) do
    if (redis.call('HGET', KEYS[2], field) or '') ~= value then return 0 end
end
redis.call('HSET', KEYS[3], unpack(ARGV, 8))
redis.call('SADD', KEYS[1], new)
redis.call('SET', KEYS[5], new, 'EX', known_s + math.max(0, stops - redis.call('TIME')[1]))
if stops == '0' then
    redis.call('SREM', KEYS[1], old)
    redis.call('DEL', KEYS[2])
else
    redis.call('HSET', KEYS[2], 'expires', stops)
end
redis.call('PUBLISH', channel, 'key:' .. old)
redis.call('PUBLISH', channel, 'key:' .. new)
append_audit(KEYS[4], entry)
return 1
"""
_REVOKE = """
if redis.call('HGET', KEYS[2], 'tenant') ~= ARGV[2] then return 0 end
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
redis.call('PUBLISH', ARGV[3], 'key:' .. ARGV[1])
append_audit(KEYS[3], ARGV[4])
return 1
"""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is stored of a key. `digest` is the SHA-256 of the
    whole key; times are Unix seconds, `expires` 0 for never."""

    id: str
    digest: bytes
    tenant_id: str
    scopes: frozenset[str]
    created: int
    expires: int
    note: str
    limits: RateLimits = NO_RATES


class NoSuchTenant(Exception):
    """A key was asked for a tenant that is not there."""


class NoSuchKey(Exception):
    """The tenant has no key of this id."""


class KeyExpired(Exception):
    """A key that has expired was to be rotated."""


def digest_of(key: str) -> bytes:
    """SHA-256 of the whole key."""
    return hashlib.sha256(key.encode()).digest()


def id_of(key: str) -> str | None:
    """Returns the id inside a well-formed key, or None when it is malformed."""
    match = _KEY.fullmatch(key)
    return match[1] if match else None


class Keys:
    """Creates, finds, lists, rotates and revokes keys. `by` goes into the audit, a key or its digest never.

    Methods raise redis' own errors when Redis is away.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._create = redis.register_script(APPEND + _CREATE)
        self._create_operator = redis.register_script(APPEND + _CREATE_OPERATOR)
        self._rotate = redis.register_script(APPEND + _ROTATE)
        self._revoke = redis.register_script(APPEND + _REVOKE)

    async def create(
        self,
        tenant_id: str,
        *,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        expires_in: int | None = None,
        note: str = "",
        limits: RateLimits = NO_RATES,
        by: Actor = GATEWAY,
    ) -> tuple[KeyRecord, str]:
        """Makes a key of a tenant; `expires_in` is in seconds.
        Returns its record, and the key for its only showing.

        Raises NoSuchTenant.
        """
        terms = _Terms(tenant_id, frozenset(scopes), expires_in, note, limits)
        record, key = _new(secrets.token_hex(6), terms)
        entry = Change("key.create", tenant_id, record.id, {}, describe(record)).to_entry(by)
        made = await self._create(
            keys=[tenant_key(tenant_id), _set_key(tenant_id), document_key(record.id), AUDIT_STREAM],
            args=[record.id, AUTH_CHANNEL, entry, *_to_fields(record)],
        )
        if not made:
            raise NoSuchTenant(tenant_id)
        return record, key

    async def create_operator(self) -> str | None:
        """Makes the operator's key unless there is one. Returns the key when this call made it, else None."""
        terms = _Terms(NO_TENANT, frozenset({"admin"}), None, "made at first start", NO_RATES)
        record, key = _new(OPERATOR_ID, terms)
        entry = Change("key.create", NO_TENANT, record.id, {}, describe(record)).to_entry(GATEWAY)
        redis_keys = [document_key(OPERATOR_ID), AUDIT_STREAM]
        return (
            key if await self._create_operator(keys=redis_keys, args=[entry, *_to_fields(record)]) else None
        )

    async def get(self, key_id: str) -> KeyRecord | None:
        """Returns the record of a key, expired ones too, or None when there is none of this id."""
        document = await read_document(self._redis, document_key(key_id))
        return from_document(key_id, document) if document else None

    async def of_tenant(self, tenant_id: str) -> list[KeyRecord]:
        """Returns the records of a tenant's keys, oldest first."""
        documents = await read_documents(self._redis, _set_key(tenant_id), document_key)
        found = [from_document(key_id, document) for key_id, document in documents.items()]
        return sorted(found, key=lambda record: (record.created, record.id))

    async def rotate(
        self, tenant_id: str, key_id: str, *, grace_s: int = 0, by: Actor = GATEWAY
    ) -> tuple[KeyRecord, str]:
        """Makes a key with the scopes, limits and note of another, which stops `grace_s` seconds later.

        The new key has the old one's lifetime, counted from now. Returns the new record, and the key for its
        only showing. Raises NoSuchKey and KeyExpired.
        """
        while True:
            document = await read_document(self._redis, document_key(key_id))
            if not document or document["tenant"] != tenant_id:
                raise NoSuchKey(key_id)
            old = from_document(key_id, document)
            now = int(time.time())
            if old.expires and old.expires <= now:
                raise KeyExpired(key_id)
            lifetime = old.expires - old.created if old.expires else None
            terms = _Terms(tenant_id, old.scopes, lifetime, old.note, old.limits)
            record, key = _new(secrets.token_hex(6), terms)
            stops = min(now + grace_s, old.expires or now + grace_s) if grace_s else 0
            after = {**describe(old), "expires": stops or now, "replaced_by": record.id}
            entry = Change("key.rotate", tenant_id, key_id, describe(old), after).to_entry(by)
            redis_keys = [
                *(_set_key(tenant_id), document_key(key_id), document_key(record.id), AUDIT_STREAM),
                _replaced_key(key_id),
            ]
            args = [
                *(key_id, record.id, stops, AUTH_CHANNEL, entry, json.dumps(document), _REPLACED_S),
                *_to_fields(record),
            ]
            if await self._rotate(keys=redis_keys, args=args):
                return record, key

    async def replacement(self, key_id: str) -> str | None:
        """Returns the id of the key that a rotation made in place of another; None: none, or days ago."""
        found: bytes | str | None = await self._redis.get(_replaced_key(key_id))
        return found.decode() if isinstance(found, bytes) else found

    async def revoke(self, tenant_id: str, key_id: str, *, by: Actor = GATEWAY) -> bool:
        """Deletes a key of this tenant and tells every gateway. Returns whether the tenant had such a key."""
        record = await self.get(key_id)
        if record is None:
            return False
        entry = Change("key.revoke", tenant_id, key_id, describe(record), {}).to_entry(by)
        redis_keys = [_set_key(tenant_id), document_key(key_id), AUDIT_STREAM]
        return bool(await self._revoke(keys=redis_keys, args=[key_id, tenant_id, AUTH_CHANNEL, entry]))


def describe(record: KeyRecord) -> dict[str, Any]:
    """Returns what a key may do, as the audit has it."""
    return {
        "scopes": sorted(record.scopes),
        "expires": record.expires or None,
        "note": record.note,
        "limits": record.limits.that_are_set(),
    }


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a key that is about to be made is for."""

    tenant_id: str
    scopes: frozenset[str]
    expires_in: int | None
    note: str
    limits: RateLimits


def _new(key_id: str, terms: _Terms) -> tuple[KeyRecord, str]:
    key = f"lpx_{key_id}_{secrets.token_urlsafe(32)}"
    now = int(time.time())
    record = KeyRecord(
        id=key_id,
        digest=digest_of(key),
        tenant_id=terms.tenant_id,
        scopes=terms.scopes,
        created=now,
        expires=now + terms.expires_in if terms.expires_in is not None else 0,
        note=terms.note,
        limits=terms.limits,
    )
    return record, key


def document_key(key_id: str) -> str:
    """The Redis key of a key's document."""
    return f"loraplex:key:{key_id}"


def _replaced_key(key_id: str) -> str:
    return f"loraplex:replaced:{key_id}"


def _set_key(tenant_id: str) -> str:
    return f"loraplex:keys:{tenant_id}"


def _to_fields(record: KeyRecord) -> list[str]:
    fields = {
        "digest": record.digest.hex(),
        "tenant": record.tenant_id,
        "scopes": " ".join(sorted(record.scopes)),
        "created": str(record.created),
        "expires": str(record.expires),
        "note": record.note,
        "limits": record.limits.to_json(),
    }
    return [item for pair in fields.items() for item in pair]


def from_document(key_id: str, fields: Mapping[str, str]) -> KeyRecord:
    """Returns the record of a hash as it is stored; one written before a field was is read without."""
    return KeyRecord(
        id=key_id,
        digest=bytes.fromhex(fields["digest"]),
        tenant_id=fields["tenant"],
        scopes=frozenset(fields["scopes"].split()),
        created=int(fields["created"]),
        expires=int(fields["expires"]),
        note=fields["note"],
        limits=rates_from_json(fields.get("limits", "")),
    )
