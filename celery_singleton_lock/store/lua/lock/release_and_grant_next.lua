-- release: release the lock or leave its queue, and grant it to the next waiter.
-- KEYS: lock
-- ARGV: name token ending mark keep_ms keep_for worker done_ms claim_ms
--   ending final = the task has ended; again = its message queues again; unread = likewise, since no
--   worker could decode it; refused = its message queues again after keep_ms, since Redis refuses the lock keep_for,
--   which its task takes, too; reject = the task rejects its message; cancel = only end its wait; keep =
--   reserve the permit for the attempt keep_for, for keep_ms; hold = reserve it for nobody, for keep_ms;
--   later = its message queues again at its place, and its wait continues; unless keep_ms is empty, the lock is
--   closed for keep_ms, and keep_for says why;
--   return = like again, if it has not begun; offer = likewise, if another worker has a free slot for it;
--   repeat = like final, for an end that Redis may have lost, unless the task runs again in another worker;
--   mark 1 = remember the end even if no copy of the message is known
-- REPLY: answer RELEASED ABSENT GRANTED
lock = name

-- The usual case: this token is the only holder, nobody waits, and no message is stored. Inlined, as in
-- acquire. The blank in a record (see acquire) means that the task was not parked, has no duplicate, and
-- is not in the index. ZREM is the first write, since a full Redis does not refuse it.
if mark == '0' and (ending == 'final' or ending == 'again') or ending == 'reject' then
  local raw = redis.call('HGET', record, token)
  if raw and string.sub(raw, 2, 2) == ' ' and redis.call('EXISTS', queue, bodies, deadlines, adrift) == 0
    and redis.call('ZCARD', holders) == 1 and redis.call('ZREM', holders, token) == 1 then
    redis.call('HDEL', record, token)
    return 'released\n0\n0\n0\n0\n1\n\n'
  end
end
-- REST
-- A separate holder reserves the permit of the ended task, and lapses like any other. Nobody can claim it.
-- It has no attempt, so that later copies of the task are not its duplicates.
local function hold_permit(token, rec, ms)
  local held = {attempt = '', of = rec.attempt, task = rec.task, lease = digits(ms), place = rec.place}
  if fair then fair.assign(held, rec) end
  add_holder('held:' .. token, held, 'held_after', ms)
  save('held:' .. token, held)
end

check()
write_though_full()
if ending == 'keep' then note_lease(keep_ms) end
if ending == 'later' and keep_ms ~= '' then close(tonumber(keep_ms), keep_for) end -- also if the lock was lost
local rec = load(token)
local where = standing(token, rec)
local verdict = where and 'released' or 'absent'
local held_it = where == 'holder' and lease_end(token) > now
local own = worker
local runs_elsewhere = held_it and rec.state == 'running' and rec.worker ~= worker
if ending == 'repeat' then
  own = ''
elseif ending == 'offer' then
  own, slots[worker] = '', math.min(free_slots(worker), 0)
elseif held_it and rec.state == 'running' then
  freed = 1
end
local returns = ending == 'return' or ending == 'offer'
local begun = held_it and not (rec.state == 'granted' and rec.parked)
local taken = ending == 'return' or ending == 'offer' and held_it and not begun and idle_worker(rec, own)
if held_it and (ending == 'cancel' or returns and (begun or not taken)) or where and returns and rec.ended_by
  or ending == 'repeat' and runs_elsewhere then
  verdict = 'granted'
elseif where then
  if where == 'holder' then leave_holders(token, rec) else unqueue(token, rec) end
  local by_itself = ending == 'final' or ending == 'keep' or ending == 'hold' or ending == 'reject'
  if by_itself and held_it and rates and rec.preempt and rec.state == 'running' and not rec.preempted_by then
    rates.note_in_a_row(rec.task, 0)
  end
  if ending == 'again' or ending == 'unread' or returns then
    return_delivery(token, rec, ending == 'unread')
  elseif ending == 'later' then
    if rec.follows then run_or_follow_another(rec) end
    end_delivery(token, rec, nil, true)
  elseif ending == 'refused' then
    rec.refused = keep_for
    end_delivery(token, rec, tonumber(keep_ms))
  elseif ending ~= 'reject' then
    remember_end(token, rec, tonumber(done_ms), mark == '1' or rec.waited and rec.state == 'running')
    forget(token, rec)
    if ending == 'keep' and held_it then reserve(keep_for, tonumber(keep_ms), rec, own) end
    if ending == 'hold' and held_it then hold_permit(token, rec, tonumber(keep_ms)) end
  elseif not have_rejected(token, rec, own) then
    forget(token, rec)
  end
end
sweep(own)
grant_waiters(own)
local head = where and redis.call('ZRANGE', queue, 0, 0)[1]
local first = head and load(head)
if first and not first.parked then -- it may now wait for a rate or a pause, and must learn its end
  local reason, till = waits_for(nil, first)
  if till and (reason == 'rate' or reason == 'pause') then wake(head) end
end
finish()
local wanted = ending == 'offer' or ending == 'again' or ending == 'later' -- it must run again
return answer(verdict, token, rec, wanted and not rec and not has_trace(token))
