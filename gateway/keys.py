"""API keys in Redis: the sole writer of these keys.

    loraplex:key:<id>               hash: digest, tenant, scopes, created, expires, note, limits (JSON)
    loraplex:keys:<tenant>          set of the tenant's key ids

A key reads `lpx_<id>_<secret>`. The secret has 256 random bits; only the SHA-256 of
the whole key is stored, so a slow password hash would add nothing. The key itself
is returned once, by `create`, and is in no log and no error. The operator's key,
when the gateway made it, is the document of id `operator`; it belongs to no tenant.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from redis.asyncio import Redis

from gateway.limits import NO_RATES, RateLimits, rates_from_json
from gateway.tenants import AUTH_CHANNEL, read_document, read_documents, tenant_key

SCOPES = frozenset({"inference", "adapters", "admin"})
DEFAULT_SCOPES = frozenset({"inference", "adapters"})
OPERATOR_ID = "operator"
NO_TENANT = ""

_KEY = re.compile(r"lpx_([a-z0-9]{1,32})_[A-Za-z0-9_-]{32,128}")

_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[3], unpack(ARGV, 2))
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""
_CREATE_OPERATOR = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
"""
_REVOKE = """
if redis.call('HGET', KEYS[2], 'tenant') ~= ARGV[2] then return 0 end
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[3], 'key:' .. ARGV[1])
return redis.call('DEL', KEYS[2])
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


def digest_of(key: str) -> bytes:
    """SHA-256 of the whole key."""
    return hashlib.sha256(key.encode()).digest()


def id_of(key: str) -> str | None:
    """Returns the id inside a well-formed key, or None when it is malformed."""
    match = _KEY.fullmatch(key)
    return match[1] if match else None


class Keys:
    """Creates, finds, lists and revokes keys. Methods raise redis' own errors when Redis is away."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._create = redis.register_script(_CREATE)
        self._create_operator = redis.register_script(_CREATE_OPERATOR)
        self._revoke = redis.register_script(_REVOKE)

    async def create(
        self,
        tenant_id: str,
        *,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        expires_in: int | None = None,
        note: str = "",
        limits: RateLimits = NO_RATES,
    ) -> tuple[KeyRecord, str]:
        """Makes a key of a tenant; `expires_in` is in seconds.
        Returns its record, and the key for its only showing.

        Raises NoSuchTenant.
        """
        record, key = _new(secrets.token_hex(6), tenant_id, frozenset(scopes), expires_in, note, limits)
        redis_keys = [tenant_key(tenant_id), _set_key(tenant_id), _document_key(record.id)]
        if not await self._create(keys=redis_keys, args=[record.id, *_to_fields(record)]):
            raise NoSuchTenant(tenant_id)
        return record, key

    async def create_operator(self) -> str | None:
        """Makes the operator's key unless there is one. Returns the key when this call made it, else None."""
        record, key = _new(OPERATOR_ID, NO_TENANT, frozenset({"admin"}), None, "made at first start")
        made = await self._create_operator(keys=[_document_key(OPERATOR_ID)], args=_to_fields(record))
        return key if made else None

    async def get(self, key_id: str) -> KeyRecord | None:
        """Returns the record of a key, expired ones too, or None when there is none of this id."""
        document = await read_document(self._redis, _document_key(key_id))
        return _from_document(key_id, document) if document else None

    async def of_tenant(self, tenant_id: str) -> list[KeyRecord]:
        """Returns the records of a tenant's keys, oldest first."""
        documents = await read_documents(self._redis, _set_key(tenant_id), _document_key)
        found = [_from_document(key_id, document) for key_id, document in documents.items()]
        return sorted(found, key=lambda record: (record.created, record.id))

    async def revoke(self, tenant_id: str, key_id: str) -> bool:
        """Deletes a key of this tenant and tells every gateway. Returns whether the tenant had such a key."""
        redis_keys = [_set_key(tenant_id), _document_key(key_id)]
        return bool(await self._revoke(keys=redis_keys, args=[key_id, tenant_id, AUTH_CHANNEL]))


def _new(
    key_id: str,
    tenant_id: str,
    scopes: frozenset[str],
    expires_in: int | None,
    note: str,
    limits: RateLimits = NO_RATES,
) -> tuple[KeyRecord, str]:
    key = f"lpx_{key_id}_{secrets.token_urlsafe(32)}"
    now = int(time.time())
    expires = now + expires_in if expires_in is not None else 0
    return KeyRecord(key_id, digest_of(key), tenant_id, scopes, now, expires, note, limits), key


def _document_key(key_id: str) -> str:
    return f"loraplex:key:{key_id}"


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


def _from_document(key_id: str, fields: Mapping[str, str]) -> KeyRecord:
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
