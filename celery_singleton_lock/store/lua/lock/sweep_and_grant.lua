-- sweep_and_grant: end lapsed leases, grant, and take out messages of a broker that no worker consumes.
-- KEYS: lock
-- ARGV: name worker realm seal patience_ms hold_ms claim_ms
--   realm = hash of the broker; seal = id of this call, empty = take out none; patience_ms = for how long
--   they must be adrift; hold_ms = after which they queue again, without record_publish_result
-- REPLY: list of token, record, message; then in how many ms the next waiter may start, if this call has granted the lock and that one waits for a rate, or in how many ms a message has settled
lock = name
check()
write_though_full()
sweeping = true
local granted_before = grants
sweep(worker)
grant_waiters(worker)

-- Whether live workers with locks consume the queue of a message, and the caller is not one of them. These workers
-- know whether they have its task. If none of them has it, they would discard the message that the broker sends them.
local function is_for_others(rec)
  local route = route_of(rec)
  if #live_of(route, 0) == 0 then return false end
  local till = worker ~= '' and redis.call('ZSCORE', fleet .. ':route:' .. route, worker)
  return not till or tonumber(till) <= now
end

local LOAD = 4194304 -- most bytes of messages in one reply, unless one message alone is longer

local untaken, looked, load_left = {}, 0, LOAD
local function send_due(token, rec)
  local since, at = tonumber(rec.since), tonumber(rec.publish_at)
  if rec.realm ~= realm or since + tonumber(patience_ms) > now or at > now then return end
  if worker_for(rec, worker) or is_for_others(rec) then return end -- a later sweep queues it again, or sends it
  local body = redis.call('HGET', bodies, base_of(token)) or ''
  if #untaken > 0 and #body > load_left then return end
  load_left = load_left - #body
  start_leaving(token, rec, seal, hold_ms)
  untaken[#untaken + 1] = token
  untaken[#untaken + 1] = cjson.encode(rec)
  untaken[#untaken + 1] = body
end

local reason = waits_for()
local leave = seal ~= '' and not alone and reason ~= 'pause' and reason ~= 'redis'
for _, route in ipairs(leave and routes_adrift(BATCH) or {}) do
  for _, token in ipairs(looked < LOOKED and #untaken < 3 * BATCH and some_adrift(route) or {}) do
    looked = looked + 1
    if #untaken < 3 * BATCH then send_due(token, load(token)) end
  end
end
if alone then keep_indexed_due() end -- an indexed holder made it due, or its keys have expired
finish()
local next_start = rates and rates.next_settled()
if rates and grants > granted_before and redis.call('ZCARD', queue) > 0 then
  local why, till = waits_for()
  if (why == 'rate' or why == 'pause') and till then next_start = math.min(till, next_start or till) end
end
if next_start then untaken[#untaken + 1] = digits(next_start - now) end
return untaken
