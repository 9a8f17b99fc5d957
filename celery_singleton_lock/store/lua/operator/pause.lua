-- pause: stop granting the lock, or (reason empty) resume. Holders keep it.
-- KEYS: lock
-- ARGV: name reason claim_ms who
-- REPLY: 1 if that changed the lock, else 0
lock = name
check()
check_audit()
write_though_full()
local changed = reason ~= '' and not paused or reason == '' and paused
if changed and reason ~= '' then
  redis.call('HSET', meta, 'name', lock, 'schema', '1', 'paused', reason)
  redis.call('PERSIST', meta)
elseif changed then
  redis.call('HDEL', meta, 'paused')
end
if changed then
  paused = reason ~= '' and reason
  note(1)
end
sweep('')
grant_waiters('')
finish()
return changed and 1 or 0
