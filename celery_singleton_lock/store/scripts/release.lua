-- release: give the lock back or leave its queue, and hand it to who is next.
-- KEYS: lock
-- ARGV: name token ending mark keep_ms keep_for worker done_ms claim_ms
--   ending final, again, cancel or keep (for the attempt keep_for, as long as keep_ms);
--   mark 1 = remember the attempt even where no copy is known
-- REPLY: answer RELEASED ABSENT GRANTED
lock = name

-- The usual case: only this token holds it, nobody waits, and nothing is kept; it takes no function.
-- What a fresh record (see acquire) tells: the task was not parked, nor copied, nor is it in the index.
-- ZREM comes first, since a full Redis lets it pass.
if mark == '0' and (ending == 'final' or ending == 'again') then
  local raw = redis.call('HGET', record, token)
  if raw and string.sub(raw, 2, 2) == ' ' and redis.call('EXISTS', queue, bodies, deadlines, adrift) == 0
    and redis.call('ZCARD', holders) == 1 and redis.call('ZREM', holders, token) == 1 then
    redis.call('HDEL', record, token)
    return 'released\n0\n0\n0\n0\n1\n'
  end
end
-- REST
check()
write_though_full()
if keep_ms ~= '' then note_lease(keep_ms) end
local rec = load(token)
local where = standing(token, rec)
local verdict = where and 'released' or 'absent'
if where == 'holder' and ending == 'cancel' and lease_end(token) > now then
  verdict = 'granted'
elseif where then
  local held_it = where == 'holder' and lease_end(token) > now
  if where == 'holder' then redis.call('ZREM', holders, token) else unqueue(token, rec) end
  if ending == 'again' then
    go_back(token, rec)
  else
    remember_end(token, rec, tonumber(done_ms), mark == '1')
    forget(token, rec)
    if ending == 'keep' and held_it then reserve(keep_for, tonumber(keep_ms), rec, worker) end
  end
end
sweep(worker)
grant_waiters(worker)
finish()
return answer(verdict, token, rec)
