-- park: keep a message, queue it at its place, and grant it at once if its turn has come.
-- KEYS: lock
-- ARGV: name token lease_ms limit_arg place_us max_waiting copy attempt task worker host pid claim_ms body realm route wait_ms on_full returns
--   wait_ms empty = for ever; on_full replace = take the room of the oldest message of this task;
--   copy 1 = perhaps a second delivery, 2 = the same, and it runs although its task has ended, else 0
-- REPLY: answer WAITING FULL DONE TWIN
lock = name
note_lease(lease_ms)
check()
refuse_if_full()
sweep(worker)

local base = base_of(token)
local rec = load(token)
local where = standing(token, rec)
local verdict, reserved
if is_done(base) or copy == '1' and is_done(attempt) then
  verdict = 'done'
elseif is_kept(token, attempt) then
  verdict = 'waiting' -- asked again after a lost reply
elseif not where then -- else it holds or waits itself, whoever does so beside it
  local other, others = twin_of(token, attempt, copy)
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
  declare(tonumber(limit_arg))
  reserved = not where and take_reservation(attempt)
  local about = {realm = realm, queue = route, task = task}
  local room = reserved or has_permit() and worker_for(about, worker)
  if not where and not room and is_full(max_waiting) then
    verdict = (on_full ~= 'replace' or not replace_oldest(task, attempt, realm, route, worker)) and 'full' or nil
  end
end

if not verdict then
  verdict = 'waiting'
  alone = false
  redis.call('HSET', bodies, base, body)
  rec = rec or {
    attempt = attempt, task = task, worker = '', host = host, pid = pid, lease = lease_ms,
    place = place_of(tonumber(place_us)), copy = copy ~= '0' and '1' or nil,
  }
  rec.parked, rec.realm, rec.queue = '1', realm, route
  rec.wait = wait_ms ~= '' and wait_ms or nil
  rec.returns = returns ~= '0' and returns or rec.returns
  rec.deadline = rec.wait and digits(now + tonumber(wait_ms)) or nil
  if where == 'holder' then
    put_in_index(token, rec)
    deliver(token, rec, 'granted', worker) -- its own acquire was granted, and the reply was lost
    save(token, rec)
  elseif reserved and worker_for(rec, worker) then -- else nobody would hear of it
    put_in_index(token, rec)
    grant(token, rec, worker)
  else
    unqueue(token, rec)
    enqueue(token, rec, 'parked')
  end
end

grant_waiters(worker)
finish()
return answer(verdict, token)
