-- release: give the lock back or leave its queue, and hand it to who is next.
-- KEYS: lock
-- ARGV: name token ending mark keep_ms keep_for worker done_ms claim_ms
--   ending final, again, cancel or keep (for the attempt keep_for, as long as keep_ms);
--   mark 1 = remember the attempt even where no copy is known
-- REPLY: answer RELEASED ABSENT GRANTED
use(0, name)
look()
local rec = load(token)
local where = standing(token, rec)
if alone and where == 'holder' and held == 1 and (ending == 'final' or ending == 'again') then -- the usual case: nobody is next
  redis.call('ZREM', holders, token) -- also on a full Redis: it takes no memory, and what follows may
  drop_record(token, rec)
  if unnamed then redis.call('ZREM', due, lock) end
  if ending == 'final' then remember_end(token, rec, tonumber(done_ms), mark == '1') end
  live_until(now, meta)
  return line('released', '0', 0, 0, 0, '')
end
-- REST
check()
write_though_full()
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
