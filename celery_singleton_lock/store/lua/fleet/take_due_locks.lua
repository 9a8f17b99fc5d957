-- take_due: names of locks that want a look. Whoever takes one has a while before others see it.
-- KEYS: due*
-- ARGV: most defer_ms
-- REPLY: list of names
local now_us = tonumber(server_time())
local now = math.floor(now_us / 1000)
local names = {}
for i = 1, #KEYS do
  local key = KEYS[1 + (now_us + i) % #KEYS] -- not always the same bucket first: none may starve
  local left = tonumber(most) - #names
  if left <= 0 then break end
  for _, found in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, left)) do
    if #names == 0 then redis.call('PERSIST', key) end -- a no-op; a full Redis refuses only the first write
    redis.call('ZADD', key, now + tonumber(defer_ms), found)
    names[#names + 1] = found
  end
end
return names
