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
local waits = rec and rec.parked and rec.realm == realm and (where == 'queue' or where == 'adrift')
if waits then
  unqueue(token, rec)
  rec.revoked = '1'
  save(token, rec)
  expire(token, worker) -- like one whose time has come: until a worker has ended it
end
grant_waiters(worker)
finish()
return answer(waits and 'released' or 'absent', token, rec)
