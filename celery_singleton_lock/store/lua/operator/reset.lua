-- reset: take the lock from all who hold it, whoever they are, and grant it to who is next.
-- KEYS: lock
-- ARGV: name claim_ms
-- REPLY: how many held it
lock = name
check()
write_though_full()
sweep('')

-- At its old place a kept message would be the next, beside its run, which goes on.
local taken = redis.call('ZRANGE', holders, 0, -1)
for _, token in ipairs(taken) do
  redis.call('ZREM', holders, token)
  local rec = load(token)
  if rec then
    rec.place = place_of(0)
    go_back(token, rec)
  end
end
count('resets')
sweep('') -- one that had not begun may wait no longer
grant_waiters('')
finish()
return #taken
