-- forget_drops: forget that these waiters were dropped. The end of a task that has run stays remembered.
-- KEYS: lock
-- ARGV: name owner*
--   owner = the token of a waiter, and in the next argument its attempt
-- REPLY: how many were forgotten
lock = name
check()
write_though_full()
local forgotten = 0
for i = 2, #ARGV, 2 do
  local token, attempt = ARGV[i], ARGV[i + 1]
  if redis.call('ZREM', done, drop_of(token)) == 1 then
    redis.call('ZREM', done, base_of(token))
    if was_only_dropped(attempt) then redis.call('ZREM', done, attempt) end -- else no copy of it would run
    redis.call('ZREM', done, drop_of_attempt(attempt))
    forgotten = forgotten + 1
  end
end
finish() -- write_though_full() has removed the expiry of the holders
return forgotten
