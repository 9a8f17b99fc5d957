-- acquire: take the lock if a permit is free and nobody waits before the caller; else queue, if asked.
-- KEYS: lock
-- ARGV: name token attempt place_us copy lease_ms limit_arg max_waiting wait_ms worker claim_ms about
--   place_us = time of arrival, 0 = now; wait_ms empty = do not queue; max_waiting empty = no limit;
--   copy = as in park; about = task, worker, host, pid and lease for the record, as a JSON object
-- REPLY: answer GRANTED WAITING BLOCKED FULL TWIN DONE TOO_COSTLY
lock = name
note_lease(lease_ms)

-- The usual case: the lock is free. No key of it exists, or only meta: then no key is of another type, and
-- the caller gets the lock. Most grants take this path. It is inlined for speed, since Redis creates each
-- function anew in each call.
-- The record is concatenated, since cjson takes 2 us to encode it and 2 us to decode it. It has a blank after the
-- first brace, which cjson never writes. If the script `release` still finds the blank, no script has changed the
-- record. For a lease longer than GRACE_MS there is no blank, since meta would expire before the lease.
local idle
last_fence, grants = 0, 0
if copy == '0' and not quarantined_until() then
  local left = redis.call('EXISTS', holders, queue, record, meta, bodies, deadlines, adrift, done, flow)
  idle = left == 0
  if left == 1 then
    local m = redis.call('HMGET', meta, 'fence', 'grants', 'paused', 'ruled')
    last_fence, grants = tonumber(m[1] or 0), tonumber(m[2] or 0)
    idle = last_fence > 0 and not m[3] and not m[4]
  end
end
if idle then
  local lease = tonumber(lease_ms)
  local fence = last_fence < now_us and now_text or digits(last_fence + 1)
  local place = place_us ~= '0' and tonumber(place_us) <= now_us and place_us or now_text
  local nth, life = grants == 0 and '1' or grants + 1, lease + GRACE_MS .. ''
  redis.call('HSET', meta, 'name', lock, 'schema', '1', 'limit', limit_arg, 'fence', fence, 'grants', nth)
  redis.call('ZADD', holders, now + lease, token)
  redis.call('HSET', record, token, (lease <= GRACE_MS and '{ ' or '{') .. '"attempt":' .. cjson.encode(attempt)
    .. ',"place":"' .. place .. '","fence":"' .. fence .. '","state":"running","since":"'
    .. string.sub(now_text, 1, -4) .. '",' .. string.sub(about, 2))
  redis.call('PEXPIRE', holders, life)
  redis.call('PEXPIRE', record, life)
  redis.call('PEXPIRE', meta, life)
  return 'granted\n' .. fence .. '\n' .. lease_ms .. '\n0\n' .. lease_ms .. '\n' .. limit_arg .. '\n\n'
end
-- REST
check()
refuse_if_full()
sweep(worker)

local rec = load(token)
local where = standing(token, rec)
if where == 'holder' then
  if rec.state == 'granted' then start(token, rec) end
  grant_waiters(worker)
  finish()
  return answer('granted', token, rec)
end

-- A message that is stored under a later token, or whose task has ended, does not run a second time.
local verdict
if not where then
  if is_done(base_of(token)) or has_ended(attempt, copy) then
    verdict = 'done'
  elseif is_stored(token, attempt) then
    verdict = 'twin'
  else
    local other, others = duplicate_of(token, attempt, copy)
    if other then
      verdict = 'twin'
      others.copied = '1' -- its end is remembered, even if it comes before the copy is parked
      save(other, others)
    end
  end
end
if verdict then
  grant_waiters(worker)
  finish()
  return answer(verdict, token)
end

declare(tonumber(limit_arg), rec and arrival_of(rec) or tonumber(place_us), copy ~= '0')
if not rec then
  rec = cjson.decode(about)
  rec.attempt = attempt
  place_at(rec, tonumber(place_us))
  rec.copy = copy ~= '0' and '1' or nil
  rec.unique, rec.preempt = wanted_flow and wanted_flow.unique, wanted_flow and wanted_flow.preempt
  if fair and fair.mine then fair.assign(rec, fair.mine) end
end
if rates then rates.note_asker(token, rec) end
if rates and not rec.parked and rates.excess(rec) then
  if where then end_delivery(token, rec) else take_reservation(attempt, true, rec) end
  unqueue(token, rec)
  grant_waiters(worker)
  finish()
  return answer('too_costly', token, rec)
end
local reserved, first
if not where then reserved, first = take_reservation(attempt, wait_ms ~= '', rec) end
if first then move_to(rec, first) end
if reserved then
  grant_caller(token, rec, tonumber(lease_ms))
  grant_waiters(worker)
  finish()
  return answer('granted', token, rec)
end
if wait_ms ~= '' and not rec.parked then rec.deadline = digits(now + tonumber(wait_ms)) end

if alone then
  if not waits_for(nil, rec) and not (fair and fair.is_full(rec)) then
    grant_caller(token, rec, tonumber(lease_ms))
    verdict = 'granted'
  end
elseif where == 'adrift' or where == 'overdue' then
  grant_waiters(worker)
else
  join_queue(token, rec)
  grant_waiters(worker, token, rec)
  if rec.state == 'running' or rec.state == 'granted' then
    verdict = 'granted'
  elseif not where then
    leave_queue(token, rec)
  end
end

if where and not verdict then
  verdict = 'waiting'
  if where == 'queue' then enqueue(token, rec, rec.state) end
elseif not verdict and wait_ms == '' then
  verdict = 'blocked'
elseif not verdict and not first and is_full(max_waiting) then
  verdict = 'full'
elseif not verdict then
  verdict = 'waiting'
  rec.waited = attempt ~= '' and '1' or nil -- the broker still has the message, and may deliver it again before the end
  enqueue(token, rec, 'waiting')
end
-- While the caller was in the queue, the others may have waited because of its cost.
if rates and (verdict == 'blocked' or verdict == 'full') then grant_waiters(worker) end
finish()
return answer(verdict, token, rec)
