-- drop: take waiters out of the line, with all that is kept of them. Holders are left alone.
-- KEYS: lock
-- ARGV: name done_ms whole claim_ms who token*
--   done_ms empty = copies of them may run; whole 1 = answer with their messages
-- REPLY: list of token, record, message
lock = name
check()
check_audit()
write_though_full()
sweep('')

local dropped, last = {}, nil
for i = 6, #ARGV do
  local token = ARGV[i]
  local rec = load(token)
  local where = standing(token, rec)
  if where and where ~= 'holder' then
    dropped[#dropped + 1] = token
    dropped[#dropped + 1] = cjson.encode(rec)
    dropped[#dropped + 1] = whole == '1' and redis.call('HGET', bodies, base_of(token)) or ''
    unqueue(token, rec)
    if done_ms ~= '' then remember_end(token, rec, tonumber(done_ms), false) end
    forget(token, rec)
    last = rec
  end
end
if last then note(#dropped / 3, #dropped == 3 and dropped[1] or nil, last) end
grant_waiters('')
finish()
return dropped
