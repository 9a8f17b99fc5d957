-- extend: renew many leases. It never creates a lease, and never revives a lapsed one.
-- KEYS: lock*
-- ARGV: (name token lease_ms)*
-- REPLY: list of 1 (held), 0 (not held), the error of that lock, or if the holder is preempted, a list of the attempt that preempts it
local function renew(offset, lock_name, token, lease_ms)
  use(offset, lock_name)
  local till = lease_end(token)
  local held = till and till > now
  local set = redis.call('HMGET', meta, 'paused', 'ruled') -- by operators: then the keys do not expire
  local free = held and not set[1] and not set[2]
  local unwanted = free and redis.call('EXISTS', queue, bodies, deadlines, adrift, flow) == 0
  if unwanted then paused, ruled, rates, fair = nil, nil, nil, nil else check() end -- not those of the lock before
  write_though_full()
  note_lease(lease_ms)
  local rec
  if held then
    redis.call('ZADD', holders, math.max(till, now + lease_ms), token)
    rec = (fair or rates) and load(token)
    if rec and fair then fair.renew(rec, lease_ms) end
    if rec and rates and rec.costs then rates.expect_charges(lease_ms) end
  elseif standing(token, load(token)) == 'overdue' then -- a worker has it, and has no free slot yet to end its task
    redis.call('ZADD', deadlines, now + lease_ms, token)
    held = true
  end
  if unwanted then finish_alone() else finish() end
  if rec and rec.preempted_by then return {rec.preempted_by} end
  return held and 1 or 0
end

-- If the keys of one lock are of another type, the other leases are still renewed.
local replies = {}
for i = 0, #ARGV / 3 - 1 do
  local ran, held = pcall(renew, 12 * i, ARGV[3 * i + 1], ARGV[3 * i + 2], tonumber(ARGV[3 * i + 3]))
  if not ran then held = type(held) == 'table' and held.err or tostring(held) end
  -- An error of the whole call: clients then leave a server that is a replica now.
  if not ran and string.find(held, 'READONLY', 1, true) then return redis.error_reply(held) end
  replies[i + 1] = held
end
return replies
