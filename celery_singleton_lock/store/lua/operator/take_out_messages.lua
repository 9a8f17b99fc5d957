-- take_out_messages: take messages out of the queue for hold_ms, and return them for publishing.
-- KEYS: lock
-- ARGV: name seal hold_ms claim_ms token*
--   seal = id of this call: if the call is repeated after a lost reply, the reply is the same
-- REPLY: list of token, record, message
lock = name
check()
write_though_full()
sweep('')

-- A follower waits out of the queue. If a process ends its task now, it stays.
local function is_free(where, rec)
  return where == 'queue' or where == 'adrift' or rec.follows and rec.delayed and not rec.ended_by
end

local sealed = {}
for i = 5, #ARGV do
  local token = ARGV[i]
  local rec = load(token)
  local where = standing(token, rec)
  local taken = is_leaving_under(rec, seal)
  if not taken and rec and rec.parked and is_free(where, rec) then
    start_leaving(token, rec, seal, hold_ms)
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
