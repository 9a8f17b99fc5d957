-- park: store a message and queue it at its place; grant it at once if the lock is free and it is first.
-- KEYS: lock
-- ARGV: name token lease_ms limit_arg place_us max_waiting copy unanswered attempt task worker host pid claim_ms body realm route wait_ms on_full returns
--   place_us = time of arrival, 0 = now; wait_ms empty = wait for ever; on_full replace = replace the
--   oldest message of this task; copy 1 = this may be a duplicate delivery; a time in microseconds = this may be a duplicate
--   delivery of a message that first arrived at that time; else 0; unanswered 1 = the delivery `token` ends now: Redis did
--   not answer its claim, or its task has run and runs again later; realm and route = broker and queue;
--   returns = deliveries that came back
-- REPLY: answer WAITING FULL DONE TWIN TOO_COSTLY
lock = name
note_lease(lease_ms)
check()
refuse_if_full()
sweep(worker)

local base = base_of(token)
local rec = load(token)
local where = standing(token, rec)
local verdict, reserved, first
local settles = wanted_flow and wanted_flow.settle
local follows = wanted_flow and wanted_flow.follow
local about = {parked = '1', realm = realm, queue = route, task = task}
if unanswered == '1' and not where then
  local former, run = run_before(token, attempt)
  if former then
    leave_holders(former, run)
    drop_record(former, run)
  end
end
if unanswered == '1' and where == 'holder' then -- its claim may have deleted the stored message
  verdict, alone, rec.settled = 'waiting', false, nil
  rec.realm, rec.queue = realm, route -- with several locks, the message may have been stored elsewhere
  rec.wait = wait_ms ~= '' and wait_ms or nil
  leave_holders(token, rec)
  redis.call('HSET', bodies, base, body)
  end_delivery(token, rec)
elseif is_done(base) or has_ended(attempt, copy) then
  verdict = 'done'
elseif is_stored(token, attempt) then
  verdict = 'waiting' -- asked again after a lost reply
elseif not where then -- a token that holds or waits itself is not a duplicate
  local other, others = duplicate_of(token, attempt, copy)
  if other then
    verdict = 'twin'
    others.copied = '1'
    if not others.settled and not has_body(base_of(other)) and not (others.twin and has_body(base_of(others.twin))) then
      alone = false
      redis.call('HSET', bodies, base, body)
      others.twin, others.realm, others.queue = token, realm, route
      others.wait = wait_ms ~= '' and wait_ms or nil
    end
    save(other, others)
  end
end

if not verdict then
  declare(tonumber(limit_arg), rec and arrival_of(rec) or tonumber(place_us), copy ~= '0')
  if rates then rates.note_asker(token, rec or about) end
  if rates and not where and rates.excess(about) then verdict = 'too_costly' end
  if verdict then take_reservation(attempt, true, about) end
end

if not verdict then
  if not where then reserved, first = take_reservation(attempt, true, about) end
  if fair and fair.mine then fair.assign(about, fair.mine) end
  local takes_room = rates and wanted_flow and wanted_flow.preempt and call_that_waits(about)
  local room = reserved or first or not waiter_waits_for(about, worker) or follows or settles or takes_room
  if not where and not room and is_full(max_waiting) then
    verdict = (on_full ~= 'replace' or not replace_oldest(task, attempt, realm, route, worker)) and 'full' or nil
  end
end

if not verdict then
  -- A repeated call must not end its delivery, nor a late call for an earlier one.
  if unanswered == '1' and not where then token = base .. '.' .. now_text end
  verdict = 'waiting'
  alone = false
  redis.call('HSET', bodies, base, body)
  rec = rec or {
    attempt = attempt, task = task, worker = '', host = host, pid = pid, lease = lease_ms,
    copy = copy ~= '0' and '1' or nil, costs = about.costs, unique = wanted_flow and wanted_flow.unique,
    ends_at_rate = wanted_flow and wanted_flow.ends_at_rate, preempt = wanted_flow and wanted_flow.preempt, follows = follows,
  }
  if not rec.place then place_at(rec, tonumber(place_us)) end
  if first then move_to(rec, first) end
  if fair and fair.mine and not where then fair.assign(rec, fair.mine) end
  rec.parked, rec.realm, rec.queue = '1', realm, route
  rec.wait = wait_ms ~= '' and wait_ms or nil
  rec.returns = returns ~= '0' and returns or rec.returns
  rec.deadline = rec.wait and digits(now + tonumber(wait_ms)) or nil
  if where == 'holder' then
    put_in_index(token, rec)
    deliver(token, rec, 'granted', worker) -- its acquire was granted, but the reply was lost
    save(token, rec)
  elseif reserved and worker_for(rec, worker) then -- without such a worker there is no inbox for the grant
    put_in_index(token, rec)
    if rec.unique then keep_unique(rec) end
    grant(token, rec, worker)
  else
    unqueue(token, rec)
    local replaced = rec.preempt and rec.preempt[2] >= 0 and not where and take_place(token, rec, worker)
    if rec.follows and not where then
      follow(token, rec, worker)
    elseif not replaced and not (settles and let_settle(token, rec, worker)) then
      enqueue(token, rec, 'parked')
    end
  end
end

grant_waiters(worker)
finish()
return answer(verdict, token, (verdict == 'full' or verdict == 'too_costly') and about or nil)
