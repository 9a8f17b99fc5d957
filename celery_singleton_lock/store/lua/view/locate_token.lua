-- locate_token: return whether a token holds a lock or waits for it, and at which rank. Writes nothing.
-- KEYS: lock
-- ARGV: name token
-- REPLY: now_ms, record (empty: neither holds nor waits), rank (0: not in the queue), lease left in ms, bytes of its message, 1 if its end is remembered, until when (ms) it may stay as it is (0: no limit)
lock = name
local rank = redis.call('ZRANK', queue, token)
local till = redis.call('ZSCORE', holders, token)
local left = till and tonumber(till) - now or 0
local ended = redis.call('ZSCORE', done, base_of(token))
return {
  digits(now), redis.call('HGET', record, token) or '', rank and rank + 1 or 0, digits(math.max(0, left)),
  redis.call('HSTRLEN', bodies, base_of(token)), ended and tonumber(ended) > now and 1 or 0,
  redis.call('ZSCORE', deadlines, token) or '0',
}
