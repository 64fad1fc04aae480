"""The Lua scripts behind the Redis index: each is one atomic step on the server.

Keys on the server, all below `daric:1:` (the number is the layout's version), segment and root keys in hex:

* `s:<segment>` hash: `n` tokens, `p` parent, `r` root, `a` last access (ms), `c` accesses, one field a copy:
  `h:<engine id>` in that engine's host memory, `d:<disk id>` in a directory that several engines may share
  (an engine's own id if it shares none)
* `r:<root>` set of the root's segments, `roots` set of roots: for tools, never read on the path of a request
* `o:<engine>` set of segments that vanish with that engine, `owners` engines by their last sign of life

Nothing read is trusted. Lengths are asked for before values, so that a giant string is never copied, and
whatever is not what this module writes is deleted. Key names are made inside the scripts: one Redis server,
not a cluster.
"""

_COMMON = """
local P = 'daric:1:'
local function now()
  local t = redis.call('TIME')
  return string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000))
end
local function field(k, name, most)
  local size = redis.pcall('HSTRLEN', k, name)
  if type(size) == 'table' or size == 0 or size > most then return nil end
  return redis.call('HGET', k, name)
end
-- The number of tokens of a sound entry; an unsound one is deleted.
local function tokens(k)
  local n = field(k, 'n', 3)
  if n and string.match(n, '^[1-9]%d*$') and tonumber(n) <= 256 then return n end
  if redis.call('EXISTS', k) == 1 then redis.pcall('UNLINK', k) end
  return nil
end
local function hex(value)
  return value and #value == 64 and string.match(value, '^%x+$') and value
end
-- Make sure that a key is absent or of the given type.
local function clean(k, kind)
  local found = redis.call('TYPE', k)['ok']
  if found ~= 'none' and found ~= kind then redis.call('UNLINK', k) end
end
-- An entry without copies is deleted; five fields are not copies.
local function drop_if_empty(segment)
  local k = P .. 's:' .. segment
  if redis.call('HLEN', k) > 5 then return end
  local root = hex(field(k, 'r', 64))
  redis.call('UNLINK', k)
  if root then
    clean(P .. 'r:' .. root, 'set')
    redis.call('SREM', P .. 'r:' .. root, segment)
  end
end
-- Up to 200 segments of an engine that is gone; true if there may be more.
local function reap(owner)
  local held = P .. 'o:' .. owner
  clean(held, 'set')
  local segments = redis.call('SPOP', held, 200)
  for _, segment in ipairs(segments) do
    local k = hex(segment) and P .. 's:' .. segment
    if k and tokens(k) then
      redis.call('HDEL', k, 'h:' .. owner, 'd:' .. owner)
      drop_if_empty(segment)
    end
  end
  return #segments == 200
end
"""

# owner, disk, segments… -> one digit for each: 1 in the owner's host memory, 2 on the disk, 3 both, 0 neither
LOOKUP = (
    _COMMON
    + """
local host, disk = 'h:' .. ARGV[1], 'd:' .. ARGV[2]
local found = {}
for i = 3, #ARGV do
  local k = P .. 's:' .. ARGV[i]
  local bits = 0
  if tokens(k) then
    bits = redis.call('HEXISTS', k, host) + 2 * redis.call('HEXISTS', k, disk)
  end
  found[#found + 1] = bits
end
return table.concat(found)
"""
)

# owner, disk, then segment, parent, tokens, tier, root for each copy.
INSERT = (
    _COMMON
    + """
local at = now()
clean(P .. 'roots', 'set')
clean(P .. 'o:' .. ARGV[1], 'set')
for i = 3, #ARGV, 5 do
  local segment, parent, n, tier, root = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local k = P .. 's:' .. segment
  if not tokens(k) then redis.call('HSET', k, 'a', at, 'c', '0') end
  redis.call('HSET', k, 'n', n, 'p', parent, 'r', root)
  if tier == 'host' then
    redis.call('HSET', k, 'h:' .. ARGV[1], '1')
    redis.call('SADD', P .. 'o:' .. ARGV[1], segment)
  else
    redis.call('HSET', k, 'd:' .. ARGV[2], '1')
    if ARGV[1] == ARGV[2] then redis.call('SADD', P .. 'o:' .. ARGV[1], segment) end
  end
  clean(P .. 'r:' .. root, 'set')
  redis.call('SADD', P .. 'r:' .. root, segment)
  redis.call('SADD', P .. 'roots', root)
end
return 'OK'
"""
)

# segments…
TOUCH = (
    _COMMON
    + """
local at = now()
for i = 1, #ARGV do
  local k = P .. 's:' .. ARGV[i]
  if tokens(k) then
    if type(redis.pcall('HINCRBY', k, 'c', 1)) == 'table' then redis.call('HSET', k, 'c', '1') end
    redis.call('HSET', k, 'a', at)
  end
end
return 'OK'
"""
)

# owner, disk, tier, segments…
SET_TIER = (
    _COMMON
    + """
clean(P .. 'o:' .. ARGV[1], 'set')
for i = 4, #ARGV do
  local k = P .. 's:' .. ARGV[i]
  if tokens(k) then
    if ARGV[3] == 'host' then
      redis.call('HSET', k, 'h:' .. ARGV[1], '1')
      redis.call('SADD', P .. 'o:' .. ARGV[1], ARGV[i])
    else
      redis.call('HDEL', k, 'h:' .. ARGV[1])
      redis.call('SREM', P .. 'o:' .. ARGV[1], ARGV[i])
      redis.call('HSET', k, 'd:' .. ARGV[2], '1')
    end
  end
end
return 'OK'
"""
)

# owner, disk, tier or "all", segments…
REMOVE = (
    _COMMON
    + """
clean(P .. 'o:' .. ARGV[1], 'set')
for i = 4, #ARGV do
  local k = P .. 's:' .. ARGV[i]
  if tokens(k) then
    if ARGV[3] ~= 'disk' then
      redis.call('HDEL', k, 'h:' .. ARGV[1])
      redis.call('SREM', P .. 'o:' .. ARGV[1], ARGV[i])
    end
    if ARGV[3] ~= 'host' then redis.call('HDEL', k, 'd:' .. ARGV[2]) end
    drop_if_empty(ARGV[i])
  end
end
return 'OK'
"""
)

# owner, milliseconds of silence after which an engine is gone -> {1 if the owner was known, 1 if call again}
BEAT = (
    _COMMON
    + """
local owners = P .. 'owners'
clean(owners, 'zset')
local at = now()
local known = redis.call('ZADD', owners, at, ARGV[1]) == 0
local dead = redis.call('ZRANGEBYSCORE', owners, '-inf', at - ARGV[2], 'LIMIT', 0, 1)[1]
if not dead then return {known and 1 or 0, 0} end
if #dead ~= 32 or not reap(dead) then redis.call('ZREM', owners, dead) end
return {known and 1 or 0, 1}
"""
)

# owner -> 1 if call again
LEAVE = (
    _COMMON
    + """
if reap(ARGV[1]) then return 1 end
clean(P .. 'owners', 'zset')
redis.call('ZREM', P .. 'owners', ARGV[1])
return 0
"""
)

# -> the number of segments of all roots
COUNT = (
    _COMMON
    + """
clean(P .. 'roots', 'set')
local total = 0
for _, root in ipairs(redis.call('SMEMBERS', P .. 'roots')) do
  local size = hex(root) and redis.pcall('SCARD', P .. 'r:' .. root)
  if type(size) == 'number' then total = total + size end
end
return total
"""
)

# key ("roots" or "r:<root>"), cursor -> {cursor, members…}; what cannot be a key is deleted
SCAN = (
    _COMMON
    + """
clean(P .. ARGV[1], 'set')
local page = redis.call('SSCAN', P .. ARGV[1], ARGV[2], 'COUNT', 500)
local found = {page[1]}
for _, member in ipairs(page[2]) do
  if hex(member) then found[#found + 1] = member else redis.call('SREM', P .. ARGV[1], member) end
end
return found
"""
)

# segments… -> parent, tokens, tiers ("h", "d", "hd"), root for each; four empty strings for what is not sound
DESCRIBE = (
    _COMMON
    + """
local found = {}
for i = 1, #ARGV do
  local k = P .. 's:' .. ARGV[i]
  local n = tokens(k)
  local parent, root = hex(field(k, 'p', 64)), hex(field(k, 'r', 64))
  local tiers = ''
  if n and redis.call('HLEN', k) <= 256 then
    local host, disk = '', ''
    for _, name in ipairs(redis.call('HKEYS', k)) do
      if string.sub(name, 1, 2) == 'h:' then host = 'h' end
      if string.sub(name, 1, 2) == 'd:' then disk = 'd' end
    end
    tiers = host .. disk
  end
  if not (n and parent and root) or tiers == '' then parent, n, tiers, root = '', '', '', '' end
  for _, value in ipairs({parent, n, tiers, root}) do found[#found + 1] = value end
end
return found
"""
)

# root -> {segments removed, 1 if call again}
CLEAR = (
    _COMMON
    + """
local k = P .. 'r:' .. ARGV[1]
clean(k, 'set')
local segments = redis.call('SPOP', k, 500)
for _, segment in ipairs(segments) do
  if hex(segment) then redis.call('UNLINK', P .. 's:' .. segment) end
end
if #segments == 500 then return {#segments, 1} end
clean(P .. 'roots', 'set')
redis.call('SREM', P .. 'roots', ARGV[1])
return {#segments, 0}
"""
)
