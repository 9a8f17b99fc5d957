-- drop: take waiters out of the line, with all that is kept of them. Holders are left alone.
-- KEYS: lock
-- ARGV: name done_ms call sealed claim_ms who token*
--   done_ms empty = copies of them may run; call names this call, and, with sealed 1, the seal under
--   which they left for the broker: one of which the copy was told TWIN queues again
-- REPLY: list of the tokens that were dropped; asked again after a lost reply, the same
lock = name
check()
check_audit()
write_though_full()
sweep('')

local ASKED_MS = 60000 -- a lost reply is asked for again within this

local dropped, steps, last, last_token = {}, 0, nil, nil
for i = 7, #ARGV do
  local token = ARGV[i]
  local rec = load(token)
  local where = standing(token, rec)
  local waits = where and where ~= 'holder' and (sealed == '0' or has_left_under(rec, call))
  if waits and sealed == '1' and rec.copied then
    stay(token, rec)
  elseif waits then
    unqueue(token, rec)
    if done_ms ~= '' then remember_end(token, rec, tonumber(done_ms), false) end
    forget(token, rec)
    remember(now + ASKED_MS, call .. ':' .. token)
    dropped[#dropped + 1] = token
    steps, last, last_token = steps + 1, rec, token
  elseif is_done(call .. ':' .. token) then
    dropped[#dropped + 1] = token
  end
end
if last then note(steps, steps == 1 and last_token or nil, last) end
grant_waiters('')
finish()
return dropped
