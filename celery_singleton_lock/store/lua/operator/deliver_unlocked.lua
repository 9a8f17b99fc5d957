-- let_run: parked messages of these tasks get their turn now, whoever holds the lock: it is not kept.
-- KEYS: lock
-- ARGV: name worker realm most claim_ms task*
--   most = how many at most; those for which a permit is free do not count
-- REPLY: how many
lock = name
check()
write_though_full()
sweep(worker)
grant_waiters(worker)

-- Each has a lease of its own, as every holder, so that it is not lost with its worker. The limit
-- stays: who does keep the lock waits until they have ended.
local wanted, moved = {}, 0
for i = 6, #ARGV do wanted[ARGV[i]] = true end
local function let_run_from(start)
  for _, token in ipairs(redis.call('ZRANGE', queue, start, start + LOOKED - 1)) do
    local rec = moved < tonumber(most) and load(token)
    if rec and rec.parked and rec.realm == realm and wanted[rec.task] and worker_for(rec, worker) then
      grant(token, rec, worker)
      moved = moved + 1
    end
  end
end
if not (alone or paused or closed_until()) then
  let_run_from(0)
  local others = redis.call('ZCARD', queue) - LOOKED
  if moved == 0 and others > 0 then let_run_from(LOOKED + now_us % others) end
end
finish()
return moved
