-- Granting waiters, and removing what has ended.

-- A stored message was acknowledged, so its task cannot reject it at the broker. A worker publishes it
-- again in order to reject it; until then it is delivered with the verdict 'rejected'. Returns whether
-- a message is stored.
local function have_rejected(token, rec, own)
  local following = next_stored(token, rec)
  if not following then return false end
  drop_record(token, rec)
  alone, rec.rejected, rec.state = false, '1', 'parked'
  put_in_index(following, rec)
  save(following, rec)
  deliver_to_end(following, own)
  return true
end

-- End a waiter that costs more than a rate allows, so that it can never start. A client asks again, and the reply
-- says why.
local function refuse_cost(token, rec, own)
  rec.excess = rates.excess(rec)
  save(token, rec)
  count('too_costly')
  deliver_to_end(token, own)
  if not rec.parked then wake(token) end
end

-- Replace the oldest message of a task and broker, to make room for a later one. Without priorities, the first in the
-- queue is the oldest.
local function replace_oldest(task, attempt, realm, queue_name, own)
  local name_of_task = '"task":' .. cjson.encode(task)
  local prioritised = redis.call('HGET', meta, 'prioritised')
  local function oldest_in(page) -- in queue order; the search for the name spares decoding most records
    local skip, tokens, oldest, first = 0, page(0), nil, nil
    while #tokens > 0 do
      for i, raw in ipairs(redis.call('HMGET', record, unpack(tokens))) do
        local rec = raw and string.find(raw, name_of_task, 1, true) and cjson.decode(raw)
        if rec and rec.parked and rec.task == task and rec.realm == realm then
          if not prioritised then return tokens[i], rec end
          if not first or arrival_of(rec) < arrival_of(first) then oldest, first = tokens[i], rec end
        end
      end
      skip = skip + BATCH
      tokens = #tokens == BATCH and page(skip) or {}
    end
    return oldest, first
  end
  local oldest, first = oldest_in(function(skip) return redis.call('ZRANGE', queue, skip, skip + BATCH - 1) end)
  local route = realm .. ':' .. queue_name
  local other, rec = oldest_in(function(skip) return adrift_of(route, skip, BATCH) end)
  if other and not (first and arrival_of(first) <= arrival_of(rec)) then oldest, first = other, rec end
  if not oldest then return false end
  replace(oldest, first, attempt, own)
  return true
end

-- Messages adrift for which there is a live worker now queue again at their place.
local function recall(own)
  local looked = 0
  for _, route in ipairs(routes_to_recall()) do
    local live = looked < LOOKED and #live_of(route, 0) > 0
    for _, token in ipairs(live and some_adrift(route) or {}) do
      local rec = load(token)
      looked = looked + 1
      if worker_for(rec, own) then
        unqueue(token, rec)
        rec.publish_at, rec.publish_every = nil, nil
        enqueue(token, rec, 'parked')
      end
    end
  end
end

local function sweep(own)
  drop_ended_rulings()
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', now)) do lapse(token) end
  if rates then rates.drop_ended() end
  if alone then return end
  local late = redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, BATCH)
  for _, token in ipairs(late) do deliver_to_end(token, own) end
  recall(own)
  if fair and sweeping then fair.repair() end
end

-- End the next waiter if it does not wait for the rate. Returns whether one was ended.
local function end_above_rate(own)
  local head = next_waiter()
  local rec = head and load(head)
  if not (rec and rec.parked and rec.ends_at_rate) then return false end
  rec.above_rate = '1'
  save(head, rec)
  deliver_to_end(head, own)
  return true
end

local ended_above_rate = 0
local function next_may_start(own)
  local reason = waits_for()
  while reason == 'rate' and ended_above_rate < BATCH and end_above_rate(own) do
    ended_above_rate = ended_above_rate + 1
    reason = waits_for()
  end
  if reason == 'holder' and rates and rates.preempts() and preempt_for_next(own) then reason = waits_for() end
  return not reason
end

-- Grant free permits in queue order, and with groups in the order of next_waiter(). Messages that no live
-- worker takes become adrift.
-- `me` is the caller's token: it gets its full lease, and needs no wake-up.
local function grant_waiters(own, me, my_record)
  if alone then return end
  if rates then rates.drop_ended() end
  local moved = 0
  while next_may_start(own) do
    local head, repaired = next_waiter()
    if not head then return end
    local rec = head == me and my_record or load(head)
    if repaired and waits_for(nil, rec) then return end -- it may cost more than the waiter that peek() has found
    local deadline = redis.call('ZSCORE', deadlines, head)
    if head == me then
      unqueue(head, rec)
      grant_caller(head, rec, tonumber(rec.lease))
    elseif moved == BATCH then
      return -- the next script continues: see next_look
    elseif not rec or deadline and tonumber(deadline) <= now then
      deliver_to_end(head, own)
      moved = moved + 1
    elseif rates and rates.excess(rec) then
      refuse_cost(head, rec, own)
      moved = moved + 1
    elseif rates and rec.preempt and rec.preempt[2] >= 0 and rec.parked and end_replaced(head, rec, own) then
      moved = moved + 1
    elseif waiter_waits_for(rec, own) == 'worker' then
      set_adrift(head, rec)
      moved = moved + 1
    else
      grant(head, rec, own)
      moved = moved + 1
    end
  end
end
