-- seal: take messages out of the line for a while, and answer with them: they leave for the broker.
-- KEYS: lock
-- ARGV: name seal hold_ms claim_ms token*
--   seal names this call; asked again after a lost reply, it answers the same
-- REPLY: list of token, record, message
lock = name
check()
write_though_full()
sweep('')

local sealed = {}
for i = 5, #ARGV do
  local token = ARGV[i]
  local rec = load(token)
  local where = standing(token, rec)
  local taken = has_left_under(rec, seal)
  if not taken and rec and rec.parked and (where == 'queue' or where == 'adrift') then
    send_off(token, rec, seal, hold_ms)
    taken = true
  end
  if taken then
    sealed[#sealed + 1] = token
    sealed[#sealed + 1] = cjson.encode(rec)
    sealed[#sealed + 1] = redis.call('HGET', bodies, base_of(token)) or ''
  end
end
grant_waiters('')
finish()
return sealed
