-- charge: correct what a start has used of the rates that count costs.
-- KEYS: lock
-- ARGV: name token charge_id amount rate_ids worker claim_ms
--   charge_id: a repeated call with it changes nothing; amount: more, or below 0 less; rate_ids: each between
--   line feeds
-- REPLY: answer CHARGED ABSENT
lock = name
check()
if not rates then return answer('absent', token) end
refuse_if_full()
sweep(worker)
local rec = load(token)
local verdict = rates.charge(token, rec, tonumber(amount), rate_ids, charge_id) and 'charged' or 'absent'
if rec and lease_end(token) then save(token, rec) end
grant_waiters(worker)
finish()
return answer(verdict, token)
