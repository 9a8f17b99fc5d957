-- drop_waiters: remove waiters and their stored messages. Not changed are holders, and tasks that a process ends now.
-- KEYS: lock
-- ARGV: name done_ms call sealed claim_ms who token*
--   done_ms = for how long copies of them do not run, empty = copies run; call = id of this call, or, with
--   sealed 1, the seal under which they were taken out: those whose copy a worker has acknowledged as a
--   duplicate queue again
-- REPLY: list of the removed tokens; the same list if the call is repeated after a lost reply
lock = name
check()
check_audit()
write_though_full()

local ASKED_MS = 60000 -- a call is repeated within this time
local DRAINED_MS = 31536000000 -- a year: nobody imports an older file

local dropped, steps, last, last_token = {}, 0, nil, nil
for i = 7, #ARGV do
  local token = ARGV[i]
  local rec = load(token)
  local where = standing(token, rec)
  local waits = where and where ~= 'holder' and not rec.ended_by and (sealed == '0' or is_leaving_under(rec, call))
  if waits and sealed == '1' and rec.copied then
    stop_leaving(token, rec)
  elseif waits then
    unqueue(token, rec)
    if done_ms ~= '' then
      local has_run = is_done(rec.attempt) and not was_only_dropped(rec.attempt)
      local marks = rec.attempt ~= '' and not has_run
      remember_end(token, rec, tonumber(done_ms), false)
      remember(now + tonumber(done_ms), drop_of(token), marks and drop_of_attempt(rec.attempt) or nil)
    end
    -- For imports, which refuse older files. No decision about the lock depends on it.
    if sealed == '1' then
      redis.pcall('HSET', fleet .. ':drained', route_of(rec), digits(now))
      redis.pcall('PEXPIRE', fleet .. ':drained', DRAINED_MS)
    end
    forget(token, rec, sealed == '1')
    remember(now + ASKED_MS, call .. ':' .. token)
    dropped[#dropped + 1] = token
    steps, last, last_token = steps + 1, rec, token
  elseif is_done(call .. ':' .. token) then
    dropped[#dropped + 1] = token
  end
end
if last then note(steps, steps == 1 and last_token or nil, last) end
sweep('') -- after the loop above: messages that are leaving would queue again
grant_waiters('')
finish()
return dropped
