-- beat: a worker lives, and consumes these queues of this realm, until ttl_ms from now (0: it leaves).
-- KEYS: fleet
-- ARGV: worker realm ttl_ms info queue*
-- REPLY: list of task (or *), mode: which tasks do not keep their locks now, by whose order
local now = math.floor(server_time() / 1000)
local ttl = tonumber(ttl_ms)
for i = 5, #ARGV do
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
local about = KEYS[1] .. ':worker:' .. worker
if ttl > 0 then redis.call('SET', about, info, 'PX', ttl * 10) else redis.call('DEL', about) end
return redis.call('HGETALL', KEYS[1] .. ':mode')
