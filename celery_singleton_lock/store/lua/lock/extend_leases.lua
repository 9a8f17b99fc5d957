-- extend: renew many leases. It never creates a lease, and never revives a lapsed one.
-- KEYS: lock*
-- ARGV: (name token lease_ms)*
-- REPLY: list of 1 (held), 0 (not held) or the error of that lock
local function renew(offset, lock_name, token, lease_ms)
  use(offset, lock_name)
  check()
  write_though_full()
  note_lease(lease_ms)
  local rec = load(token)
  local till = lease_end(token)
  local held = till and till > now
  if held then
    redis.call('ZADD', holders, math.max(till, now + lease_ms), token)
  elseif standing(token, rec) == 'overdue' then -- a worker has it, and has no free slot yet to end its task
    redis.call('ZADD', deadlines, now + lease_ms, token)
    held = true
  end
  finish()
  return held and 1 or 0
end

-- If the keys of one lock are of another type, the other leases are still renewed.
local replies = {}
for i = 0, #ARGV / 3 - 1 do
  local ran, held = pcall(renew, 11 * i, ARGV[3 * i + 1], ARGV[3 * i + 2], tonumber(ARGV[3 * i + 3]))
  replies[i + 1] = ran and held or type(held) == 'table' and held.err or tostring(held)
end
return replies
