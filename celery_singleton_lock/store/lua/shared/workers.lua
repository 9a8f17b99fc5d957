-- Which worker gets a message, and its delivery.

local PAGE = 16 -- live workers that are read together

-- A page of the live workers that consume a route.
local function live_of(route, skip)
  return redis.pcall('ZREVRANGEBYSCORE', fleet .. ':route:' .. route, '+inf', '(' .. now, 'LIMIT', skip, PAGE)
end

-- Whether a worker locks a task. A worker without this list is of an older version: it locks all.
local function declares(worker, task)
  local tasks = fleet .. ':tasks:' .. worker
  return redis.pcall('SISMEMBER', tasks, task) == 1 or redis.pcall('EXISTS', tasks) == 0
end

-- Live workers that consume a message's queue and lock its task. `own` is the caller's worker; the field
-- `own` of the result is true if it is one of them.
local takers_of = {}
local function takers(rec, own)
  local route, task = route_of(rec), rec.task or ''
  local wanted = route .. '\n' .. task
  if not takers_of[wanted] then
    local found, skip, live = {}, 0, live_of(route, 0)
    local till = #live > 0 and own ~= '' and redis.call('ZSCORE', fleet .. ':route:' .. route, own)
    found.own = till and tonumber(till) > now and declares(own, task)
    while #found == 0 and #live > 0 do
      for _, worker in ipairs(live) do
        if declares(worker, task) then found[#found + 1] = worker end
      end
      skip = skip + PAGE
      live = #live == PAGE and live_of(route, skip) or {}
    end
    takers_of[wanted] = found
  end
  return takers_of[wanted]
end

-- Free slots of a worker: the number in its last heartbeat, minus the grants since then.
local slots = {}
local freed = 0 -- slots of the caller's worker that become free with this call
local function free_slots(worker)
  slots[worker] = slots[worker] or tonumber(redis.pcall('GET', fleet .. ':free:' .. worker) or 0) or 0
  return slots[worker]
end

local function take_slot(worker, own)
  if worker == own and freed > 0 then
    freed = freed - 1
  else
    slots[worker] = free_slots(worker) - 1
    redis.pcall('SET', fleet .. ':free:' .. worker, slots[worker], 'XX', 'KEEPTTL')
  end
end

-- A worker that has a free slot and takes the message: the caller's worker if possible, else any; nil if there is
-- none.
local function idle_worker(rec, own)
  local live = takers(rec, own)
  if live.own and free_slots(own) + freed > 0 then return own end
  for i = 1, #live do
    local other = live[1 + (now_us + i) % #live]
    if other ~= own and free_slots(other) > 0 then return other end
  end
end

-- The worker that gets a message: one with a free slot, else the caller's worker, else any worker that takes the
-- message; false if no live worker takes it.
local function worker_for(rec, own)
  local live = takers(rec, own)
  return idle_worker(rec, own) or live.own and own or live[1 + now_us % math.max(#live, 1)] or false
end

-- As waits_for(), for one waiter, which may also wait for its group. A parked message may also wait for a worker that
-- takes it.
local function waiter_waits_for(rec, own)
  local reason, till = waits_for(nil, rec)
  if not reason and fair and fair.is_full(rec) then
    return 'group', tonumber(redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2])
  end
  if not reason and rec.parked and not worker_for(rec, own) then return 'worker' end
  return reason, till
end

local function tell_worker(worker, head, body)
  local inbox = fleet .. ':inbox:' .. worker
  redis.pcall('RPUSH', inbox, cjson.encode(head) .. '\n' .. body)
  redis.pcall('PEXPIRE', inbox, INBOX_MS)
  local prefix, bucket = string.match(fleet, '^(.*):{b(%d%d)}:fleet$')
  if bucket then redis.pcall('PUBLISH', prefix .. ':fleet:bell:' .. worker, bucket) end -- Cluster
end

-- Put a stored message into the inbox of a live worker that takes it. Returns whether there is one.
local function deliver(token, rec, verdict, own)
  local worker = worker_for(rec, own)
  if not worker then return false end
  local body = redis.call('HGET', bodies, base_of(token)) or ''
  tell_worker(worker, {
    lock = lock, token = token, fence = rec.fence or '0', verdict = verdict, by = rec.by or verdict == 'following' and rec.follows[2] or '',
    whole = #body <= INBOX_BODY and '1' or '0',
    waited = digits(math.max(0, now_us - arrival_of(rec)) / 1000),
    returns = rec.returns, queue = rec.queue, excess = rec.excess, settles = rec.by and rec.settles,
  }, #body <= INBOX_BODY and body or '')
  take_slot(worker, own)
  rec.worker = worker
  return true
end

local function wake(token)
  local list = string.sub(holders, 1, -8) .. 'wake:' .. token
  redis.pcall('RPUSH', list, '1')
  redis.pcall('PEXPIRE', list, GRACE_MS)
end
