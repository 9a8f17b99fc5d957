-- Deadlines of waiters, and debounce.

-- Messages replace each other while they settle only if they have one source, that is the same broker and task. A
-- task with this name at another broker belongs to another application.
local function source_of(rec) return rec.realm .. ':' .. rec.task end

-- A message has settled: it queues as if it arrived now, with its head start.
local function end_settling(token, rec)
  local source = source_of(rec)
  if rates and rates.settling(source) == token then rates.note_settling(source, nil) end
  rec.place, rec.arrived = digits(arrival_at(0)), nil
  if rec.ahead then move_to(rec, digits(math.max(0, tonumber(rec.place) - tonumber(rec.ahead)))) end
  rec.settles, rec.settles_from, rec.ahead = nil, nil, nil
end

-- Queue a message again at the end of its time out of the queue. One that was delayed because it came back goes
-- behind all waiters.
local function queue_again(token, rec)
  rec.seal = nil
  if rec.delayed then
    rec.delayed, rec.refused = nil, nil
    if rec.settles then end_settling(token, rec) else move_behind_all(rec) end
    rec.deadline = rec.wait and digits(now + tonumber(rec.wait)) or nil
  end
  enqueue(token, rec, 'parked')
end

-- After how many ms a message that was delivered to be ended is delivered again. A replaced message may wait long for
-- a slot, and there may be thousands, so the interval doubles each time.
local function offered_again_in(rec)
  local pause = tonumber(claim_ms)
  if not (rec.by or rec.follows) then return pause end
  local longer = math.max(pause, math.min(tonumber(rec.offer_every or 0), MOST_DELAY_MS))
  rec.offer_every = digits(2 * longer)
  return longer
end

-- The id of the task that counts for a key: it waits or runs, or its message is in the broker.
local function id_that_counts(key)
  local entry = read_unique(key)
  return entry and (entry.state ~= 'here' or find(entry.attempt) ~= nil) and entry.id
end

local FOLLOW_MS = 10000 -- pause between two looks of a follower, if nothing wakes it; longer if many follow a task,
local LOOK_MS = 50 -- so that at most one of them looks in this time

-- A follower waits, out of the queue, while its first task counts. Then it is delivered with the verdict 'following',
-- until a worker has given it the result of the first one, or has found none: see run_or_follow_another. If no live worker
-- takes it, it is adrift.
-- Until it is delivered, it is not listed as parked: a limit must not stop the queue that has the first task's retry.
-- Its state is that of a delayed message, since scripts of an older version queue such a message, too.
local function follow(token, rec, own)
  local first, list = rec.follows[2], followers_of(rec.follows[2])
  rec.delayed = '1'
  set_state(rec, 'leaving')
  put_in_index(token, rec)
  local till
  if id_that_counts(rec.follows[1]) == first then
    rec.offer_every = nil
    redis.pcall('ZADD', list, rec.place, token)
    local pause = math.max(FOLLOW_MS, LOOK_MS * (tonumber(redis.pcall('ZCARD', list)) or 0))
    redis.pcall('PEXPIRE', list, 3 * pause)
    till = now + pause
  else
    redis.pcall('ZREM', list, token) -- it may have looked by itself
    wake_followers(first, 1)
    list_parked(token, rec)
    rec.ended_by = nil
    if deliver(token, rec, 'following', own) then
      till = now + offered_again_in(rec)
    else
      rec.delayed = nil
      set_adrift(token, rec)
    end
  end
  save(token, rec)
  till = math.min(till or math.huge, tonumber(rec.deadline or math.huge))
  if till < math.huge then redis.call('ZADD', deadlines, digits(till), token) end
end

local INSTEAD_MS = 3600000 -- by then the other followers have had a slot

-- The task that counts for the followers of another one, which has left no result. It is remembered, since some of them
-- get a slot only when it has ended.
local function counts_instead_of(first, id)
  local key = unique_part(first, 'instead')
  redis.pcall('SET', key, id, 'NX', 'PX', INSTEAD_MS)
  local known = redis.pcall('GET', key)
  return type(known) == 'string' and known or id
end

-- The first task of a follower has left no result. One of its followers runs, and counts as the first one from now on;
-- the others follow that one. If it leaves no result either, each of them runs. If the first task counts again, since
-- it waits for its next attempt, it is followed on.
local function run_or_follow_another(rec)
  local key, first, until_start, most, late = unpack(rec.follows)
  local me, other = (retries_of(rec.attempt)), id_that_counts(key)
  if other == first then return end
  local another = not rec.follows_another and until_start and counts_instead_of(first, other or me)
  if another and another ~= me then
    rec.follows[2], rec.follows_another, rec.offer_every = another, '1', nil
  else
    rec.follows, rec.unique = nil, another and {key, until_start, most, late} or nil
  end
end

-- End the wait of a waiter. A client is removed. A stored message is never removed: it is
-- delivered with a verdict, repeatedly, until a worker has ended its task.
local function deliver_to_end(token, own)
  local rec = load(token)
  unqueue(token, rec)
  if not rec then return end
  if not rec.parked then return end_delivery(token, rec) end
  local follows = rec.follows and rec.delayed
  if follows and (not rec.deadline or tonumber(rec.deadline) > now) then return follow(token, rec, own) end
  if rec.state == 'leaving' and not follows then
    queue_again(token, rec)
    if not rec.deadline or tonumber(rec.deadline) > now then return end
    unqueue(token, rec)
  end
  rec.delayed, rec.ended_by = nil, nil
  local ended = rec.by and 'replaced' or rec.excess and 'too_costly' or rec.above_rate and 'above_rate' or 'overdue'
  set_state(rec, rec.rejected and 'rejected' or rec.revoked and 'revoked' or ended)
  deliver(token, rec, rec.state, own)
  local pause = offered_again_in(rec)
  save(token, rec)
  redis.call('ZADD', deadlines, now + pause, token)
end

-- End a stored message that a later one replaces; `by` is the attempt of the later one. The message does not run: it
-- is delivered with the verdict 'replaced' until a worker has ended its task.
local function replace(token, rec, by, own)
  unqueue(token, rec)
  rec.by, rec.delayed, rec.state = by, nil, 'parked'
  put_in_index(token, rec)
  save(token, rec)
  count('replaced')
  deliver_to_end(token, own)
end

-- Debounce: a new message settles before it queues. It replaces the message of its source that settles. If one of the
-- two is a copy, that one counts as the older. A message that settles has the state of a delayed message, since
-- scripts of an older version queue such a message at its deadline, too. Returns false if the message need not
-- settle: it is the first after a quiet period, and lock_debounce_first is "run".
local function let_settle(token, rec, own)
  local quiet_ms, most_ms, run_first = unpack(wanted_flow.settle)
  rates, alone = rates or open_rates(), false
  local source = source_of(rec)
  local last = rates.note_arrival(source, quiet_ms)
  local other = rates.settling(source)
  local older = other and load(other)
  if not (older and older.settles and older.delayed) then older = nil end
  if not older and run_first == 1 and last + quiet_ms <= now then return false end
  if older and (rec.copy and not older.copy or arrival_of(rec) < arrival_of(older)) then
    rec.settles = '1'
    replace(token, rec, older.attempt, own)
    return true
  end
  if older then replace(other, older, rec.attempt, own) end
  rec.settles, rec.delayed, rec.settles_from = '1', '1', older and older.settles_from or digits(now)
  rec.ahead = wanted_flow.head_start and digits(wanted_flow.head_start)
  local till = now + quiet_ms
  if most_ms > 0 then till = math.min(till, tonumber(rec.settles_from) + most_ms) end
  set_state(rec, 'leaving')
  put_in_index(token, rec)
  list_parked(token, rec)
  save(token, rec)
  redis.call('ZADD', deadlines, digits(till), token)
  rates.note_settling(source, token)
  return true
end
