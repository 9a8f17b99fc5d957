-- deliver_unlocked: grant parked messages of these tasks now, whoever holds the lock.
-- KEYS: lock
-- ARGV: name worker realm most claim_ms task*
--   most = how many at most; grants of free permits do not count; task = tasks whose mode is not enforce
-- REPLY: how many were granted
lock = name
check()
write_though_full()
sweep(worker)
grant_waiters(worker)

-- Each gets a lease like any holder, so that the message is not lost if its worker dies. It counts as a
-- holder: tasks that take the lock wait until it has ended.
local wanted, moved = {}, 0
for i = 6, #ARGV do wanted[ARGV[i]] = true end
local function grant_from(start)
  for _, token in ipairs(redis.call('ZRANGE', queue, start, start + LOOKED - 1)) do
    local rec = moved < tonumber(most) and load(token)
    if rec and rec.parked and rec.realm == realm and wanted[rec.task] and worker_for(rec, worker) then
      grant(token, rec, worker)
      moved = moved + 1
    end
  end
end
local reason = waits_for()
if not alone and reason ~= 'pause' and reason ~= 'redis' then
  grant_from(0)
  local others = redis.call('ZCARD', queue) - LOOKED
  if moved == 0 and others > 0 then grant_from(LOOKED + now_us % others) end
end
finish()
return moved
