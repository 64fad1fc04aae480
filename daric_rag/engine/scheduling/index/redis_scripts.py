"""The Lua scripts behind the Redis index: each is one atomic step on the server.

Keys on the server, all below `daric:2:` (the number is the layout's version), segments in hex:

* `s:<segment>` set of the segment's copies: `h:<engine id>` in that engine's host memory, `d:<disk id>` in a
  directory that several engines may share (an engine's own id if it shares none)
* `all` set of the segments that have a copy: to be counted, never read on the path of a request
* `o:<engine>` set of segments that vanish with that engine, `owners` engines by their last sign of life

Nothing read is trusted: whatever is not what this module writes is deleted, and no value is ever copied. Key
names are made inside the scripts: one Redis server, not a cluster.
"""

_COMMON = """
local P = 'daric:2:'
local function now()
  local t = redis.call('TIME')
  return string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000))
end
-- Make sure that a key is absent or of the given type.
local function clean(k, kind)
  local found = redis.call('TYPE', k)['ok']
  if found ~= 'none' and found ~= kind then redis.call('UNLINK', k) end
end
-- Redis deletes a set that becomes empty.
local function drop(segment, ...)
  local k = P .. 's:' .. segment
  clean(k, 'set')
  redis.call('SREM', k, ...)
  if redis.call('EXISTS', k) == 0 then redis.call('SREM', P .. 'all', segment) end
end
-- Up to 200 segments of an engine that is gone; true if there may be more.
local function reap(owner)
  local held = P .. 'o:' .. owner
  clean(held, 'set')
  clean(P .. 'all', 'set')
  local segments = redis.call('SPOP', held, 200)
  for _, segment in ipairs(segments) do
    if #segment == 64 then drop(segment, 'h:' .. owner, 'd:' .. owner) end
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
  local in_host, on_disk = redis.pcall('SISMEMBER', k, host), redis.pcall('SISMEMBER', k, disk)
  if type(in_host) == 'table' then
    redis.call('UNLINK', k)
    in_host, on_disk = 0, 0
  end
  found[#found + 1] = in_host + 2 * on_disk
end
return table.concat(found)
"""
)

# owner, disk, tier, segments…
INSERT = (
    _COMMON
    + """
local held = P .. 'o:' .. ARGV[1]
clean(P .. 'all', 'set')
clean(held, 'set')
local copy = ARGV[3] == 'host' and 'h:' .. ARGV[1] or 'd:' .. ARGV[2]
for i = 4, #ARGV do
  local k = P .. 's:' .. ARGV[i]
  clean(k, 'set')
  redis.call('SADD', k, copy)
  redis.call('SADD', P .. 'all', ARGV[i])
  if ARGV[3] == 'host' or ARGV[1] == ARGV[2] then redis.call('SADD', held, ARGV[i]) end
end
return 'OK'
"""
)

# owner, disk, tier or "all", segments…
REMOVE = (
    _COMMON
    + """
local held = P .. 'o:' .. ARGV[1]
local host, disk = 'h:' .. ARGV[1], 'd:' .. ARGV[2]
clean(P .. 'all', 'set')
clean(held, 'set')
for i = 4, #ARGV do
  local k = P .. 's:' .. ARGV[i]
  if ARGV[3] ~= 'disk' then drop(ARGV[i], host) end
  if ARGV[3] ~= 'host' then drop(ARGV[i], disk) end
  if redis.call('SISMEMBER', k, host) + redis.call('SISMEMBER', k, 'd:' .. ARGV[1]) == 0 then
    redis.call('SREM', held, ARGV[i])
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

# -> the number of segments
COUNT = (
    _COMMON
    + """
clean(P .. 'all', 'set')
return redis.call('SCARD', P .. 'all')
"""
)
