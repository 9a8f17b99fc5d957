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
local DEAD_MS = 3600000    -- a run without an end after this time counts as dead
local KEPT_MS = 604800000  -- how long the report lives after the last run
local MOST_RUNS = 256      -- undecided runs of one lock
local MOST_LOCKS = 32      -- locks in the report, per bucket: those that would have blocked most often
local MOST_TASKS = 128     -- tasks in the report, per bucket
lock = name
local bucket = string.sub(due, 1, -4)
local runs = string.sub(holders, 1, -8) .. 'observed'
local by_task, by_lock, ranks = bucket .. 'observed:tasks', bucket .. 'observed:locks', bucket .. 'observed:ranks'

-- The starts that rates allow are simulated in the same way, from the times at which earlier runs would have begun.
local BEGUN = 10000        -- most of these times: a sliding rate needs no more
local begun = runs .. ':begun'
local options = rates_arg ~= '' and cjson.decode(rates_arg) or {}
local computed = options.newest or {}
local rates_in_force = options.rates or computed.rates or {}
limit_arg = computed.limit or limit_arg
local costs = {}
for _, rate in ipairs(rates_in_force) do costs[rate[1]] = rate[5] end
-- A pause, a limit and rates that an operator has set count, although no task takes this lock.
read_rulings(unpack(redis.call('HMGET', meta, 'paused', 'paused_until', 'ruled', 'ruled_until'), 1, 4))
rates = redis.call('EXISTS', flow) == 1 and open_rates() or nil
if rates then rates_in_force = rates.in_force(rates_in_force) end
limit_arg = ruled or limit_arg
local MOST_COSTS = 1000    -- most starts whose costs are added up
local function cost_of(entry, rate) return entry.costs and entry.costs[rate[1]] or 1 end
local function begun_at(rate) return begun .. ':' .. rate[1] end
local function burst_of(rate) return rate[4] > 0 and rate[4] or rate[2] end
local function costs_too_much(entry)
  for _, rate in ipairs(rates_in_force) do
    if rate[5] and cost_of(entry, rate) > burst_of(rate) then return true end
  end
end
local function gap_ms(rate) return rate[3] / rate[2] / 1000 end
local function on_time(rate) return tonumber(redis.call('GET', begun_at(rate)) or 0) end -- of a smooth rate, as in rates.lua
local function allowed_by_costs(entry, from, rate)
  local cost, most, per_ms = cost_of(entry, rate), burst_of(rate), rate[3] / 1000
  if rate[4] > 0 then return math.max(from, math.ceil(on_time(rate) + (cost - most) * gap_ms(rate))) end
  local left, since = most - cost, '(' .. digits(from - per_ms)
  local seen = redis.call('ZREVRANGEBYSCORE', begun_at(rate), '+inf', since, 'WITHSCORES', 'LIMIT', 0, MOST_COSTS)
  for i = 1, #seen, 2 do
    left = left - tonumber(string.match(seen[i], '^%d+'))
    if left < 0 then return math.max(from, math.ceil(tonumber(seen[i + 1]) + per_ms)) end
  end
  return from
end
local function allowed_from(entry, from)
  for _, rate in ipairs(rates_in_force) do
    local most, per_ms = burst_of(rate), rate[3] / 1000
    if rate[4] > 0 then per_ms = rate[4] * rate[3] / rate[2] / 1000 end
    if rate[5] then from = allowed_by_costs(entry, from, rate) end
    local nth = not rate[5] and redis.call('ZREVRANGE', begun, most - 1, most - 1, 'WITHSCORES')[2]
    if nth then from = math.max(from, math.ceil(tonumber(nth) + per_ms)) end
  end
  return from
end

local function note_begin(entry)
  if #rates_in_force == 0 then return end
  for _, rate in ipairs(rates_in_force) do
    local cost = cost_of(entry, rate)
    if rate[5] and rate[4] > 0 then
      redis.call('SET', begun_at(rate), digits(math.max(on_time(rate), entry.begins) + cost * gap_ms(rate)), 'PX', KEPT_MS)
    elseif rate[5] then
      redis.call('ZADD', begun_at(rate), entry.begins, digits(cost) .. ' ' .. entry.token)
      redis.call('ZREMRANGEBYRANK', begun_at(rate), 0, -MOST_COSTS - 1)
      redis.call('PEXPIRE', begun_at(rate), KEPT_MS)
    end
  end
  redis.call('ZADD', begun, entry.begins, entry.token)
  redis.call('ZREMRANGEBYRANK', begun, 0, -BEGUN - 1)
  redis.call('PEXPIRE', begun, KEPT_MS)
end

-- A pool of permits: when each free one became free, and how many are in use. The lock has one, and each group with
-- a limit has its own. The order in which groups start is not simulated.
local entries, permits, of_group, pools = {}, {free = {}, in_use = 0}, {}, {}
local function add_pool(group, free)
  of_group[group] = {free = free, in_use = 0, group = group}
  pools[#pools + 1] = of_group[group]
end
local raw = redis.call('HGETALL', runs)
for i = 1, #raw, 2 do
  local value = cjson.decode(raw[i + 1])
  if raw[i] == 'free' then
    permits.free = value
  elseif raw[i] == 'groups' then
    for _, pool in ipairs(value) do add_pool(pool.group, pool.free) end
  else
    entries[#entries + 1] = value
  end
end
local function pools_of(entry)
  if not entry.group then return {permits} end
  if not of_group[entry.group] then add_pool(entry.group, {}) end
  return {permits, of_group[entry.group]}
end
local function earlier(one, other) return one.start - (one.ahead or 0) < other.start - (other.ahead or 0) end
local function later(one, other) return one > other end
table.sort(entries, earlier)

local function add_up(key, field, most, blocked, wait, ran, held_back, dropped)
  local old = redis.call('HGET', key, field)
  if not old and most and redis.call('HLEN', key) >= most then return end
  local sum = old and cjson.decode(old) or {runs = 0, blocked = 0, waited = 0, longest = 0}
  sum.runs, sum.blocked = sum.runs + ran, sum.blocked + blocked
  sum.paused, sum.replaced = (sum.paused or 0) + (held_back or 0), (sum.replaced or 0) + (dropped or 0)
  sum.waited, sum.longest = sum.waited + wait, math.max(sum.longest, wait)
  redis.call('HSET', key, field, cjson.encode(sum))
  redis.call('PEXPIRE', key, KEPT_MS)
end

local function rank_lock(shown)
  redis.call('ZINCRBY', ranks, 1, shown)
  redis.call('PEXPIRE', ranks, KEPT_MS)
  local over = redis.call('ZCARD', ranks) - MOST_LOCKS
  for _, least in ipairs(over > 0 and redis.call('ZRANGE', ranks, 0, -1) or {}) do
    if over > 0 and least ~= shown then
      redis.call('ZREM', ranks, least)
      redis.call('HDEL', by_lock, least)
      over = over - 1
    end
  end
end

local function blocked(entry, wait)
  local shown, held_back = string.sub(lock, 1, 200), entry.met == 'pause' and 1 or 0
  add_up(by_task, entry.task, MOST_TASKS, 1, wait, 0, held_back)
  rank_lock(shown)
  add_up(by_lock, shown, nil, 1, wait, 0, held_back)
end

-- When the first permit of a pool becomes free. Returns nil if a run that has not ended may free its permit before
-- that.
local function first_free(pool, most, runs_on)
  local free = pool.free
  if #free + pool.in_use < most then free[#free + 1] = 0 end
  if #free == 0 then return nil end
  table.sort(free, later)
  for _, entry in ipairs(runs_on) do
    local uses_it = not pool.group or entry.group == pool.group
    if uses_it and entry.begins and not entry.took and free[#free] > entry.begins + now - entry.start then return nil end
  end
  return free[#free]
end

-- A run that begins later, for its group or a rate, does not take a permit that an earlier one could use.
local function take_permits(entry)
  for _, pool in ipairs(pools_of(entry)) do
    pool.in_use = pool.in_use + 1
    table.sort(pool.free, later)
    local last = 1
    while pool.free[last] > entry.begins do last = last + 1 end
    table.remove(pool.free, last)
  end
end

local function give_back(entry)
  for _, pool in ipairs(pools_of(entry)) do
    pool.in_use = pool.in_use - 1
    pool.free[#pool.free + 1] = entry.begins + entry.took
  end
end

-- Runs that would settle (lock_debounce), by task: the last one, and when the quiet period after the last call ends. A
-- run enters the simulated queue when it has settled, unless a later one replaces it.
local settling, tasks, settle_key = {}, {}, runs .. ':settling'
local function note_settling(of, last)
  if not settling[of] then tasks[#tasks + 1] = of end
  settling[of] = last
end
local raw_settling = redis.call('HGETALL', settle_key)
for i = 1, #raw_settling, 2 do
  local last = cjson.decode(raw_settling[i + 1])
  local entry = last.entry
  if entry and entry.token == token and took_ms ~= '' then entry.took = tonumber(took_ms) end
  if entry and entry.till <= now then
    entry.start, last.entry = entry.till, nil
    entries[#entries + 1] = entry
  end
  if last.entry or last.quiet_till > now then note_settling(raw_settling[i], last) end
end
table.sort(entries, earlier)

local function keep_settling()
  if #raw_settling > 0 then redis.call('DEL', settle_key) end
  for _, of in ipairs(tasks) do redis.call('HSET', settle_key, of, cjson.encode(settling[of])) end
  if #tasks > 0 then redis.call('PEXPIRE', settle_key, KEPT_MS) end
end

-- Whether a run would settle, and the run that it would replace.
local function would_settle(entry)
  if not options.settle or not string.find(attempt, '/0/%d+$') then return false end -- a retry does not settle
  local quiet_ms, most_ms, run_first = unpack(options.settle)
  local last = settling[task] or {quiet_till = 0}
  local older, was_quiet = last.entry, last.quiet_till <= now
  last.quiet_till = now + quiet_ms
  note_settling(task, last)
  if not older and run_first == 1 and was_quiet then return false end
  entry.from, entry.till = older and older.from or now, now + quiet_ms
  if most_ms > 0 then entry.till = math.min(entry.till, entry.from + most_ms) end
  last.entry = entry
  return true, older
end

local function replaced(entry)
  local shown = string.sub(lock, 1, 200)
  add_up(by_task, entry.task, MOST_TASKS, 0, 0, 0, 0, 1)
  rank_lock(shown)
  add_up(by_lock, shown, nil, 0, 0, 0, 0, 1)
end

local kept = {}
for _, entry in ipairs(entries) do
  if entry.token == token and took_ms ~= '' then entry.took = tonumber(took_ms) end
  if not entry.took and entry.start < now - DEAD_MS then entry.took = DEAD_MS end
  for _, pool in ipairs(entry.begins and pools_of(entry) or {}) do pool.in_use = pool.in_use + 1 end
end
for _, entry in ipairs(entries) do
  if entry.begins and entry.took then give_back(entry) else kept[#kept + 1] = entry end
end

local me, answer = nil, ''
if took_ms == '' then
  me = {token = token, task = task, attempt = attempt, worker = worker, start = now}
  me.ahead, me.costs = options.head_start and options.head_start / 1000, #rates_in_force > 0 and costs or nil
  local group, group_limit = unpack(options.group or {})
  if (group_limit or 0) > 0 then me.group, me.group_limit = group, group_limit end
  limit, declared = tonumber(limit_arg), tonumber(limit_arg)
  add_up(by_task, task, MOST_TASKS, 0, 0, 1)
  local settles, older = would_settle(me)
  if older then
    replaced(older)
    answer = cjson.encode({task = older.task, attempt = older.attempt, worker = older.worker, waits_for = 'settling'})
  end
  if settles then
    me = nil
  else
    me.met = waits_for(redis.call('ZCOUNT', holders, '(' .. now, '+inf'))
    kept[#kept + 1] = me
    table.sort(kept, earlier)
  end
end
keep_settling()

-- The holder that would block this run: the first run that has not ended, else a real holder.
local function who()
  for _, entry in ipairs(kept) do
    if entry ~= me and not entry.took then return entry end
  end
  local first = redis.call('ZRANGE', holders, 0, 0)[1]
  local rec = first and redis.call('HGET', record, first)
  return rec and cjson.decode(rec) or {}
end

local left, undecided, full = {}, false, {}
local never = me and costs_too_much(me) -- it would fail
for _, entry in ipairs(kept) do
  local permit, group_permit
  if not entry.begins and not undecided then
    permit = first_free(permits, tonumber(limit_arg), kept)
    undecided = not permit
  end
  if permit and entry.group and not full[entry.group] then
    group_permit = first_free(pools_of(entry)[2], entry.group_limit, kept)
    full[entry.group] = not group_permit
  end
  local has_permits = permit and (group_permit or not entry.group)
  local begins = entry.begins or has_permits and allowed_from(entry, math.max(permit, group_permit or 0, entry.start))
  local late = not entry.begins and (not begins or begins > entry.start or entry.met or entry == me and never)
  if entry == me and late then
    local holder, reason = who(), 'holder'
    if never or has_permits and math.max(permit, group_permit or 0) <= entry.start then
      reason = 'rate'
    elseif permit and permit <= entry.start then
      reason = 'group'
    end
    answer = cjson.encode({
      task = holder.task or '', attempt = holder.attempt or '', worker = holder.worker or '', waits_for = entry.met or reason,
    })
  end
  if entry.begins then
    left[#left + 1] = entry
  elseif late and (waits == '0' or never) and entry == me then
    blocked(entry, 0)
  elseif begins then
    if late then blocked(entry, math.max(0, begins - entry.start)) end
    entry.begins = begins
    take_permits(entry)
    note_begin(entry)
    if entry.took then give_back(entry) else left[#left + 1] = entry end
  else
    left[#left + 1] = entry
  end
end
if #left > MOST_RUNS then
  local oldest = table.remove(left, 1)
  if not oldest.begins then blocked(oldest, now - oldest.start) end
end

redis.call('DEL', runs)
local last, groups = 0, {}
for _, at in ipairs(permits.free) do last = math.max(last, at) end
for _, pool in ipairs(pools) do -- a permit that is free by now is added again when it is wanted
  local free = {}
  for _, at in ipairs(pool.free) do
    if at > now then free[#free + 1] = at end
  end
  if #free > 0 then groups[#groups + 1] = {group = pool.group, free = free} end
end
if #left > 0 or last > now then
  for _, entry in ipairs(left) do redis.call('HSET', runs, entry.token, cjson.encode(entry)) end
  redis.call('HSET', runs, 'free', cjson.encode(permits.free))
  if #groups > 0 then redis.call('HSET', runs, 'groups', cjson.encode(groups)) end
  redis.call('PEXPIRE', runs, math.min(math.max(last - now, DEAD_MS), KEPT_MS))
end
return answer
