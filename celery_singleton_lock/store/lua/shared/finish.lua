-- Expiry of the keys, and the time of the next sweep.

-- `meta` lives at least as long as what an operator has set, and while the lock is closed, so that lists show it.
local function live_until(until_ms, ...)
  local closed = rates and rates.reopens_at() or 0
  for _, key in ipairs({...}) do
    local till = key == meta and math.max(until_ms, closed, rulings_end()) or until_ms
    if till < math.huge then redis.call('PEXPIRE', key, till - now + GRACE_MS) end
  end
end

-- When the lock must be swept next. At once, if this script set a message adrift: right after an outage
-- of Redis, the heartbeats of live workers have not arrived yet. Only a sweep postpones the time.
local function next_look(first)
  local look = tonumber(first or now + ADRIFT_MS)
  local deadline = redis.call('ZRANGE', deadlines, 0, 0, 'WITHSCORES')[2]
  if deadline then look = math.min(look, tonumber(deadline)) end
  if redis.call('ZCARD', adrift) > 0 then
    local planned = became_adrift and now or redis.call('ZSCORE', due, lock)
    look = math.min(look, tonumber(not sweeping and planned or now + ADRIFT_MS))
  end
  if redis.call('ZCARD', queue) > 0 then
    local reason, till = queue_waits_for()
    if not reason then till = now end -- this script has moved as many waiters as it may
    look = math.min(look, till or look)
    -- If no live worker took the next call, no holder was told to end. So the lock is swept again soon.
    if reason == 'holder' and rates and rates.preempts() then look = math.min(look, now + ADRIFT_MS) end
  end
  return look
end

-- Without waiters, the keys of a lock expire some time after its last lease. It needs no sweeper: the
-- next caller sweeps.
local function finish_alone()
  local last = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
  if last then live_until(tonumber(last), holders, record, meta) else live_until(now, meta) end
end

-- A holder that had waited stays in the index while it runs. If it dies without waiters behind it, the
-- lock's keys expire, but the index, which many locks share, does not. So a sweeper must remove the entry.
local function keep_indexed_due()
  local held = redis.call('ZRANGE', holders, 0, BATCH - 1)
  for i, token in ipairs(held) do
    local rec = load(token)
    if rec and (rec.indexed or rec.unique) or i == BATCH then return redis.call('ZADD', due, lease_end(token), lock) end
  end
  redis.call('ZREM', due, lock)
end

-- The state of the groups lives as long as a message, a holder or a client that waits.
local function keep_groups()
  local last = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2] or now
  local deadline = redis.call('ZRANGE', deadlines, -1, -1, 'WITHSCORES')[2] or now
  fair.keep(redis.call('EXISTS', bodies) == 1, math.max(tonumber(last), tonumber(deadline)))
end

-- Set when the keys expire, and when the lock is swept next. With a stored message they do not expire.
local function finish()
  if rates then rates.keep(redis.call('EXISTS', bodies) == 1) end
  if fair then keep_groups() end
  if alone and not index_changed then return finish_alone() end
  if redis.call('EXISTS', queue, deadlines, adrift, bodies) == 0 then
    keep_indexed_due()
    return finish_alone()
  end
  local first = redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', due, next_look(first), lock)
  if redis.call('EXISTS', bodies) == 1 then
    for _, key in ipairs({holders, queue, record, meta, deadlines, adrift}) do redis.call('PERSIST', key) end
    return
  end
  local last = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2] or now
  local deadline = redis.call('ZRANGE', deadlines, -1, -1, 'WITHSCORES')[2] or now
  live_until(math.max(tonumber(last), tonumber(deadline)), holders, queue, record, meta, deadlines)
end
