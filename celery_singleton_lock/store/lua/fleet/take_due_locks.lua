-- take_due_locks: return names of locks that are due for a sweep, and postpone them for other callers.
-- KEYS: due*
-- ARGV: most defer_ms
--   defer_ms = for how long other callers do not get the same lock
-- REPLY: list of names
if redis.call('EXISTS', unpack(KEYS)) == 0 then return {} end

local now_us = tonumber(server_time())
local now = math.floor(now_us / 1000)
local names = {}
for i = 1, #KEYS do
  local key = KEYS[1 + (now_us + i) % #KEYS] -- each call starts at another bucket, so that each bucket is read in time
  local left = tonumber(most) - #names
  if left <= 0 then break end
  -- A key of another type yields an error, which ipairs reads as an empty list: the other buckets are read.
  for _, found in ipairs(redis.pcall('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, left)) do
    if #names == 0 then redis.call('PERSIST', key) end -- a no-op; a full Redis refuses only the first write
    redis.call('ZADD', key, now + tonumber(defer_ms), found)
    names[#names + 1] = found
  end
end
return names
