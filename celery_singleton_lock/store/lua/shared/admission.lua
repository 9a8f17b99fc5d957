-- The admission decision: the limit and rates in force, and what the next start waits for.

-- Holders and waiters declare limits as numbers. The lowest one is in force. If the lock is idle, the limit of the
-- caller is in force. A limit that was computed for a message is in force if it is lower. The same applies to rates.
-- A caller without a rate must keep the rates of others. `copy`: the caller may be a second delivery of a message.
local function declare(wanted, place, copy)
  local idle = redis.call('EXISTS', holders) == 0 and (alone or redis.call('EXISTS', queue, bodies, deadlines) == 0)
  local options = wanted_flow and (wanted_flow.rates or wanted_flow.newest) and wanted_flow
  if options then rates = rates or open_rates() end
  local before = rates and rates.static_limit(declared) or declared
  local is_new = options and rates.declare(options, place > 0 and math.min(place, now_us) or now_us, copy, idle)
  local lowest = (wanted < before or idle) and wanted or before
  local limited = rates and rates.bounded(lowest) or lowest
  if limited ~= declared then
    declared = limited
    limit = ruled or declared
    redis.call('HSET', meta, 'limit', declared)
  end
  local group = wanted_flow and wanted_flow.group
  if group then
    rates = rates or open_rates()
    if not fair then
      fair = open_groups('0')
      fair.begin()
    end
    local most = group[2]
    fair.mine = {group = group[1], group_limit = most and most > 0 and most or nil, group_weight = group[3]}
  end
  if not options then return end
  for _, token in ipairs(is_new and redis.call('ZRANGE', holders, 0, BATCH - 1) or {}) do
    local rec = load(token)
    if rec and rec.state == 'granted' then rates.note_grant(token, rec) end
  end
end

-- The admission decision, which is made before every grant. Returns nil if the next waiter may start.
-- Otherwise returns what it waits for (redis, pause, holder or rate), and the earliest time (ms) at which that
-- can end without a call to this lock. The time is nil if only a call can end it. `held` is the number of
-- holders to count; nil counts all. `rec` is the waiter to check; nil checks the first of the queue.
local function waits_for(held, rec)
  local opens = quarantined_until()
  if opens then return 'redis', opens end
  local closed = rates and rates.reopens_at()
  if paused then return 'pause', ruling.pause and math.max(ruling.pause, closed or 0) end
  if closed then return 'pause', closed end
  if (held or redis.call('ZCARD', holders)) < limit then
    if rates then return rates.waits(rec) end
    return nil
  end
  local till = tonumber(redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2])
  if ruled and ruled < declared then till = math.min(till, ruling.limit or till) end
  return 'holder', till
end
