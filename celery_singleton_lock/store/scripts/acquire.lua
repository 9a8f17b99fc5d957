-- acquire: take the lock if a permit is free and nobody who came earlier waits; else, if asked, queue.
-- KEYS: lock
-- ARGV: name token attempt place_us copy lease_ms limit_arg max_waiting wait_ms worker claim_ms about
--   place_us 0 = now; wait_ms empty = do not queue; max_waiting empty = no bound; copy 1 or 0;
--   about the asker, for its record: task, worker, host, pid and lease, as a JSON object
-- REPLY: answer GRANTED WAITING BLOCKED FULL TWIN DONE
use(0, name)
note_lease(lease_ms)
if copy == '0' and not closed_until() and look_idle() then -- the usual case: nobody else is here, nor was lately
  local lease, fence = tonumber(lease_ms), digits(math.max(last_fence + 1, now_us))
  redis.call('HSET', meta, 'name', lock, 'schema', '1', 'limit', limit_arg, 'fence', fence, 'grants', digits(grants + 1))
  redis.call('ZADD', holders, now + lease, token)
  redis.call('HSET', record, token, fresh_record(fence, lease))
  live_until(now + lease, holders, record, meta)
  return 'granted\n' .. fence .. '\n' .. lease_ms .. '\n0\n' .. lease_ms .. '\n' .. limit_arg .. '\n'
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

-- A message that is kept here under a later token, or was settled, does not run a second time.
local verdict
if not where then
  if is_done(base_of(token)) or copy == '1' and is_done(attempt) then
    verdict = 'done'
  elseif is_kept(token, attempt) then
    verdict = 'twin'
  else
    local other, others = find(attempt)
    if other then
      verdict = 'twin'
      others.copied = '1' -- so that its end is remembered, even if it comes before the copy is parked
      save(other, others)
    end
  end
end
if verdict then
  grant_waiters(worker)
  finish()
  return answer(verdict, token)
end

declare(tonumber(limit_arg))
if not rec then
  rec = cjson.decode(about)
  rec.attempt, rec.place = attempt, place_of(tonumber(place_us))
end
if not where and take_reservation(attempt) then
  write_in(token, rec, 'running', tonumber(lease_ms))
  save(token, rec)
  grant_waiters(worker)
  finish()
  return answer('granted', token, rec)
end
if wait_ms ~= '' and not rec.parked then rec.deadline = digits(now + tonumber(wait_ms)) end

if alone then
  if has_permit() then
    write_in(token, rec, 'running', tonumber(lease_ms))
    save(token, rec)
    verdict = 'granted'
  end
elseif where == 'adrift' or where == 'overdue' then
  grant_waiters(worker)
else
  redis.call('ZADD', queue, rec.place, token)
  grant_waiters(worker, token, rec)
  if rec.state == 'running' then
    verdict = 'granted'
  elseif not where then
    redis.call('ZREM', queue, token)
  end
end

if where and not verdict then
  verdict = 'waiting'
  if where == 'queue' then enqueue(token, rec, rec.state) end
elseif not verdict and wait_ms == '' then
  verdict = 'blocked'
elseif not verdict and is_full(max_waiting) then
  verdict = 'full'
elseif not verdict then
  verdict = 'waiting'
  enqueue(token, rec, 'waiting')
end
finish()
return answer(verdict, token, rec)
