-- What the scripts share: the state of one lock, and the functions that change it.
--
-- Lua has no roll-back. So a script reads every key, which checks its type, before it writes.
-- Keys of others (inboxes, wake lists, routes) are written with pcall: if another program uses such a
-- key, a wake-up or a route is missing, but the lock itself is not left half changed.
-- Numbers of 16 digits are written with %.0f, since tostring rounds them to 14.
--
-- A record is a JSON object per token. Its states, and what they mean:
--   waiting    a client or a blocking task waits in the queue, without a stored message
--   parked     a stored message waits in the queue
--   adrift     a stored message for which no live worker is known; it is not in the queue
--   leaving    a stored message that is being published, or delayed; it queues again at its deadline
--   overdue, replaced, revoked, rejected, too_costly, above_rate   a stored message that must not run: it is delivered
--              with this verdict until a worker has ended its task
--   granted    holds the lock, and has not claimed the grant yet
--   running    holds the lock, and has claimed the grant or needed no claim
--   reserved, held_after   the permit stays taken: for the next attempt, or for nobody
-- Fields of a record whose names do not say what they contain:
--   place      position in the queue: the time of arrival in microseconds, minus the head start
--   arrived    time of arrival in microseconds, if it is not the place
--   lease, wait, deadline, since   milliseconds
--   realm, queue   broker and queue of a stored message; together its route
--   twin       token of a duplicate delivery, whose message is stored with this record
--   copy       1 if this may be a duplicate delivery
--   copied     1 if a duplicate of this message was acknowledged
--   indexed    1 if the index has an entry for it
--   by         attempt whose message replaced this one
--   bytes      of its stored message, while they count in the sum of its route
--   returns    how many deliveries of the message came back
--   costs      cost of its start, by the id of a rate that counts costs; started = when it counted
--   excess     why it costs too much ever to start: cost, number, period and burst of a rate
--   ends_at_rate   true if it ends when it is next and above the rate (lock_on_rate); above_rate = it does
--   seal       id of the call that took the message out of the queue for publishing
--   settles    1: it settles, or was replaced while it did; delayed and in the state leaving. See let_settle()
--   settles_from   when the first message of this burst came, milliseconds; ahead = its head start, microseconds
--   publish_at, publish_every   earliest time of the next attempt to publish, and the interval
local GRACE_MS = 60000   -- how long keys live after the last lease, so that fencing tokens continue to grow
local ADRIFT_MS = 5000   -- pause between two sweeps of a lock with messages that no worker consumes
local PUBLISH_MS = 2000  -- first pause after a failed attempt to publish such a message; it doubles
local BATCH = 100        -- most waiters that one script moves
local INBOX_BODY = 65536 -- longer bodies do not go through the inbox: the worker reads them itself
local INBOX_MS = 600000  -- how long the inbox of a worker lives
local DELAY_MS = 1000    -- first delay of a message that is returned repeatedly; it doubles
local MOST_DELAY_MS = 60000

local WAITS = {
  waiting = 'queue', parked = 'queue', adrift = 'adrift',
  overdue = 'overdue', replaced = 'overdue', revoked = 'overdue', rejected = 'overdue', too_costly = 'overdue',
  above_rate = 'overdue',
  leaving = 'overdue', -- out of the queue until its deadline, then it queues again
}

local now_text = server_time()
local now_us = tonumber(now_text)
local now = math.floor(now_us / 1000)

local lock -- name of the lock that the functions below change; a script sets it in its first line
local holders, queue, record, meta, bodies, deadlines, adrift, done, flow, due, index, fleet = unpack(KEYS, 1, 12)
local limit, last_fence, grants
local declared        -- the limit that holders and waiters have declared
local paused, ruled   -- set by operators: no grants, and a limit that overrides the declared ones
local ruling = {}     -- when these end (ms), `pause` and `limit`; nil: not without a call
local alone      -- there are no waiters and no stored messages: the keys of the queue need not be read
local remembers  -- `done` has entries: ends of attempts are remembered
local index_changed   -- the index has gained or lost an entry
local sweeping   -- a sweeper runs this script
local became_adrift    -- a message has become adrift in this script
local rates        -- functions of open_rates(); nil: no caller has declared a rate
local kept_for_me  -- the caller's attempt has a reservation, and may not start yet
local wanted_flow  -- flow options of the caller; nil: none
local fair         -- functions of open_groups(); nil: no caller has declared a group
local starts_later -- the caller has other locks to acquire before it starts: another claim logs its start

local function digits(n) return string.format('%.0f', n) end

-- Rates bound the starts of a lock: for each rate {id, n, per, burst, costed}, at most n in (t - per, t]. `per` is
-- in microseconds. burst 0 = sliding: the log has each start. Else smooth (GCRA): `tat:<id>` is the time from which
-- on the next start is on time, and `burst` starts may come at once. A start is logged when its grant is
-- claimed. Until then the grant counts with the score UNCLAIMED: else a late claim could exceed the rate. One
-- function creates all others, so that a lock without rates does not pay for them.
-- A lock can also be closed until a time: then nobody is granted. It may be closed and have no rates.
-- A costed rate counts costs, not starts. Its own log has members '<cost> <token>'; `used:<id>` is their sum. A
-- smooth one logs only unclaimed grants. A caller without a cost for it costs 1.
local UNCLAIMED = 9e15
local MOST_PAST = 16
local function open_rates()
  local log, kept, flat = flow .. ':log', {}, redis.call('HGETALL', flow)
  for i = 1, #flat, 2 do kept[flat[i]] = flat[i + 1] end
  local own = cjson.decode(kept.rates or '[]')
  -- `newest`: the last computed limit and rates, each with the place of the message that computed it.
  local newest = cjson.decode(kept.newest or '{}')
  -- The rates that an operator has set, and when they end (ms; nil: not without a call).
  local set, set_ends = kept.ruled_rates and cjson.decode(kept.ruled_rates), tonumber(kept.rates_until)
  local set_ended = set and set_ends and set_ends <= now
  if set_ended then set = nil end
  -- Rates that were in force, until another caller met the idle lock: each with the time (us) at which what it
  -- counted has left its period. Until then starts are logged for it, too, since it may be declared again.
  local past = cjson.decode(kept.past or '[]')
  local list, known -- the rates in force, and those with all that may be in force later
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
  local function choose_rates()
    list = {}
    for _, rate in ipairs(own) do add(list, rate) end
    for _, rate in ipairs(newest.rates and newest.rates[1] or {}) do add(list, rate) end
    known = list
    if not set and #past == 0 then return end
    known = {unpack(set or list)}
    for _, rate in ipairs(set and list or {}) do known[#known + 1] = rate end
    for _, each in ipairs(past) do known[#known + 1] = each[1] end
    list = set or list
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
  -- Until when (ms) the lock is closed for a time; nil if it is not.
  local function closed_till()
    local till = tonumber(kept.closed or 0)
    return till > now and till or nil
  end
  local function live(key, left_ms)
    local closed_ms, kept_ms = (closed_till() or now) - now, math.max(math.ceil(longest_window() / 1000), left_ms or 0)
    if key == flow then kept_ms = math.max(kept_ms, tonumber(kept.quiet or 0)) end
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
  -- Debounce: `settling:<task>` is the token of the message that settles, and `came:<task>` when the last one came.
  local function note_settling(task, token)
    if token then return store('settling:' .. task, token) end
    kept['settling:' .. task] = nil
    redis.call('HDEL', flow, 'settling:' .. task)
  end
  -- Returns when the last message of this task came before this one (ms).
  local function note_arrival(task, quiet_ms)
    local last = tonumber(kept['came:' .. task] or 0)
    store('came:' .. task, digits(now))
    if quiet_ms > tonumber(kept.quiet or 0) then store('quiet', digits(quiet_ms)) end
    return last
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
  -- A start gives back, at most as much as the lowest level since then: what is below would take from later ones.
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
  -- The waiter that is next: its cost decides. The caller's record may not be stored yet.
  local function record_of_next()
    local first
    if fair then first = fair.peek() else first = redis.call('ZRANGE', queue, 0, 0)[1] end
    if not first or first == asker then return asking end
    local raw = redis.call('HGET', record, first)
    return raw and cjson.decode(raw) or nil
  end
  -- Cost, number, period and burst of a rate whose number or burst is lower than the cost: it never starts.
  local function excess(rec)
    for _, rate in ipairs(list) do
      local cost = cost_of(rate, rec)
      if cost > (rate[4] > 0 and rate[4] or rate[2]) then
        return table.concat({digits(cost), rate[2], digits(rate[3]), rate[4]}, ' ')
      end
    end
  end
  -- When one more may start by this rate; from UNCLAIMED on: not before a grant is claimed, or ends. With costs
  -- it may be earlier: many entries must leave, and only the first ones are read.
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
  -- As waits_for(), for a record, else for the next waiter. One that costs too much does not wait: it ends.
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
    each_costed(function(rate) enter(rate, cost_of(rate, rec), token, UNCLAIMED) end)
  end
  -- A grant was claimed, or needs no claim.
  local function note_start(token, rec)
    if #known == 0 then return end
    local old = redis.call('ZCOUNT', log, '-inf', digits(at - longest_window()))
    if old > 0 then redis.call('ZREMRANGEBYRANK', log, 0, math.min(old, 10 * BATCH) - 1) end
    redis.call('HSET', flow, 'seen', digits(at))
    local sliding, counted = false, {}
    for _, rate in ipairs(known) do -- also those that are in force when an operator's end
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
    if not sliding then return redis.call('ZREM', log, token) end
    redis.call('ZADD', log, digits(at), token)
    live(log)
  end
  -- A grant that has ended unclaimed was no start.
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
  -- What messages compute: the newest by place counts. A copy arrives later than its message, so it does not
  -- count; and a place in the future is from before the clock was set back.
  local function note_newest(what, value, place, copy)
    local last = newest[what] and tonumber(newest[what][2])
    if last and (copy or place < last and last <= now_us) then return end
    newest[what] = {value, digits(place)}
    redis.call('HSET', flow, 'newest', cjson.encode(newest))
  end
  -- Keep the caller's costs for its record. In the rates themselves, a flag says that they count costs.
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
  -- An idle lock takes the rates of the caller. Returns whether a rate is new.
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
  -- An operator sets rates until `till` (ms; nil: for ever), or, without `wanted`, ends them.
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
  -- While a message is stored, the rates do not expire: it does not declare them again, as a client does.
  -- Nor does the log, since a grant may wait for its claim longer than the log lives. While a holder of
  -- several locks waits for another one, both live until its lease ends.
  local function keep(stored)
    local ends = not stored and unclaimed() > 0 and redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
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
  -- A later correction of what a start costs, by the rates of these ids. More counts from now on. Less is given
  -- back at most as far as the start still counts. Returns whether the lock has such a rate.
  local function charge(token, rec, amount, ids, charge_id)
    local found, repeated = false, is_known(charge_id)
    each_costed(function(rate)
      if not string.find(ids, '\n' .. rate[1] .. '\n', 1, true) then return end
      found = true
      if repeated then return end
      if amount > 0 and rate[4] > 0 then return add_smooth(rate, amount) end
      if amount > 0 then return enter(rate, amount, '+' .. charge_id, at) end
      if not rec or not rec.started then return end
      local cost = cost_of(rate, rec)
      local less = math.min(cost, -amount)
      if rate[4] > 0 then give_back_smooth(rate, tonumber(rec.started), less) end
      if rate[4] == 0 then give_back_sliding(rate, token, cost, less) end
      rec.costs = rec.costs or {}
      rec.costs[rate[1]] = cost - less
    end)
    return found
  end
  -- The rates, each with what it counts now, and whether it counts costs.
  local function view_rates()
    local seen = {}
    for i, rate in ipairs(list) do
      local level = rate[4] > 0 and rate[5] and math.ceil((on_time(rate) - at) / gap_of(rate)) or 0
      local used = rate[5] and used_by(rate) or rate[4] > 0 and unclaimed() or in_window(rate)
      seen[i] = {rate[1], rate[2], rate[3], rate[4], used + level, rate[5] and 1 or 0}
    end
    return #list > 0 and cjson.encode(seen) or ''
  end
  return {
    waits = waits, note_grant = note_grant, note_start = note_start, drop = drop, drop_ended = drop_ended,
    declare = declare_rates, keep = keep, view = view_rates, static_limit = static_limit, bounded = bounded,
    rule = rule, ruling_ends = ruling_ends, drop_ruling = drop_ruling,
    ruled = function() return set end, newest = newest,
    note_asker = note_asker, excess = excess, charge = charge,
    close = close_until, reopen = reopen, closed_till = closed_till,
    counts = function() return #known > 0 end,
    note_settling = note_settling, note_arrival = note_arrival, next_settled = next_settled,
    settling = function(task) return kept['settling:' .. task] end,
    closed_why = function() return closed_till() and kept.closed_why or '' end,
    vt = kept.vt,
  }
end

-- Fairness: each waiter of a lock belongs to a group, and start-time fair queueing chooses the group that is
-- next. A start moves the virtual time of its group by 1/weight; the group with the lowest one is next, and of
-- equal ones that whose first waiter came first. Within a group the score decides. A waiter without a group
-- belongs to the group ''. A group is in one of three places, each with its virtual time:
--   flow:groups   it has a waiter, and is below its limit; the members begin with the score of that waiter,
--                 so flow:heads has the member of each group
--   flow:full     it has a waiter, and is at its limit: it comes back with an end
--   flow:idle     it has no waiter; those behind the virtual time of the lock, and the oldest of many, are
--                 forgotten: a group gains nothing while it has no waiter
-- A line may have tokens that an older version took out of the queue, so the first one is compared with it.
local MOST_IDLE = 10000
local function open_groups(vt)
  local groups, heads, full, idle = flow .. ':groups', flow .. ':heads', flow .. ':full', flow .. ':idle'
  local at, mine = tonumber(vt), nil
  local known, chosen = {}, {} -- records of waiters; the group from whose line a token was chosen
  local call = redis.call
  call('ZCARD', groups)
  call('HLEN', heads)
  call('ZCARD', full)
  call('ZCARD', idle)
  local function exact(number) return string.format('%.17g', number) end
  local function line_of(group) return flow .. ':line:' .. group end
  local function running_of(group) return flow .. ':running:' .. group end
  local function group_of(token, rec) return chosen[token] or rec and rec.group or '' end
  local function record_of(token)
    local raw = not known[token] and call('HGET', record, token)
    return known[token] or raw and cjson.decode(raw) or {}
  end
  -- Whether as many of the group hold the lock as its waiter allows. Tokens that hold it no more do not count.
  local function is_full(rec)
    local most, running = rec.group_limit, running_of(rec.group or '')
    return most and call('ZCARD', running) >= most and #call('ZINTER', 2, running, holders) >= most
  end
  -- The virtual time of the next start of a group.
  local function next_start(group)
    local member = call('HGET', heads, group)
    local own = member and call('ZSCORE', groups, member) or call('ZSCORE', full, group) or call('ZSCORE', idle, group)
    return math.max(at, tonumber(own or at))
  end
  -- Put a group in its place, with this virtual time.
  local function settle(group, start)
    local head, member = call('ZRANGE', line_of(group), 0, 0, 'WITHSCORES'), call('HGET', heads, group)
    if member then
      call('ZREM', groups, member)
      call('HDEL', heads, group)
    end
    call('ZREM', full, group)
    call('ZREM', idle, group)
    if not head[1] then
      if start > at then call('ZADD', idle, exact(start), group) end
    elseif is_full(record_of(head[1])) then
      call('ZADD', full, exact(start), group)
    else
      member = string.format('%016.0f', tonumber(head[2])) .. ':' .. group
      call('ZADD', groups, exact(start), member)
      call('HSET', heads, group, member)
    end
  end
  -- A line lives as long as a message is in it, else until the last client has given up. See keep().
  local function join(token, rec, score)
    local group = group_of(token, rec)
    local line = line_of(group)
    call('ZADD', line, score, token)
    known[token] = rec
    local left = call('PTTL', line)
    if rec.parked then
      call('PERSIST', line)
    elseif left >= 0 or call('ZCARD', line) == 1 then
      call('PEXPIRE', line, digits(math.max(left, tonumber(rec.deadline or now) - now + GRACE_MS)))
    end
    if call('ZRANK', line, token) == 0 then settle(group, next_start(group)) end
  end
  local function leave(token, rec)
    local group = group_of(token, rec)
    local rank = call('ZRANK', line_of(group), token)
    if not rank then return end
    local start = rank == 0 and next_start(group)
    call('ZREM', line_of(group), token)
    if start then settle(group, start) end
  end
  -- A token has become a holder; `starts` is false for a reservation, which is no start.
  local function hold(token, rec, starts, lease)
    local group = rec.group or ''
    call('ZADD', running_of(group), now, token)
    local left = call('PTTL', running_of(group))
    call('PEXPIRE', running_of(group), digits(math.max(left, lease + GRACE_MS)))
    local start, first = next_start(group), call('ZRANGE', groups, 0, 0, 'WITHSCORES')[2]
    if starts then
      at = math.max(at, math.min(start, tonumber(first or start)))
      call('HSET', flow, 'vt', exact(at))
      start = start + 1 / (rec.group_weight or 1)
    end
    settle(group, start)
    call('ZREMRANGEBYSCORE', idle, '-inf', exact(at))
    call('ZREMRANGEBYRANK', idle, 0, -MOST_IDLE - 1)
  end
  local function end_hold(token, rec)
    local group = rec and rec.group or ''
    call('ZREM', running_of(group), token)
    if call('ZSCORE', full, group) then settle(group, next_start(group)) end
  end
  -- The first waiter of the group that is next; nil if each group with a waiter is at its limit. The second result
  -- is true if it may be another one than peek() has found.
  local function choose()
    local repaired = false
    while true do
      local member = call('ZRANGE', groups, 0, 0)[1]
      if not member then return nil end
      local group = string.sub(member, 18)
      local token = call('ZRANGE', line_of(group), 0, 0)[1]
      if token and call('ZSCORE', queue, token) then
        chosen[token] = group
        return token, repaired
      end
      repaired = true
      local start = next_start(group)
      if token then call('ZREM', line_of(group), token) end
      settle(group, start)
    end
  end
  -- As choose(), without a repair.
  local function peek()
    local member = call('ZRANGE', groups, 0, 0)[1]
    return member and call('ZRANGE', line_of(string.sub(member, 18)), 0, 0)[1]
  end
  -- Repair what scripts of an older version left: waiters without a line, and groups whose holders have ended.
  local function repair()
    for _, token in ipairs(call('ZRANGE', queue, 0, BATCH - 1)) do
      local rec = record_of(token)
      local group = group_of(token, rec)
      local placed = call('HEXISTS', heads, group) == 1 or call('ZSCORE', full, group)
      if placed and call('ZSCORE', line_of(group), token) then break end
      join(token, rec, call('ZSCORE', queue, token))
      settle(group, next_start(group))
    end
    local skip = now_us % math.max(1, call('ZCARD', full) - BATCH + 1)
    for _, group in ipairs(call('ZRANGE', full, skip, skip + BATCH - 1)) do
      local running = running_of(group)
      local left = call('PTTL', running)
      if call('ZINTERSTORE', running, 2, running, holders, 'WEIGHTS', 1, 0) > 0 and left > 0 then
        call('PEXPIRE', running, left)
      end
      settle(group, next_start(group))
    end
  end
  -- The lock gets groups now. Waiters from before belong to the group ''.
  local function begin()
    call('DEL', groups, heads, full, idle)
    call('HSET', flow, 'vt', exact(at))
    if alone or call('ZUNIONSTORE', line_of(''), 1, queue) == 0 then return end
    if call('PTTL', queue) > 0 then call('PEXPIRE', line_of(''), call('PTTL', queue)) end
    settle('', at)
  end
  -- The first call without a stored message finds keys that do not expire. Then a line of clients may be one too.
  local function keep(stored, till)
    local live = till - now + GRACE_MS
    if not stored and (call('PTTL', heads) == -1 or call('PTTL', full) == -1) then
      local waiting = call('HKEYS', heads)
      for _, group in ipairs(call('ZRANGE', full, 0, -1)) do waiting[#waiting + 1] = group end
      for _, group in ipairs(waiting) do
        if call('PTTL', line_of(group)) == -1 then call('PEXPIRE', line_of(group), digits(live)) end
      end
    end
    for _, key in ipairs({flow, groups, heads, full, idle}) do
      if stored then
        call('PERSIST', key)
      elseif key ~= flow or call('PTTL', key) ~= -1 and call('PTTL', key) < live then -- see rates.keep
        call('PEXPIRE', key, digits(live))
      end
    end
  end
  local function assign(rec, of) rec.group, rec.group_limit, rec.group_weight = of.group, of.group_limit, of.group_weight end
  return {
    join = join, leave = leave, hold = hold, end_hold = end_hold, choose = choose, peek = peek, is_full = is_full, repair = repair,
    all_full = function() return call('ZCARD', groups) == 0 end, begin = begin, keep = keep, assign = assign, line_of = function(rec) return line_of(rec.group or '') end,
    renew = function(rec, lease)
      local running = running_of(rec.group or '')
      call('PEXPIRE', running, digits(math.max(call('PTTL', running), lease + GRACE_MS)))
    end,
  }
end

local function close(ms, why)
  rates = rates or open_rates()
  rates.close(ms, why)
end

-- One string, since clients parse it faster than a list.
local function line(verdict, fence, left_ms, rank, look_ms, reason, who)
  return table.concat({verdict, fence, left_ms, rank, look_ms, limit, reason, who}, '\n')
end

-- For scripts about several locks: select the lock whose keys begin behind KEYS[offset].
local function use(offset, lock_name)
  lock = lock_name
  holders, queue, record, meta, bodies, deadlines, adrift, done, flow, due, index, fleet = unpack(KEYS, offset + 1, offset + 12)
end

-- QUARANTINE
-- Without quarantine. _quarantine.lua replaces these two functions.
local function closed_until() return false end

local function note_lease() end
-- END OF QUARANTINE

-- The pause and the limit that an operator has set, as read from `meta`. Their time may have ended: then they
-- are not in force, and the next sweep deletes them.
local function read_rulings(reason, pause_till, number, limit_till)
  ruling = {pause = tonumber(pause_till or nil), limit = tonumber(limit_till or nil)}
  local pause_ended, limit_ended = reason and ruling.pause, number and ruling.limit
  pause_ended, limit_ended = pause_ended and pause_ended <= now, limit_ended and limit_ended <= now
  paused, ruled = not pause_ended and reason, not limit_ended and number and tonumber(number)
  ruling.pause_ended, ruling.limit_ended = pause_ended, limit_ended
end

-- Until when `meta` must have what operators have set (ms); 0: it has nothing.
local function rulings_end()
  local pause_till = paused and (ruling.pause or math.huge) or 0
  local limit_till = ruled and (ruling.limit or math.huge) or 0
  return math.max(pause_till, limit_till, rates and rates.ruling_ends() or 0)
end

local function drop_ended_rulings()
  if ruling.pause_ended then redis.call('HDEL', meta, 'paused', 'paused_until') end
  if ruling.limit_ended then redis.call('HDEL', meta, 'ruled', 'ruled_until') end
  if rates then rates.drop_ruling() end
  ruling.pause_ended, ruling.limit_ended = nil, nil
end

-- Read every key once, so that a key of another type ends the script before its first write.
local function check()
  closed_until()
  local left = redis.call('EXISTS', queue, bodies, deadlines, adrift, flow)
  rates = left > 0 and redis.call('EXISTS', flow) == 1 and open_rates() or nil
  alone = left == (rates and 1 or 0)
  fair = rates and rates.vt and open_groups(rates.vt) or nil
  redis.call('ZCARD', holders)
  redis.call('HLEN', record)
  remembers = redis.call('ZCARD', done) > 0
  local m = redis.call('HMGET', meta, 'limit', 'fence', 'grants', 'paused', 'paused_until', 'ruled', 'ruled_until')
  declared, last_fence, grants = tonumber(m[1] or 1), tonumber(m[2] or 0), tonumber(m[3] or 0)
  read_rulings(m[4], m[5], m[6], m[7])
  limit = ruled or declared
  if not alone then
    redis.call('ZCARD', queue)
    redis.call('HLEN', bodies)
    redis.call('ZCARD', deadlines)
    redis.call('ZCARD', adrift)
  end
  redis.call('ZCARD', due)
  redis.call('HLEN', index)
end

-- A full Redis refuses a script's first write only. Scripts that take memory begin with this write ...
local function refuse_if_full() redis.call('HSET', meta, 'name', lock, 'schema', '1') end

-- ... and scripts that must work on a full Redis begin with this no-op, which it does not refuse.
local function write_though_full() redis.call('PERSIST', holders) end

local function load(token)
  local raw = redis.call('HGET', record, token)
  return raw and cjson.decode(raw) or nil
end

local function set_state(rec, state)
  if rec.state ~= state then rec.since = digits(now) end
  rec.state = state
end

local function save(token, rec) redis.call('HSET', record, token, cjson.encode(rec)) end

local function split(token)
  local base, n = string.match(token, '^(.*)%.(%d+)$')
  return base or token, tonumber(n or 0)
end

local function base_of(token) return (split(token)) end

local function next_token(token)
  local base, n = split(token)
  return base .. '.' .. digits(n + 1)
end

local function has_body(base) return not alone and redis.call('HEXISTS', bodies, base) == 1 end

local function count(what) redis.call('HINCRBY', meta, what, 1) end

-- When a token's lease ends, or ended; nil if the token does not hold the lock.
local function lease_end(token) return tonumber(redis.call('ZSCORE', holders, token) or nil) end

-- In which collection a token is: 'holder', 'queue', 'adrift', 'overdue' or nil.
local function standing(token, rec)
  if not rec then return nil end
  return WAITS[rec.state] or lease_end(token) and 'holder' or nil
end

-- The lowest limit that a holder or waiter declared as a number is in force; an idle lock takes the new one. A
-- limit that messages compute counts if it is lower. Likewise with rates. A caller without a rate declares none:
-- it is bound by those of others. `copy`: the caller may be a second delivery of a message.
local function declare(wanted, place, copy)
  local idle = redis.call('EXISTS', holders) == 0 and (alone or redis.call('EXISTS', queue, bodies, deadlines) == 0)
  local options = wanted_flow and (wanted_flow.rates or wanted_flow.newest) and wanted_flow
  if options then rates = rates or open_rates() end
  local before = rates and rates.static_limit(declared) or declared
  local is_new = options and rates.declare(options, place > 0 and math.min(place, now_us) or now_us, copy, idle)
  local lowest = (wanted < before or idle) and wanted or before
  local limited = rates and rates.bounded(lowest) or lowest
  if limited ~= declared then
    declared = limited
    limit = ruled or declared
    redis.call('HSET', meta, 'limit', declared)
  end
  local group = wanted_flow and wanted_flow.group
  if group then
    rates = rates or open_rates()
    if not fair then
      fair = open_groups('0')
      fair.begin()
    end
    local most = group[2]
    fair.mine = {group = group[1], group_limit = most and most > 0 and most or nil, group_weight = group[3]}
  end
  if not options then return end
  for _, token in ipairs(is_new and redis.call('ZRANGE', holders, 0, BATCH - 1) or {}) do
    local rec = load(token)
    if rec and rec.state == 'granted' then rates.note_grant(token, rec) end
  end
end

-- The admission decision, which is made before every grant. Returns nil if the next waiter may start.
-- Otherwise returns what it waits for (redis, pause, holder or rate), and the earliest time (ms) at which that
-- can end without a call to this lock. The time is nil if only a call can end it. `held` is the number of
-- holders, if the caller does not count all of them; `rec` is the waiter, if it is not the first of the queue.
local function waits_for(held, rec)
  local opens = closed_until()
  if opens then return 'redis', opens end
  local closed = rates and rates.closed_till()
  if paused then return 'pause', ruling.pause and math.max(ruling.pause, closed or 0) end
  if closed then return 'pause', closed end
  if (held or redis.call('ZCARD', holders)) < limit then
    if rates then return rates.waits(rec) end
    return nil
  end
  local till = tonumber(redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2])
  if ruled and ruled < declared then till = math.min(till, ruling.limit or till) end
  return 'holder', till
end

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
  redis.call('HSET', meta, 'prioritised', '1') -- so the queue is not in order of arrival: see replace_oldest
end

-- Give a record another place. The time of its arrival stays.
local function move_to(rec, place)
  rec.arrived, rec.place = rec.arrived or rec.place, place
end

-- Put a message behind all waiters, as one that arrives now. It loses its head start.
local function move_behind_all(rec)
  local arrived = arrival_at(0)
  rec.place, rec.arrived = digits(arrived), nil
  local last = last_in_queue()
  if last >= arrived then move_to(rec, digits(last + 1)) end
end

local function new_fence()
  last_fence = math.max(last_fence + 1, now_us)
  grants = grants + 1
  redis.call('HSET', meta, 'fence', digits(last_fence), 'grants', digits(grants), 'limit', declared)
  return digits(last_fence)
end

-- Messages that no worker consumes are sorted by route, then by place: so those of one route are found
-- without reading the others.
local function route_of(rec) return rec.realm .. ':' .. rec.queue end

-- Autoscalers ask how many messages of a route wait, and since when; workers, how many bytes they have: above
-- a limit they stop consuming the queue. So messages are also listed by route, for all locks of a bucket, with
-- the sum of their bytes. The list and the sum change together. The record keeps the bytes that were added,
-- since the stored message may be gone when they are subtracted. No grant depends on this.
local function list_parked(token, rec)
  if not rec.parked then return end
  local route, size = route_of(rec), redis.call('HSTRLEN', bodies, base_of(token))
  if redis.pcall('ZADD', fleet .. ':parked:' .. route, rec.arrived or rec.place, token) ~= 1 then return end
  rec.bytes = digits(size)
  redis.pcall('SADD', fleet .. ':parked', route)
  redis.pcall('HINCRBY', fleet .. ':parked_bytes', route, size)
end

-- Records of an older version have no bytes: none were added.
local function unlist_parked(token, rec)
  if not (rec and rec.parked) then return end
  local route, sums = route_of(rec), fleet .. ':parked_bytes'
  local list = fleet .. ':parked:' .. route
  local size = rec.bytes
  rec.bytes = nil
  if redis.pcall('ZREM', list, token) ~= 1 then return end
  if size then redis.pcall('HINCRBY', sums, route, '-' .. size) end
  if redis.pcall('EXISTS', list) == 0 then
    redis.pcall('SREM', fleet .. ':parked', route)
    redis.pcall('HDEL', sums, route) -- a wrong sum, as after scripts of an older version, ends here
  end
end

local function adrift_member(token, rec)
  return route_of(rec) .. '\n' .. string.format('%016.0f', tonumber(rec.place)) .. '\n' .. token
end

local function adrift_of(route, skip, most)
  local members = redis.call(
    'ZRANGEBYLEX', adrift, '[' .. route .. '\n', '(' .. route .. '\n\255', 'LIMIT', skip, most
  )
  local tokens = {}
  for i, member in ipairs(members) do tokens[i] = string.match(member, '[^\n]*$') end
  return tokens
end

local LOOKED = 1000 -- most messages that one script reads in a search

-- The first messages of a route, and a page of the others, from a different start each time.
local function some_adrift(route)
  local tokens = adrift_of(route, 0, BATCH)
  if #tokens < BATCH then return tokens end
  local others = redis.call('ZLEXCOUNT', adrift, '[' .. route .. '\n', '(' .. route .. '\n\255') - BATCH
  if others == 0 then return tokens end
  for _, token in ipairs(adrift_of(route, BATCH + now_us % others, BATCH)) do tokens[#tokens + 1] = token end
  return tokens
end

local function route_in(member) return string.match(member, '^(.*)\n%d+\n[^\n]*$') end

-- At most `most` routes of messages adrift. There may be more, so each call starts at another one and
-- continues from the last to the first.
local function routes_adrift(most)
  local total = redis.call('ZCARD', adrift)
  if total == 0 then return {} end
  local start = now_us % total
  local first = route_in(redis.call('ZRANGE', adrift, start, start)[1])
  local routes, route = {}, first
  repeat
    routes[#routes + 1] = route
    local member = redis.call('ZRANGEBYLEX', adrift, '(' .. route .. '\n\255', '+', 'LIMIT', 0, 1)[1]
      or redis.call('ZRANGE', adrift, 0, 0)[1]
    route = route_in(member)
  until route == first or #routes == most
  return routes
end

-- The routes whose messages may queue again. If there are more than one call finds, also the routes of
-- live workers. Workers of an older version are not in that list.
local function routes_to_recall()
  local routes = routes_adrift(BATCH)
  if #routes < BATCH then return routes end
  local live = redis.pcall('ZRANGEBYSCORE', fleet .. ':routes', '(' .. now, '+inf', 'LIMIT', 0, LOOKED)
  for _, route in ipairs(live) do routes[#routes + 1] = route end
  return routes
end

-- The number by which a waiter is sorted among those of its group, and of a lock without groups.
local function score_of(rec) return rec.place end

-- Each waiter enters the queue, and the line of its group, by the first function, and leaves by the second one.
local function join_queue(token, rec)
  redis.call('ZADD', queue, score_of(rec), token)
  if fair then fair.join(token, rec, score_of(rec)) end
end

local function leave_queue(token, rec)
  redis.call('ZREM', queue, token)
  if fair then fair.leave(token, rec) end
end

-- The waiter that is granted next, if the lock allows it; nil if each one waits for its group.
local function next_waiter()
  if fair then return fair.choose() end
  return redis.call('ZRANGE', queue, 0, 0)[1]
end

-- waits_for() for the queue: all of its waiters may wait for their groups.
local function queue_waits_for()
  local reason, till = waits_for()
  if reason or not (fair and fair.all_full()) then return reason, till end
  return 'group', tonumber(redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2])
end

-- End a hold, by whatever cause.
local function leave_holders(token, rec)
  redis.call('ZREM', holders, token)
  if rates then rates.drop(token, rec) end
  if fair then fair.end_hold(token, rec) end
end

-- Remove a token from the queue and from adrift; its record stays.
local function unqueue(token, rec)
  if alone then return end
  leave_queue(token, rec)
  redis.call('ZREM', deadlines, token)
  unlist_parked(token, rec)
  if rec and rec.state == 'adrift' then redis.call('ZREM', adrift, adrift_member(token, rec)) end
end

local PAGE = 16 -- live workers that are read together

-- A page of the live workers that consume a route.
local function live_of(route, skip)
  return redis.pcall('ZREVRANGEBYSCORE', fleet .. ':route:' .. route, '+inf', '(' .. now, 'LIMIT', skip, PAGE)
end

-- Whether a worker locks a task. A worker without this list is of an older version: it locks all.
local function declares(worker, task)
  local tasks = fleet .. ':tasks:' .. worker
  return redis.pcall('SISMEMBER', tasks, task) == 1 or redis.pcall('EXISTS', tasks) == 0
end

-- Live workers that consume a message's queue and lock its task. `own` is the caller's worker; the field
-- `own` of the result is true if it is one of them.
local takers_of = {}
local function takers(rec, own)
  local route, task = route_of(rec), rec.task or ''
  local wanted = route .. '\n' .. task
  if not takers_of[wanted] then
    local found, skip, live = {}, 0, live_of(route, 0)
    local till = #live > 0 and own ~= '' and redis.call('ZSCORE', fleet .. ':route:' .. route, own)
    found.own = till and tonumber(till) > now and declares(own, task)
    while #found == 0 and #live > 0 do
      for _, worker in ipairs(live) do
        if declares(worker, task) then found[#found + 1] = worker end
      end
      skip = skip + PAGE
      live = #live == PAGE and live_of(route, skip) or {}
    end
    takers_of[wanted] = found
  end
  return takers_of[wanted]
end

-- Free slots of a worker: the number in its last heartbeat, minus the grants since then.
local slots = {}
local freed = 0 -- slots of the caller's worker that become free with this call
local function free_slots(worker)
  slots[worker] = slots[worker] or tonumber(redis.pcall('GET', fleet .. ':free:' .. worker) or 0) or 0
  return slots[worker]
end

local function take_slot(worker, own)
  if worker == own and freed > 0 then
    freed = freed - 1
  else
    slots[worker] = free_slots(worker) - 1
    redis.pcall('SET', fleet .. ':free:' .. worker, slots[worker], 'XX', 'KEEPTTL')
  end
end

-- A worker with a free slot that takes the message: the caller's, else any, else nil.
local function idle_worker(rec, own)
  local live = takers(rec, own)
  if live.own and free_slots(own) + freed > 0 then return own end
  for i = 1, #live do
    local other = live[1 + (now_us + i) % #live]
    if other ~= own and free_slots(other) > 0 then return other end
  end
end

-- The worker that gets a message: one with a free slot, else the caller's, else any that takes it; false
-- if no live worker takes it.
local function worker_for(rec, own)
  local live = takers(rec, own)
  return idle_worker(rec, own) or live.own and own or live[1 + now_us % math.max(#live, 1)] or false
end

-- waits_for() for one waiter: it also waits for its group, and a parked message for a worker that takes it.
local function waiter_waits_for(rec, own)
  local reason, till = waits_for(nil, rec)
  if not reason and fair and fair.is_full(rec) then
    return 'group', tonumber(redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2])
  end
  if not reason and rec.parked and not worker_for(rec, own) then return 'worker' end
  return reason, till
end

-- Put a stored message into the inbox of a live worker that takes it, if there is one.
local function deliver(token, rec, verdict, own)
  local worker = worker_for(rec, own)
  if not worker then return end
  local body = redis.call('HGET', bodies, base_of(token)) or ''
  local head = cjson.encode({
    lock = lock, token = token, fence = rec.fence or '0', verdict = verdict, by = rec.by or '',
    whole = #body <= INBOX_BODY and '1' or '0',
    waited = digits(math.max(0, now_us - arrival_of(rec)) / 1000),
    returns = rec.returns, queue = rec.queue, excess = rec.excess, settles = rec.by and rec.settles,
  })
  local inbox = fleet .. ':inbox:' .. worker
  redis.pcall('RPUSH', inbox, head .. '\n' .. (#body <= INBOX_BODY and body or ''))
  redis.pcall('PEXPIRE', inbox, INBOX_MS)
  local prefix, bucket = string.match(fleet, '^(.*):{b(%d%d)}:fleet$')
  if bucket then redis.pcall('PUBLISH', prefix .. ':fleet:bell:' .. worker, bucket) end -- Cluster
  take_slot(worker, own)
  rec.worker = worker
end

local function wake(token)
  local list = string.sub(holders, 1, -8) .. 'wake:' .. token
  redis.pcall('RPUSH', list, '1')
  redis.pcall('PEXPIRE', list, GRACE_MS)
end

-- Make a token a holder, with the next fencing token.
local function add_holder(token, rec, state, lease)
  rec.fence = new_fence()
  set_state(rec, state)
  redis.call('ZADD', holders, now + lease, token)
  if fair then fair.hold(token, rec, state == 'granted' or state == 'running', lease) end
end

-- A holder claims its grant: its full lease begins.
local function start(token, rec)
  if rates and rec.state ~= 'running' and not starts_later then rates.note_start(token, rec) end
  if not starts_later then set_state(rec, 'running') end
  rec.ends_at_rate = nil -- what has started once waits, if it comes back
  redis.call('ZADD', holders, now + tonumber(rec.lease), token)
  if fair then fair.renew(rec, tonumber(rec.lease)) end
  save(token, rec)
end

-- A waiter gets a short lease. Within it, it must claim the grant, or its worker must renew it.
local function grant(token, rec, own)
  unqueue(token, rec)
  add_holder(token, rec, 'granted', math.min(tonumber(claim_ms), tonumber(rec.lease)))
  if rates then rates.note_grant(token, rec) end
  if rec.parked then deliver(token, rec, 'granted', own) else wake(token) end
  save(token, rec)
end

-- The index has an entry for the attempt of each waiter. If that is not the first attempt of its task, a
-- second entry is the task id with @ before it. Older versions write both for each waiter.
local function names_in_index(rec, by_older)
  local id, tries = string.match(rec.attempt, '^(.*)/(%d+/%d+)$')
  if tries == '0/0' and not by_older then return {rec.attempt} end
  return {rec.attempt, '@' .. (id or rec.attempt)}
end

-- The entries of the index under one name. One entry is plain text, which contains a line feed. Several,
-- for a task id that was used twice, are a JSON list, which contains none.
local function entries_in_index(known)
  local raw = redis.call('HGET', index, known)
  if not raw then return {} end
  return string.find(raw, '\n', 1, true) and {raw} or cjson.decode(raw)
end

-- Write the entries of a name without that of the message `but`, and with `added`, if given.
local function put_entries(known, entries, but, added)
  local left = {}
  for _, entry in ipairs(entries) do
    if base_of(entry) ~= base_of(but) then left[#left + 1] = entry end
  end
  left[#left + 1] = added
  if #left > BATCH then table.remove(left, 1) end
  if #left == 0 then return redis.call('HDEL', index, known) end
  redis.call('HSET', index, known, #left == 1 and left[1] or cjson.encode(left))
end

local function put_in_index(token, rec)
  if rec.attempt == '' then return end
  rec.indexed, index_changed = '1', true
  local mine = lock .. '\n' .. token
  for _, known in ipairs(names_in_index(rec)) do
    if redis.call('HSETNX', index, known, mine) == 0 then put_entries(known, entries_in_index(known), mine, mine) end
  end
end

-- The caller becomes a holder, and needs no claim. A copy is found by the index: see duplicate_of.
local function grant_caller(token, rec, lease)
  add_holder(token, rec, starts_later and 'granted' or 'running', lease)
  if rates and starts_later then rates.note_grant(token, rec) end
  if rates and not starts_later then rates.note_start(token, rec) end
  if rec.copy and not rec.indexed then put_in_index(token, rec) end
  save(token, rec)
end

local function enqueue(token, rec, state)
  alone = false
  set_state(rec, state)
  join_queue(token, rec)
  if rec.deadline then redis.call('ZADD', deadlines, rec.deadline, token) end
  put_in_index(token, rec)
  list_parked(token, rec)
  save(token, rec)
end

-- A message behind another one of its route and task counts as adrift since the same time as that one.
local function set_adrift(token, rec)
  became_adrift = true
  leave_queue(token, rec)
  set_state(rec, 'adrift')
  local first = adrift_of(route_of(rec), 0, 1)[1]
  local before = first and load(first)
  if before and before.task == rec.task then rec.since = before.since end
  rec.publish_at = rec.publish_at or digits(now)
  rec.publish_every = rec.publish_every or digits(PUBLISH_MS)
  redis.call('ZADD', adrift, 0, adrift_member(token, rec))
  save(token, rec)
end

-- Take a message out of the queue for publishing. From now on `copied` tells whether the published copy
-- reached a worker that locks: the reply there is 'twin', and the worker acknowledges the copy.
local function start_leaving(token, rec, seal, hold_ms)
  unqueue(token, rec)
  set_state(rec, 'leaving')
  rec.seal, rec.copied = seal, nil
  save(token, rec)
  redis.call('ZADD', deadlines, now + tonumber(hold_ms), token)
end

local function is_leaving_under(rec, seal) return rec and rec.state == 'leaving' and rec.seal == seal end

-- Publishing failed or was not needed: the message queues again at its place.
local function stop_leaving(token, rec)
  unqueue(token, rec)
  rec.seal = nil
  enqueue(token, rec, 'parked')
end

local function unindex(token, rec)
  if not rec.indexed then return end
  index_changed = true
  for _, known in ipairs(names_in_index(rec, true)) do
    local entries = entries_in_index(known)
    if #entries > 0 then put_entries(known, entries, lock .. '\n' .. token) end
  end
end

local function drop_record(token, rec)
  redis.call('HDEL', record, token)
  unindex(token, rec)
end

-- The token under which the stored message of a delivery queues again, and whether that message is the
-- one of its duplicate; nil if no message is stored.
local function next_stored(token, rec)
  local own = has_body(base_of(token))
  local stored = own and token or rec.twin and has_body(base_of(rec.twin)) and rec.twin
  if not stored then return nil end
  if not own then rec.twin = nil end
  rec.fence, rec.worker, rec.parked, rec.delayed = nil, '', '1', nil
  return next_token(stored), not own
end

-- The delivery `token` has ended, but its task has not. The stored message, or that of its duplicate,
-- queues again at its place under the next token: at once, or after `delay` ms. Its wait begins anew, or goes on.
local function end_delivery(token, rec, delay, wait_goes_on)
  drop_record(token, rec)
  local was_parked = rec.parked
  local following, is_duplicate = next_stored(token, rec)
  if not following then return end
  -- A waiter in a slot had a deadline of its own. Published copies have arrived by now.
  if is_duplicate or not was_parked or rec.state == 'running' then
    local from = wait_goes_on and math.floor(arrival_of(rec) / 1000) or now
    if not (wait_goes_on and was_parked) then rec.deadline = rec.wait and digits(from + tonumber(rec.wait)) or nil end
    rec.publish_at, rec.publish_every = nil, nil
  end
  if rec.by or rec.revoked or rec.rejected or rec.excess or rec.above_rate then rec.deadline, delay = digits(now), nil end -- it may not run
  if not delay then return enqueue(following, rec, 'parked') end
  alone, rec.delayed = false, '1'
  set_state(rec, 'leaving') -- workers of an older version queue a message in this state again, too
  put_in_index(following, rec)
  save(following, rec)
  redis.call('ZADD', deadlines, now + delay, following)
end

-- A delivery came back after it had begun, or no worker could decode it. The first time it keeps its
-- place, since its worker was stopped or crashed. Later it waits for a growing delay, so that it does
-- not block the others.
local function return_delivery(token, rec, unread)
  if rec.state ~= 'running' and not unread then return end_delivery(token, rec) end
  local times = tonumber(rec.returns or 0) + 1
  rec.returns = digits(times)
  local before = unread and times - 1 or times - 2
  end_delivery(token, rec, before >= 0 and math.min(DELAY_MS * 2 ^ before, MOST_DELAY_MS) or nil)
end

local function remember(till, ...)
  redis.call('ZREMRANGEBYSCORE', done, '-inf', now)
  for _, member in ipairs({...}) do redis.call('ZADD', done, till, member) end
  local last = redis.call('ZRANGE', done, -1, -1, 'WITHSCORES')[2]
  redis.call('PEXPIRE', done, tonumber(last) - now + GRACE_MS)
end

-- Remember the end of an attempt, if copies of its message exist or, with `feared`, may exist.
local function remember_end(token, rec, done_ms, feared)
  if rec.attempt == '' or not (rec.parked or rec.twin or rec.copied or feared) then return end
  local till = now + done_ms
  remember(till, base_of(token))
  -- A broker may redeliver a rejected message, which then must run.
  if not rec.rejected or rec.publish_at then remember(till, rec.attempt) end
end

-- The task has ended: delete its record and its stored messages.
local function forget(token, rec)
  drop_record(token, rec)
  if not alone then redis.call('HDEL', bodies, base_of(token), base_of(rec.twin or token)) end
end

local function lapse(token)
  local rec = load(token)
  leave_holders(token, rec)
  if not rec or rec.state ~= 'held_after' then count('lapses') end
  if rec then return_delivery(token, rec) end
end

-- A message has settled: it queues, with its head start.
local function end_settling(token, rec)
  if rates and rates.settling(rec.task) == token then rates.note_settling(rec.task, nil) end
  if rec.ahead then move_to(rec, digits(math.max(0, tonumber(rec.place) - tonumber(rec.ahead)))) end
  rec.settles, rec.settles_from, rec.ahead = nil, nil, nil
end

-- Queue a message again at the end of its time out of the queue. A delayed one goes behind all waiters.
local function queue_again(token, rec)
  rec.seal = nil
  if rec.delayed then
    rec.delayed = nil
    move_behind_all(rec)
    if rec.settles then end_settling(token, rec) end
    rec.deadline = rec.wait and digits(now + tonumber(rec.wait)) or nil
  end
  enqueue(token, rec, 'parked')
end

-- The deadline of a waiter has passed. A client is removed. A stored message is never removed: it is
-- delivered with a verdict, repeatedly, until a worker has ended its task.
local function expire(token, own)
  local rec = load(token)
  unqueue(token, rec)
  if not rec then return end
  if not rec.parked then return end_delivery(token, rec) end
  if rec.state == 'leaving' then
    queue_again(token, rec)
    if not rec.deadline or tonumber(rec.deadline) > now then return end
    unqueue(token, rec)
  end
  local ended = rec.by and 'replaced' or rec.excess and 'too_costly' or rec.above_rate and 'above_rate' or 'overdue'
  set_state(rec, rec.rejected and 'rejected' or rec.revoked and 'revoked' or ended)
  deliver(token, rec, rec.state, own)
  save(token, rec)
  redis.call('ZADD', deadlines, now + tonumber(claim_ms), token)
end

-- End a message that has not settled: `by` is the attempt of a later one.
local function replace_settling(token, rec, by, own)
  unqueue(token, rec)
  rec.by, rec.settles, rec.delayed, rec.state = by, '1', nil, 'parked'
  put_in_index(token, rec)
  save(token, rec)
  count('replaced')
  expire(token, own)
end

-- Debounce: a new message settles before it queues. It replaces the one of its task that settles; of the two, a
-- copy is the older one. It is out of the queue in the state of a delayed message, since scripts of an older
-- version queue such a message at its deadline, too. Returns false if it need not settle: it is the first after
-- a quiet period, and the first one shall not wait.
local function let_settle(token, rec, own)
  local quiet_ms, most_ms, run_first = unpack(wanted_flow.settle)
  rates, alone = rates or open_rates(), false
  local last = rates.note_arrival(rec.task, quiet_ms)
  local other = rates.settling(rec.task)
  local older = other and load(other)
  if not (older and older.settles and older.delayed) then older = nil end
  if not older and run_first == 1 and last + quiet_ms <= now then return false end
  if older and (rec.copy or arrival_of(rec) < arrival_of(older)) then
    replace_settling(token, rec, older.attempt, own)
    return true
  end
  if older then replace_settling(other, older, rec.attempt, own) end
  rec.settles, rec.delayed, rec.settles_from = '1', '1', older and older.settles_from or digits(now)
  rec.ahead = wanted_flow.head_start and digits(wanted_flow.head_start)
  local till = now + quiet_ms
  if most_ms > 0 then till = math.min(till, tonumber(rec.settles_from) + most_ms) end
  set_state(rec, 'leaving')
  put_in_index(token, rec)
  list_parked(token, rec)
  save(token, rec)
  redis.call('ZADD', deadlines, digits(till), token)
  rates.note_settling(rec.task, token)
  return true
end

-- A stored message was acknowledged, so its task cannot reject it at the broker. A worker publishes it
-- again in order to reject it; until then it is delivered with the verdict 'rejected'. Returns whether
-- a message is stored.
local function have_rejected(token, rec, own)
  local following = next_stored(token, rec)
  if not following then return false end
  drop_record(token, rec)
  alone, rec.rejected, rec.state = false, '1', 'parked'
  put_in_index(following, rec)
  save(following, rec)
  expire(following, own)
  return true
end

-- A waiter costs more than a rate allows, and can never start: it ends. A client asks again, and is told.
local function refuse_cost(token, rec, own)
  rec.excess = rates.excess(rec)
  save(token, rec)
  count('too_costly')
  expire(token, own)
  if not rec.parked then wake(token) end
end

-- Remove the oldest message of a task and broker from the queue, to make room for a later one. It does
-- not run: it is delivered with the verdict 'replaced' until a worker has ended its task. Without
-- priorities, the first in the queue is the oldest.
local function replace_oldest(task, attempt, realm, queue_name, own)
  local name_of_task = '"task":' .. cjson.encode(task)
  local prioritised = redis.call('HGET', meta, 'prioritised')
  local function oldest_in(page) -- in queue order; the search for the name spares decoding most records
    local skip, tokens, oldest, first = 0, page(0), nil, nil
    while #tokens > 0 do
      for i, raw in ipairs(redis.call('HMGET', record, unpack(tokens))) do
        local rec = raw and string.find(raw, name_of_task, 1, true) and cjson.decode(raw)
        if rec and rec.parked and rec.task == task and rec.realm == realm then
          if not prioritised then return tokens[i], rec end
          if not first or arrival_of(rec) < arrival_of(first) then oldest, first = tokens[i], rec end
        end
      end
      skip = skip + BATCH
      tokens = #tokens == BATCH and page(skip) or {}
    end
    return oldest, first
  end
  local oldest, first = oldest_in(function(skip) return redis.call('ZRANGE', queue, skip, skip + BATCH - 1) end)
  local route = realm .. ':' .. queue_name
  local other, rec = oldest_in(function(skip) return adrift_of(route, skip, BATCH) end)
  if other and not (first and arrival_of(first) <= arrival_of(rec)) then oldest, first = other, rec end
  if not oldest then return false end
  unqueue(oldest, first)
  first.by = attempt
  save(oldest, first)
  expire(oldest, own)
  count('replaced')
  return true
end

-- Messages adrift for which there is a live worker now queue again at their place.
local function recall(own)
  local looked = 0
  for _, route in ipairs(routes_to_recall()) do
    local live = looked < LOOKED and #live_of(route, 0) > 0
    for _, token in ipairs(live and some_adrift(route) or {}) do
      local rec = load(token)
      looked = looked + 1
      if worker_for(rec, own) then
        unqueue(token, rec)
        rec.publish_at, rec.publish_every = nil, nil
        enqueue(token, rec, 'parked')
      end
    end
  end
end

local function sweep(own)
  drop_ended_rulings()
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', now)) do lapse(token) end
  if rates then rates.drop_ended() end
  if alone then return end
  local late = redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, BATCH)
  for _, token in ipairs(late) do expire(token, own) end
  recall(own)
  if fair and sweeping then fair.repair() end
end

-- The next waiter ends if it does not wait for the rate. Returns whether there was one.
local function end_above_rate(own)
  local head = next_waiter()
  local rec = head and load(head)
  if not (rec and rec.parked and rec.ends_at_rate) then return false end
  rec.above_rate = '1'
  save(head, rec)
  expire(head, own)
  return true
end

local ended_above_rate = 0
local function next_may_start(own)
  local reason = waits_for()
  while reason == 'rate' and ended_above_rate < BATCH and end_above_rate(own) do
    ended_above_rate = ended_above_rate + 1
    reason = waits_for()
  end
  return not reason
end

-- Grant free permits in queue order, and with groups in the order of next_waiter(). Messages that no live
-- worker takes become adrift.
-- `me` is the caller's token: it gets its full lease, and needs no wake-up.
local function grant_waiters(own, me, my_record)
  if alone then return end
  if rates then rates.drop_ended() end
  local moved = 0
  while next_may_start(own) do
    local head, repaired = next_waiter()
    if not head then return end
    local rec = head == me and my_record or load(head)
    if repaired and waits_for(nil, rec) then return end -- it may cost more than the one that peek() has found
    local deadline = redis.call('ZSCORE', deadlines, head)
    if head == me then
      unqueue(head, rec)
      grant_caller(head, rec, tonumber(rec.lease))
    elseif moved == BATCH then
      return -- the next script continues: see next_look
    elseif not rec or deadline and tonumber(deadline) <= now then
      expire(head, own)
      moved = moved + 1
    elseif rates and rates.excess(rec) then
      refuse_cost(head, rec, own)
      moved = moved + 1
    elseif waiter_waits_for(rec, own) == 'worker' then
      set_adrift(head, rec)
      moved = moved + 1
    else
      grant(head, rec, own)
      moved = moved + 1
    end
  end
end

-- `meta` lives at least as long as what an operator has set, and while the lock is closed, so that lists show it.
local function live_until(until_ms, ...)
  local closed = rates and rates.closed_till() or 0
  for _, key in ipairs({...}) do
    local till = key == meta and math.max(until_ms, closed, rulings_end()) or until_ms
    if till < math.huge then redis.call('PEXPIRE', key, till - now + GRACE_MS) end
  end
end

-- When the lock must be swept next. At once, if this script set a message adrift: right after an outage
-- of Redis, the heartbeats of live workers have not arrived yet. Only a sweep postpones the time.
local function next_look(first)
  local look = tonumber(first or now + ADRIFT_MS)
  local deadline = redis.call('ZRANGE', deadlines, 0, 0, 'WITHSCORES')[2]
  if deadline then look = math.min(look, tonumber(deadline)) end
  if redis.call('ZCARD', adrift) > 0 then
    local planned = became_adrift and now or redis.call('ZSCORE', due, lock)
    look = math.min(look, tonumber(not sweeping and planned or now + ADRIFT_MS))
  end
  if redis.call('ZCARD', queue) > 0 then
    local reason, till = queue_waits_for()
    if not reason then till = now end -- one script may not move more
    look = math.min(look, till or look)
  end
  return look
end

-- Without waiters, the keys of a lock expire some time after its last lease. It needs no sweeper: the
-- next caller sweeps.
local function finish_alone()
  local last = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
  if last then live_until(tonumber(last), holders, record, meta) else live_until(now, meta) end
end

-- A holder that had waited stays in the index while it runs. If it dies without waiters behind it, the
-- lock's keys expire, but the index, which many locks share, does not. So a sweeper must remove the entry.
local function keep_indexed_due()
  local held = redis.call('ZRANGE', holders, 0, BATCH - 1)
  for i, token in ipairs(held) do
    local rec = load(token)
    if rec and rec.indexed or i == BATCH then return redis.call('ZADD', due, lease_end(token), lock) end
  end
  redis.call('ZREM', due, lock)
end

-- The state of the groups lives as long as a message, a holder or a client that waits.
local function keep_groups()
  local last = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2] or now
  local deadline = redis.call('ZRANGE', deadlines, -1, -1, 'WITHSCORES')[2] or now
  fair.keep(redis.call('EXISTS', bodies) == 1, math.max(tonumber(last), tonumber(deadline)))
end

-- Set when the keys expire, and when the lock is swept next. With a stored message they do not expire.
local function finish()
  if rates then rates.keep(redis.call('EXISTS', bodies) == 1) end
  if fair then keep_groups() end
  if alone and not index_changed then return finish_alone() end
  if redis.call('EXISTS', queue, deadlines, adrift, bodies) == 0 then
    keep_indexed_due()
    return finish_alone()
  end
  local first = redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', due, next_look(first), lock)
  if redis.call('EXISTS', bodies) == 1 then
    for _, key in ipairs({holders, queue, record, meta, deadlines, adrift}) do redis.call('PERSIST', key) end
    return
  end
  local last = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2] or now
  local deadline = redis.call('ZRANGE', deadlines, -1, -1, 'WITHSCORES')[2] or now
  live_until(math.max(tonumber(last), tonumber(deadline)), holders, queue, record, meta, deadlines)
end

local function describe(token, reason)
  local raw = token and redis.call('HGET', record, token)
  local who = raw and token .. '\n' .. raw or ''
  local why = paused or reason == 'closed' and rates.closed_why()
  if why then return (raw and who or '\n') .. '\n' .. why end
  return who
end

-- waits_for() for a reply: it tells a close, which ends by itself, from an operator's pause.
local function told_reason(held)
  local reason, till = waits_for(held)
  return reason == 'pause' and till and not paused and 'closed' or reason, till
end

local function answer(verdict, token, rec)
  local first = redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')
  local next_look_ms = first[2] and tonumber(first[2]) - now or 0
  if verdict == 'granted' or verdict == 'released' or verdict == 'charged' then -- with the time of the next start, for a timer
    local reason, till
    if (rates or paused) and redis.call('ZCARD', queue) > 0 then reason, till = told_reason() end
    till = (reason == 'rate' or reason == 'closed' or reason == 'pause') and till
    local look, why = till and till - now or next_look_ms, till and reason or ''
    if verdict ~= 'granted' then return line(verdict, '0', 0, 0, look, why, '') end
    return line(verdict, rec.fence, lease_end(token) - now, 0, look, why, '')
  end
  if verdict == 'too_costly' then return line(verdict, '0', 0, 0, 0, rates.excess(rec), '') end
  local rank = not alone and redis.call('ZRANK', queue, token)
  local reason, till = '', nil
  if verdict == 'waiting' or verdict == 'blocked' or verdict == 'full' then
    reason, till = told_reason(kept_for_me and redis.call('ZCARD', holders) - 1)
    if verdict == 'blocked' and reason == 'holder' and rates and wanted_flow and wanted_flow.ends_at_rate then
      local limited, opens = rates.waits(rec)
      if limited then reason, till = limited, opens end
    end
    if not reason and fair and fair.is_full(rec or load(token) or {}) then reason = 'group' end
    reason = reason or 'queue'
  end
  if verdict == 'waiting' and not rank then -- adrift; or granted just now, or stored under a later number
    local mine = load(token)
    if mine and mine.settles and mine.delayed then
      local settled = tonumber(redis.call('ZSCORE', deadlines, token))
      return line(verdict, '0', 0, 0, settled - now, 'settling', '')
    end
    if not mine or mine.state ~= 'adrift' then reason = '' elseif reason == 'queue' then reason = 'worker' end
  end
  if till then next_look_ms = till - now end
  return line(verdict, '0', 0, rank and rank + 1 or 0, next_look_ms, reason, describe(first[1], reason))
end

-- The token and record of an attempt that waits, or waited before its grant, or nil.
-- `fits` decides which message counts; without it, any does.
local function indexed(attempt, fits)
  for _, entry in ipairs(attempt ~= '' and entries_in_index(attempt) or {}) do
    local of, token = string.match(entry, '^(.*)\n([^\n]*)$')
    local rec = of == lock and load(token)
    if rec and standing(token, rec) then
      if not fits or fits(token, rec) then return token, rec end
    elseif of == lock then
      put_entries(attempt, entries_in_index(attempt), entry) -- out of date: the lock's keys have expired
    end
  end
end

local FEW = 10 -- the records of as many holders are all read in a search; of their tokens, ten times as many

-- 47 bits, so that each product is exact. Two attempts with one digest only cost time.
local function digest_of(attempt)
  local digest = 0
  for i = 1, #attempt do digest = (31 * digest + string.byte(attempt, i)) % 2 ^ 47 end
  return digits(digest)
end

-- Add the holders that `attempts` misses. Remove former holders when they are many.
local function read_new_holders(attempts)
  local held, page = redis.call('ZCARD', holders), {}
  if redis.call('ZCARD', attempts) > 2 * held + BATCH then
    redis.call('ZINTERSTORE', attempts, 2, attempts, holders, 'WEIGHTS', 1, 0)
  end
  local function add_page()
    local scored = {}
    for i, raw in ipairs(redis.call('HMGET', record, unpack(page))) do
      if raw then
        scored[#scored + 1] = digest_of(cjson.decode(raw).attempt)
        scored[#scored + 1] = page[i]
      end
    end
    if #scored > 0 then redis.call('ZADD', attempts, unpack(scored)) end
    page = {}
  end
  for _, token in ipairs(redis.call('ZDIFF', 2, holders, attempts)) do
    page[#page + 1] = token
    if #page == BATCH then add_page() end
  end
  if #page > 0 then add_page() end
  redis.call('ZADD', attempts, digits(last_fence), '')
  redis.call('PEXPIRE', attempts, GRACE_MS)
end

-- Tokens among which is each holder with this attempt. Of many holders, `attempts` (ZSET, token -> digest
-- of its attempt) has those that an earlier search has read, so that a search reads only later ones. Grants
-- do not write it, so those of an older version need not. The score of its member '' is the fencing token of
-- the last grant at that search: while that has not changed, no holder is missing. It may have former
-- holders, whose records are gone.
local function among_holders(attempt, few)
  local tokens = redis.call('ZRANGE', holders, 0, few)
  if #tokens <= few then return tokens end
  local attempts = string.sub(holders, 1, -8) .. 'attempts'
  local known = redis.pcall('ZSCORE', attempts, '')
  if type(known) == 'table' then return redis.call('ZRANGE', holders, 0, -1) end -- the key of another program
  if not known or tonumber(known) ~= last_fence then read_new_holders(attempts) end
  local digest = digest_of(attempt)
  return redis.call('ZRANGEBYSCORE', attempts, digest, digest)
end

-- The token and record of the holder with this attempt whose token begins with `start`, or nil.
local function holder_of(attempt, start)
  for _, token in ipairs(among_holders(attempt, start == '' and FEW or 10 * FEW)) do
    local rec = string.find(token, start, 1, true) == 1 and load(token)
    if rec and rec.attempt == attempt and rec.state ~= 'reserved' then return token, rec end
  end
end

-- The token and record of an attempt that holds or waits already, or nil.
local function find(attempt)
  if attempt == '' then return nil end
  local token, rec = holder_of(attempt, '')
  if token then return token, rec end
  return indexed(attempt)
end

-- The token and record of another delivery of the same message: one of the two is marked as a copy, or
-- both have the same base. Any other message with this attempt is a call of its own. Only for a copy do
-- all holders count, since the index has every copy.
local function duplicate_of(token, attempt, copy)
  if copy ~= '0' or attempt == '' then return find(attempt) end
  local base = base_of(token)
  local other, rec = holder_of(attempt, base .. '.')
  if other then return other, rec end
  return indexed(attempt, function(other, rec) return rec.copy or base_of(other) == base end)
end

-- A place before all waiters in the queue, and not behind the place of `rec`.
local function place_before_all(rec)
  local head = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')[2]
  return digits(math.min(tonumber(rec.place), head and tonumber(head) - 1 or math.huge))
end

-- A retried task reserves its permit for its next attempt: the reservation is a holder that nobody can
-- claim, and that lapses like any other. If that attempt waits already, it is granted instead; or, if the
-- lock is granted to nobody now, it becomes the first of the queue.
local function reservation_of(attempt) return 'keep:' .. attempt end

local function reserve(attempt, ms, rec, own)
  if redis.call('ZCARD', holders) >= limit then return end -- no permit is left to reserve, paused or not
  local token, waits = find(attempt)
  if token then
    local deadline = redis.call('ZSCORE', deadlines, token)
    local in_time = not (deadline and tonumber(deadline) <= now)
    if standing(token, waits) ~= 'queue' or not in_time then return end
    if rates and rates.excess(waits) then return end -- it ends when its turn comes
    local reason = waiter_waits_for(waits, own)
    if not reason then return grant(token, waits, own) end
    if reason == 'worker' then return end
    unqueue(token, waits)
    move_to(waits, place_before_all(rec))
    return enqueue(token, waits, waits.state)
  end
  token = reservation_of(attempt)
  local reserved = {attempt = attempt, task = rec.task, lease = digits(ms), place = rec.place}
  if fair then fair.assign(reserved, rec) end
  add_holder(token, reserved, 'reserved', ms)
  save(token, reserved)
end

-- End the reservation of an attempt that has arrived. Returns whether the attempt may start with that
-- permit. In a pause, a quarantine or above a rate it may not: then the second result is the place at which it queues,
-- before all others. If it does not queue (`queues` is false), the reservation stays.
local function take_reservation(attempt, queues, rec)
  local token = reservation_of(attempt)
  if attempt == '' or not lease_end(token) then return false end
  local reason = waits_for(redis.call('ZCARD', holders) - 1, rec)
  local later = reason == 'pause' or reason == 'redis' or reason == 'rate'
  local ends = reason == 'rate' and not queues and wanted_flow and wanted_flow.ends_at_rate -- it does not come again
  kept_for_me = later and not queues and not ends
  if kept_for_me then return false end
  local place = later and place_before_all(load(token)) or nil
  leave_holders(token, fair and load(token))
  redis.call('HDEL', record, token)
  return not reason, place
end

-- Whether a message is stored already, under this or another number of its token. If the stored message
-- is leaving, the caller has the published copy, and acknowledges it.
local function is_stored(token, attempt)
  local other, rec = indexed(attempt, function(other, rec) return rec.parked and base_of(other) == base_of(token) end)
  if rec and rec.state == 'leaving' and not rec.copied then
    rec.copied = '1'
    save(other, rec)
  end
  return other ~= nil or has_body(base_of(token))
end

local function is_done(member)
  if not remembers or member == '' then return false end
  local till = redis.call('ZSCORE', done, member)
  return till and tonumber(till) > now
end

-- Whether the queue has reached its limit.
local function is_full(most)
  if most == '' or alone and tonumber(most) > 0 then return false end
  return redis.call('ZCARD', queue) + redis.call('ZCARD', adrift) >= tonumber(most)
end
