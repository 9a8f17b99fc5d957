-- set_limit: override the declared limits, or (limit_arg empty) use them again.
-- KEYS: lock
-- ARGV: name limit_arg claim_ms who
-- REPLY: the limit in force
lock = name
check()
check_audit()
write_though_full()
if limit_arg ~= '' then
  redis.call('HSET', meta, 'name', lock, 'schema', '1', 'ruled', limit_arg)
  redis.call('PERSIST', meta)
  ruled = tonumber(limit_arg)
else
  redis.call('HDEL', meta, 'ruled')
  ruled = false
end
limit = ruled or declared
note(1)
sweep('')
grant_waiters('')
finish()
return limit
