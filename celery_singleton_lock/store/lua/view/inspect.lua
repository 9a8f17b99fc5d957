-- inspect: return the current state of a lock, without lapsed leases. Only a quarantine may write.
-- KEYS: lock
-- ARGV: name waiters
-- REPLY: now_ms, meta pairs, holders (token, till_ms, record), waiters (token, record), waiting, adrift, bodies, what the next one waits for (empty: a permit is free), and until when (ms) at the earliest (0: only a call can end it), rates as JSON (empty: none): id, n, per us, burst, starts that count, until when (ms) it is closed for a time (0: it is not), why, when an operator's rates end (ms; 0: only by a call; empty: there are none), 1 if the limit is computed, number of groups that wait, then name, waiters and 1 if it is at its limit, for the largest groups (empty: no groups)
lock = name
check()
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
local reason, till = waits_for(#held / 3)
if not reason and fair and fair.all_full() and redis.call('ZCARD', queue) > 0 then reason, till = 'group', held[2] end
return {
  digits(now), redis.call('HGETALL', meta), held, waiting,
  redis.call('ZCARD', queue), redis.call('ZCARD', adrift), redis.call('HLEN', bodies),
  reason or '', digits(till or 0), rates and rates.view() or '',
  digits(rates and rates.reopens_at() or 0), rates and rates.closed_why() or '',
  rates and rates.ruled() and digits(rates.ruling_ends() < math.huge and rates.ruling_ends() or 0) or '',
  rates and rates.newest.limit and limit == rates.newest.limit[1] and 1 or 0,
  fair and fair.view() or {},
}
