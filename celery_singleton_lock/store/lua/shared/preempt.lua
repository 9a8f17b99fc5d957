-- Preemption: the newest call of a task replaces the one that waits, and the one that runs.

-- `rec.preempt` is {most, age} (lock_on_conflict="preempt"). most = how many calls of the task may be preempted in a
-- row. age 1 = a new call; 0 = a retry, which is older than all others, whenever it came; -1 = a copy: it may be
-- older or newer than those that came before it, so it replaces none of them, and none of them replaces it.
local function is_older(rec, than)
  local retry, other = rec.preempt[2] == 0, than.preempt[2] == 0
  if retry ~= other then return retry end
  return arrival_of(rec) < arrival_of(than)
end

-- The call of the same task and broker that waits; it is the only one that may.
local function call_that_waits(rec)
  return indexed(rates.newest_call(source_of(rec)) or '', function(token, other) -- others may have its task id
    local where = other.preempt and other.preempt[2] >= 0 and standing(token, other)
    return where == 'queue' or where == 'adrift' or where == 'overdue' and other.delayed
  end)
end

-- Reads the calls of the same task that hold the lock. Returns token and record of the older call that started first;
-- the record of a newer call with another task id; and whether one of them must already end.
local function calls_that_run(rec)
  local first, older, newer, ends = nil, nil, nil, false
  for skip = 0, redis.call('ZCARD', holders) - 1, BATCH do
    local tokens = redis.call('ZRANGE', holders, skip, skip + BATCH - 1)
    for i, raw in ipairs(redis.call('HMGET', record, unpack(tokens))) do
      local other = raw and string.find(raw, '"preempt":', 1, true) and cjson.decode(raw)
      if other and other.preempt and other.task == rec.task then
        ends = ends or other.preempted_by ~= nil
        if not is_older(other, rec) then
          local is_known = other.preempt[2] >= 0 -- a copy may be older
          if is_known and retries_of(other.attempt) ~= retries_of(rec.attempt) then newer = other end
        elseif not older or tonumber(other.fence) < tonumber(older.fence) then
          first, older = tokens[i], other
        end
      end
    end
  end
  return first, older, newer, ends
end

-- A new call takes the place of the one that waits. Returns whether it ends instead, since a newer one waits or runs.
local function take_place(token, rec, own)
  rates = rates or open_rates()
  local other, waits = call_that_waits(rec)
  local newer, _ = waits and is_older(rec, waits) and waits, nil
  if not newer and waits_for(nil, rec) == 'holder' then _, _, newer = calls_that_run(rec) end
  if newer then
    replace(token, rec, newer.attempt, own)
    return true
  end
  if waits then
    if tonumber(waits.place) < tonumber(rec.place) then move_to(rec, waits.place) end -- else a stream never starts
    replace(other, waits, rec.attempt, own)
  end
  rates.note_newest_call(source_of(rec), rec.attempt)
  return false
end

-- A call that was returned queues at its old place. Returns whether it ends instead, since a newer one waits.
local function end_replaced(token, rec, own)
  local other, waits = call_that_waits(rec) -- itself, if it is the newest
  if not other or not is_older(rec, waits) then return false end
  replace(token, rec, waits.attempt, own)
  return true
end

-- The next waiter waits for a holder. If the holder is an older call of the same task, it must end: its worker is
-- told now, and with each renewal (see extend). If the holder has not begun, it gives its permit back at once.
-- If the holder is a newer call, the waiter was returned, and ends. Returns whether a permit was given back.
local function preempt_for_next(own)
  local head = not fair and redis.call('ZRANGE', queue, 0, 0)[1]
  local rec = head and load(head)
  if not (rec and rec.parked and rec.preempt and rec.preempt[2] == 1) then return false end
  if rates.waits(rec) or rates.excess(rec) or not worker_for(rec, own) then return false end
  local first, older, newer, ends = calls_that_run(rec)
  if newer then
    replace(head, rec, newer.attempt, own)
    return false
  end
  local row = rates.preempted_in_a_row(rec.task)
  if ends or not older or row >= rec.preempt[1] then return false end
  local unbegun = older.state == 'granted' and older.parked
  if not unbegun and older.state ~= 'running' then return false end
  rates.note_in_a_row(rec.task, row + 1)
  if unbegun then
    leave_holders(first, older)
    older.by = rec.attempt
    count('replaced')
    end_delivery(first, older) -- its deadline has passed then, so it is delivered to be ended
    return true
  end
  older.preempted_by = rec.attempt
  save(first, older)
  count('preempted')
  tell_worker(older.worker, {
    lock = lock, token = first, fence = older.fence, verdict = 'preempted', by = rec.attempt, whole = '1', waited = '0',
  }, '')
  return false
end
