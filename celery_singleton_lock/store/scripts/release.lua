-- release: give the lock back or leave its queue, and hand it to who is next.
-- KEYS: lock
-- ARGV: name token ending worker done_ms mark claim_ms
--   ending final, again or cancel; mark 1 = remember the attempt even where no copy is known
-- REPLY: answer RELEASED ABSENT GRANTED
use(0, name)
check()
write_though_full()

local rec = load(token)
local where = standing(token, rec)
local verdict = where and 'released' or 'absent'
if where == 'holder' and ending == 'cancel' and lease_end(token) > now then
  verdict = 'granted'
elseif where then
  if where == 'holder' then redis.call('ZREM', holders, token) else unqueue(token, rec) end
  if ending == 'again' then go_back(token, rec) else forget(token, rec, tonumber(done_ms), mark == '1') end
end
sweep(worker)
grant_waiters(worker)
finish()
return answer(verdict, token, rec)
