-- reopen: end a timed close. An operator's pause stays.
-- KEYS: lock
-- ARGV: name claim_ms who
-- REPLY: 1 if it was closed, else 0
lock = name
check()
check_audit()
write_though_full()
local was_closed = rates and rates.reopens_at()
if was_closed then
  rates.reopen()
  note(1)
end
sweep('')
grant_waiters('')
finish()
return was_closed and 1 or 0
