-- kick: sweep and grant; take messages of a realm that nobody consumes out of the line, and answer with them.
-- KEYS: lock
-- ARGV: name worker realm seal patience_ms hold_ms claim_ms
--   seal empty = take none; patience_ms = for how long they are adrift at least; hold_ms = then they
--   queue again, unless left was told of them
-- REPLY: list of token, record, message
lock = name
check()
write_though_full()
sweeping = true
sweep(worker)
grant_waiters(worker)

local LOAD = 4194304 -- bytes of messages that one answer holds, unless one alone is longer

local strays, looked, load_left = {}, 0, LOAD
local function send_due(token, rec)
  local since, at = tonumber(rec.since), tonumber(rec.publish_at)
  if rec.realm ~= realm or since + tonumber(patience_ms) > now or at > now then return end
  if worker_for(rec, worker) then return end -- a later look queues it: one recalls not all of many routes
  local body = redis.call('HGET', bodies, base_of(token)) or ''
  if #strays > 0 and #body > load_left then return end
  load_left = load_left - #body
  send_off(token, rec, seal, hold_ms)
  strays[#strays + 1] = token
  strays[#strays + 1] = cjson.encode(rec)
  strays[#strays + 1] = body
end

local leave = seal ~= '' and not (alone or paused or closed_until())
for _, route in ipairs(leave and routes_to_look_at(worker) or {}) do
  for _, token in ipairs(looked < LOOKED and #strays < 3 * BATCH and some_adrift(route) or {}) do
    looked = looked + 1
    if #strays < 3 * BATCH then send_due(token, load(token)) end
  end
end
if alone then mind_the_named() end -- it was looked at for one of them, or its keys are gone
finish()
return strays
