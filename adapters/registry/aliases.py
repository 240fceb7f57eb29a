"""What the bare name means: its live version, a canary beside it, and whether engines keep it resident."""

from __future__ import annotations

from redis.asyncio import Redis

from adapters.identity import check_name
from adapters.registry.errors import raise_fault
from adapters.registry.scripts import Script, check_tenant, text
from adapters.registry.versions import AdapterVersion, read_version

_PROMOTE = """
local tenant, name, version, by = unpack(ARGV)
local live = live_of(tenant, name)
if not live then return {'no_name'} end
local canary = canary_of(tenant, name)
if version == '' then version = canary or newest_of(tenant, name) end
local record = record_of(tenant, name, version)
if not record then return {'no_version'} end
if live ~= version or canary then
    supersede(tenant, name, version)
    changed(tenant, name, 'promote', by, {version = tonumber(version)})
end
return {'ok', version, record}
"""

_ROLLBACK = """
local tenant, name, by = unpack(ARGV)
local live = live_of(tenant, name)
if not live then return {'no_name'} end
local version
repeat version = redis.call('LPOP', at('past', tenant, name)) until not version or version ~= live
if not version then return {'nothing_before'} end
make_live(tenant, name, version)
changed(tenant, name, 'rollback', by, {version = tonumber(version)})
return {'ok', version, record_of(tenant, name, version)}
"""

_CANARY = """
local tenant, name, version, percent, by = unpack(ARGV)
local live, record = live_of(tenant, name), record_of(tenant, name, version)
if not live then return {'no_name'} end
if not record then return {'no_version'} end
if live == '0' then return {'no_live'} end
if live == version then return {'canary_is_live'} end
redis.call('HSET', at('canary', tenant), name, version .. ':' .. percent)
changed(tenant, name, 'canary', by, {version = tonumber(version), detail = percent .. ' %'})
return {'ok', version, record}
"""

_CANARY_OFF = """
local tenant, name, by = unpack(ARGV)
if not live_of(tenant, name) then return {'no_name'} end
local version = canary_of(tenant, name)
if version then
    redis.call('HDEL', at('canary', tenant), name)
    changed(tenant, name, 'canary_off', by, {version = tonumber(version)})
end
return {'ok'}
"""

_PIN = """
local tenant, name, quota, most_pages, by = unpack(ARGV)
local live = live_of(tenant, name)
if not live then return {'no_name'} end
if live == '0' then return {'no_live'} end
local pin, pins = tenant .. ':' .. name, #pinned_of(tenant)
if redis.call('HEXISTS', at('pins'), pin) == 1 then return {'ok'} end
if pins >= tonumber(quota) then return {'pin_quota', tostring(pins)} end
if most_pages ~= '' then
    local beside = pinned_beside(tenant, name)
    if beside + pages_of(tenant, name) > tonumber(most_pages) then
        return {'pinned_pages', string.format('%d of %s', beside, most_pages)}
    end
end
redis.call('HSET', at('pins'), pin, cjson.decode(record_of(tenant, name, live)).digest)
changed(tenant, name, 'pin', by, {})
return {'ok'}
"""

_UNPIN = """
local tenant, name, by = unpack(ARGV)
if not live_of(tenant, name) then return {'no_name'} end
if redis.call('HDEL', at('pins'), tenant .. ':' .. name) == 1 then changed(tenant, name, 'unpin', by, {}) end
return {'ok'}
"""


class Aliases:
    """See `Registry` for `by` and for what is raised. Whatever makes another version live ends a canary."""

    def __init__(self, redis: Redis) -> None:
        self._promote = Script(redis, _PROMOTE)
        self._rollback = Script(redis, _ROLLBACK)
        self._canary = Script(redis, _CANARY)
        self._canary_off = Script(redis, _CANARY_OFF)
        self._pin = Script(redis, _PIN)
        self._unpin = Script(redis, _UNPIN)

    async def promote(
        self, tenant: str, name: str, version: int | None = None, *, by: str = ""
    ) -> AdapterVersion:
        """Makes a version live; None: the canary, or the newest where none runs."""
        return await self._live(self._promote, tenant, name, version, "" if version is None else version, by)

    async def rollback(self, tenant: str, name: str, *, by: str = "") -> AdapterVersion:
        """Makes the version live that was so before this one; again, the one before that."""
        return await self._live(self._rollback, tenant, name, None, by)

    async def canary(
        self, tenant: str, name: str, version: int, percent: float, *, by: str = ""
    ) -> AdapterVersion:
        """Gives a version `percent` of the requests for the bare name, in place of a canary that runs."""
        return await self._live(self._canary, tenant, name, version, version, f"{percent:g}", by)

    async def end_canary(self, tenant: str, name: str, *, by: str = "") -> None:
        """All requests for the bare name go to the live version again."""
        await self._call(self._canary_off, tenant, name, by)

    async def pin(
        self, tenant: str, name: str, *, quota: int, most_pages: int | None = None, by: str = ""
    ) -> None:
        """Has engines keep the name's live version resident, also when it changes.

        Raises `AdapterConflict` where the tenant has pinned `quota` names already, or where the largest
        versions of those and of this one take more rank pages than `most_pages`.
        """
        await self._call(self._pin, tenant, name, quota, "" if most_pages is None else most_pages, by)

    async def unpin(self, tenant: str, name: str, *, by: str = "") -> None:
        """Lets engines evict it again."""
        await self._call(self._unpin, tenant, name, by)

    async def _live(
        self, script: Script, tenant: str, name: str, version: int | None, *args: str | int
    ) -> AdapterVersion:
        number, record = await self._call(script, tenant, name, *args, version=version)
        return read_version(tenant, name, number, record)

    async def _call(
        self, script: Script, tenant: str, name: str, *args: str | int, version: int | None = None
    ) -> list[str]:
        check_name(name)
        status, *rest = map(text, await script(check_tenant(tenant), name, *args))
        raise_fault(status, name=name, version=version, detail="".join(rest))
        return rest
