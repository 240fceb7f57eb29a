"""The scripts that change batches in Redis. See `gateway/batches/store.py` for the keys.

Whoever works on a batch holds a lease, and has its token in the batch's `holder`. Every script of a holder
asks for it first: one whose lease has ended meanwhile, because its process was stopped, changes nothing.
"""

from __future__ import annotations

from gateway.batches.files import ADD_FILE

CREATE = """
-- KEYS: the tenant's root. ARGV: tenant, id, created_ms, its input file, the most that may be open, fields.
-- Replies with 1; 0: there is no such file; -1: the tenant has too many batches that have not ended.
local root, id = KEYS[1], ARGV[2]
local batch, file = root .. ':batch:' .. id, root .. ':file:' .. ARGV[4]
if redis.call('EXISTS', batch) == 1 then return 1 end
if redis.call('EXISTS', file) == 0 then return 0 end
if redis.call('SCARD', root .. ':batches:open') >= tonumber(ARGV[5]) then return -1 end
redis.call('HINCRBY', file, 'users', 1)
redis.call('HSET', batch, unpack(ARGV, 6))
redis.call('ZADD', root .. ':batches', ARGV[3], id)
redis.call('SADD', root .. ':batches:open', id)
redis.call('ZADD', 'loraplex:batches', ARGV[3], ARGV[1] .. ' ' .. id)
return 1
"""

CLAIM = """
-- ARGV: the token, the lease in ms, tenants of which enough runs here. Replies with `<tenant> <id>` or false.
-- Of the tenants it takes the one whose last turn is longest ago; of its batches, the one that waits longest.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local full, turns = {}, {}
local chosen, batch, tenant, turn
for index = 3, #ARGV do full[ARGV[index]] = true end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', 'loraplex:batches', '-inf', now, 'LIMIT', 0, 1000)) do
    local space = string.find(member, ' ')
    local of, id = string.sub(member, 1, space - 1), string.sub(member, space + 1)
    turns[of] = turns[of] or tonumber(redis.call('ZSCORE', 'loraplex:batches:turns', of) or 0)
    if not full[of] and (not chosen or turns[of] < turn) then
        local found = 'loraplex:{' .. of .. '}:batch:' .. id
        if redis.call('EXISTS', found) == 0 then
            redis.call('ZREM', 'loraplex:batches', member)
        else
            chosen, batch, tenant, turn = member, found, of, turns[of]
        end
    end
end
if not chosen then return false end
redis.call('HSET', batch, 'holder', ARGV[1])
redis.call('ZADD', 'loraplex:batches', now + ARGV[2], chosen)
redis.call('ZADD', 'loraplex:batches:turns', now, tenant)
return chosen
"""

_HELD = """
local batch = KEYS[1] .. ':batch:' .. ARGV[1]
if redis.call('HGET', batch, 'holder') ~= ARGV[2] then return false end
"""
"""Begins the scripts of a holder. KEYS: the tenant's root. ARGV: id, token."""

RENEW = (
    _HELD
    + """
-- ARGV: and the lease in ms, the tenant. Replies with the batch's status.
local time = redis.call('TIME')
local expiry = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]
redis.call('ZADD', 'loraplex:batches', 'XX', expiry, ARGV[4] .. ' ' .. ARGV[1])
return redis.call('HGET', batch, 'status')
"""
)

GIVE_BACK = (
    _HELD
    + """
-- ARGV: and the tenant. Anybody may claim the batch at once, but after those that wait already: work on this
-- one may have failed, and may fail again.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', batch, 'holder', '')
redis.call('ZADD', 'loraplex:batches', 'XX', now, ARGV[3] .. ' ' .. ARGV[1])
return 1
"""
)

MOVE = (
    _HELD
    + """
-- ARGV: and the states that it may be in, with commas around each, and fields to set. Replies with the status
-- that it has then: where it was in none of the states, as before.
local status = redis.call('HGET', batch, 'status')
if not string.find(ARGV[3], ',' .. status .. ',', 1, true) then return status end
redis.call('HSET', batch, unpack(ARGV, 4))
return redis.call('HGET', batch, 'status')
"""
)

RECORD = (
    _HELD
    + """
-- ARGV: and a line's number, its result, the count that it belongs to. Replies with 1; 0: it has a result.
if redis.call('SETBIT', batch .. ':done', ARGV[3], 1) == 1 then return 0 end
redis.call('HSET', batch .. ':results', ARGV[3], ARGV[4])
redis.call('HINCRBY', batch, ARGV[5], 1)
return 1
"""
)

SPILL = (
    _HELD
    + """
-- ARGV: and the name of a file in the store, the numbers of the lines whose results are there now.
for first = 4, #ARGV, 1000 do  -- Lua's stack has no room for many more
    redis.call('HDEL', batch .. ':results', unpack(ARGV, first, math.min(first + 999, #ARGV)))
end
-- A client of Redis repeats a call whose connection broke: a file must not be there twice.
if not redis.call('LPOS', batch .. ':segments', ARGV[3]) then
    redis.call('RPUSH', batch .. ':segments', ARGV[3])
end
return 1
"""
)

FINISH = (
    ADD_FILE
    + _HELD
    + """
-- ARGV: and the tenant, now in ms, for how many s the batch stays listed, fields of the batch as JSON, files
-- as JSON, how many that have ended stay listed. Each file has an id, expires_at, bytes and fields.
local root = KEYS[1]
for _, file in ipairs(cjson.decode(ARGV[7])) do
    add_file(root, ARGV[3], file.id, ARGV[4], file.expires_at, file.bytes, file.fields)
end
redis.call('HSET', batch, 'holder', '', unpack(cjson.decode(ARGV[6])))
redis.call('EXPIRE', batch, ARGV[5])
redis.call('DEL', batch .. ':results', batch .. ':done', batch .. ':segments')
redis.call('ZREM', 'loraplex:batches', ARGV[3] .. ' ' .. ARGV[1])
redis.call('SREM', root .. ':batches:open', ARGV[1])
redis.call('ZADD', root .. ':batches:ended', ARGV[4], ARGV[1])
for _, old in ipairs(redis.call('ZRANGE', root .. ':batches:ended', 0, -1 - ARGV[8])) do
    redis.call('DEL', root .. ':batch:' .. old)
    redis.call('ZREM', root .. ':batches', old)
    redis.call('ZREM', root .. ':batches:ended', old)
end
local input = root .. ':file:' .. redis.call('HGET', batch, 'input_file_id')
if redis.call('EXISTS', input) == 1 then redis.call('HINCRBY', input, 'users', -1) end
return 1
"""
)

CANCEL = """
-- KEYS: the tenant's root. ARGV: id, now in s. Replies with 1; 0: it is too late, or there is no such batch.
local batch = KEYS[1] .. ':batch:' .. ARGV[1]
local status = redis.call('HGET', batch, 'status')
if status == 'cancelling' then return 1 end
if status ~= 'validating' and status ~= 'in_progress' then return 0 end
redis.call('HSET', batch, 'status', 'cancelling', 'cancelling_at', ARGV[2])
return 1
"""
