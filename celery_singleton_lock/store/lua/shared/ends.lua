-- Ends of deliveries and of tasks.

local function drop_record(token, rec)
  redis.call('HDEL', record, token)
  unindex(token, rec)
end

local function remember(till, ...)
  redis.call('ZREMRANGEBYSCORE', done, '-inf', now)
  for _, member in ipairs({...}) do redis.call('ZADD', done, till, member) end
  local last = redis.call('ZRANGE', done, -1, -1, 'WITHSCORES')[2]
  redis.call('PEXPIRE', done, math.ceil(last - now) + GRACE_MS)
end

-- The token under which the stored message of a delivery queues again, and whether it is the message of the
-- duplicate; nil if no message is stored.
local function next_stored(token, rec)
  local own = has_body(base_of(token))
  local stored = own and token or rec.twin and has_body(base_of(rec.twin)) and rec.twin
  if not stored then return nil end
  if not own then rec.twin = nil end
  rec.fence, rec.worker, rec.parked, rec.delayed, rec.preempted_by, rec.ended_by = nil, '', '1', nil, nil, nil
  return next_token(stored), not own
end

local STALE_MS = 3600000 -- a worker that stood still finds out within this time that it has lost a grant

local PARKED_SOON_MS = 30000 -- a task that runs again later is parked by its worker within this time

-- The delivery `token` has ended, but its task has not. The stored message, or that of its duplicate,
-- queues again at its place under the next token: at once, or after `delay` ms. Its wait begins again, or continues.
local function end_delivery(token, rec, delay, wait_goes_on)
  drop_record(token, rec)
  local was_parked = rec.parked
  local following, is_duplicate = next_stored(token, rec)
  if not following and rec.unique then
    if wait_goes_on then rec.unique[3] = PARKED_SOON_MS end
    -- The message of a task that waits in its slot is not acknowledged.
    end_unique(rec, wait_goes_on or rec.unique[4] == 1 or rec.state == 'waiting')
  end
  if not following then return end
  if rec.state == 'granted' then remember(now + STALE_MS, 'returned:' .. token) end -- see has_trace
  -- A waiter in a slot had a deadline of its own. Published copies have arrived by now.
  if is_duplicate or not was_parked or rec.state == 'running' then
    local from = wait_goes_on and math.floor(arrival_of(rec) / 1000) or now
    if not (wait_goes_on and was_parked) then rec.deadline = rec.wait and digits(from + tonumber(rec.wait)) or nil end
    rec.publish_at, rec.publish_every = nil, nil
  end
  if rec.follows and not wait_goes_on then -- it goes on following, ever more rarely: the result may be out of reach
    delay = DELAY_MS * math.max(1, tonumber(rec.offer_every or 0) / tonumber(claim_ms) / 2)
  end
  if rec.by or rec.revoked or rec.rejected or rec.excess or rec.above_rate then rec.deadline, delay = digits(now), nil end -- it may not run
  if not delay then return enqueue(following, rec, 'parked') end
  keep_out(following, rec, delay)
end

-- A delivery came back after it had begun, or no worker could decode it. The first time it keeps its
-- place, since its worker was stopped or crashed. Later it waits for a growing delay, so that it does
-- not block the others.
local function return_delivery(token, rec, unread)
  if rec.state ~= 'running' and not unread then return end_delivery(token, rec) end
  local times = tonumber(rec.returns or 0) + 1
  rec.returns = digits(times)
  local before = unread and times - 1 or times - 2
  end_delivery(token, rec, before >= 0 and math.min(DELAY_MS * 2 ^ before, MOST_DELAY_MS) or nil)
end

local END_SHARE = 1024 -- a power of 2: the division is exact

-- Remember the end of an attempt if copies of its message exist, or with `feared` if they may exist.
local function remember_end(token, rec, done_ms, feared)
  if rec.attempt == '' or not (rec.parked or rec.twin or rec.copied or feared) then return end
  local till = now + done_ms
  remember(till, base_of(token))
  -- A broker may redeliver a rejected message, which then must run.
  if rec.rejected and not rec.publish_at then return end
  remember(till, rec.attempt)
  -- The two scores tell when: see has_ended. This one is the lower one, since workers of the release candidate use
  -- the highest score of `done` for PEXPIRE, which refuses a fraction.
  remember(till - done_ms / END_SHARE, 'end:' .. rec.attempt)
end

local SENT_MS = 120000 -- a worker that has parked a message finds out within this time that it is no longer stored

-- The task has ended, or with `left` the broker has its message: delete its record and its stored messages.
local function forget(token, rec, left)
  drop_record(token, rec)
  if left then remember(now + SENT_MS, 'sent:' .. base_of(token)) end -- it is not lost if Redis restarts now
  if rec.unique then end_unique(rec, left) end
  if not alone then redis.call('HDEL', bodies, base_of(token), base_of(rec.twin or token)) end
end

local function lapse(token)
  local rec = load(token)
  leave_holders(token, rec)
  if not rec or rec.state ~= 'held_after' then count('lapses') end
  if rec then return_delivery(token, rec) end
end
