-- promote: put a waiter at the head of the queue.
-- KEYS: lock
-- ARGV: name token claim_ms who
-- REPLY: answer WAITING ABSENT
lock = name
check()
check_audit()
write_though_full()
sweep('')

local rec = load(token)
local where = standing(token, rec)
local waits = where == 'queue' or where == 'adrift'
if waits then
  local first = tonumber(redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')[2] or rec.place)
  for _, route in ipairs(routes_adrift(math.huge)) do -- these queue again at their places
    first = math.min(first, tonumber(load(adrift_of(route, 0, 1)[1]).place))
  end
  unqueue(token, rec)
  if first <= tonumber(rec.place) then move_to(rec, digits(first - 1)) end
  enqueue(token, rec, where == 'adrift' and 'parked' or rec.state)
  note(1, token, rec)
end
grant_waiters('')
finish()
return answer(waits and 'waiting' or 'absent', token, rec)
