-- inspect: the lock as it stands. Writes nothing; lapsed leases are left out.
-- KEYS: lock
-- ARGV: name waiters
-- REPLY: now_ms, meta pairs, holders (token, till_ms, record), waiters (token, record), waiting, adrift, bodies
lock = name
local held = {}
local found = redis.call('ZRANGEBYSCORE', holders, '(' .. now, '+inf', 'WITHSCORES')
for i = 1, #found, 2 do
  held[#held + 1] = found[i]
  held[#held + 1] = found[i + 1]
  held[#held + 1] = redis.call('HGET', record, found[i]) or '{}'
end
local waiting = {}
local most = tonumber(waiters)
for _, token in ipairs(most > 0 and redis.call('ZRANGE', queue, 0, most - 1) or {}) do
  waiting[#waiting + 1] = token
  waiting[#waiting + 1] = redis.call('HGET', record, token) or '{}'
end
return {
  digits(now), redis.call('HGETALL', meta), held, waiting,
  redis.call('ZCARD', queue), redis.call('ZCARD', adrift), redis.call('HLEN', bodies),
}
