-- claim: begin to use a grant, with a full lease from now. A waiter whose turn it is may claim too.
-- KEYS: lock
-- ARGV: name token lease_ms settle worker host pid claim_ms
--   settle 1 = the message counts as acknowledged from its start: drop its body, and keep no copy;
--   2 = it is kept at another lock: drop its body
-- REPLY: answer GRANTED WAITING ABSENT
lock = name
check()
write_though_full()
sweep(worker)

local rec = load(token)
local where = standing(token, rec)
if where and (rec.state == 'reserved' or rec.state == 'held_after') then where = nil end -- nobody's to claim
local twin = where and rec.twin
if where then
  rec.worker, rec.host, rec.pid, rec.lease = worker, host, pid, lease_ms
  if settle == '1' then rec.settled, rec.twin = '1', nil end
  if where == 'holder' then start(token, rec) end
end
grant_waiters(worker, token, rec)
local verdict = where and (lease_end(token) and 'granted' or 'waiting') or 'absent'
if verdict == 'granted' and settle ~= '0' then redis.call('HDEL', bodies, base_of(token)) end
if verdict == 'granted' and settle == '1' and twin then redis.call('HDEL', bodies, base_of(twin)) end
finish()
return answer(verdict, token, rec)
