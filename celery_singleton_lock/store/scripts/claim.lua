-- claim: begin to use a grant, with a full lease from now.
-- KEYS: lock
-- ARGV: name token lease_ms settle worker host pid claim_ms
--   settle 1 = the message counts as acknowledged from its start: drop its body
-- REPLY: answer GRANTED WAITING ABSENT
use(0, name)
check()
write_though_full()
sweep(worker)

local rec = load(token)
local where = standing(token, rec)
local verdict = where == 'holder' and 'granted' or where and 'waiting' or 'absent'
if verdict == 'granted' then
  rec.worker, rec.host, rec.pid, rec.lease = worker, host, pid, lease_ms
  if settle == '1' then redis.call('HDEL', bodies, base_of(token)) end
  start(token, rec)
end
grant_waiters(worker)
finish()
return answer(verdict, token, rec)
