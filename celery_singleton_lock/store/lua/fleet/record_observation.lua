-- record_observation: record the start or end of a run without its lock, and what the lock would have done.
-- KEYS: lock
-- ARGV: name token attempt task worker limit_arg waits took_ms rates_arg
--   waits 1 = it would wait if blocked, 0 = it would be skipped; took_ms empty = it starts, else it has
--   ended and took this long; rates_arg = flow options of the task, empty = none
-- REPLY: empty, or what would have blocked it: task, attempt, worker, waits_for, as a JSON object; waits_for is
--   settling if it would have replaced that run
--
-- This simulates the queue: each run gets the permit that becomes free first, for as long as the run really took. So
-- the recorded wait is the one that the lock would have caused, including the wait for others that would have waited.
-- If a run would get its permit only when another run ends, it stays undecided until that end.
local DEAD_MS = 3600000 -- a run without an end after this time counts as dead
local MOST_RUNS = 256   -- undecided runs of one lock
lock = name
local runs = string.sub(holders, 1, -8) .. 'observed'
local options = rates_arg ~= '' and cjson.decode(rates_arg) or {}
local computed = options.newest or {}
local took = took_ms ~= '' and tonumber(took_ms) or nil

-- A pause, a limit and rates that an operator has set count, although no task takes this lock.
local rates_in_force, costs = options.rates or computed.rates or {}, {}
for _, rate in ipairs(rates_in_force) do costs[rate[1]] = rate[5] end
read_rulings(unpack(redis.call('HMGET', meta, 'paused', 'paused_until', 'ruled', 'ruled_until'), 1, 4))
rates = redis.call('EXISTS', flow) == 1 and open_rates() or nil
if rates then rates_in_force = rates.in_force(rates_in_force) end
limit = tonumber(ruled or computed.limit or limit_arg)
declared = limit

local report = open_report(string.sub(due, 1, -4))
local starts = open_observed_rates(rates_in_force, runs .. ':begun')
local settling = open_settling(runs .. ':settling')
local entries = settling.read(token, took)
local free, saved_groups = {}, {}
local raw = redis.call('HGETALL', runs)
for i = 1, #raw, 2 do
  local value = cjson.decode(raw[i + 1])
  if raw[i] == 'free' then
    free = value
  elseif raw[i] == 'groups' then
    saved_groups = value
  else
    entries[#entries + 1] = value
  end
end
local permits = open_observed_permits(free, saved_groups)
local function earlier(one, other) return one.start - (one.ahead or 0) < other.start - (other.ahead or 0) end
table.sort(entries, earlier)

-- The runs that still need a decision, or whose permit is in use.
local kept = {}
for _, entry in ipairs(entries) do
  if entry.token == token and took then entry.took = took end
  if not entry.took and entry.start < now - DEAD_MS then entry.took = DEAD_MS end
  if entry.begins then permits.count(entry) end
end
for _, entry in ipairs(entries) do
  if entry.begins and entry.took then permits.give_back(entry) else kept[#kept + 1] = entry end
end

local function describe(entry, reason)
  return cjson.encode({
    task = entry.task or '', attempt = entry.attempt or '', worker = entry.worker or '', waits_for = reason,
  })
end

local function new_entry()
  local entry = {token = token, task = task, attempt = attempt, worker = worker, start = now}
  entry.ahead = options.head_start and options.head_start / 1000
  if #rates_in_force > 0 then entry.costs = costs end
  entry.ends_at_rate = options.ends_at_rate
  local group, group_limit = unpack(options.group or {})
  if (group_limit or 0) > 0 then entry.group, entry.group_limit = group, group_limit end
  return entry
end

local me, answer = nil, ''
if not took then
  report.run(task)
  local entry = new_entry()
  local settles, older = settling.would_settle(entry, options.settle)
  if older then
    report.replaced(older)
    answer = describe(older, 'settling')
  end
  if not settles then
    me = entry
    me.met = waits_for(redis.call('ZCOUNT', holders, '(' .. now, '+inf'))
    kept[#kept + 1] = me
    table.sort(kept, earlier)
  end
end
settling.save()

-- The holder that would block this run: the first run that has not ended, else a real holder.
local function who()
  for _, entry in ipairs(kept) do
    if entry ~= me and not entry.took then return entry end
  end
  local first = redis.call('ZRANGE', holders, 0, 0)[1]
  local rec = first and redis.call('HGET', record, first)
  return rec and cjson.decode(rec) or {}
end

-- What this run would wait for: the times at which it would get a permit of the lock and one of its group.
local function reason_of(permit, group_permit, has_permits, never)
  if me.met then return me.met end
  if never or has_permits and math.max(permit, group_permit or 0) <= me.start then return 'rate' end
  return permit and permit <= me.start and 'group' or 'holder'
end

local left, undecided, full = {}, false, {}
local above_rate = me and me.ends_at_rate and starts.allowed_from(me, me.start) > me.start
local never = me and (starts.costs_too_much(me) or above_rate) -- it would fail, or be skipped
for _, entry in ipairs(kept) do
  local permit, group_permit
  if not entry.begins and not undecided then
    permit = permits.first_of_lock(limit, kept)
    undecided = not permit
  end
  if permit and entry.group and not full[entry.group] then
    group_permit = permits.first_of_group(entry, kept)
    full[entry.group] = not group_permit
  end
  local has_permits = permit and (group_permit or not entry.group)
  local begins, ended = entry.begins, nil
  if not begins and has_permits then
    local next_at = math.max(permit, group_permit or 0, entry.start)
    begins = starts.allowed_from(entry, next_at)
    ended = entry.ends_at_rate and begins > next_at and next_at
  end
  local late = not entry.begins and (not begins or begins > entry.start or entry.met or entry == me and never)
  if entry == me and late then answer = describe(who(), reason_of(permit, group_permit, has_permits, never)) end
  if entry.begins then
    left[#left + 1] = entry
  elseif late and (waits == '0' or never) and entry == me then
    report.blocked(entry, 0)
  elseif ended then -- it would be skipped when it is next
    report.blocked(entry, ended - entry.start)
  elseif begins then
    if late then report.blocked(entry, math.max(0, begins - entry.start)) end
    entry.begins = begins
    permits.take(entry)
    starts.note_begin(entry)
    if entry.took then permits.give_back(entry) else left[#left + 1] = entry end
  else
    left[#left + 1] = entry
  end
end
if #left > MOST_RUNS then
  local oldest = table.remove(left, 1)
  if not oldest.begins then report.blocked(oldest, now - oldest.start) end
end

redis.call('DEL', runs)
local times, last, groups = permits.to_save()
if #left > 0 or last > now then
  for _, entry in ipairs(left) do redis.call('HSET', runs, entry.token, cjson.encode(entry)) end
  redis.call('HSET', runs, 'free', cjson.encode(times))
  if #groups > 0 then redis.call('HSET', runs, 'groups', cjson.encode(groups)) end
  redis.call('PEXPIRE', runs, math.min(math.max(last - now, DEAD_MS), REPORT_MS))
end
return answer
