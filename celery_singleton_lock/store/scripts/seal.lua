-- seal: take messages out of the line for a while, and answer with them: they leave for the broker.
-- KEYS: lock
-- ARGV: name hold_ms claim_ms token*
-- REPLY: list of token, record, message
lock = name
check()
write_though_full()
sweep('')

local sealed = {}
for i = 4, #ARGV do
  local token = ARGV[i]
  local rec = load(token)
  local where = standing(token, rec)
  if rec and rec.parked and (where == 'queue' or where == 'adrift') then
    unqueue(token, rec)
    become(rec, 'leaving')
    save(token, rec)
    redis.call('ZADD', deadlines, now + tonumber(hold_ms), token) -- then it queues again
    sealed[#sealed + 1] = token
    sealed[#sealed + 1] = cjson.encode(rec)
    sealed[#sealed + 1] = redis.call('HGET', bodies, base_of(token)) or ''
  end
end
grant_waiters('')
finish()
return sealed
