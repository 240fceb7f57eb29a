"""Who is calling: from the `Authorization` header to a Principal.

A worker keeps what it looked up, so that a request costs no Redis round trip, and Redis pushes each change of
a key or a tenant over a channel. An entry is believed for `auth_cache_s` while the push works. When the push
is lost, or silent for longer than a heartbeat allows, everything cached so far must be looked up again, and
is then believed for half a second only; so a revoked key stops within a second either way. When Redis cannot
be reached at all, a known key goes on for `auth_grace_s`, and an unknown one gets 503: neither yes nor no can
be said of it.

Ids that Redis does not know are remembered as well, for seconds, and look-ups that meet share a round trip:
whoever sends made-up keys costs Redis little. `gateway/failed_logins.py` slows down the answers.
"""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.datastructures import Headers

from adapters.loop_timeout import LoopTimeout
from gateway.errors import ApiError
from gateway.failed_logins import FailedLogins
from gateway.key_lookup import KeyLookup
from gateway.keys import NO_TENANT, OPERATOR_ID, KeyRecord, Keys, digest_of, id_of
from gateway.limits import NO_LIMITS, NO_RATES, RateLimits, TenantLimits
from gateway.redis_health import RedisHealth
from gateway.redis_push import RedisPush
from gateway.tenants import AUTH_CHANNEL, PrefixSharing, Tenant

_MAX_AGE_WITHOUT_PUSH_S = 0.4
_LOOKUP_TIMEOUT_S = 1.0
_MAX_ENTRIES = 20_000
_MAX_UNKNOWN = 20_000
_UNKNOWN_CACHE_S = 5.0


_Known = TypeVar("_Known")


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request. All of it comes from the key; the operator's `tenant_id` is empty."""

    tenant_id: str
    key_id: str
    scopes: frozenset[str]
    prefix_sharing: PrefixSharing
    weight: float
    limits: TenantLimits = NO_LIMITS
    key_limits: RateLimits = NO_RATES
    adapter_limits: Mapping[str, RateLimits] = field(default_factory=dict)
    """Rates of single adapters, as the tenant names them: `sql`, and `acme/sql` for a granted one."""
    base_models: frozenset[str] | None = None
    """The base models that the tenant may use; None for all."""


@dataclass(frozen=True, slots=True)
class _Entry:
    record: KeyRecord
    principal: Principal
    suspended: bool
    checked_at: float  # time.monotonic()

    @property
    def has_expired(self) -> bool:
        return bool(self.record.expires) and time.time() >= self.record.expires


class Authenticator:
    """Turns `Authorization` headers into principals, from a cache that Redis keeps true.

    `start` begins to follow Redis' push and `close` ends it;
    without `start`, entries are believed for half a second.
    """

    def __init__(
        self,
        redis: Redis,
        health: RedisHealth,
        *,
        operator_key: SecretStr | None,
        cache_s: float,
        grace_s: float,
    ) -> None:
        self._health = health
        self._key_lookup, self._keys = KeyLookup(redis), Keys(redis)
        self._operator_digest = digest_of(operator_key.get_secret_value()) if operator_key else None
        self._cache_s = cache_s
        self._grace_s = grace_s
        self._failures = FailedLogins()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()  # ids that Redis had not, by when it was asked
        self._changes = 0  # counts what was pushed, so that a look-up that a change overtook is not kept
        self._push = RedisPush(redis, AUTH_CHANNEL, self._apply)

    async def start(self) -> None:
        """Follows changes from now on. Returns at once, also while Redis is away."""
        await self._push.start()

    async def close(self) -> None:
        """Ends what `start` began."""
        await self._push.close()

    async def authenticate(self, header: str | None, address: str = "") -> Principal:
        """Returns whose key the header holds; `address` is where it comes from.

        Raises ApiError: 401 for a key that is absent, malformed, unknown, revoked or expired, with the same
        answer for all but an absent or an expired one, and later the more wrong keys came from the address;
        429 beyond that; 403 when the tenant is suspended; 503 for a key not seen before while Redis is away.
        """
        key = _bearer(header)
        digest = digest_of(key)
        if self._operator_digest and hmac.compare_digest(self._operator_digest, digest):
            return _OPERATOR
        key_id = id_of(key)
        entry = None
        if key_id is not None and not (key_id == OPERATOR_ID and self._operator_digest):
            entry = await self._find(key_id)
        if entry is None or not hmac.compare_digest(entry.record.digest, digest):
            await self._failures.penalise(address)
            raise _unauthorized()
        return _usable(entry)

    async def principal_of(self, key_id: str) -> Principal:
        """Returns whose key this is, for work that goes on after the request that began it. When it has been
        rotated, and is taken no more, it is the key that replaced it.

        Raises ApiError as `authenticate` does, where neither would be taken any more; redis' own errors when
        Redis is away and it was rotated.
        """
        entry = await self._find(key_id)
        while entry is None or entry.has_expired:
            replacement = await self._keys.replacement(key_id)
            if replacement is None:
                break
            key_id = replacement
            entry = await self._find(key_id)
        if entry is None:
            raise _unauthorized("The API key that this began with is gone.")
        return _usable(entry)

    async def _find(self, key_id: str) -> _Entry | None:
        """Returns what is known of a key: from memory while that may be believed, else from Redis."""
        entry = self._entries.get(key_id)
        now = time.monotonic()
        if entry and self._fresh(entry.checked_at, now, self._cache_s):
            return entry
        if key_id in self._unknown and self._fresh(self._unknown[key_id], now, _UNKNOWN_CACHE_S):
            return None
        # Counted as `/ready` counts it; the age bounds it where Redis answers pings, and no look-up in time.
        may_wait = (
            entry is not None
            and self._health.silent_s < self._grace_s
            and now - entry.checked_at < self._cache_s + self._grace_s
        )
        if may_wait and self._health.is_away:
            return entry
        try:
            async with LoopTimeout(_LOOKUP_TIMEOUT_S):
                return await self._look_up(key_id)
        except (RedisError, OSError, TimeoutError) as error:
            self._health.failed()
            if may_wait:
                return entry
            raise ApiError(
                503,
                "API keys cannot be checked at the moment. Try again shortly.",
                type="server_error",
                code="key_store_unavailable",
                headers={"Retry-After": "1"},
            ) from error

    def _fresh(self, checked_at: float, now: float, cache_s: float) -> bool:
        """Whether what Redis said then may be believed now."""
        if self._push.since is None:
            return now - checked_at < _MAX_AGE_WITHOUT_PUSH_S
        return checked_at >= self._push.since and now - checked_at < cache_s

    async def _look_up(self, key_id: str) -> _Entry | None:
        changes, checked_at = self._changes, time.monotonic()
        found = await self._key_lookup(key_id)
        entry = _entry_of(*found, checked_at) if found else None
        if entry is None:
            self._entries.pop(key_id, None)
        if changes != self._changes:  # what was read may be older than what was pushed meanwhile
            return entry
        if entry is None:
            _remember(self._unknown, key_id, checked_at, _MAX_UNKNOWN)
        else:
            _remember(self._entries, key_id, entry, _MAX_ENTRIES)
        return entry

    def _apply(self, change: str) -> None:
        kind, _, name = change.partition(":")
        self._changes += 1
        if kind == "key":
            self._entries.pop(name, None)
            self._unknown.pop(name, None)
        elif kind == "tenant":
            for key_id in [i for i, entry in self._entries.items() if entry.principal.tenant_id == name]:
                del self._entries[key_id]


async def ensure_operator_key(keys: Keys, configured: SecretStr | None) -> str | None:
    """Makes the operator's key at the first start, unless
    the settings hold one. Returns it to be printed, once."""
    return None if configured else await keys.create_operator()


@dataclass(frozen=True, slots=True)
class Requirement:
    """A FastAPI dependency: yields the caller, and refuses with 403 a key without the scope."""

    scope: str

    async def __call__(self, request: Request) -> Principal:
        """Returns the caller. Raises ApiError as `authenticate` does, and 403."""
        authenticator: Authenticator = request.app.state.services.authenticator
        principal = await authenticator.authenticate(_key_header(request.headers), address_of(request))
        request.state.caller = principal
        if self.scope not in principal.scopes:
            message = f"This API key has no scope '{self.scope}'."
            raise ApiError(403, message, type="permission_error", code="missing_scope")
        return principal


def _key_header(headers: Headers) -> str | None:
    """The `Authorization` header, or what Anthropic's clients send in its place."""
    if (key := headers.get("x-api-key")) is not None and "authorization" not in headers:
        return f"Bearer {key}"
    return headers.get("authorization")


def address_of(request: Request) -> str:
    """The client's address, as the connection or a trusted proxy has it; empty for none."""
    return request.client.host if request.client else ""


def require(scope: str) -> Requirement:
    """Returns the dependency of the routes that need this scope."""
    return Requirement(scope)


def _usable(entry: _Entry) -> Principal:
    """Returns whose key it is. Raises ApiError: 401 where it has expired, 403 for a suspended tenant."""
    if entry.has_expired:
        raise _unauthorized("This API key has expired. Ask your operator for a new one.")
    if entry.suspended:
        raise ApiError(
            403,
            "This tenant is suspended. Ask your operator.",
            type="permission_error",
            code="tenant_suspended",
        )
    return entry.principal


_OPERATOR = Principal(NO_TENANT, OPERATOR_ID, frozenset({"admin"}), PrefixSharing.PRIVATE, 1.0)


def _entry_of(record: KeyRecord, tenant: Tenant | None, checked_at: float) -> _Entry | None:
    """What is known of a key; None where its tenant is gone."""
    if record.tenant_id == NO_TENANT:
        return _Entry(record, _OPERATOR, suspended=False, checked_at=checked_at)
    if tenant is None:
        return None
    principal = Principal(
        tenant_id=tenant.id,
        key_id=record.id,
        scopes=record.scopes,
        prefix_sharing=tenant.prefix_sharing,
        weight=tenant.weight,
        limits=tenant.limits,
        key_limits=record.limits,
        adapter_limits=tenant.adapter_limits,
        base_models=tenant.base_models,
    )
    return _Entry(record, principal, tenant.suspended, checked_at)


def _remember(known: OrderedDict[str, _Known], key_id: str, value: _Known, most: int) -> None:
    """Keeps a value as the newest, and forgets the oldest of more than `most`."""
    known[key_id] = value
    known.move_to_end(key_id)
    if len(known) > most:
        known.popitem(last=False)


def _bearer(header: str | None) -> str:
    scheme, _, key = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized(
            "No API key was given. Send it as 'Authorization: Bearer lpx_...', or as 'x-api-key: lpx_...'."
        )
    return key.strip()


def _unauthorized(message: str = "The API key is not valid.") -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers)
