-- Replies to callers.

local function describe(token, reason)
  local raw = token and redis.call('HGET', record, token)
  local who = raw and token .. '\n' .. raw or ''
  local why = paused or reason == 'closed' and rates.closed_why()
  if why then return (raw and who or '\n') .. '\n' .. why end
  return who
end

-- As waits_for(), for a reply: it distinguishes a close, which ends by itself, from an operator's pause.
local function told_reason(held)
  local reason, till = waits_for(held)
  return reason == 'pause' and till and not paused and 'closed' or reason, till
end

-- The holder that a blocked caller is told: the last attempt of its own task, which has sent this retry or replacement
-- and ends at once, or else the one whose lease ends first.
local function told_holder(first, rec)
  local attempt = rec and rec.attempt or ''
  local id = retries_of(attempt)
  local is_first = attempt == '' or string.sub(attempt, -4) == '/0/0' -- clients have no attempt
  if is_first or redis.call('ZCARD', holders) < 2 then return first end
  for _, token in ipairs(redis.call('ZRANGE', holders, 0, -1)) do
    local other = load(token)
    if other and retries_of(other.attempt) == id then return token end
  end
  return first
end

-- `lost`: the verdict is absent, since Redis has lost the message.
local function answer(verdict, token, rec, lost)
  local first = redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')
  local next_look_ms = first[2] and tonumber(first[2]) - now or 0
  if verdict == 'granted' or verdict == 'released' or verdict == 'charged' then -- with the time of the next start, for a timer
    local reason, till
    if (rates or paused) and redis.call('ZCARD', queue) > 0 then reason, till = told_reason() end
    till = (reason == 'rate' or reason == 'closed' or reason == 'pause') and till
    local look, why = till and till - now or next_look_ms, till and reason or ''
    if verdict ~= 'granted' then return line(verdict, '0', 0, 0, look, why, '') end
    return line(verdict, rec.fence or '0', (lease_end(token) or now) - now, 0, look, why, '')
  end
  if verdict == 'too_costly' then return line(verdict, '0', 0, 0, 0, rates.excess(rec), '') end
  local rank = not alone and redis.call('ZRANK', queue, token)
  local reason, till = lost and 'lost' or '', nil
  if verdict == 'waiting' or verdict == 'blocked' or verdict == 'full' then
    reason, till = told_reason(kept_for_me and redis.call('ZCARD', holders) - 1)
    if verdict == 'blocked' and reason == 'holder' and rates and wanted_flow and wanted_flow.ends_at_rate then
      local limited, opens = rates.waits(rec)
      if limited then reason, till = limited, opens end
    end
    if not reason and fair and fair.is_full(rec or load(token) or {}) then reason = 'group' end
    reason = reason or 'queue'
  end
  if verdict == 'waiting' and not rank then -- adrift; or granted just now, or stored under a later number
    local mine = load(token)
    if mine and mine.settles and mine.delayed then
      local settled = tonumber(redis.call('ZSCORE', deadlines, token))
      return line(verdict, '0', 0, 0, settled - now, 'settling', '')
    end
    if mine and mine.follows and mine.delayed then return line(verdict, '0', 0, 0, 0, 'following', '') end
    if not mine or mine.state ~= 'adrift' then reason = '' elseif reason == 'queue' then reason = 'worker' end
  end
  if till then next_look_ms = till - now end
  local holder = verdict == 'blocked' and told_holder(first[1], rec) or first[1]
  return line(verdict, '0', 0, rank and rank + 1 or 0, next_look_ms, reason, describe(holder, reason))
end
