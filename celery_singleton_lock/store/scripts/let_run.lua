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
for _, token in ipairs((alone or paused or closed_until()) and {} or redis.call('ZRANGE', queue, 0, 999)) do
  local rec = moved < tonumber(most) and load(token)
  if rec and rec.parked and rec.realm == realm and wanted[rec.task] and worker_for(route_of(rec), worker) then
    grant(token, rec, worker)
    moved = moved + 1
  end
end
finish()
return moved
