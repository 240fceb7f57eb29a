"""What the ledger keeps in Redis, and the two scripts that write it: a writer's records, and the reaper's.

    loraplex:{<tenant>}:ledger              stream: a message per request that has ended, named by FIELDS
    loraplex:{<tenant>}:usage:<yyyy-mm-dd>  hash: sums by adapter and key, over the UTC day of arrival
    loraplex:{<tenant>}:progress            hash: request id -> entry of a running request, as last recorded
    loraplex:{<tenant>}:written             hash: writer -> number of its last record here, and when it came
    loraplex:{<tenant>}:closed:<id>         a request that has an entry: which, if a reaper wrote it; expires

A tenant's part of a batch is one script call: what a request held of its limits, its entry, and the sums that
count it, change together or not at all.

Records of a writer are numbered and come in order. So a batch whose answer was lost is sent again, and what
had been applied is passed over. Who else may settle a request, a reaper, leaves a mark with what it wrote;
should the writer turn out to live, or its journal turn up, that entry is taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from redis.asyncio import Redis

from adapters.script_batches import ScriptBatches
from gateway.accounts.entry import ERRORS, FIELDS, Outcome, as_text
from gateway.accounts.windows import SHARED, root_of

OPEN_TENANTS = "loraplex:open-tenants"
"""Set of the tenants that may have open requests: the reaper looks there."""
USAGE_TENANTS = "loraplex:usage-tenants"
"""Set of the tenants, deleted ones too, that have a ledger."""

SEPARATOR = "\x1f"
"""Between adapter, key and field in the names of the sums."""


def _places(*names: str) -> str:
    """Returns where fields are in an entry, as Lua counts."""
    return ", ".join(str(FIELDS.index(name) + 1) for name in names)


_LEDGER = (
    SHARED
    + f"""
local FIELDS = {{{", ".join(f"'{name}'" for name in FIELDS)}}}
local ID, TIME, KEY, ADAPTER, OUTCOME = {_places("id", "time", "key", "adapter", "outcome")}
local INPUT, CACHED, OUTPUT = {_places("input_tokens", "cached_tokens", "output_tokens")}
local ERRORS = {{{", ".join(f"['{outcome}'] = true" for outcome in sorted(ERRORS))}}}
local LOST = '{Outcome.LOST}'
local SEPARATOR = '\\{ord(SEPARATOR)}'
"""
    + """
-- How long a late message of a settled request may still arrive, and how long its gateway may turn up, in s.
local SETTLED_S, REAPED_S = 120, 30 * 86400

local function text_of(fault) return type(fault) == 'table' and fault.err or tostring(fault) end

local function tokens_of(entry) return tonumber(entry[INPUT]) + tonumber(entry[OUTPUT]) end

-- Adds an entry to the sums of its day, or takes it away (sign -1).
local function count(root, entry, sign)
    local key = root .. ':usage:' .. day_of(tonumber(entry[TIME]))
    local prefix = entry[ADAPTER] .. SEPARATOR .. entry[KEY] .. SEPARATOR
    local function add(field, amount)
        if amount ~= 0 then redis.call('HINCRBY', key, prefix .. field, sign * amount) end
    end
    add('requests', 1)
    add('errors', ERRORS[entry[OUTCOME]] and 1 or 0)
    add('input_tokens', tonumber(entry[INPUT]))
    add('cached_tokens', tonumber(entry[CACHED]))
    add('output_tokens', tonumber(entry[OUTPUT]))
end

local function append(root, entry)
    local message = {}
    for index, name in ipairs(FIELDS) do
        message[2 * index - 1], message[2 * index] = name, entry[index]
    end
    count(root, entry, 1)
    return redis.call('XADD', root .. ':ledger', '*', unpack(message))
end

-- What admission noted of a request, or nil when it is not open. Its `reserved` is nil when it holds nothing.
local function open_of(root, id)
    local open = redis.call('HGET', root .. ':open', id)
    return open and cjson.decode(open) or nil
end

-- Gives back what a request did not use, and forgets that it was open. Returns the month that it counts in.
local function finish(root, entry, open)
    local id, reserved, arrival = entry[ID], open and open.reserved, tonumber(entry[TIME])
    settle_windows(root, reserved, tonumber(entry[INPUT]), tonumber(entry[OUTPUT]), arrival)
    release(root, id, reserved)
    redis.call('HDEL', root .. ':progress', id)
    return reserved and reserved.month or month_of(arrival)
end
"""
)

_APPLY = (
    _LEDGER
    + """
-- KEYS: the account's root. ARGV: the writer's name; how long a lease lasts, in ms; then for each record its
-- number, its kind and the request's entry. Replies with what is wrong with records that cannot be applied:
-- they must not hold up those behind them.
local root, writer, lease_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
local now = now_ms()

-- Whether the request has an entry by its own writer. What a reaper wrote for it is taken back: the writer
-- lives, or its journal has turned up.
local function has_entry(id)
    local closed = root .. ':closed:' .. id
    local mark = redis.call('GET', closed)
    if not mark or mark == 'settled' then return mark end
    local reaped = cjson.decode(mark)
    redis.call('XDEL', root .. ':ledger', reaped.message)
    count(root, reaped.entry, -1)
    add_to_month(root, reaped.month, -tokens_of(reaped.entry))
    redis.call('DEL', closed)
    return false
end

local function note_progress(entry, text)
    local id = entry[ID]
    if has_entry(id) then return end
    local open = open_of(root, id)
    if not open then
        redis.call('HSET', root .. ':open', id, '{}')
        redis.call('ZADD', root .. ':leases', now + lease_ms, id)
    end
    renew(root, id, open and open.reserved, now + lease_ms)
    redis.call('HSET', root .. ':progress', id, text)
end

local function settle(entry)
    local id = entry[ID]
    if has_entry(id) then return end
    finish(root, entry, open_of(root, id))
    append(root, entry)
    redis.call('SET', root .. ':closed:' .. id, 'settled', 'EX', SETTLED_S)
end

local last = tonumber(string.match(redis.call('HGET', root .. ':written', writer) or '0', '^%d+'))
local faults = {}
for at = 3, #ARGV, 3 do
    local number, kind, text = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 2]
    if number > last then
        last = number
        local ok, fault = pcall(function()
            local entry = cjson.decode(text)
            if kind == 'end' then settle(entry) else note_progress(entry, text) end
        end)
        if not ok then
            table.insert(faults, text_of(fault) .. ' in ' .. text)
        end
    end
end
redis.call('HSET', root .. ':written', writer, string.format('%d %d', last, now))
return faults
"""
)

REAP = (
    _LEDGER
    + """
-- KEYS: the account's root. ARGV: Redis' time in ms, as its caller just read it. Settles some requests whose
-- lease has run out, with what was last recorded of them. Replies with how many they were, and then with what
-- is wrong with those that cannot be settled: they must not hold up others.
local root, now = KEYS[1], tonumber(ARGV[1])
-- Redis stood still since then, and has heard of nobody meanwhile.
if now_ms() - now > 2000 then return {0} end

local function reap(id)
    local open = open_of(root, id) or {}
    local recorded = redis.call('HGET', root .. ':progress', id)
    local entry = recorded and cjson.decode(recorded) or open.entry
    local closed = root .. ':closed:' .. id
    if not entry or redis.call('EXISTS', closed) == 1 then
        -- Opened by a message that came after the request had been settled: it has used nothing.
        if open.reserved then settle_windows(root, open.reserved, 0, 0, now) end
        release(root, id, open.reserved)
        redis.call('HDEL', root .. ':progress', id)
        return
    end
    entry[OUTCOME] = LOST
    local month = finish(root, entry, open)
    local mark = {entry = entry, message = append(root, entry), month = month}
    redis.call('SET', closed, cjson.encode(mark), 'EX', REAPED_S)
end

local expired = redis.call('ZRANGE', root .. ':leases', '-inf', now, 'BYSCORE', 'LIMIT', 0, 200)
local reply = {#expired}
for _, id in ipairs(expired) do
    local ok, fault = pcall(reap, id)
    if not ok then
        redis.call('ZREM', root .. ':leases', id)
        table.insert(reply, text_of(fault) .. ' in ' .. id)
    end
end
return reply
"""
)


class Kind(StrEnum):
    """What a record says of its request."""

    PROGRESS = "progress"
    END = "end"


@dataclass(frozen=True, slots=True)
class Record:
    """One step of a request, for the ledger. `number` counts
    up over all records of a writer; `entry` is in wire form."""

    number: int
    tenant: str
    kind: Kind
    entry: str


class LedgerScript:
    """Applies records of a writer, in one round trip or two, each exactly once however often it is sent."""

    def __init__(self, redis: Redis, *, lease_ms: int) -> None:
        """`lease_ms`: how long a request counts as running after its last record."""
        self._redis = redis
        self._script = ScriptBatches(redis, redis.register_script(_APPLY))
        self._lease_ms = lease_ms
        self._listed: set[str] = set()

    def lists(self, tenant: str) -> bool:
        """Whether the tenant has been noted where reapers and usage look for tenants."""
        return tenant in self._listed

    def list_again(self) -> None:
        """Has tenants noted anew with their next record, in case Redis has lost who has a ledger."""
        self._listed.clear()

    async def apply(self, writer: str, records: Sequence[Record]) -> list[str]:
        """Applies records, which must not be fewer or other than in an earlier attempt, in order.

        Returns what is wrong with records that can never be applied. Raises RedisError or OSError when it is
        not known whether all were applied; then the same records must be sent again before any others.
        """
        calls: dict[str, list[str]] = {}
        for record in records:
            call = calls.setdefault(record.tenant, [])
            call += (str(record.number), record.kind, record.entry)
        await self._list(calls.keys() - self._listed)
        # Two round trips at most: all but the first are there when the first has its answer.
        replies = await asyncio.gather(
            *(
                self._script([root_of(tenant)], [writer, str(self._lease_ms), *args])
                for tenant, args in calls.items()
            )
        )
        return [as_text(fault) for faults in replies for fault in faults]

    async def _list(self, tenants: Set[str]) -> None:
        """Notes where there is a ledger."""
        if tenants:
            for kind in (OPEN_TENANTS, USAGE_TENANTS):
                await self._redis.sadd(kind, *tenants)  # type: ignore[misc]
            self._listed |= tenants
