-- Places in the queue, and fencing tokens.

local function last_in_queue()
  local last = alone and {} or redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')
  return tonumber(last[2] or 0), last[1]
end

local function arrival_of(rec) return tonumber(rec.arrived or rec.place) end

-- The time of arrival. 0 means after all waiters, even if the clock was set back.
local function arrival_at(wanted)
  if wanted > 0 then return math.min(wanted, now_us) end
  local last, token = last_in_queue()
  local rec = last >= now_us and load(token) -- its place may be later than its arrival: see place_at
  return math.max(now_us, (rec and arrival_of(rec) or last) + 1)
end

-- Give a new record its place. A task with priority counts as having arrived earlier, by its head start: so
-- only tasks that arrive less than their head start after another one can pass it.
local function place_at(rec, wanted)
  local arrived = arrival_at(wanted)
  local ahead = wanted_flow and wanted_flow.head_start
  rec.place = digits(arrived)
  if not ahead then return end
  rec.place, rec.arrived = digits(math.max(0, arrived - ahead)), rec.place
  redis.call('HSET', meta, 'prioritised', '1') -- then the queue is not in order of arrival: see replace_oldest
end

-- Give a record another place. The time of its arrival stays.
local function move_to(rec, place)
  rec.arrived, rec.place = rec.arrived or rec.place, place
end

-- Put a message behind all waiters, as if it arrived now. It loses its head start. If calls of its task preempt each
-- other, the time of its arrival stays, since that tells which call is the newest.
local function move_behind_all(rec)
  local arrived = arrival_at(0)
  rec.place, rec.arrived = digits(arrived), rec.preempt and (rec.arrived or rec.place) or nil
  local last = last_in_queue()
  if last >= arrived then move_to(rec, digits(last + 1)) end
end

local function new_fence()
  last_fence = math.max(last_fence + 1, now_us)
  grants = grants + 1
  redis.call('HSET', meta, 'fence', digits(last_fence), 'grants', digits(grants), 'limit', declared)
  return digits(last_fence)
end
