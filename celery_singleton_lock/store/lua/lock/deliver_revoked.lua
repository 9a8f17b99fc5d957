-- deliver_revoked: deliver, with the verdict revoked, the message of a revoked task that has not started.
-- KEYS: lock
-- ARGV: name token realm worker claim_ms
--   a call that is repeated, or comes from another worker, has the same reply for two minutes
-- REPLY: answer RELEASED ABSENT
local TAKEN_MS = 120000 -- the worker that has the grant receives the revoke within this time
lock = name
check()
write_though_full()

local rec = load(token)
local where = standing(token, rec)
-- A claim at the first of several locks deletes the message there, and leaves the state.
local unbegun = where == 'holder' and rec.state == 'granted' and rec.parked and has_body(base_of(token))
unbegun = unbegun and rec.realm == realm
local taken = not rec and is_done('taken:' .. token)
if unbegun then
  remember(now + TAKEN_MS, 'taken:' .. token) -- the worker with the grant may ask later, or again
  leave_holders(token, rec)
  rec.revoked = '1'
  end_delivery(token, rec) -- its deadline has passed then: the sweep delivers it until a worker has ended its task
end
sweep(worker)

rec = load(token)
where = standing(token, rec)
local waits = where == 'queue' or where == 'adrift' or where == 'overdue' and rec.delayed and not rec.ended_by
waits = waits and rec.parked and rec.realm == realm
if waits then
  unqueue(token, rec)
  rec.revoked, rec.delayed, rec.state = '1', nil, 'parked'
  save(token, rec)
  deliver_to_end(token, worker) -- it is delivered until a worker has ended its task
end
grant_waiters(worker)
finish()
return answer((waits or unbegun or taken) and 'released' or 'absent', token, rec)
