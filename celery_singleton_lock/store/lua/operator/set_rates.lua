-- set_rates: override the declared rates, or (rates_arg empty) use them again.
-- KEYS: lock
-- ARGV: name rates_arg for_ms claim_ms who
--   rates_arg = rates as a JSON list, as in flow options; for_ms = how long; empty = until they are cleared
-- REPLY: 1 if rates that an operator had set were in force, else 0
lock = name
check()
check_audit()
write_though_full()
drop_ended_rulings()
rates = rates or open_rates()
local before = rates.ruled() and 1 or 0
local wanted = rates_arg ~= '' and rates_arg or nil
local till = wanted and for_ms ~= '' and now + tonumber(for_ms) or nil
rates.rule(wanted, till)
if wanted then
  redis.call('HSET', meta, 'name', lock, 'schema', '1')
  redis.call('PERSIST', meta)
end
for _, token in ipairs(redis.call('ZRANGE', holders, 0, BATCH - 1)) do
  local rec = load(token)
  if rec and rec.state == 'granted' then rates.note_grant(token, rec) end -- it counts until it is claimed
end
new_entry['until'] = till and digits(till)
note(1)
sweep('')
grant_waiters('')
finish()
return before
