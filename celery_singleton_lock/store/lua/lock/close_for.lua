-- close_for: stop granting the lock for a time. Holders keep it. Of two closes the longer one is in force.
-- KEYS: lock
-- ARGV: name close_ms why
--   why = who closes it, and why, for people
-- REPLY: for how many ms it is closed
lock = name
check()
write_though_full()
redis.call('HSET', meta, 'name', lock, 'schema', '1')
close(tonumber(close_ms), why)
finish()
return rates.reopens_at() - now
