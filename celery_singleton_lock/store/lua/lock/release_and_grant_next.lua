-- release: give the lock back or leave its queue, and hand it to who is next.
-- KEYS: lock
-- ARGV: name token ending mark keep_ms keep_for worker done_ms claim_ms
--   ending final, again, unread (like again, of what no worker could receive), reject, cancel, keep
--   (for the attempt keep_for, as long as keep_ms), hold (for nobody, as long as keep_ms), return:
--   again, if it has not begun, or offer: likewise, if a worker other than this one has a free slot
--   for it;
--   mark 1 = remember the attempt even where no copy is known
-- REPLY: answer RELEASED ABSENT GRANTED
lock = name

-- The usual case: only this token holds it, nobody waits, and nothing is kept; it takes no function.
-- What a fresh record (see acquire) tells: the task was not parked, nor copied, nor is it in the index.
-- ZREM comes first, since a full Redis lets it pass.
if mark == '0' and (ending == 'final' or ending == 'again') or ending == 'reject' then
  local raw = redis.call('HGET', record, token)
  if raw and string.sub(raw, 2, 2) == ' ' and redis.call('EXISTS', queue, bodies, deadlines, adrift) == 0
    and redis.call('ZCARD', holders) == 1 and redis.call('ZREM', holders, token) == 1 then
    redis.call('HDEL', record, token)
    return 'released\n0\n0\n0\n0\n1\n'
  end
end
-- REST
-- The permit of a task that has ended is kept by a holder of its own, which lapses like any other. Nobody
-- can claim it, and it has no attempt: later copies of the task are told apart as if it were not there.
local function hold_on(token, rec, ms)
  local held = {attempt = '', of = rec.attempt, task = rec.task, lease = digits(ms), place = rec.place}
  write_in('held:' .. token, held, 'held_after', ms)
  save('held:' .. token, held)
end

check()
write_though_full()
if ending == 'keep' then note_lease(keep_ms) end
local rec = load(token)
local where = standing(token, rec)
local verdict = where and 'released' or 'absent'
local held_it = where == 'holder' and lease_end(token) > now
local own = worker
if ending == 'offer' then
  own, slots[worker] = '', math.min(free_slots(worker), 0)
elseif held_it and rec.state == 'running' then
  freed = 1
end
local returns = ending == 'return' or ending == 'offer'
local begun = held_it and not (rec.state == 'granted' and rec.parked)
local taken = ending == 'return' or ending == 'offer' and held_it and not begun and idle_worker(rec, own)
if held_it and (ending == 'cancel' or returns and (begun or not taken)) then
  verdict = 'granted'
elseif where then
  if where == 'holder' then redis.call('ZREM', holders, token) else unqueue(token, rec) end
  if ending == 'again' or ending == 'unread' or returns then
    come_back(token, rec, ending == 'unread')
  elseif ending ~= 'reject' then
    remember_end(token, rec, tonumber(done_ms), mark == '1')
    forget(token, rec)
    if ending == 'keep' and held_it then reserve(keep_for, tonumber(keep_ms), rec, own) end
    if ending == 'hold' and held_it then hold_on(token, rec, tonumber(keep_ms)) end
  elseif not have_rejected(token, rec, own) then
    forget(token, rec)
  end
end
sweep(own)
grant_waiters(own)
finish()
return answer(verdict, token, rec)
