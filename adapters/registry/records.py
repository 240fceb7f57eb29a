"""The copy of a name that the store keeps, so that a Redis that was lost is rebuilt from there.

A record is everything of one name, taken at once: its versions, what it means, its grants and its counters. A
name that was deleted leaves a record without versions, since its numbers are not given again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from adapters.identity import check_name
from adapters.registry.scripts import UNRECORDED, Script, check_tenant, key, text

FORMAT = 1

# → {revision, last, live, canary, percent, pinned, moved, versions, past, grants, log}
_EXPORT = """
local tenant, name = unpack(ARGV)
local canary, percent = canary_of(tenant, name)
return {
    redis.call('HGET', at('revision', tenant), name) or '0',
    redis.call('HGET', at('last', tenant), name) or '0',
    live_of(tenant, name) or '0',
    canary or '', percent or '',
    redis.call('HEXISTS', at('pins'), tenant .. ':' .. name),
    redis.call('HGET', at('moved', tenant), name) or '',
    redis.call('HGETALL', at('versions', tenant, name)),
    redis.call('LRANGE', at('past', tenant, name), 0, -1),
    redis.call('SMEMBERS', at('grants', tenant, name)),
    redis.call('LRANGE', at('log', tenant, name), 0, -1),
}
"""

# Lists come as JSON. What is there at the same or a later revision stays.
_RESTORE = """
local tenant, name, revision, last, live, canary, pinned, moved = unpack(ARGV, 1, 8)
local versions, past = cjson.decode(ARGV[9]), cjson.decode(ARGV[10])
local grants, log = cjson.decode(ARGV[11]), cjson.decode(ARGV[12])
local present = redis.call('HGET', at('revision', tenant), name)
if present and tonumber(present) >= tonumber(revision) then return 0 end
remove_name(tenant, name)
tell(tenant, name)
redis.call('HSET', at('revision', tenant), name, revision)
redis.call('HSET', at('last', tenant), name, last)
redis.call('SREM', at('unrecorded'), tenant .. ':' .. name)
if moved ~= '' then redis.call('HSET', at('moved', tenant), name, moved) end
if #versions == 0 then return 1 end
for i = 1, #versions, 2 do
    redis.call('HSET', at('versions', tenant, name), versions[i], versions[i + 1])
    hold(tenant, versions[i + 1])
end
redis.call('HSET', at('live', tenant), name, live)
if canary ~= '' then redis.call('HSET', at('canary', tenant), name, canary) end
for _, version in ipairs(past) do redis.call('RPUSH', at('past', tenant, name), version) end
for _, event in ipairs(log) do redis.call('RPUSH', at('log', tenant, name), event) end
for _, grantee in ipairs(grants) do
    redis.call('SADD', at('grants', tenant, name), grantee)
    redis.call('SADD', at('granted', grantee), tenant .. '/' .. name)
end
if pinned == '1' and live ~= '0' then
    redis.call('HSET', at('pins'), tenant .. ':' .. name, cjson.decode(record_of(tenant, name, live)).digest)
end
return 1
"""

_RECORDED = """
local tenant, name, revision = unpack(ARGV)
if (redis.call('HGET', at('revision', tenant), name) or '0') ~= revision then return 0 end
redis.call('SREM', at('unrecorded'), tenant .. ':' .. name)
return 1
"""


class Records:
    """Takes records of names, and brings them back."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._export = Script(redis, _EXPORT)
        self._restore = Script(redis, _RESTORE)
        self._recorded = Script(redis, _RECORDED)

    async def export(self, tenant: str, name: str) -> dict[str, Any]:
        """All that Redis knows of a name, as JSON has it."""
        reply = await self._export(check_tenant(tenant), check_name(name))
        revision, last, live, canary, percent, pinned, moved, flat, past, grants, log = reply
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return {
            "format": FORMAT,
            "tenant": tenant,
            "name": name,
            "revision": int(revision),
            "last": int(last),
            "live": int(live),
            "canary": {"version": int(canary), "percent": float(percent)} if canary else None,
            "pinned": bool(pinned),
            "moved": text(moved),
            "versions": {text(version): json.loads(record) for version, record in pairs},
            "past": [int(version) for version in past],
            "grants": sorted(map(text, grants)),
            "log": [json.loads(event) for event in log],
        }

    async def restore(self, record: Mapping[str, Any]) -> bool:
        """Brings a name back as its record has it, with its references.

        Returns False, and changes nothing, where Redis has the name at the same or a later revision. Raises
        ValueError or KeyError for what is no record.
        """
        if record["format"] != FORMAT:
            raise ValueError(f"the record has the format {record['format']!a}; this program reads {FORMAT}")
        tenant, name = check_tenant(record["tenant"]), check_name(record["name"])
        canary = record["canary"]
        versions: list[str] = []
        for version, values in record["versions"].items():
            versions += [version, _json(values)]
        reply = await self._restore(
            *(tenant, name, record["revision"], record["last"], record["live"]),
            f"{canary['version']}:{canary['percent']:g}" if canary else "",
            int(record["pinned"]),
            record["moved"],
            _json(versions),
            _json([str(version) for version in record["past"]]),
            _json([check_tenant(grantee) for grantee in record["grants"]]),
            _json([_json(event) for event in record["log"]]),
        )
        return bool(reply)

    async def knows(self, tenant: str, name: str) -> bool:
        """Whether Redis has ever heard of the name; it remembers those that were deleted."""
        return bool(await self._redis.hexists(key("revision", check_tenant(tenant)), check_name(name)))

    async def outdated(self) -> Sequence[tuple[str, str]]:
        """The tenant and name of each name whose record in the store is not its last."""
        found = [text(item).partition(":") for item in await self._redis.smembers(UNRECORDED)]
        return sorted((tenant, name) for tenant, _, name in found)

    async def recorded(self, tenant: str, name: str, revision: int) -> bool:
        """Notes that the store holds the record of this revision. False: the name has changed since."""
        return bool(await self._recorded(check_tenant(tenant), check_name(name), revision))


def digests_of(record: Mapping[str, Any]) -> set[bytes]:
    """The blobs that a record's versions need."""
    return {bytes.fromhex(values["digest"]) for values in record["versions"].values()}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
