-- beat: a worker lives, and consumes these queues of this realm, until ttl_ms from now (0: it leaves).
-- KEYS: fleet
-- ARGV: worker realm ttl_ms info free digest tasks queue*
--   free = so many slots of its pool are free; below 0, so many tasks wait for one; digest of the names
--   of the tasks that it locks (empty: it does not say); tasks = those names as a JSON list, or empty if
--   they were told before
-- REPLY: 1 if its tasks are known, else 0; then of each task (or *) that does not keep its lock now: its name, its mode
local now = math.floor(server_time() / 1000)
local ttl = tonumber(ttl_ms)
for i = 8, #ARGV do
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

-- Else it would be given messages of tasks that it runs without their locks, or does not know.
local declared = KEYS[1] .. ':tasks:' .. worker
if tasks ~= '' then
  redis.call('DEL', declared)
  for _, task in ipairs(cjson.decode(tasks)) do redis.call('SADD', declared, task) end
  redis.call('SADD', declared, '#' .. digest)
end
local known = ttl == 0 or digest == '' or redis.call('SISMEMBER', declared, '#' .. digest) == 1
if ttl > 0 then redis.call('PEXPIRE', declared, ttl * 10) end
local reply = redis.call('HGETALL', KEYS[1] .. ':mode')
table.insert(reply, 1, known and 1 or 0)
return reply
