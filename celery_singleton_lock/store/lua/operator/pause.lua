-- pause: stop granting the lock, or (reason empty) resume. Holders keep it.
-- KEYS: lock
-- ARGV: name reason for_ms claim_ms who
--   for_ms = how long; empty = until it is resumed
-- REPLY: 1 if that changed the lock, else 0
lock = name
check()
check_audit()
write_though_full()
drop_ended_rulings()
local till = for_ms ~= '' and now + tonumber(for_ms) or nil
local pauses = reason ~= ''
local changed = pauses and (not paused or till or ruling.pause) or not pauses and paused
if changed then redis.call('HDEL', meta, 'paused_until') end
if changed and pauses then
  redis.call('HSET', meta, 'name', lock, 'schema', '1', 'paused', reason)
  if till then redis.call('HSET', meta, 'paused_until', digits(till)) end
  redis.call('PERSIST', meta)
elseif changed then
  redis.call('HDEL', meta, 'paused')
end
if changed then
  paused, ruling.pause = pauses and reason, till
  new_entry['until'] = till and digits(till)
  note(1)
end
sweep('')
grant_waiters('')
finish()
return changed and 1 or 0
