"""What all scripts of the registry have in common: key names, and the few state changes that several make."""

from __future__ import annotations

import re
from typing import Any

from redis.asyncio import Redis

from adapters.script_batches import ScriptBatches

_ROOT = "loraplex:{adapters}:"
CHANGES_CHANNEL = _ROOT + "changes"
"""Over which `owner/name` goes with each change of what a name means, or of who may use it."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

REFERENCES = _ROOT + "references"
PINS = _ROOT + "pins"
BYTES = _ROOT + "bytes"
UNRECORDED = _ROOT + "unrecorded"
UNREFERENCED = _ROOT + "unreferenced"

MOST_VERSIONS = 10_000
"""Of a name."""

PAGE_RANK = 16
"""Ranks of a rank page, in which engines hold adapters."""

# Keys are built here rather than passed: they are all in the slot of the one key that is passed.
_SHARED = (
    f"local MOST_VERSIONS, PAGE_RANK = {MOST_VERSIONS}, {PAGE_RANK}"
    + """
local function at(...) return 'loraplex:{adapters}:' .. table.concat({...}, ':') end
local function now() return tonumber(redis.call('TIME')[1]) end
local function known(reply) if reply then return reply end end

local function live_of(tenant, name) return known(redis.call('HGET', at('live', tenant), name)) end

local function record_of(tenant, name, version)
    return known(redis.call('HGET', at('versions', tenant, name), version))
end

-- The canary's version and percent, as text, or nothing.
local function canary_of(tenant, name)
    local canary = redis.call('HGET', at('canary', tenant), name)
    if canary then return string.match(canary, '^(%d+):(.+)$') end
end

local function newest_of(tenant, name)
    local newest = 0
    for _, version in ipairs(redis.call('HKEYS', at('versions', tenant, name))) do
        newest = math.max(newest, tonumber(version))
    end
    return string.format('%d', newest)
end

-- One version more has this record's digest.
local function hold(tenant, record)
    local values = cjson.decode(record)
    redis.call('HINCRBY', at('references'), values.digest, 1)
    redis.call('ZREM', at('unreferenced'), values.digest)
    if redis.call('HINCRBY', at('holdings', tenant), values.digest, 1) == 1 then
        redis.call('HINCRBY', at('bytes'), tenant, values.nbytes)
    end
end

-- One version less has this record's digest. Returns the digest if no other version has it.
local function drop(tenant, record)
    local values = cjson.decode(record)
    if redis.call('HINCRBY', at('holdings', tenant), values.digest, -1) <= 0 then
        redis.call('HDEL', at('holdings', tenant), values.digest)
        redis.call('HINCRBY', at('bytes'), tenant, -values.nbytes)
    end
    if redis.call('HINCRBY', at('references'), values.digest, -1) > 0 then return nil end
    redis.call('HDEL', at('references'), values.digest)
    redis.call('ZADD', at('unreferenced'), now(), values.digest)
    return values.digest
end

local function pages_in(record) return math.ceil((cjson.decode(record).rank or 0) / PAGE_RANK) end

-- The rank pages that a pin of this name may take, whichever of its versions is live.
local function pages_of(tenant, name)
    local pages = 0
    for _, record in ipairs(redis.call('HVALS', at('versions', tenant, name))) do
        pages = math.max(pages, pages_in(record))
    end
    return pages
end

-- The names that a tenant has pinned. Pins of all tenants are in one small hash, which engines read.
local function pinned_of(tenant)
    local own, names = tenant .. ':', {}
    for _, pin in ipairs(redis.call('HKEYS', at('pins'))) do
        if string.sub(pin, 1, #own) == own then names[#names + 1] = string.sub(pin, #own + 1) end
    end
    return names
end

-- The rank pages of a tenant's pins without this name's.
local function pinned_beside(tenant, name)
    local pages = 0
    for _, pinned in ipairs(pinned_of(tenant)) do
        if pinned ~= name then pages = pages + pages_of(tenant, pinned) end
    end
    return pages
end

-- Which quota the tenant would exceed with this version more, and how much of it is used; nothing: it fits.
-- An empty quota is none. The bytes of a digest that the tenant has already are no more bytes. A name's
-- versions are read all at once, so their number is bounded for everybody. A pin counts by the largest of its
-- name's versions: so what is promoted later was counted before.
local function over_quota(tenant, name, record, most_names, most_bytes, most_pages)
    local versions = redis.call('HLEN', at('versions', tenant, name))
    if versions >= MOST_VERSIONS then return 'versions', tostring(versions) end
    local names = redis.call('HLEN', at('live', tenant))
    if most_names ~= '' and not live_of(tenant, name) and names >= tonumber(most_names) then
        return 'adapter_quota', tostring(names)
    end
    local is_pinned = redis.call('HEXISTS', at('pins'), tenant .. ':' .. name) == 1
    if most_pages ~= '' and is_pinned and pages_in(record) > pages_of(tenant, name) then
        local beside = pinned_beside(tenant, name)
        if beside + pages_in(record) > tonumber(most_pages) then
            return 'pinned_pages', string.format('%d', beside)
        end
    end
    local values = cjson.decode(record)
    if most_bytes == '' or redis.call('HEXISTS', at('holdings', tenant), values.digest) == 1 then return end
    local used = redis.call('HGET', at('bytes'), tenant) or '0'
    if tonumber(used) + values.nbytes > tonumber(most_bytes) then return 'bytes_quota', used end
end

-- Whoever remembers what the name means, or that it may use it, must ask again.
local function tell(tenant, name) redis.call('PUBLISH', at('changes'), tenant .. '/' .. name) end

-- The name's record in the store is out of date from here on.
local function outdate(tenant, name)
    tell(tenant, name)
    redis.call('HINCRBY', at('revision', tenant), name, 1)
    redis.call('SADD', at('unrecorded'), tenant .. ':' .. name)
end

local function changed(tenant, name, action, by, event)
    event.action, event.by, event.at = action, by, now()
    redis.call('LPUSH', at('log', tenant, name), cjson.encode(event))
    redis.call('LTRIM', at('log', tenant, name), 0, 199)
    outdate(tenant, name)
end

-- The bare name means this version now. Ends a canary; a pin follows.
local function make_live(tenant, name, version)
    redis.call('HSET', at('live', tenant), name, version)
    redis.call('HDEL', at('canary', tenant), name)
    local pin = tenant .. ':' .. name
    if redis.call('HEXISTS', at('pins'), pin) == 1 then
        redis.call('HSET', at('pins'), pin, cjson.decode(record_of(tenant, name, version)).digest)
    end
end

-- The same, and a rollback will return to the version that was live until now.
local function supersede(tenant, name, version)
    local live = live_of(tenant, name)
    if live == tostring(version) then
        redis.call('HDEL', at('canary', tenant), name)
        return
    end
    if live and live ~= '0' then
        redis.call('LPUSH', at('past', tenant, name), live)
        redis.call('LTRIM', at('past', tenant, name), 0, 99)
    end
    make_live(tenant, name, version)
end

-- Everything of a name goes but its counters. Returns the digests that no version has any more.
local function remove_name(tenant, name)
    local unused = {}
    for _, record in ipairs(redis.call('HVALS', at('versions', tenant, name))) do
        unused[#unused + 1] = drop(tenant, record)
    end
    for _, grantee in ipairs(redis.call('SMEMBERS', at('grants', tenant, name))) do
        redis.call('SREM', at('granted', grantee), tenant .. '/' .. name)
    end
    redis.call('DEL', at('versions', tenant, name), at('past', tenant, name), at('log', tenant, name),
               at('grants', tenant, name))
    redis.call('HDEL', at('live', tenant), name)
    redis.call('HDEL', at('canary', tenant), name)
    redis.call('HDEL', at('pins'), tenant .. ':' .. name)
    return unused
end
"""
)


class Script:
    """One verb: a Lua body that may use what is shared. Its arguments are texts and integers, as ARGV."""

    def __init__(self, redis: Redis, body: str) -> None:
        self._script = redis.register_script(_SHARED + body)

    async def __call__(self, *args: str | int) -> Any:
        return await self._script(keys=[REFERENCES], args=list(args))


class BatchedScript:
    """The same, for a verb of every request: calls that meet share a round trip."""

    def __init__(self, redis: Redis, body: str) -> None:
        self._batches = ScriptBatches(redis, redis.register_script(_SHARED + body))

    async def __call__(self, *args: str) -> Any:
        return await self._batches([REFERENCES], args)


def key(*parts: str) -> str:
    """A key of the registry's, as scripts build them."""
    return _ROOT + ":".join(parts)


def check_tenant(tenant: str) -> str:
    """Returns a tenant's id. A colon in it would let its keys meet another's: that raises ValueError."""
    if _TENANT.fullmatch(tenant) is None:
        raise ValueError(f"{tenant!a} is no tenant id")
    return tenant


def text(value: str | bytes) -> str:
    """Replies are text or bytes, as the client was made."""
    return value.decode() if isinstance(value, bytes) else value
