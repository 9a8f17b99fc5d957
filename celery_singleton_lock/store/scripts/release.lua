-- release: give the lock back or leave its queue, and hand it to who is next.
-- KEYS: lock
-- ARGV: name token ending mark keep_ms keep_for worker done_ms claim_ms
--   ending final, again, cancel or keep (for the attempt keep_for, as long as keep_ms);
--   mark 1 = remember the attempt even where no copy is known
-- REPLY: answer RELEASED ABSENT GRANTED
use(0, name)
if mark == '0' and (ending == 'final' or ending == 'again') and leave_alone(token) then
  return 'released\n0\n0\n0\n0\n1\n' -- the usual case: nobody is next, and nothing is kept
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
