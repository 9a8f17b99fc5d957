-- Entering and leaving the queue and the holders.

-- The number by which a waiter is sorted among those of its group, and of a lock without groups.
local function score_of(rec) return rec.place end

-- The first function adds a waiter to the queue and to the line of its group; the second one removes it from both.
local function join_queue(token, rec)
  redis.call('ZADD', queue, score_of(rec), token)
  if fair then fair.join(token, rec, score_of(rec)) end
end

local function leave_queue(token, rec)
  redis.call('ZREM', queue, token)
  if fair then fair.leave(token, rec) end
end

-- The waiter that is granted next, if the lock can be granted; nil if every waiter waits for its group.
local function next_waiter()
  if fair then return fair.choose() end
  return redis.call('ZRANGE', queue, 0, 0)[1]
end

-- As waits_for(), for the queue: all of its waiters may wait for their groups.
local function queue_waits_for()
  local reason, till = waits_for()
  if reason or not (fair and fair.all_full()) then return reason, till end
  return 'group', tonumber(redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2])
end

-- End a hold, whatever the cause.
local function leave_holders(token, rec)
  redis.call('ZREM', holders, token)
  if rates then rates.drop(token, rec) end
  if fair then fair.end_hold(token, rec) end
end

-- Remove a token from the queue and from adrift; its record stays.
local function unqueue(token, rec)
  if alone then return end
  leave_queue(token, rec)
  redis.call('ZREM', deadlines, token)
  unlist_parked(token, rec)
  if rec and rec.state == 'adrift' then redis.call('ZREM', adrift, adrift_member(token, rec)) end
end
