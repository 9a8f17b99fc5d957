-- revoke: a message that waits, and whose task was revoked, is delivered with that verdict.
-- KEYS: lock
-- ARGV: name token realm worker claim_ms
-- REPLY: answer RELEASED ABSENT
lock = name
check()
write_though_full()
sweep(worker)

local rec = load(token)
local where = standing(token, rec)
local waits = where == 'queue' or where == 'adrift' or where == 'overdue' and rec.delayed
waits = waits and rec.parked and rec.realm == realm
if waits then
  unqueue(token, rec)
  rec.revoked, rec.delayed, rec.state = '1', nil, 'parked'
  save(token, rec)
  expire(token, worker) -- like one whose time has come: until a worker has ended it
end
grant_waiters(worker)
finish()
return answer(waits and 'released' or 'absent', token, rec)
