-- beat: a worker lives, and consumes these queues of this realm, until ttl_ms from now (0: it leaves).
-- KEYS: fleet
-- ARGV: worker realm ttl_ms info free queue*
--   free = so many slots of its pool are free; below 0, so many tasks wait for one
-- REPLY: list of task (or *), mode: which tasks do not keep their locks now, by whose order
local now = math.floor(server_time() / 1000)
local ttl = tonumber(ttl_ms)
for i = 6, #ARGV do
  local route = KEYS[1] .. ':route:' .. realm .. ':' .. ARGV[i]
  redis.call('ZREMRANGEBYSCORE', route, '-inf', now)
  if ttl > 0 then
    redis.call('ZADD', route, now + ttl, worker)
    redis.call('PEXPIRE', route, ttl * 10)
  else
    redis.call('ZREM', route, worker)
  end
end
-- Clients read from its TTL how long ago this was (REMEMBERED in model.py).
local about, slots = KEYS[1] .. ':worker:' .. worker, KEYS[1] .. ':free:' .. worker
if ttl > 0 then
  redis.call('SET', about, info, 'PX', ttl * 10)
  redis.call('SET', slots, free, 'PX', ttl * 10)
else
  redis.call('DEL', about, slots)
end
return redis.call('HGETALL', KEYS[1] .. ':mode')
