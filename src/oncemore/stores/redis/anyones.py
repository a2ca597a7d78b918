"""The scripts of the Redis store that need no lease: to look, to decide, to delete, and to sweep."""

from __future__ import annotations

from .scripts import Script

# → {now, record}, or nothing where it is absent.
LOOK = Script(
    "look",
    0,
    """
local function verb(key)
  local r = read(key, DECISION)
  if not r or r.err then
    return r or false
  end
  return r.now ~= 'absent' and {now, r.value}
end
""",
)

# → the state as stored and as the clock sees it; of something that is no record, nothing.
TALLY = Script(
    "tally",
    0,
    """
local function verb(key)
  local r = read(key, DECISION)
  if not r or r.err or r.now == 'unreadable' then
    return false
  end
  return {r[STATE], r.now}
end
""",
)

# nonce, retention, note, settled or released, outcome and its hash → {now, record}, or the state that forbids it.
RESOLVE = Script(
    "resolve",
    5,
    """
local function verb(key, a)
  local r = read(key, DECISION)
  if not r or r.err then
    return r or 'absent'
  end
  if r.now == 'held' or r.now == 'lapsed' then
    ring_if_watched(r)
    local target = ARGV[a + 3]
    r[STATE], r[TOKEN], r[NOTE], r[DECISION] = target, next_token(r), ARGV[a + 2], ARGV[a]
    r[EXPIRES_AT] = now + ARGV[a + 1]
    if target == 'settled' then
      r[SETTLED_AT], r[ACCESSED_AT] = now, now
    end
    write(key, target == 'settled' and SETTLED or OPEN, r, ARGV[a + 4], lifetime(ARGV[a + 1]))
  elseif r.now == 'absent' or r[DECISION] ~= ARGV[a] then
    return r.now
  end
  return {now, redis.call('GET', key)}
end
""",
)

# nonce, scope, key → 1 where there was a record, 0 where there was none, -1 where it is running.
DELETE = Script(
    "delete",
    3,
    """
local function verb(key, a)
  local r = read(key, DECISION)
  if r and r.err then
    return r
  end
  if r and r.now == 'running' then
    return -1
  end
  local again = r and r[STATE] == 'deleted' and r[DECISION] == ARGV[a]
  if r and r[STATE] ~= 'deleted' then
    if r.now == 'absent' and r[AUDIT] then
      archive(key, r)
    end
    save(key, DELETED .. pack('deleted', tonumber(r[TOKEN]) or 0, 0, 0, 0, nil, nil, nil, '', false, false, false,
      ARGV[a]), DAY)
  end
  ring(ARGV[a + 1], ARGV[a + 2])
  return (again or r and r.now ~= 'absent') and 1 or 0
end
""",
)

# → 1 where the record had expired and is gone now, archived if its rule asks for that.
SWEEP = Script(
    "sweep",
    0,
    """
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
""",
)
