-- claim: start to use a grant, with a full lease from now. The first waiter of a free lock is granted too.
-- A message that is delivered to be ended is claimed, too: the reply is waiting, or absent if another process ends it.
-- KEYS: lock
-- ARGV: name token lease_ms delete_message worker host pid claim_ms limit_arg
--   delete_message 1 = acknowledge early: delete the stored message, and that of a duplicate; 2 = the message is
--   stored at another lock: delete it here; 3 = likewise, and another claim will log the start; 0 = keep it
--   limit_arg = the number that the task declares; 0 = none
-- REPLY: answer GRANTED WAITING ABSENT
lock = name
starts_later = delete_message == '3'
note_lease(lease_ms)
check()
write_though_full()
sweep(worker)

local rec = load(token)
local where = standing(token, rec)
if where and (rec.state == 'reserved' or rec.state == 'held_after') then where = nil end -- no task can claim these
if where == 'overdue' and (rec.state ~= 'leaving' or rec.follows) then
  local process = worker .. ' ' .. pid
  local sent_off = rec.state == 'leaving' and not rec.delayed -- an operator drains it
  if sent_off or (rec.ended_by or process) ~= process then where = nil end
  if where then
    rec.ended_by = process
    save(token, rec)
    redis.call('ZADD', deadlines, now + tonumber(lease_ms), token) -- then it is delivered again
  end
end
local twin = where and rec.twin
if where then
  rec.worker, rec.host, rec.pid, rec.lease = worker, host, pid, lease_ms
  if delete_message == '1' then rec.settled, rec.twin = '1', nil end
  if where == 'holder' then start(token, rec) end
end
-- The message was parked under a higher limit than its task declares now: its declaration was changed since.
local most = tonumber(limit_arg)
if where == 'holder' and most > 0 and most < declared then
  declared = most
  limit = ruled or declared
  redis.call('HSET', meta, 'limit', declared)
end
grant_waiters(worker, token, rec)
local verdict = where and (lease_end(token) and 'granted' or 'waiting') or 'absent'
if verdict == 'granted' and delete_message ~= '0' then redis.call('HDEL', bodies, base_of(token)) end
if verdict == 'granted' and delete_message == '1' and twin then redis.call('HDEL', bodies, base_of(twin)) end
finish()
return answer(verdict, token, rec, not rec and not has_trace(token))
