"""What a tenant has used of its limits, in Redis: the scripts' common text, and the one that admits.

    loraplex:{<tenant>}:window:<subject>   hash: <kind> used in the current window, <kind>:start its first ms
    loraplex:{<tenant>}:month:<yyyy-mm>    tokens of a UTC month, input and output; for 70 days
    loraplex:{<tenant>}:leases[:<subject>] sorted set of running requests, by when each is given up, in ms
    loraplex:{<tenant>}:open               hash: request id -> what it holds, and its ledger entry so far

A subject is `tenant`, `key:<id>` or `adapter:<name>`. A window is fixed: it begins with the first request
that needs it and lasts a minute, each kind's by itself. All times are Redis' own, so any number of gateways,
with whatever clocks, count as one. The braces put all keys of a tenant into one slot of a cluster.

A request takes what it may need when it is admitted and gives back, at its end, what it did not use: into the
window that it was taken from and no other, since later ones never counted it.
"""

from __future__ import annotations

REQUESTS = "requests_per_minute"
INPUT_TOKENS = "input_tokens_per_minute"
OUTPUT_TOKENS = "output_tokens_per_minute"
CONCURRENT = "concurrent_requests"
MONTH_TOKENS = "tokens_per_month"
"""The kinds of limits, in the scripts as in the limits' own fields."""

TENANT = "tenant"
"""The subject that is the tenant as a whole."""


def root_of(tenant_id: str) -> str:
    """Returns the key that every script of a tenant's account is given, and builds the others from."""
    return f"loraplex:{{{tenant_id}}}"


SHARED = """
local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The UTC day of a time in ms, as yyyy-mm-dd. Years are counted from March, so that a leap day is the last.
local function day_of(ms)
    local days = math.floor(ms / 86400000) + 719468
    local era = math.floor(days / 146097)
    local of_era = days - era * 146097
    local leaps = math.floor(of_era / 1460) - math.floor(of_era / 36524) + math.floor(of_era / 146096)
    local year = math.floor((of_era - leaps) / 365)
    local of_year = of_era - 365 * year - math.floor(year / 4) + math.floor(year / 100)
    local shifted = math.floor((5 * of_year + 2) / 153)
    local month = shifted < 10 and shifted + 3 or shifted - 9
    local day = of_year - math.floor((153 * shifted + 2) / 5) + 1
    return string.format('%04d-%02d-%02d', year + era * 400 + (month <= 2 and 1 or 0), month, day)
end

local function month_of(ms) return string.sub(day_of(ms), 1, 7) end

local function window_key(root, subject) return root .. ':window:' .. subject end

local function leases_key(root, subject)
    return subject == 'tenant' and root .. ':leases' or root .. ':leases:' .. subject
end

local function add_to_month(root, month, tokens)
    local key = root .. ':month:' .. month
    if redis.call('INCRBY', key, tokens) == tokens then redis.call('EXPIRE', key, 70 * 86400) end -- it is new
end

-- Gives back what a request has not used of what it held, and adds the rest to its month. `reserved` is what
-- admission noted; nil for a request that was let through unseen, which counts in the month of `now`.
local function settle_windows(root, reserved, input, output, now)
    if not reserved then
        add_to_month(root, month_of(now), input + output)
        return
    end
    for _, held in ipairs(reserved.windows) do
        local subject, kind, start, amount = unpack(held)
        local used = kind == 'input_tokens_per_minute' and input or output
        local key = window_key(root, subject)
        if used ~= amount and tonumber(redis.call('HGET', key, kind .. ':start')) == start then
            redis.call('HINCRBY', key, kind, used - amount)
        end
    end
    add_to_month(root, reserved.month, input + output - reserved.month_tokens)
end

local function subjects_leased(reserved)
    return {'tenant', unpack(reserved and reserved.leases or {})}
end

-- Lets a request count as running until `expiry`, in ms; not one that has been given up or never was.
local function renew(root, id, reserved, expiry)
    for _, subject in ipairs(subjects_leased(reserved)) do
        redis.call('ZADD', leases_key(root, subject), 'XX', expiry, id)
    end
end

-- Ends a request's leases and forgets that it was open.
local function release(root, id, reserved)
    for _, subject in ipairs(subjects_leased(reserved)) do
        redis.call('ZREM', leases_key(root, subject), id)
    end
    redis.call('HDEL', root .. ':open', id)
end
"""
"""Goes before the text of every script of an account."""


ADMIT = (
    SHARED
    + """
-- KEYS: the account's root. ARGV: the request's id; what it asks for, as JSON; its ledger entry so far, as
-- JSON. What it asks for: `lease` and `window` in ms; `limits`, each a subject, a kind, the limit, an amount.
-- Takes all or nothing. Replies with a JSON array: whether it is admitted, the time, and then for each limit
-- what is used of it by now and when its window began, 0 where none has or needs to.
local root, id, ask = KEYS[1], ARGV[1], cjson.decode(ARGV[2])
local now = now_ms()
local month = month_of(now)
local PLACES = {requests_per_minute = 1, input_tokens_per_minute = 3, output_tokens_per_minute = 5}

-- A subject's windows are read together and written together: a command costs more than what it moves.
local read, written, begun = {}, {}, {}

local function windows_of(subject)
    local found = read[subject]
    if not found then
        found = redis.call(
            'HMGET', window_key(root, subject), 'requests_per_minute', 'requests_per_minute:start',
            'input_tokens_per_minute', 'input_tokens_per_minute:start',
            'output_tokens_per_minute', 'output_tokens_per_minute:start')
        read[subject] = found
    end
    return found
end

local function standing(subject, kind)
    if kind == 'concurrent_requests' then
        return redis.call('ZCOUNT', leases_key(root, subject), '(' .. now, '+inf'), 0
    elseif kind == 'tokens_per_month' then
        return tonumber(redis.call('GET', root .. ':month:' .. month) or 0), 0
    end
    local windows, at = windows_of(subject), PLACES[kind]
    local start = tonumber(windows[at + 1] or 0)
    -- A Redis on another machine may take over, whose clock is behind: no window begins so far ahead.
    if now >= start + ask.window or now < start - ask.window then return 0, 0 end
    return tonumber(windows[at]), start
end

-- A client of Redis repeats a call whose connection broke, so the first may have been carried out.
local repeated = redis.call('HEXISTS', root .. ':open', id) == 1
local admitted, reply = 1, {0, now}
for _, limit in ipairs(ask.limits) do
    local subject, kind, most, amount = unpack(limit)
    local used, start = standing(subject, kind)
    if used + amount > most and not repeated then admitted = 0 end
    table.insert(reply, used)
    table.insert(reply, start)
end
reply[1] = admitted
if admitted == 0 or repeated then return cjson.encode(reply) end

local leases, windows, month_tokens = {}, {}, 0
local function lease(subject) redis.call('ZADD', leases_key(root, subject), now + ask.lease, id) end
lease('tenant')
for index, limit in ipairs(ask.limits) do
    local subject, kind, _, amount = unpack(limit)
    local at = 2 * index + 1
    local used = reply[at] + amount
    reply[at] = used
    if kind == 'concurrent_requests' then
        if subject ~= 'tenant' then
            lease(subject)
            table.insert(leases, subject)
        end
    elseif kind == 'tokens_per_month' then
        month_tokens = amount
        add_to_month(root, month, amount)
    else
        local start, fields = reply[at + 1], written[subject]
        if start == 0 then start, begun[subject] = now, true end
        reply[at + 1] = start
        if not fields then
            fields = {}
            written[subject] = fields
        end
        for _, field in ipairs({kind, used, kind .. ':start', start}) do table.insert(fields, field) end
        if kind ~= 'requests_per_minute' then table.insert(windows, {subject, kind, start, amount}) end
    end
end
for subject, fields in pairs(written) do
    local key = window_key(root, subject)
    redis.call('HSET', key, unpack(fields))
    if begun[subject] then redis.call('PEXPIRE', key, ask.window) end -- it has until the last window's end
end
local reserved = {month = month, month_tokens = month_tokens, windows = windows, leases = leases}
local open = '{"reserved":' .. cjson.encode(reserved) .. ',"entry":' .. ARGV[3] .. '}'
redis.call('HSET', root .. ':open', id, open)
return cjson.encode(reply)
"""
)
