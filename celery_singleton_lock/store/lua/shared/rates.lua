-- Rates, costs and timed closes of a lock.

-- Rates bound the starts of a lock: for each rate {id, n, per, burst, costed}, at most n in (t - per, t]. `per` is
-- in microseconds. burst 0 = sliding: the log has each start. Else smooth (GCRA): `tat:<id>` is the time at which the
-- next start is due, and `burst` starts may come at once. A start is logged when its grant is claimed. Until then the
-- grant counts with the score UNCLAIMED, since a late claim could otherwise exceed the rate. One function creates all
-- others, so that a lock without rates does not pay for them.
-- A lock can also be closed until a time: then it is granted to nobody. A closed lock need not have rates.
-- A costed rate counts costs instead of starts. It has its own log with members '<cost> <token>'; `used:<id>` is the
-- sum of the costs. If the rate is smooth, only unclaimed grants are logged. A caller that declares no cost for it
-- costs 1.
local UNCLAIMED = 9e15
local MOST_PAST = 16
local function open_rates()
  local log, kept, flat = flow .. ':log', {}, redis.call('HGETALL', flow)
  for i = 1, #flat, 2 do kept[flat[i]] = flat[i + 1] end
  local own = cjson.decode(kept.rates or '[]')
  -- `newest`: the last computed limit and rates, each with the place of the message that computed it.
  local newest = cjson.decode(kept.newest or '{}')
  -- The rates that an operator has set, and when they end (ms; nil: only a call ends them).
  local set, set_ends = kept.ruled_rates and cjson.decode(kept.ruled_rates), tonumber(kept.rates_until)
  local set_ended = set and set_ends and set_ends <= now
  if set_ended then set = nil end
  -- Former rates: they were in force until a caller with other rates used the idle lock. Each has the time (us) at
  -- which all starts that it counted are older than its period. Until then starts are logged for it, too, since it
  -- may be declared again.
  local past = cjson.decode(kept.past or '[]')
  local list, known -- the rates in force; and these with all rates that may be in force later
  -- Of two declarations of one rate the lower one is in force.
  local function add(to, rate)
    for _, other in ipairs(to) do
      if other[1] == rate[1] then
        other[2], other[4] = math.min(other[2], rate[2]), math.min(other[4], rate[4])
        return
      end
    end
    to[#to + 1] = {unpack(rate)}
  end
  -- An operator's rates replace declared rates of the same kind: those that count starts, or costs. The others stay
  -- in force.
  local function counts_costs(rate) return rate[5] and true or false end
  local function in_force(declared)
    if not set then return declared end
    local found, units = {unpack(set)}, {}
    for _, rate in ipairs(set) do units[counts_costs(rate)] = true end
    for _, rate in ipairs(declared) do
      if not units[counts_costs(rate)] then found[#found + 1] = rate end
    end
    return found
  end
  local function choose_rates()
    list = {}
    for _, rate in ipairs(own) do add(list, rate) end
    for _, rate in ipairs(newest.rates and newest.rates[1] or {}) do add(list, rate) end
    known = list
    if not set and #past == 0 then return end
    known = {unpack(set or list)}
    for _, rate in ipairs(set and list or {}) do known[#known + 1] = rate end
    for _, each in ipairs(past) do known[#known + 1] = each[1] end
    list = in_force(list)
  end
  choose_rates()
  local at = math.max(now_us, tonumber(kept.seen or 0)) -- a clock that was set back allows no start
  local costs, asker, asking -- the caller's costs by rate, its token and its record
  redis.call('ZCARD', log)
  local function unclaimed() return redis.call('ZCOUNT', log, digits(UNCLAIMED), '+inf') end
  local function in_window(rate) return redis.call('ZCOUNT', log, '(' .. digits(at - rate[3]), '+inf') end
  local function gap_of(rate) return math.ceil(rate[3] / rate[2]) end
  local function on_time(rate) return math.max(at, tonumber(kept['tat:' .. rate[1]] or 0)) end
  local function longest_window()
    local most = 0
    for _, rate in ipairs(known) do most = math.max(most, rate[3]) end
    return most
  end
  -- Until when (ms) the lock is closed; nil if it is not closed for a time.
  local function reopens_at()
    local till = tonumber(kept.closed or 0)
    return till > now and till or nil
  end
  -- For how long (ms) the rates may be needed although no waiter declares them: a holder that has declared costs may
  -- charge until its lease ends, and a charge may move the next start of a smooth rate by many periods.
  local function may_count_for()
    local till_us = 1000 * tonumber(kept.charging or 0)
    for _, rate in ipairs(known) do
      if rate[4] > 0 then till_us = math.max(till_us, on_time(rate)) end
    end
    return math.ceil((math.min(till_us, UNCLAIMED) - now_us) / 1000) -- Redis refuses an expiry of 18 digits
  end
  local function live(key, left_ms)
    local closed_ms, kept_ms = (reopens_at() or now) - now, math.max(math.ceil(longest_window() / 1000), left_ms or 0)
    if key == flow then kept_ms = math.max(kept_ms, tonumber(kept.quiet or 0), may_count_for()) end
    redis.call('PEXPIRE', key, math.max(closed_ms, kept_ms + GRACE_MS))
  end
  -- Of two closes the longer one is in force.
  local function close_until(ms, why)
    if now + ms <= tonumber(kept.closed or 0) then return end
    kept.closed, kept.closed_why = digits(now + ms), why
    redis.call('HSET', flow, 'closed', kept.closed, 'closed_why', why)
    redis.call('HSET', meta, 'closed', kept.closed) -- for lists, which read this key only
    if redis.call('PTTL', flow) < ms then live(flow) end
  end
  local function reopen()
    kept.closed = nil
    redis.call('HDEL', flow, 'closed', 'closed_why')
    redis.call('HDEL', meta, 'closed')
  end
  local function store(field, value)
    kept[field] = value
    redis.call('HSET', flow, field, value)
  end
  -- Note that a lease of a holder that has declared costs begins.
  local function expect_charges(lease_ms)
    if now + lease_ms <= tonumber(kept.charging or 0) then return end
    store('charging', digits(now + lease_ms))
    live(flow)
  end
  -- Debounce: `settling:<source>` is the token of the message that settles, and `came:<source>` the time at which the
  -- last message came; see source_of().
  local function note_settling(source, token)
    if token then return store('settling:' .. source, token) end
    kept['settling:' .. source] = nil
    redis.call('HDEL', flow, 'settling:' .. source)
  end
  -- Returns when the last message came before this one (ms).
  local function note_arrival(source, quiet_ms)
    local last = tonumber(kept['came:' .. source] or 0)
    store('came:' .. source, digits(now))
    if quiet_ms > tonumber(kept.quiet or 0) then store('quiet', digits(quiet_ms)) end
    return last
  end
  -- Preemption: `newest:<source>` is the attempt of the newest call, while that call waits. `in_a_row:<task>` is the
  -- number of calls of a task that were preempted since one of them ended by itself.
  local function note_newest_call(source, attempt)
    store('preempts', '1')
    store('newest:' .. source, attempt)
  end
  local function note_in_a_row(task, number)
    if number > 0 then return store('in_a_row:' .. task, digits(number)) end
    kept['in_a_row:' .. task] = nil
    redis.call('HDEL', flow, 'in_a_row:' .. task)
  end
  -- When the first of the messages that settle may queue (ms); nil if none settles.
  local function next_settled()
    local first
    for i = 1, #flat, 2 do
      local token = string.sub(flat[i], 1, 9) == 'settling:' and kept[flat[i]]
      local till = token and tonumber(redis.call('ZSCORE', deadlines, token) or nil)
      if till and not (first and first <= till) then first = till end
    end
    return first
  end
  -- Costs.
  local function log_of(rate) return log .. ':' .. rate[1] end
  local function cost_in(entry) return tonumber(string.match(entry, '^%d+')) end
  local function cost_of(rate, rec) return rate[5] and rec and rec.costs and tonumber(rec.costs[rate[1]]) or 1 end
  local function each_costed(call)
    local called = {}
    for _, rate in ipairs(known) do
      if rate[5] and not called[rate[1]] then call(rate) end
      called[rate[1]] = true
    end
  end
  local function outdated(rate, most)
    return redis.call('ZRANGEBYSCORE', log_of(rate), '-inf', digits(at - rate[3]), 'LIMIT', 0, most)
  end
  local function used_by(rate)
    if redis.call('EXISTS', log_of(rate)) == 0 then return 0 end
    local used = tonumber(kept['used:' .. rate[1]] or 0)
    for _, entry in ipairs(outdated(rate, -1)) do used = used - cost_in(entry) end
    return used
  end
  local function add_used(rate, cost)
    local before = redis.call('ZCARD', log_of(rate)) > 0 and tonumber(kept['used:' .. rate[1]] or 0) or 0
    store('used:' .. rate[1], digits(before + cost))
  end
  local function enter(rate, cost, member, score)
    local entry = digits(cost) .. ' ' .. member
    if cost == 0 or redis.call('ZSCORE', log_of(rate), entry) then return end
    add_used(rate, cost)
    redis.call('ZADD', log_of(rate), digits(score), entry)
    live(log_of(rate))
    live(flow) -- the sum lives as long as the log
  end
  local function strike(rate, entry)
    if redis.call('ZREM', log_of(rate), entry) == 1 then add_used(rate, -cost_in(entry)) end
  end
  local function forget_outdated(rate)
    repeat
      local entries = outdated(rate, 10 * BATCH)
      for _, entry in ipairs(entries) do strike(rate, entry) end
    until #entries < 10 * BATCH
  end
  -- The level of a smooth rate is how far it is ahead of `at`. `lows:<id>` has {time, level} before starts: the
  -- lowest level since a time is that of the first entry after it.
  local function note_low(rate)
    local lows, level = cjson.decode(kept['lows:' .. rate[1]] or '[]'), on_time(rate) - at
    while #lows > 0 and lows[#lows][2] >= level do table.remove(lows) end
    lows[#lows + 1] = {digits(at), level}
    if #lows > 16 then
      lows[2][2] = lows[1][2]
      table.remove(lows, 1)
    end
    store('lows:' .. rate[1], cjson.encode(lows))
  end
  local function add_smooth(rate, cost)
    if rate[5] then note_low(rate) end
    store('tat:' .. rate[1], digits(on_time(rate) + cost * gap_of(rate)))
  end
  -- Give back a part of the cost of a start, at most the lowest level since then: more is the cost of later starts.
  local function give_back_smooth(rate, since, less)
    local lows, left = cjson.decode(kept['lows:' .. rate[1]] or '[]'), {}
    local back = math.min(less * gap_of(rate), on_time(rate) - at)
    for _, low in ipairs(lows) do
      if tonumber(low[1]) > since then back = math.min(back, low[2]) end
    end
    for _, low in ipairs(lows) do
      if tonumber(low[1]) > since then low[2] = low[2] - back end
      while #left > 0 and left[#left][2] >= low[2] do table.remove(left) end
      left[#left + 1] = low
    end
    store('lows:' .. rate[1], cjson.encode(left))
    store('tat:' .. rate[1], digits(on_time(rate) - back))
  end
  local function give_back_sliding(rate, token, cost, less)
    local entry = digits(cost) .. ' ' .. token
    local score = redis.call('ZSCORE', log_of(rate), entry)
    if not score then return end
    strike(rate, entry)
    enter(rate, cost - less, token, tonumber(score))
  end
  -- The record of the next waiter, whose cost decides. The caller's record may not be stored yet.
  local function record_of_next()
    local first
    if fair then first = fair.peek() else first = redis.call('ZRANGE', queue, 0, 0)[1] end
    if not first or first == asker then return asking end
    local raw = redis.call('HGET', record, first)
    return raw and cjson.decode(raw) or nil
  end
  -- If a cost is above the number or burst of its rate, so that it never starts: cost, number, period and burst.
  local function excess(rec)
    for _, rate in ipairs(list) do
      local cost = cost_of(rate, rec)
      if cost > (rate[4] > 0 and rate[4] or rate[2]) then
        return table.concat({digits(cost), rate[2], digits(rate[3]), rate[4]}, ' ')
      end
    end
  end
  -- When this rate allows one more start; UNCLAIMED or more: not before a grant is claimed, or ends. With costs the
  -- time may be too early, since many entries must leave and only the first ones are read.
  local function opens_at(rate, rec)
    local cost, costed = cost_of(rate, rec), rate[5]
    local taken = not costed and (rate[4] > 0 and unclaimed() or in_window(rate)) or used_by(rate)
    if rate[4] > 0 then return on_time(rate) + (taken - rate[4] + cost) * gap_of(rate) end
    local over = taken + cost - rate[2]
    if over <= 0 then return at end
    local after = '(' .. digits(at - rate[3])
    if not costed then
      local leaves = redis.call('ZRANGEBYSCORE', log, after, '+inf', 'WITHSCORES', 'LIMIT', over - 1, 1)[2]
      return tonumber(leaves) + rate[3]
    end
    local leaving, last = redis.call('ZRANGEBYSCORE', log_of(rate), after, '+inf', 'WITHSCORES', 'LIMIT', 0, BATCH), at
    for i = 1, #leaving, 2 do
      if over > 0 then last = tonumber(leaving[i + 1]) + rate[3] end
      over = over - cost_in(leaving[i])
    end
    return last
  end
  -- As waits_for(), for a record, else for the next waiter. A waiter that costs too much does not wait, but ends.
  local function waits(rec)
    local till = at
    each_costed(function() rec = rec or record_of_next() end)
    if excess(rec) then return nil end
    for _, rate in ipairs(list) do till = math.max(till, opens_at(rate, rec)) end
    if till <= at then return nil end
    local opens = till < UNCLAIMED and math.ceil(till / 1000) or nil
    if set and set_ends then opens = math.min(opens or set_ends, set_ends) end
    return 'rate', opens
  end
  local function note_grant(token, rec)
    if #known == 0 then return end
    redis.call('HSET', flow, 'seen', digits(at)) -- its claim counts at this time at the earliest
    redis.call('ZADD', log, digits(UNCLAIMED), token)
    live(log)
    each_costed(function(rate)
      local cost = cost_of(rate, rec)
      strike(rate, digits(cost) .. ' ' .. token) -- an earlier grant whose reply its worker did not receive
      enter(rate, cost, token, UNCLAIMED)
    end)
  end
  -- A grant was claimed, or needs no claim.
  local function note_start(token, rec)
    if #known == 0 then return end
    rec.given = nil
    local old = redis.call('ZCOUNT', log, '-inf', digits(at - longest_window()))
    if old > 0 then redis.call('ZREMRANGEBYRANK', log, 0, math.min(old, 10 * BATCH) - 1) end
    redis.call('HSET', flow, 'seen', digits(at))
    local sliding, counted = false, {}
    for _, rate in ipairs(known) do -- also those that are in force again when an operator's rates end
      local cost, again = cost_of(rate, rec), counted[rate[1]]
      counted[rate[1]] = true
      if rate[5] and not again then strike(rate, digits(cost) .. ' ' .. token) end
      if again then
        -- of two with one id the lower one is in force
      elseif rate[4] > 0 then
        add_smooth(rate, cost)
      elseif rate[5] then
        enter(rate, cost, token, at)
      else
        sliding = true
      end
      if rate[5] then rec.started = digits(at) end
    end
    if rec.costs then expect_charges(tonumber(rec.lease)) end
    if not sliding then return redis.call('ZREM', log, token) end
    redis.call('ZADD', log, digits(at), token)
    live(log)
  end
  -- A grant that has ended without a claim was not a start.
  local function drop(token, rec)
    local since = redis.call('ZSCORE', log, token)
    if not since or tonumber(since) < UNCLAIMED then return end
    redis.call('ZREM', log, token)
    each_costed(function(rate) strike(rate, digits(cost_of(rate, rec)) .. ' ' .. token) end)
  end
  -- Scripts of an older version may have ended it. One call looks at some of many, from a different start each time.
  local function drop_ended()
    local function ended(token) return not redis.call('ZSCORE', holders, token) end
    local from = now_us % math.max(1, unclaimed() - BATCH + 1)
    for _, token in ipairs(redis.call('ZRANGEBYSCORE', log, digits(UNCLAIMED), '+inf', 'LIMIT', from, BATCH)) do
      if ended(token) then redis.call('ZREM', log, token) end
    end
    each_costed(function(rate)
      forget_outdated(rate)
      local granted = redis.call('ZRANGEBYSCORE', log_of(rate), digits(UNCLAIMED), '+inf', 'LIMIT', from, BATCH)
      for _, entry in ipairs(granted) do
        if ended(string.match(entry, ' (.*)$')) then strike(rate, entry) end
      end
    end)
  end
  -- Store a limit or rates that were computed for a message: those of the newest message, by place, are in force. A
  -- copy arrives later than its message, so it does not count. A place in the future is from a time before the clock
  -- was set back, so it does not count either.
  local function note_newest(what, value, place, copy)
    local last = newest[what] and tonumber(newest[what][2])
    if last and (copy or place < last and last <= now_us) then return end
    newest[what] = {value, digits(place)}
    redis.call('HSET', flow, 'newest', cjson.encode(newest))
  end
  -- Keep the caller's costs for its record. In the rates themselves, only a flag says that they count costs.
  local function take_costs(rates_wanted)
    for _, rate in ipairs(rates_wanted or {}) do
      if rate[5] then
        costs = costs or {}
        costs[rate[1]], rate[5] = rate[5], 1
      end
    end
  end
  -- Remember the rates that the caller does not declare, the latest ones of many.
  local function replace_own(rates_wanted)
    local before, left = {}, {}
    for _, rate in ipairs(own) do before[#before + 1] = {rate, digits(at + rate[3])} end
    for _, each in ipairs(past) do before[#before + 1] = each end
    local taken = {}
    for _, rate in ipairs(rates_wanted) do taken[rate[1]] = true end
    for _, each in ipairs(before) do
      if not taken[each[1][1]] and tonumber(each[2]) > at and #left < MOST_PAST then left[#left + 1] = each end
      taken[each[1][1]] = true
    end
    own = {}
    if #left > 0 or #past > 0 then store('past', cjson.encode(left)) end
    past = left
  end
  -- The rates of the caller are in force for an idle lock. Returns whether a rate is new.
  local function declare_rates(wanted, place, copy, replace)
    local before, is_new = {}, false
    for _, rate in ipairs(known) do before[rate[1]] = true end
    take_costs(wanted.rates)
    take_costs(wanted.newest and wanted.newest.rates)
    if wanted.rates then
      if replace then replace_own(wanted.rates) end
      for _, rate in ipairs(wanted.rates) do add(own, rate) end
      redis.call('HSET', flow, 'rates', cjson.encode(own))
    end
    local computed = wanted.newest or {}
    if computed.limit then note_newest('limit', computed.limit, place, copy) end
    if computed.rates then note_newest('rates', computed.rates, place, copy) end
    choose_rates()
    for _, rate in ipairs(known) do is_new = is_new or not before[rate[1]] end
    live(flow)
    live(log)
    each_costed(function(rate) live(log_of(rate)) end)
    return is_new
  end
  -- The caller's record, with its costs if it has declared some.
  local function note_asker(token, rec)
    asker, asking = token, rec
    rec.costs = costs or rec.costs
  end
  -- The lowest limit that was declared as a number. `in_meta` is the declared limit in `meta`: the lower one of
  -- that and the computed one, or a lower one of a script of an older version.
  local function static_limit(in_meta)
    local most = newest.limit and newest.limit[1]
    if not most or not kept.static or in_meta < math.min(most, tonumber(kept.static)) then return in_meta end
    return tonumber(kept.static)
  end
  local function bounded(lowest)
    if not newest.limit then return lowest end
    kept.static = digits(lowest)
    redis.call('HSET', flow, 'static', kept.static)
    return math.min(lowest, newest.limit[1])
  end
  -- Set an operator's rates until `till` (ms; nil: for ever); without `wanted`, end them.
  local function rule(wanted, till)
    set, set_ends, set_ended = wanted and cjson.decode(wanted), till, nil
    redis.call('HDEL', flow, 'ruled_rates', 'rates_until')
    if set then redis.call('HSET', flow, 'ruled_rates', wanted) end
    if set and till then redis.call('HSET', flow, 'rates_until', digits(till)) end
    choose_rates()
    live(flow)
    live(log)
  end
  local function ruling_ends() return set and (set_ends or math.huge) or 0 end
  local function drop_ruling() if set_ended then rule(nil) end end
  -- While a message is stored, the rates do not expire: unlike a client, a message does not declare them again.
  -- Nor does the log, since a grant may wait for its claim longer than the log lives. While a holder of
  -- several locks waits for another one, or a call that can be preempted runs, both live until its lease ends.
  local function keep(stored)
    local ends = not stored and (kept.preempts or unclaimed() > 0) and redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
    local left = ends and tonumber(ends) - now
    if stored or left then live(log, left) end
    if stored or left then each_costed(function(rate) live(log_of(rate), left) end) end
    if stored or ruling_ends() == math.huge then return redis.call('PERSIST', flow) end
    if left or redis.call('PTTL', flow) == -1 then live(flow, left) end
    if not (set or newest.limit) then return end
    local last = newest.limit and redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
    local least = math.max(ruling_ends(), tonumber(last or 0)) - now + GRACE_MS
    if redis.call('PTTL', flow) < least then redis.call('PEXPIRE', flow, least) end
  end
  -- Whether a charge is known; if not, it is known from now on.
  local function is_known(charge_id)
    local charged = flow .. ':charged'
    redis.call('ZREMRANGEBYSCORE', charged, '-inf', digits(at - longest_window() - GRACE_MS * 1000))
    if redis.call('ZADD', charged, 'NX', digits(at), charge_id) == 0 then return true end
    redis.call('HSET', flow, 'seen', digits(at))
    live(charged)
  end
  -- Correct what a start has cost, for the rates with these ids. An additional amount counts from now on. A lower
  -- amount is given back only as far as the start still counts. Returns whether the lock has such a rate.
  local function charge(token, rec, amount, ids, charge_id)
    local found, repeated = false, is_known(charge_id)
    each_costed(function(rate)
      if not string.find(ids, '\n' .. rate[1] .. '\n', 1, true) then return end
      found = true
      if repeated then return end
      if amount > 0 and rate[4] > 0 then return add_smooth(rate, amount) end
      if amount > 0 then return enter(rate, amount, '+' .. charge_id, at) end
      if not rec or not rec.started then return end
      rec.given = rec.given or {}
      local given = tonumber(rec.given[rate[1]] or 0)
      local cost = cost_of(rate, rec) - given
      local less = math.min(cost, -amount)
      if rate[4] > 0 then give_back_smooth(rate, tonumber(rec.started), less) end
      if rate[4] == 0 then give_back_sliding(rate, token, cost, less) end
      rec.given[rate[1]] = given + less
    end)
    if found and not repeated then live(flow) end
    return found
  end
  -- The rates: each with the starts or costs that count now, whether it counts costs, and whether an operator has set
  -- it.
  local function view_rates()
    local seen = {}
    for i, rate in ipairs(list) do
      local level = rate[4] > 0 and rate[5] and math.ceil((on_time(rate) - at) / gap_of(rate)) or 0
      local used = rate[5] and used_by(rate) or rate[4] > 0 and unclaimed() or in_window(rate)
      seen[i] = {rate[1], rate[2], rate[3], rate[4], used + level, rate[5] and 1 or 0, set and i <= #set and 1 or 0}
    end
    return #list > 0 and cjson.encode(seen) or ''
  end
  return {
    waits = waits, note_grant = note_grant, note_start = note_start, drop = drop, drop_ended = drop_ended,
    declare = declare_rates, keep = keep, view = view_rates, static_limit = static_limit, bounded = bounded,
    rule = rule, ruling_ends = ruling_ends, drop_ruling = drop_ruling,
    ruled = function() return set end, newest = newest, in_force = in_force,
    note_asker = note_asker, excess = excess, charge = charge, expect_charges = expect_charges,
    close = close_until, reopen = reopen, reopens_at = reopens_at,
    note_settling = note_settling, note_arrival = note_arrival, next_settled = next_settled,
    settling = function(source) return kept['settling:' .. source] end,
    preempts = function() return kept.preempts end,
    note_newest_call = note_newest_call, newest_call = function(source) return kept['newest:' .. source] end,
    note_in_a_row = note_in_a_row,
    preempted_in_a_row = function(task) return tonumber(kept['in_a_row:' .. task] or 0) end,
    closed_why = function() return reopens_at() and kept.closed_why or '' end,
    vt = kept.vt,
  }
end
