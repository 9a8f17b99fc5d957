-- Reservations of a retried task for its next attempt.

-- A place before all waiters in the queue, and not behind the place of `rec`.
local function place_before_all(rec)
  local head = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')[2]
  return digits(math.min(tonumber(rec.place), head and tonumber(head) - 1 or math.huge))
end

-- A retried task reserves its permit for its next attempt: the reservation is a holder that nobody can
-- claim, and that lapses like any other. If that attempt waits already, it is granted instead; or, if the
-- lock is granted to nobody now, it becomes the first of the queue.
local function reservation_of(attempt) return 'keep:' .. attempt end

local function reserve(attempt, ms, rec, own)
  if redis.call('ZCARD', holders) >= limit then return end -- no permit is left to reserve, paused or not
  local token, waits = find(attempt)
  if token then
    local deadline = redis.call('ZSCORE', deadlines, token)
    local in_time = not (deadline and tonumber(deadline) <= now)
    if standing(token, waits) ~= 'queue' or not in_time then return end
    if rates and rates.excess(waits) then return end -- it ends when it is next
    local reason = waiter_waits_for(waits, own)
    if not reason then return grant(token, waits, own) end
    if reason == 'worker' then return end
    unqueue(token, waits)
    move_to(waits, place_before_all(rec))
    return enqueue(token, waits, waits.state)
  end
  token = reservation_of(attempt)
  local reserved = {attempt = attempt, task = rec.task, lease = digits(ms), place = rec.place}
  if fair then fair.assign(reserved, rec) end
  add_holder(token, reserved, 'reserved', ms)
  save(token, reserved)
end

-- End the reservation of an attempt that has arrived. Returns whether the attempt may start with that
-- permit. In a pause, a quarantine or above a rate it may not: then the second result is the place at which it queues,
-- before all others. If it does not queue (`queues` is false), the reservation stays.
local function take_reservation(attempt, queues, rec)
  local token = reservation_of(attempt)
  if attempt == '' or not lease_end(token) then return false end
  local reason = waits_for(redis.call('ZCARD', holders) - 1, rec)
  local later = reason == 'pause' or reason == 'redis' or reason == 'rate'
  local ends = reason == 'rate' and not queues and wanted_flow and wanted_flow.ends_at_rate -- its attempt ends
  kept_for_me = later and not queues and not ends
  if kept_for_me then return false end
  local place = later and place_before_all(load(token)) or nil
  leave_holders(token, fair and load(token))
  redis.call('HDEL', record, token)
  return not reason, place
end
