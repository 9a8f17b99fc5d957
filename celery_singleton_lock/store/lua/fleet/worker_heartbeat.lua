-- worker_heartbeat: a worker is alive and consumes these queues of this broker, for ttl_ms (0: it stops).
-- KEYS: fleet
-- ARGV: worker realm ttl_ms info free digest tasks light queue*
--   realm = hash of the broker; info = a JSON object for clients; free = free slots of its pool, below 0 the
--   number of tasks that wait for one; tasks = names of the tasks that it locks as a JSON list, or empty if
--   it has sent them before; digest = of those names (empty: an older worker, which locks all); light 1 =
--   nothing has changed since its last heartbeat, and the keys do not expire soon
-- REPLY: 1 if its tasks are known, else 0; then for each task (or *) whose mode is not enforce: name, mode
local now = math.floor(server_time() / 1000)
local ttl = tonumber(ttl_ms)
local routes = KEYS[1] .. ':routes'
local about, slots = KEYS[1] .. ':worker:' .. worker, KEYS[1] .. ':free:' .. worker
local REMEMBERED_MS = 27000 -- from this TTL clients compute the age of the heartbeat: REMEMBERED in core/model.py

-- Most heartbeats only move the deadlines: a worker that does nothing costs as little as possible. If a
-- member is missing, the server has lost data, and the whole heartbeat follows.
local function renewed()
  -- A full Redis refuses only the first write, and not this one.
  if redis.call('PEXPIRE', about, ttl + REMEMBERED_MS) == 0 then return false end
  local known = {}
  for i = 9, #ARGV do
    local route = realm .. ':' .. ARGV[i]
    if redis.call('ZADD', KEYS[1] .. ':route:' .. route, 'XX', 'CH', now + ttl, worker) == 0 then return false end
    known[#known + 1], known[#known + 2] = now + ttl, route
  end
  if #known > 0 then redis.call('ZADD', routes, unpack(known)) end
  redis.call('SET', slots, free, 'PX', ttl * 10)
  return true
end

local MOST = 1000 -- arguments with which Lua can still call one command
if light == '1' and #ARGV < MOST and renewed() then
  local reply = redis.call('HGETALL', KEYS[1] .. ':mode')
  table.insert(reply, 1, 1)
  return reply
end

redis.call('ZREMRANGEBYSCORE', routes, '-inf', now)

-- A worker gets no messages until its tasks are known: it might run a task without its lock, or not have the task.
local declared = KEYS[1] .. ':tasks:' .. worker
if tasks ~= '' then
  redis.call('DEL', declared)
  for _, task in ipairs(cjson.decode(tasks)) do redis.call('SADD', declared, task) end
  redis.call('SADD', declared, '#' .. digest)
end
local known = ttl == 0 or digest == '' or redis.call('SISMEMBER', declared, '#' .. digest) == 1
if ttl > 0 then redis.call('PEXPIRE', declared, ttl * 10) end

for i = 9, #ARGV do
  local route = KEYS[1] .. ':route:' .. realm .. ':' .. ARGV[i]
  redis.call('ZREMRANGEBYSCORE', route, '-inf', now)
  if ttl > 0 and known then
    redis.call('ZADD', route, now + ttl, worker)
    redis.call('PEXPIRE', route, ttl * 10)
    redis.call('ZADD', routes, now + ttl, realm .. ':' .. ARGV[i])
  elseif ttl == 0 then
    redis.call('ZREM', route, worker)
  end
end
if ttl > 0 then redis.call('PEXPIRE', routes, ttl * 10) end

if ttl > 0 then
  redis.call('SET', about, info, 'PX', ttl + REMEMBERED_MS)
  redis.call('SET', slots, free, 'PX', ttl * 10)
else
  redis.call('DEL', about, slots)
end

local reply = redis.call('HGETALL', KEYS[1] .. ':mode')
table.insert(reply, 1, known and 1 or 0)
return reply
