-- deliver_revoked: deliver the waiting message of a revoked task with the verdict revoked.
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
  deliver_to_end(token, worker) -- it is delivered until a worker has ended its task
end
grant_waiters(worker)
finish()
return answer(waits and 'released' or 'absent', token, rec)
