"""Which other tenants may use a name. They write it `owner/name`, which no name of their own can be."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from adapters.identity import check_name
from adapters.registry.errors import raise_fault
from adapters.registry.scripts import Script, check_tenant, text
from adapters.registry.versions import AdapterVersion, read_version

_MAX_GRANTS = 1000

_GRANT = """
local tenant, name, grantee, by, most = unpack(ARGV)
if not live_of(tenant, name) then return 'no_name' end
local grants = at('grants', tenant, name)
if redis.call('SISMEMBER', grants, grantee) == 0 and redis.call('SCARD', grants) >= tonumber(most) then
    return 'too_many_grants'
end
if redis.call('SADD', grants, grantee) == 1 then
    redis.call('SADD', at('granted', grantee), tenant .. '/' .. name)
    changed(tenant, name, 'grant', by, {detail = grantee})
end
return 'ok'
"""

_REVOKE = """
local tenant, name, grantee, by = unpack(ARGV)
if not live_of(tenant, name) then return 'no_name' end
if redis.call('SREM', at('grants', tenant, name), grantee) == 1 then
    redis.call('SREM', at('granted', grantee), tenant .. '/' .. name)
    changed(tenant, name, 'revoke', by, {detail = grantee})
end
return 'ok'
"""

# → {owner, name, live version, record}, of each granted name that has a live version.
_GRANTED = """
local result = {}
for _, granted in ipairs(redis.call('SMEMBERS', at('granted', ARGV[1]))) do
    local owner, name = string.match(granted, '^([^/]+)/(.+)$')
    local live = live_of(owner, name)
    if live and live ~= '0' then
        result[#result + 1] = {owner, name, live, record_of(owner, name, live)}
    end
end
return result
"""


class Grants:
    """See `Registry` for `by` and for what is raised."""

    def __init__(self, redis: Redis) -> None:
        self._grant = Script(redis, _GRANT)
        self._revoke = Script(redis, _REVOKE)
        self._granted = Script(redis, _GRANTED)

    async def grant(self, tenant: str, name: str, grantee: str, *, by: str = "") -> None:
        """Lets another tenant use all versions of a name. Whether there is such a tenant is not asked."""
        await self._call(self._grant, tenant, name, grantee, by, _MAX_GRANTS)

    async def revoke(self, tenant: str, name: str, grantee: str, *, by: str = "") -> None:
        """Takes a grant back; one that was not given is no error."""
        await self._call(self._revoke, tenant, name, grantee, by)

    async def granted_to(self, tenant: str) -> Sequence[AdapterVersion]:
        """The live versions of the names that others let the tenant use, by owner and name."""
        found = await self._granted(check_tenant(tenant))
        versions = [read_version(text(owner), text(name), *rest) for owner, name, *rest in found]
        return sorted(versions, key=lambda item: (item.tenant, item.name))

    async def _call(self, script: Script, tenant: str, name: str, grantee: str, *args: str | int) -> None:
        check_name(name)
        status = await script(check_tenant(tenant), name, check_tenant(grantee), *args)
        raise_fault(text(status), name=name, detail=f"{_MAX_GRANTS:,}")
