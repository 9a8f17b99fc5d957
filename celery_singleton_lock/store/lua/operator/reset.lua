-- reset: take the lock from all holders, and grant it to the next waiter.
-- KEYS: lock
-- ARGV: name call claim_ms
--   call = id of this call
-- REPLY: the number of holders; the same if the call is repeated after a lost reply
lock = name
check()

-- The next waiters hold the lock by now. A repeated call must not take it from them.
local ASKED_MS = 60000 -- a call is repeated within this time
local known = 0
while is_done(call .. ':' .. known + 1) do known = known + 1 end
if known > 0 or is_done(call .. ':0') then return known end

write_though_full()
sweep('')

-- A stored message goes to the end of the queue: at its old place it would be granted next, while its
-- task still runs.
local taken = redis.call('ZRANGE', holders, 0, -1)
if #taken == 0 then remember(now + ASKED_MS, call .. ':0') end
for i, token in ipairs(taken) do
  local rec = load(token)
  leave_holders(token, rec)
  remember(now + ASKED_MS, call .. ':' .. i)
  if rec then
    move_behind_all(rec)
    end_delivery(token, rec)
  end
end
count('resets')
sweep('') -- the deadline of a holder that had not begun may have passed
grant_waiters('')
finish()
return #taken
