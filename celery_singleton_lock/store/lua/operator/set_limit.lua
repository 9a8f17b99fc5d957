-- set_limit: override the declared limits, or (limit_arg empty) use them again.
-- KEYS: lock
-- ARGV: name limit_arg for_ms claim_ms who
--   for_ms = how long; empty = until it is cleared
-- REPLY: the limit in force
lock = name
check()
check_audit()
write_though_full()
drop_ended_rulings()
redis.call('HDEL', meta, 'ruled', 'ruled_until')
ruled, ruling.limit = tonumber(limit_arg) or false, nil
if ruled then
  redis.call('HSET', meta, 'name', lock, 'schema', '1', 'ruled', limit_arg)
  redis.call('PERSIST', meta)
end
if ruled and for_ms ~= '' then
  ruling.limit = now + tonumber(for_ms)
  redis.call('HSET', meta, 'ruled_until', digits(ruling.limit))
  new_entry['until'] = digits(ruling.limit)
end
limit = ruled or declared
note(1)
sweep('')
grant_waiters('')
finish()
return limit
