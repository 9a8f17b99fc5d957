-- Stored messages that enter the queue, become adrift, or leave to be published.

-- Keep a message out of the queue for `ms`, in the state of a delayed one: then it queues or, if it follows, looks again.
local function keep_out(token, rec, ms)
  alone, rec.delayed = false, '1'
  set_state(rec, 'leaving') -- workers of an older version queue a message in this state again, too
  put_in_index(token, rec)
  save(token, rec)
  redis.call('ZADD', deadlines, now + ms, token)
end

local function enqueue(token, rec, state)
  if rec.follows then return keep_out(token, rec, 0) end -- a follower does not queue: it follows on
  alone = false
  set_state(rec, state)
  join_queue(token, rec)
  if rec.deadline then redis.call('ZADD', deadlines, rec.deadline, token) end
  put_in_index(token, rec)
  list_parked(token, rec)
  if rec.unique then keep_unique(rec) end
  save(token, rec)
end

-- If the first message that is adrift on this route is of the same task, `since` is copied from it.
local function set_adrift(token, rec)
  became_adrift = true
  leave_queue(token, rec)
  set_state(rec, 'adrift')
  local first = adrift_of(route_of(rec), 0, 1)[1]
  local before = first and load(first)
  if before and before.task == rec.task then rec.since = before.since end
  rec.publish_at = rec.publish_at or digits(now)
  rec.publish_every = rec.publish_every or digits(PUBLISH_MS)
  redis.call('ZADD', adrift, 0, adrift_member(token, rec))
  save(token, rec)
end

-- Take a message out of the queue for publishing. From now on `copied` tells whether the published copy
-- reached a worker that locks: the reply there is 'twin', and the worker acknowledges the copy.
local function start_leaving(token, rec, seal, hold_ms)
  unqueue(token, rec)
  set_state(rec, 'leaving')
  rec.seal, rec.copied, rec.delayed = seal, nil, nil
  save(token, rec)
  redis.call('ZADD', deadlines, now + tonumber(hold_ms), token)
end

local function is_leaving_under(rec, seal) return rec and rec.state == 'leaving' and rec.seal == seal end

-- Publishing failed or was not needed: the message queues again at its place.
local function stop_leaving(token, rec)
  unqueue(token, rec)
  rec.seal = nil
  enqueue(token, rec, 'parked')
end
