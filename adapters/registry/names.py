"""Names and their versions; aliases, grants, references and records hang from here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from adapters.identity import check_name
from adapters.model_ref import ModelRef
from adapters.registry.aliases import Aliases
from adapters.registry.errors import raise_fault
from adapters.registry.grants import Grants
from adapters.registry.quotas import NO_QUOTA, Quota
from adapters.registry.records import Records
from adapters.registry.references import References
from adapters.registry.scripts import BYTES, BatchedScript, Script, check_tenant, key, text
from adapters.registry.versions import (
    AdapterName,
    AdapterVersion,
    Canary,
    Event,
    Resolution,
    new_record,
    read_event,
    read_version,
)
from adapters.validation import AdapterSummary

# → {'ok', the new version's number}, or which quota it would exceed. A name that is uploaded to again can no
# longer be the target of a rename back.
_ADD = """
local tenant, name, record, promote, by, most_names, most_bytes, most_pages = unpack(ARGV)
local full, used = over_quota(tenant, name, record, most_names, most_bytes, most_pages)
if full then return {full, used} end
local version = redis.call('HINCRBY', at('last', tenant), name, 1)
redis.call('HSET', at('versions', tenant, name), version, record)
redis.call('HDEL', at('moved', tenant), name)
hold(tenant, record)
if promote == '1' then
    supersede(tenant, name, version)
elseif not live_of(tenant, name) then
    redis.call('HSET', at('live', tenant), name, 0)
end
changed(tenant, name, 'upload', by, {version = version, detail = promote == '1' and 'live' or 'staged'})
return {'ok', version}
"""

# → {'ok'}, or which quota a new version would exceed.
_ROOM = """
local tenant, name, record, most_names, most_bytes, most_pages = unpack(ARGV)
local full, used = over_quota(tenant, name, record, most_names, most_bytes, most_pages)
if full then return {full, used} end
return {'ok'}
"""

# → version and record, and with a canary its version, record and percent; '0' when nothing is live yet;
# nothing for what the caller may not use or nobody has.
_RESOLVE = """
local caller, owner, name, wanted = unpack(ARGV)
if caller ~= owner and redis.call('SISMEMBER', at('grants', owner, name), caller) == 0 then return {} end
local version = wanted
if wanted == '' or wanted == 'live' then version = live_of(owner, name) end
if version == '0' then return {'0'} end
local record = version and record_of(owner, name, version)
if not record then return {} end
local canary, percent = canary_of(owner, name)
if wanted == '' and canary then return {version, record, canary, record_of(owner, name, canary), percent} end
return {version, record}
"""

_LISTED_AT_ONCE = 200
"""Names of a tenant that a script looks at, about, so that who has thousands holds nobody else up."""

# → where to go on, '0' at the end, and {name, live version, shown version, record, canary, percent, pinned}
# of some names. Shown is the live version, or the newest when none is live.
_LIST = (
    f"local LISTED_AT_ONCE = {_LISTED_AT_ONCE}"
    + """
local tenant, cursor = unpack(ARGV)
local scanned = redis.call('HSCAN', at('live', tenant), cursor, 'COUNT', LISTED_AT_ONCE)
local result, live = {scanned[1]}, scanned[2]
for i = 1, #live, 2 do
    local name, shown = live[i], live[i + 1]
    if shown == '0' then shown = newest_of(tenant, name) end
    local canary, percent = canary_of(tenant, name)
    local pinned = redis.call('HEXISTS', at('pins'), tenant .. ':' .. name)
    result[#result + 1] = {name, live[i + 1], shown, record_of(tenant, name, shown), canary or '',
                           percent or '', pinned}
end
return result
"""
)

# → {live version, canary, percent, pinned, versions and records, grants}, or nothing.
_SHOW = """
local tenant, name = unpack(ARGV)
local live = live_of(tenant, name)
if not live then return {} end
local canary, percent = canary_of(tenant, name)
return {live, canary or '', percent or '', redis.call('HEXISTS', at('pins'), tenant .. ':' .. name),
        redis.call('HGETALL', at('versions', tenant, name)),
        redis.call('SMEMBERS', at('grants', tenant, name))}
"""

# → {'ok', {the digests that no version has any more}}, which may be more than Lua can unpack.
_DELETE = """
local tenant, name = unpack(ARGV)
if not live_of(tenant, name) then return {'no_name'} end
local unused = remove_name(tenant, name)
outdate(tenant, name)
return {'ok', unused}
"""

# → the same.
_DELETE_VERSION = """
local tenant, name, version, by = unpack(ARGV)
local live, record = live_of(tenant, name), record_of(tenant, name, version)
if not record then return {'no_version'} end
if live == version then return {'is_live'} end
if canary_of(tenant, name) == version then return {'is_canary'} end
if redis.call('HLEN', at('versions', tenant, name)) == 1 then
    local unused = remove_name(tenant, name)
    outdate(tenant, name)
    return {'ok', unused}
end
redis.call('HDEL', at('versions', tenant, name), version)
redis.call('LREM', at('past', tenant, name), 0, version)
local unused = drop(tenant, record)
changed(tenant, name, 'delete', by, {version = tonumber(version)})
return {'ok', {unused}}
"""

MOST_FORMER_NAMES = 10_000
"""Of a tenant. Each rename looks through them, and holds up Redis for all tenants meanwhile."""

# A number must not come to mean another version, so the target is a name that never had any, or the one that
# these versions had before.
_RENAME = (
    f"local MOST_FORMER_NAMES = {MOST_FORMER_NAMES}"
    + """
local tenant, name, target, by = unpack(ARGV)
local live = live_of(tenant, name)
if not live then return {'no_name'} end
if live_of(tenant, target) then return {'taken', target} end
local moved = at('moved', tenant)
local is_back = redis.call('HGET', moved, target) == name
if redis.call('HEXISTS', at('last', tenant), target) == 1 and not is_back then return {'used', target} end
if not is_back and redis.call('HLEN', moved) >= MOST_FORMER_NAMES then
    return {'too_many_renames', tostring(MOST_FORMER_NAMES)}
end
for _, kind in ipairs({'versions', 'past', 'log', 'grants'}) do
    if redis.call('EXISTS', at(kind, tenant, name)) == 1 then
        redis.call('RENAME', at(kind, tenant, name), at(kind, tenant, target))
    end
end
for _, grantee in ipairs(redis.call('SMEMBERS', at('grants', tenant, target))) do
    redis.call('SREM', at('granted', grantee), tenant .. '/' .. name)
    redis.call('SADD', at('granted', grantee), tenant .. '/' .. target)
end
for from, to in pairs({[name] = target, [tenant .. ':' .. name] = tenant .. ':' .. target}) do
    for _, hash in ipairs({at('live', tenant), at('canary', tenant), at('pins')}) do
        local value = redis.call('HGET', hash, from)
        if value then
            redis.call('HDEL', hash, from)
            redis.call('HSET', hash, to, value)
        end
    end
end
redis.call('HSET', at('last', tenant), target, redis.call('HGET', at('last', tenant), name))
local former = redis.call('HGETALL', moved)
for i = 1, #former, 2 do
    if former[i + 1] == name then redis.call('HSET', moved, former[i], target) end
end
redis.call('HDEL', moved, target)
redis.call('HSET', moved, name, target)
changed(tenant, target, 'rename', by, {detail = name})
outdate(tenant, name)
return {'ok'}
"""
)

# Nothing of a tenant that is gone stays, and nobody who gets its id inherits what others granted it.
_FORGET = """
local tenant = ARGV[1]
for _, name in ipairs(redis.call('HKEYS', at('live', tenant))) do
    remove_name(tenant, name)
    tell(tenant, name)
end
for _, granted in ipairs(redis.call('SMEMBERS', at('granted', tenant))) do
    local owner, name = string.match(granted, '^([^/]+)/(.+)$')
    redis.call('SREM', at('grants', owner, name), tenant)
    outdate(owner, name)
end
for _, name in ipairs(redis.call('HKEYS', at('last', tenant))) do
    redis.call('SREM', at('unrecorded'), tenant .. ':' .. name)
end
redis.call('DEL', at('granted', tenant), at('last', tenant), at('moved', tenant), at('revision', tenant))
redis.call('HDEL', at('bytes'), tenant)
"""


class Registry:
    """The adapters of all tenants. Names are checked (`InvalidName`); tenants come from authentication.

    `by` is the id of the key that asks, for the name's history. Verbs raise `AdapterNotFound` where the
    tenant has no such name or version, and `AdapterConflict` where the name's state forbids them.
    """

    def __init__(self, redis: Redis) -> None:
        self.aliases = Aliases(redis)
        self.grants = Grants(redis)
        self.references = References(redis)
        self.records = Records(redis)
        self._redis = redis
        self._add = Script(redis, _ADD)
        self._room = Script(redis, _ROOM)
        self._resolve = BatchedScript(redis, _RESOLVE)
        self._list = Script(redis, _LIST)
        self._show = Script(redis, _SHOW)
        self._delete = Script(redis, _DELETE)
        self._delete_version = Script(redis, _DELETE_VERSION)
        self._rename = Script(redis, _RENAME)
        self._forget = Script(redis, _FORGET)

    async def add_version(
        self,
        tenant: str,
        name: str,
        summary: AdapterSummary,
        *,
        promote: bool = True,
        by: str = "",
        quota: Quota = NO_QUOTA,
    ) -> AdapterVersion:
        """Gives the name a new version, and makes it live unless it is only staged.

        Its blob must be in the store already, and reserved there (see `References.reserved`). Raises
        `AdapterConflict` where the tenant would then have more than its quota: of any number of calls at
        once, on any number of gateways, only as many pass as fit.
        """
        check_name(name)
        record = new_record(summary)
        reply = await self._add(check_tenant(tenant), name, record, int(promote), by, *quota.to_args())
        status, detail = map(text, reply)
        quota.raise_fault(status, name=name, used=detail, more=summary.nbytes)
        return read_version(tenant, name, detail, record)

    async def check_room(self, tenant: str, name: str, nbytes: int, quota: Quota) -> None:
        """Raises `AdapterConflict` where a version of so many bytes, which the tenant has not yet, would
        exceed the quota now. It keeps no room: `add_version` asks again.
        """
        check_name(name)
        record = json.dumps({"digest": "", "nbytes": nbytes})
        status, *used = map(text, await self._room(check_tenant(tenant), name, record, *quota.to_args()))
        quota.raise_fault(status, name=name, used="".join(used), more=nbytes)

    async def resolve(self, caller: str, ref: ModelRef) -> Resolution | None:
        """What the reference means to the calling tenant, or None: there is none such, or none for it."""
        owner = ref.owner or caller
        wanted = "live" if ref.live_only else str(ref.version or "")
        found = await self._resolve(check_tenant(caller), check_tenant(owner), ref.name, wanted)
        if not found:
            return None
        if len(found) == 1:
            return Resolution(None)
        live = read_version(owner, ref.name, *found[:2])
        if len(found) == 2:
            return Resolution(live)
        return Resolution(live, Canary(read_version(owner, ref.name, *found[2:4]), float(found[4])))

    async def list(self, tenant: str) -> Sequence[AdapterName]:
        """The tenant's names, in their order, without all their versions.

        Of very many, one that is made, renamed or deleted meanwhile may be there or not.
        """
        found: dict[str, AdapterName] = {}
        cursor = "0"
        while True:
            reply = await self._list(check_tenant(tenant), cursor)
            cursor = text(reply[0])
            found |= {item.name: item for item in (_listed(tenant, *row) for row in reply[1:])}
            if cursor == "0":
                return [found[name] for name in sorted(found)]

    async def show(self, tenant: str, name: str) -> AdapterName | None:
        """The tenant's name with all its versions and grants, or None if there is no such name."""
        check_name(name)
        found = await self._show(check_tenant(tenant), name)
        if not found:
            return None
        live, canary, percent, pinned, flat, grants = found
        pairs = zip(flat[::2], flat[1::2], strict=True)
        versions = sorted(
            (read_version(tenant, name, *pair) for pair in pairs), key=lambda item: item.version
        )
        return AdapterName(
            tenant=tenant,
            name=name,
            live=next((item for item in versions if item.version == int(live)), None),
            newest=versions[-1],
            canary_version=int(canary) if canary else None,
            canary_percent=float(percent) if percent else None,
            pinned=bool(pinned),
            versions=tuple(versions),
            grants=tuple(sorted(map(text, grants))),
        )

    async def history(self, tenant: str, name: str) -> Sequence[Event]:
        """What happened to a name, the latest first: its last 200 changes. Empty if there is no such name."""
        check_name(name)
        documents = await self._redis.lrange(key("log", check_tenant(tenant), name), 0, -1)
        return [read_event(document) for document in documents]

    async def bytes_of(self, tenant: str) -> int:
        """The bytes of a tenant's versions; those of one digest count once."""
        return int(await self._redis.hget(BYTES, check_tenant(tenant)) or 0)

    async def tenant_refers(self, tenant: str, digest: bytes) -> bool:
        """Whether some version of the tenant's own has this digest."""
        return bool(await self._redis.hexists(key("holdings", check_tenant(tenant)), digest.hex()))

    async def delete(self, tenant: str, name: str) -> Sequence[bytes]:
        """Forgets a name with all its versions; their numbers are not given again.

        Returns the digests that no version of any tenant has any more.
        """
        check_name(name)
        return _digests(await self._delete(check_tenant(tenant), name), name)

    async def delete_version(self, tenant: str, name: str, version: int, *, by: str = "") -> Sequence[bytes]:
        """Forgets a version that is neither live nor a canary; the last one of a name takes the name with it.

        Returns its digest, if no version of any tenant has it any more.
        """
        check_name(name)
        reply = await self._delete_version(check_tenant(tenant), name, version, by)
        return _digests(reply, name, version)

    async def rename(self, tenant: str, name: str, target: str, *, by: str = "") -> None:
        """Gives a name's versions, aliases and grants another name. The numbers stay."""
        check_name(name)
        check_name(target)
        status, *detail = map(text, await self._rename(check_tenant(tenant), name, target, by))
        raise_fault(status, name=name, detail="".join(detail))

    async def forget_tenant(self, tenant: str) -> None:
        """Removes everything of a tenant, and what others granted it."""
        await self._forget(check_tenant(tenant))


def _listed(
    tenant: str, name: Any, live: Any, shown: Any, record: Any, canary: Any, percent: Any, pinned: Any
) -> AdapterName:
    version = read_version(tenant, text(name), shown, record)
    return AdapterName(
        tenant=tenant,
        name=version.name,
        live=version if int(live) else None,
        newest=version,
        canary_version=int(canary) if canary else None,
        canary_percent=float(percent) if percent else None,
        pinned=bool(pinned),
    )


def _digests(reply: Sequence[Any], name: str, version: int | None = None) -> Sequence[bytes]:
    status, *unused = reply
    raise_fault(text(status), name=name, version=version)
    return [bytes.fromhex(text(digest)) for digest in unused[0]]
