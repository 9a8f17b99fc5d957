-- force_release: take the lock from one holder, and grant it to the next waiter.
-- KEYS: lock
-- ARGV: name token keep done_ms worker claim_ms who
--   keep 1 = its stored message goes to the end of the queue, 0 = it is deleted
-- REPLY: answer RELEASED ABSENT
lock = name
check()
check_audit()
write_though_full()
sweep(worker)

local rec = load(token)
local held = lease_end(token)
if held then
  leave_holders(token, rec)
  if rec and keep == '1' then
    move_behind_all(rec) -- at its old place it would be granted next
    end_delivery(token, rec)
  elseif rec then
    if rec.state ~= 'reserved' then remember_end(token, rec, tonumber(done_ms), true) end -- its retry must run
    forget(token, rec)
  end
  count('forced')
  note(1, token, rec)
end
grant_waiters(worker)
finish()
return answer(held and 'released' or 'absent', token, rec)
