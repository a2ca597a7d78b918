"""The scripts of the Redis store, one for each verb: each is atomic, compares only the server's clock, and can be sent twice.

A record is a string that holds one msgpack array: FIELDS, of which the last two are there once it is settled.  Beside a
hash of the same fields it takes half of the memory and half of the server's time.  Times are whole microseconds.

One call carries any number of items of the same verb: KEYS are the records, ARGV the clock's shift, the channel for
wake-ups, and then each item's own arguments.  In a cluster, where the records of a group live in different slots, each
item is a call of its own.
"""

from __future__ import annotations

import hashlib
import re

# The scripts rewrite the head; the rest they only move about, and of that look at no more than who claimed what.
HEAD = (
    "state", "token", "attempts", "created_at", "lease_until", "settled_at", "expires_at", "accessed_at", "note",
    "audit", "watched", "lapsed", "decision",
)  # fmt: skip
FIELDS = (*HEAD, "holder", "fingerprint", "scope", "key", "name", "outcome", "response_hash")

# The state is read off the clock as in _ledger/states.py.  A deleted record leaves its token behind for a day, so that
# the next one's is higher even if the clock was set back.  Settled and released records stay for a minute after they
# have expired, for the same reason; those kept for the audit stay until they are archived.
CAPITALS = re.compile(r"\b[A-Z_]+\b")
PRELUDE = r"""
local time = redis.call('TIME')
local real = time[1] * 1000000 + time[2]
local now = real + ARGV[1]
local GRACE, DAY = 60000, 86400000
local DELETED, OPEN, SETTLED = '\220\0\13', '\220\0\18', '\220\0\20'  -- how an array of so many begins
local pack, peek = cmsgpack.pack, cmsgpack.unpack_limit

local function judged(state, lease_until, expires_at)
  if state == 'running' then
    return (tonumber(lease_until) or 0) <= now and 'lapsed' or state
  elseif state == 'settled' or state == 'released' then
    expires_at = tonumber(expires_at)
    return expires_at and expires_at <= now and 'absent' or state
  end
  return state == 'held' and state or state == 'deleted' and 'absent' or 'unreadable'
end

-- The fields up to *last*, and what the clock makes of the state; nil where there is nothing, an error where it is not ours.
local function read(key, last)
  local value = redis.pcall('GET', key)
  if not value or type(value) == 'table' then
    return value or nil
  end
  local r = {pcall(peek, value, last - 2, 3)}
  if not r[1] then
    r = {}
  end
  r.value, r.last, r.now = value, last, judged(r[STATE], r[LEASE_UNTIL], r[EXPIRES_AT])
  return r
end

local function save(key, value, expiry)
  if expiry then
    redis.call('SET', key, value, 'PX', string.format('%.0f', expiry))
  else
    redis.call('SET', key, value)
  end
end

local function write(key, kind, r, tail, expiry)
  local rest = r[2] > 0 and string.sub(r.value, r[2] + 1) or ''
  save(key, kind .. pack(unpack(r, STATE, r.last)) .. rest .. tail, expiry)
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

-- A wake-up that cannot be sent must not undo the write; whoever waits looks again by itself.
local function ring(scope, name)
  redis.pcall('PUBLISH', ARGV[2], #scope .. ':' .. scope .. name)
end

local function ring_if_watched(r)
  if r[WATCHED] then
    local all = {true, peek(r.value, KEY - 2, 3)}
    ring(all[SCOPE], all[KEY])
    r[WATCHED] = false
  end
end
"""

LOOP = """
local answers = {}
for i = 1, #KEYS do
  answers[i] = verb(KEYS[i], 3 + (i - 1) * WIDTH)
end
return answers
"""

# The owner's record; and 1 where it is running, 2 where it has come to *target* before, 0 where the token does not fit.
OWNED = """
local function owned(key, token, target)
  local r = read(key, DECISION)
  if not r or r.err then
    return r, r or 0
  end
  if r[TOKEN] ~= tonumber(token) then
    return r, 0
  end
  return r, r[STATE] == 'running' and 1 or r.now == target and 2 or 0
end
"""


class Script:
    """One verb in Lua.  *width* is the number of arguments of each item."""

    def __init__(self, name: str, width: int, *parts: str) -> None:
        # Where each field is in what `read` gives: before them come a success and how far it has read.
        numbers = {"WIDTH": width, **{field.upper(): at for at, field in enumerate(FIELDS[:-3], start=3)}}
        text = CAPITALS.sub(lambda name: str(numbers.get(name[0], name[0])), PRELUDE + "".join(parts) + LOOP)
        self.name = name
        self.width = width
        self.source = text.strip().encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


# lease, who claims what → the token, which is the time, of a first claim; {token, lease_until, attempts, lapsed} of a
# further one; or {now, record} of the one in the way.
# A claim sent twice is granted twice, with the same token; once its lease was given back, its holder's name is used up.
CLAIM = Script(
    "claim",
    2,
    """
local function grant(key, a, token, attempts, created_at, watched, lapsed)
  local lease_until = now + ARGV[a]
  redis.call('SET', key, OPEN .. pack('running', token, attempts, created_at, lease_until, nil, nil, nil, '',
    false, watched, lapsed, nil) .. ARGV[a + 1])
  return lease_until
end

local function grant_again(key, a, r)
  local token, attempts, created_at, watched, lapsed = next_token(r), 1, now, false, r.now == 'lapsed'
  if r.now ~= 'absent' then
    attempts, created_at, watched = (tonumber(r[ATTEMPTS]) or 0) + 1, r[CREATED_AT], r[WATCHED]
  elseif r[AUDIT] then
    archive(key, r)
  end
  local lease_until = grant(key, a, token, attempts, created_at, watched, lapsed)
  return {token, lease_until, attempts, lapsed and 1 or 0}
end

local function verb(key, a)
  local r = read(key, FINGERPRINT)
  if not r then
    grant(key, a, real, 1, now, false, false)
    return real
  elseif r.err then
    return r
  end
  local _, holder, fingerprint = peek(ARGV[a + 1], 2)
  local again = r[HOLDER] == holder
  if again and r[STATE] == 'running' then
    r[LEASE_UNTIL] = now + ARGV[a]
    write(key, OPEN, r, '')
    return {r[TOKEN], r[LEASE_UNTIL], r[ATTEMPTS], r[LAPSED] and 1 or 0}
  end
  local free = r.now == 'released' or r.now == 'lapsed'
  if r.now == 'absent' or (free and r[FINGERPRINT] == fingerprint and not again) then
    return grant_again(key, a, r)
  end
  if r.now == 'running' and not r[WATCHED] then
    r[WATCHED] = true
    write(key, OPEN, r, '')
  end
  return {now, r.value}
end
""",
)

# who claims what → 1 where that claim was granted and its lease is given back, by one who will not use it; else 0.
# What was in doubt stays in doubt, and what had failed before is remembered for longer; if it had not, the next is the first.
UNCLAIM = Script(
    "unclaim",
    1,
    """
local function verb(key, a)
  local r = read(key, HOLDER)
  local _, holder = peek(ARGV[a], 1)
  if not r or r.err or r[STATE] ~= 'running' or r[HOLDER] ~= holder then
    return 0
  end
  ring_if_watched(r)
  if r[LAPSED] then
    r[LEASE_UNTIL] = now
    write(key, OPEN, r, '')
  else
    local retention = DAY * 1000
    if r[ATTEMPTS] == 1 then
      retention, r[ATTEMPTS] = GRACE * 1000, 0
    end
    r[STATE], r[EXPIRES_AT] = 'released', now + retention
    write(key, OPEN, r, '', lifetime(retention))
  end
  return 1
end
""",
)

# token, lease → lease_until, or 0 for a late owner.  A lease of nothing ends it now, which those who wait should know.
RENEW = Script(
    "renew",
    2,
    OWNED,
    """
local function verb(key, a)
  local r, own = owned(key, ARGV[a], 'running')
  if own ~= 1 then
    return own
  end
  r[LEASE_UNTIL] = now + ARGV[a + 1]
  if r[LEASE_UNTIL] <= now then
    ring_if_watched(r)
  end
  write(key, OPEN, r, '')
  return r[LEASE_UNTIL]
end
""",
)

# token, retention, note and audit if any, outcome and its hash → 1 or 2 (settled before), or 0 for a late owner.
SETTLE = Script(
    "settle",
    4,
    OWNED,
    """
local function verb(key, a)
  local r, own = owned(key, ARGV[a], 'settled')
  if own == 1 then
    ring_if_watched(r)
    r[STATE], r[SETTLED_AT], r[ACCESSED_AT], r[EXPIRES_AT] = 'settled', now, now, now + ARGV[a + 1]
    if ARGV[a + 2] ~= '' then
      r[NOTE], r[AUDIT] = cmsgpack.unpack(ARGV[a + 2])
    end
    write(key, SETTLED, r, ARGV[a + 3], lifetime(ARGV[a + 1], r[AUDIT]))
  end
  return own
end
""",
)

# token, retention → as settle.  One for no time at all leaves nothing that a second one could find released.
RELEASE = Script(
    "release",
    2,
    OWNED,
    """
local function verb(key, a)
  local r, own = owned(key, ARGV[a], 'released')
  if own == 1 then
    ring_if_watched(r)
    r[STATE], r[EXPIRES_AT] = 'released', now + ARGV[a + 1]
    write(key, OPEN, r, '', lifetime(ARGV[a + 1]))
  elseif own == 0 and r and ARGV[a + 1] == '0' and r[STATE] == 'released' and r[TOKEN] == tonumber(ARGV[a]) then
    return 2
  end
  return own
end
""",
)

# token, note → as settle.
HOLD = Script(
    "hold",
    2,
    OWNED,
    """
local function verb(key, a)
  local r, own = owned(key, ARGV[a], 'held')
  if own == 1 then
    ring_if_watched(r)
    r[STATE], r[NOTE] = 'held', ARGV[a + 1]
    write(key, OPEN, r, '')
  end
  return own
end
""",
)

# token, retention → 1 where the record is settled under that token and lives on.
TOUCH = Script(
    "touch",
    2,
    """
local function verb(key, a)
  local r = read(key, DECISION)
  if not r or r.err then
    return r or 0
  end
  if r.now ~= 'settled' or r[TOKEN] ~= tonumber(ARGV[a]) then
    return 0
  end
  r[ACCESSED_AT], r[EXPIRES_AT] = now, now + ARGV[a + 1]
  write(key, SETTLED, r, '', lifetime(ARGV[a + 1], r[AUDIT]))
  return 1
end
""",
)
