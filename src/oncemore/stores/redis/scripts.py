"""The Lua scripts of the Redis store, one for each verb.  Each is atomic, uses the server's clock, and may be sent twice.

A record is a string with one msgpack array.  It begins with FIELDS.  A settled record then has its outcome and the
outcome's hash; another record may have its request there.  A Redis hash of the same fields would take twice the memory
and twice the server's time.  Times are whole microseconds.

One call carries any number of items of the same verb.  KEYS are the records.  ARGV are the clock's shift, the channel
for wake-ups, and the arguments of each item.  In a cluster, records are in different slots, so each item is a call.
"""

from __future__ import annotations

import hashlib
import re

# The scripts rewrite the head, and copy the other fields unchanged.  Most of them read only the head.
HEAD = (
    "state", "token", "attempts", "created_at", "lease_until", "settled_at", "expires_at", "accessed_at", "note",
    "audit", "watched", "lapsed", "decision",
)  # fmt: skip
FIELDS = (*HEAD, "holder", "fingerprint", "scope", "key", "name")

# The clock decides the state as in _ledger/states.py.  A deleted record leaves its token behind for a day, so that the
# next token is higher even if the clock was set back.  For the same reason, settled and released records stay for a minute
# after they have expired.  Records that are kept for an audit stay until they are archived.
CAPITALS = re.compile(r"\b[A-Z_]+\b")
ARGUMENT = re.compile(r"ARGV\[a(?: \+ (\d+))?\]")
PRELUDE = r"""
local time = redis.call('TIME')
local real = time[1] * 1000000 + time[2]
local now = real + ARGV[1]
local GRACE, DAY = 60000, 86400000
-- The first bytes of an array of 13, 14, 18, 19 or 20 fields.  ASKED is an open record with a request.
local DELETED, UNCLAIMED, OPEN, ASKED, SETTLED = '\220\0\13', '\220\0\14', '\220\0\18', '\220\0\19', '\220\0\20'
local pack, peek = cmsgpack.pack, cmsgpack.unpack_limit

local function state_now(state, lease_until, expires_at)
  if state == 'running' then
    return (tonumber(lease_until) or 0) <= now and 'lapsed' or state
  elseif state == 'settled' or state == 'released' then
    expires_at = tonumber(expires_at)
    return expires_at and expires_at <= now and 'absent' or state
  end
  return state == 'held' and state or state == 'deleted' and 'absent' or 'unreadable'
end

-- Return the fields up to *last*, with the state by the clock as `now`.  Return nil if there is no record, and an error
-- if the value is not a string.
local function read(key, last)
  local value = redis.pcall('GET', key)
  if not value or type(value) == 'table' then
    return value or nil
  end
  local r = {pcall(peek, value, last - 2, 3)}
  if not r[1] then
    r = {}
  end
  r.value, r.last, r.now = value, last, state_now(r[STATE], r[LEASE_UNTIL], r[EXPIRES_AT])
  return r
end

local function save(key, value, expiry)
  if expiry then
    redis.call('SET', key, value, 'PX', string.format('%.0f', expiry))
  else
    redis.call('SET', key, value)
  end
end

-- Return the end of the last field that every record has, or -1 if nothing follows it.
local function name_end(r)
  return (peek(r.value, NAME - 2, 3))
end

-- Write the record with its changed head.  If *outcome* (packed with its hash) is given, it replaces the request.
local function write(key, r, expiry, outcome)
  local header, rest = string.sub(r.value, 1, 3), r[2] > 0 and string.sub(r.value, r[2] + 1) or ''
  if outcome then
    if header == ASKED then
      rest = string.sub(r.value, r[2] + 1, name_end(r))
    end
    header, rest = SETTLED, rest .. outcome
  end
  save(key, header .. pack(unpack(r, STATE, r.last)) .. rest, expiry)
end

local function lifetime(retention, audit)
  return not audit and math.ceil(retention / 1000) + GRACE or nil
end

local function next_token(r)
  return math.max(real, (tonumber(r[TOKEN]) or 0) + 1)
end

local function archive(key, r)
  redis.call('RENAME', key, key .. ':' .. string.format('%.0f', r[TOKEN]))
end

-- A wake-up that cannot be sent must not fail the script.  Waiters also look by themselves, after each `poll`.
local function notify(scope, name)
  redis.pcall('PUBLISH', ARGV[2], #scope .. ':' .. scope .. name)
end

local function notify_if_watched(r)
  if r[WATCHED] then
    local all = {true, peek(r.value, KEY - 2, 3)}
    notify(all[SCOPE], all[KEY])
    r[WATCHED] = false
  end
end

-- Write the record unchanged, for a verb that is sent again.  Without a write, WAIT would return immediately, although
-- the replicas may not have the first call's write.
local function write_again(key, r)
  redis.call('SET', key, r.value, 'KEEPTTL')
end

-- Return the record, and 1 if the caller owns it and it is running, 2 if it is already in the state *target*, else 0.
local function owned(key, token, target)
  local r = read(key, DECISION)
  if not r or r.err then
    return r, r or 0
  end
  if r[TOKEN] ~= tonumber(token) then
    return r, 0
  elseif r[STATE] == 'running' then
    return r, 1
  elseif r.now ~= target then
    return r, 0
  end
  write_again(key, r)
  return r, 2
end
"""

LOOP = """
local answers = {}
for i = 1, #KEYS do
  answers[i] = verb(KEYS[i], 3 + (i - 1) * WIDTH)
end
return answers
"""


class Script:
    """One verb in Lua.  The number of arguments of each item is found in the text of the verb."""

    def __init__(self, verb: str) -> None:
        arguments = {int(number or 0) for number in ARGUMENT.findall(verb)}
        # The index of each field in the result of `read`; before them come a success and the number of bytes read.
        numbers = {field.upper(): at for at, field in enumerate(FIELDS, start=3)}
        numbers["WIDTH"] = max(arguments, default=-1) + 1
        text = CAPITALS.sub(lambda name: str(numbers.get(name[0], name[0])), PRELUDE + verb + LOOP)
        self.source = text.strip().encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


# lease, packed fields from holder to name, packed request or '' → for a first claim, the token, which is the time;
# for a later claim, {token, lease_until, attempts, lapsed}; if a record prevents the claim, {now, record}.
# A claim that is sent twice is granted twice, with the same token, if the record is still stored as running.
CLAIM = Script("""
local function grant(key, a, token, attempts, created_at, watched, lapsed, request)
  local lease_until = now + ARGV[a]
  redis.call('SET', key, (request == '' and OPEN or ASKED) .. pack('running', token, attempts, created_at, lease_until,
    nil, nil, nil, '', false, watched, lapsed, nil) .. ARGV[a + 1] .. request)
  return lease_until
end

local function grant_again(key, a, r)
  local token, attempts, created_at, watched, lapsed = next_token(r), 1, now, false, r.now == 'lapsed'
  local request = ARGV[a + 2]
  if r.now ~= 'absent' then
    attempts, created_at, watched = (tonumber(r[ATTEMPTS]) or 0) + 1, r[CREATED_AT], r[WATCHED]
    if request == '' and string.sub(r.value, 1, 3) == ASKED then
      request = string.sub(r.value, name_end(r) + 1)
    end
  elseif r[AUDIT] then
    archive(key, r)
  end
  local lease_until = grant(key, a, token, attempts, created_at, watched, lapsed, request)
  return {token, lease_until, attempts, lapsed and 1 or 0}
end

local function verb(key, a)
  local r = read(key, FINGERPRINT)
  if not r then
    grant(key, a, real, 1, now, false, false, ARGV[a + 2])
    return real
  elseif r.err then
    return r
  end
  local _, holder, fingerprint = peek(ARGV[a + 1], 2)
  local again = r[HOLDER] == holder
  if again and r[STATE] == 'running' then
    r[LEASE_UNTIL] = now + ARGV[a]
    write(key, r)
    return {r[TOKEN], r[LEASE_UNTIL], r[ATTEMPTS], r[LAPSED] and 1 or 0}
  end
  local free = r.now == 'released' or r.now == 'lapsed'
  if not again and (r.now == 'absent' or free and r[FINGERPRINT] == fingerprint) then
    return grant_again(key, a, r)
  end
  if r.now == 'running' and not r[WATCHED] then
    r[WATCHED] = true
    write(key, r)
  end
  return {now, r.value}
end
""")

# holder → 1 if the claim of that holder was granted and is now undone; otherwise 0.
# A first attempt leaves its token and holder for a minute, so that a late copy of the claim is not granted.
UNCLAIM = Script("""
local function verb(key, a)
  local r = read(key, HOLDER)
  if not r or r.err or r[STATE] ~= 'running' or r[HOLDER] ~= ARGV[a] then
    return 0
  end
  notify_if_watched(r)
  if r[LAPSED] then
    r[LEASE_UNTIL] = now
    write(key, r)
  elseif r[ATTEMPTS] == 1 then
    save(key, UNCLAIMED .. pack('deleted', r[TOKEN], 0, 0, 0, nil, nil, nil, '', false, false, false, '', ARGV[a]), GRACE)
  else
    r[STATE], r[EXPIRES_AT] = 'released', now + DAY * 1000
    write(key, r, lifetime(DAY * 1000))
  end
  return 1
end
""")

# token, lease → lease_until, or 0 for a late owner.  If *lease* is 0, it ends now, so the waiters are notified.
RENEW = Script("""
local function verb(key, a)
  local r, own = owned(key, ARGV[a], 'running')
  if own ~= 1 then
    return own
  end
  r[LEASE_UNTIL] = now + ARGV[a + 1]
  if r[LEASE_UNTIL] <= now then
    notify_if_watched(r)
  end
  write(key, r)
  return r[LEASE_UNTIL]
end
""")

# token, retention, note and audit if any, outcome and its hash → 1 or 2 (settled before), or 0 for a late owner.
SETTLE = Script("""
local function verb(key, a)
  local r, own = owned(key, ARGV[a], 'settled')
  if own == 1 then
    notify_if_watched(r)
    r[STATE], r[SETTLED_AT], r[ACCESSED_AT], r[EXPIRES_AT] = 'settled', now, now, now + ARGV[a + 1]
    if ARGV[a + 2] ~= '' then
      r[NOTE], r[AUDIT] = cmsgpack.unpack(ARGV[a + 2])
    end
    write(key, r, lifetime(ARGV[a + 1], r[AUDIT]), ARGV[a + 3])
  end
  return own
end
""")

# token, retention → as SETTLE.  With retention 0 the record expires immediately, so a repeat compares the stored state.
RELEASE = Script("""
local function verb(key, a)
  local r, own = owned(key, ARGV[a], 'released')
  if own == 1 then
    notify_if_watched(r)
    r[STATE], r[EXPIRES_AT] = 'released', now + ARGV[a + 1]
    write(key, r, lifetime(ARGV[a + 1]))
  elseif own == 0 and r and ARGV[a + 1] == '0' and r[STATE] == 'released' and r[TOKEN] == tonumber(ARGV[a]) then
    write_again(key, r)
    return 2
  end
  return own
end
""")

# token, note → as SETTLE.
HOLD = Script("""
local function verb(key, a)
  local r, own = owned(key, ARGV[a], 'held')
  if own == 1 then
    notify_if_watched(r)
    r[STATE], r[NOTE] = 'held', ARGV[a + 1]
    write(key, r)
  end
  return own
end
""")

# token, retention → 1 if the record is settled under that token, and now expires later.
TOUCH = Script("""
local function verb(key, a)
  local r = read(key, DECISION)
  if not r or r.err then
    return r or 0
  end
  if r.now ~= 'settled' or r[TOKEN] ~= tonumber(ARGV[a]) then
    return 0
  end
  r[ACCESSED_AT], r[EXPIRES_AT] = now, now + ARGV[a + 1]
  write(key, r, lifetime(ARGV[a + 1], r[AUDIT]))
  return 1
end
""")

# → {now, record}, or nothing if it is absent.
FIND = Script("""
local function verb(key)
  local r = read(key, DECISION)
  if not r or r.err then
    return r or false
  end
  return r.now ~= 'absent' and {now, r.value}
end
""")

# → {the stored state, the state by the clock}, or nothing if the key does not hold a record.
STATES = Script("""
local function verb(key)
  local r = read(key, DECISION)
  if not r or r.err or r.now == 'unreadable' then
    return false
  end
  return {r[STATE], r.now}
end
""")

# nonce, retention, note, 'settled' or 'released', outcome and its hash → {now, record}, or the state that forbids it.
RESOLVE = Script("""
local function verb(key, a)
  local r = read(key, DECISION)
  if not r or r.err then
    return r or 'absent'
  end
  if r.now == 'held' or r.now == 'lapsed' then
    notify_if_watched(r)
    local target = ARGV[a + 3]
    r[STATE], r[TOKEN], r[NOTE], r[DECISION] = target, next_token(r), ARGV[a + 2], ARGV[a]
    r[EXPIRES_AT] = now + ARGV[a + 1]
    if target == 'settled' then
      r[SETTLED_AT], r[ACCESSED_AT] = now, now
    end
    write(key, r, lifetime(ARGV[a + 1]), target == 'settled' and ARGV[a + 4])
  elseif r.now == 'absent' or r[DECISION] ~= ARGV[a] then
    return r.now
  else
    write_again(key, r)
  end
  return {now, redis.call('GET', key)}
end
""")

# nonce, scope, key → 1 if there was a record, 0 if there was none, -1 if it is running.
DELETE = Script("""
local function verb(key, a)
  local r = read(key, DECISION)
  if r and r.err then
    return r
  end
  if r and r.now == 'running' then
    return -1
  end
  local again = r and r[STATE] == 'deleted' and r[DECISION] == ARGV[a]
  if again then
    write_again(key, r)
  elseif r and r[STATE] ~= 'deleted' then
    if r.now == 'absent' and r[AUDIT] then
      archive(key, r)
    end
    save(key, DELETED .. pack('deleted', tonumber(r[TOKEN]) or 0, 0, 0, 0, nil, nil, nil, '', false, false, false,
      ARGV[a]), DAY)
  end
  notify(ARGV[a + 1], ARGV[a + 2])
  return (again or r and r.now ~= 'absent') and 1 or 0
end
""")

# → 1 if the record had expired and was removed, or archived if its rule says so; otherwise 0.
PURGE = Script("""
local function verb(key)
  local r = read(key, DECISION)
  if not r or r.err or r.now ~= 'absent' or r[STATE] == 'deleted' then
    return 0
  end
  if r[AUDIT] then
    archive(key, r)
  else
    redis.call('DEL', key)
  end
  return 1
end
""")
