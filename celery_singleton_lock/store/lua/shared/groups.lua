-- Groups: shares of the starts by weight, and limits of a group.

-- Fairness: each waiter of a lock belongs to a group, and start-time fair queueing chooses the group that is
-- next. A start adds 1/weight to the virtual time of its group. The group with the lowest virtual time is next; if
-- several have it, the one whose first waiter came first. Within a group the score decides. A waiter without a group
-- belongs to the group ''. A group is in one of three sorted sets, with its virtual time:
--   flow:groups   it has a waiter, and is below its limit; the members begin with the score of that waiter,
--                 so flow:heads has the member of each group
--   flow:full     it has a waiter, and is at its limit: it returns to flow:groups when a holder of it ends
--   flow:idle     it has no waiter; those behind the virtual time of the lock, and the oldest of many, are
--                 forgotten: a group gains nothing while it has no waiter
-- A line may have tokens that an older version has taken out of the queue, so its first token is looked up in the
-- queue.
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
  -- Whether as many of the group hold the lock as its waiter allows. Tokens that no longer hold it do not count.
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
  -- Put a group into its sorted set, with this virtual time.
  local function place_group(group, start)
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
    if call('ZRANK', line, token) == 0 then place_group(group, next_start(group)) end
  end
  local function leave(token, rec)
    local group = group_of(token, rec)
    local rank = call('ZRANK', line_of(group), token)
    if not rank then return end
    local start = rank == 0 and next_start(group)
    call('ZREM', line_of(group), token)
    if start then place_group(group, start) end
  end
  -- A token has become a holder; `starts` is false for a reservation, which is not a start.
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
    place_group(group, start)
    call('ZREMRANGEBYSCORE', idle, '-inf', exact(at))
    call('ZREMRANGEBYRANK', idle, 0, -MOST_IDLE - 1)
  end
  local function end_hold(token, rec)
    local group = rec and rec.group or ''
    call('ZREM', running_of(group), token)
    if call('ZSCORE', full, group) then place_group(group, next_start(group)) end
  end
  -- The first waiter of the group that is next; nil if each group with a waiter is at its limit. The second result is
  -- true if it may differ from the result of peek().
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
      place_group(group, start)
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
      place_group(group, next_start(group))
    end
    local skip = now_us % math.max(1, call('ZCARD', full) - BATCH + 1)
    for _, group in ipairs(call('ZRANGE', full, skip, skip + BATCH - 1)) do
      local running = running_of(group)
      local left = call('PTTL', running)
      if call('ZINTERSTORE', running, 2, running, holders, 'WEIGHTS', 1, 0) > 0 and left > 0 then
        call('PEXPIRE', running, left)
      end
      place_group(group, next_start(group))
    end
  end
  -- The lock gets groups now. Waiters from before belong to the group ''.
  local function begin()
    call('DEL', groups, heads, full, idle)
    call('HSET', flow, 'vt', exact(at))
    if alone or call('ZUNIONSTORE', line_of(''), 1, queue) == 0 then return end
    if call('PTTL', queue) > 0 then call('PEXPIRE', line_of(''), call('PTTL', queue)) end
    place_group('', at)
  end
  -- The first call without a stored message finds keys that do not expire. Then the line of a group of clients may be
  -- such a key, too.
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
  -- How many groups have a waiter, then name, waiters and 1 for a group at its limit, the largest first. If there are
  -- very many groups, only the next ones are read, so that Redis is not blocked.
  local function view()
    local READ, SHOWN = 500, 10
    local found, shown = {}, {call('ZCARD', groups) + call('ZCARD', full)}
    local function add(group, is_at_limit) found[#found + 1] = {group, call('ZCARD', line_of(group)), is_at_limit} end
    local function larger(one, other)
      return one[2] > other[2] or one[2] == other[2] and one[1] < other[1]
    end
    for _, member in ipairs(call('ZRANGE', groups, 0, READ - 1)) do add(string.sub(member, 18), 0) end
    for _, group in ipairs(call('ZRANGE', full, 0, READ - 1)) do add(group, 1) end
    table.sort(found, larger)
    for i = 1, math.min(#found, SHOWN) do
      for _, value in ipairs(found[i]) do shown[#shown + 1] = value end
    end
    return shown
  end
  local function assign(rec, of) rec.group, rec.group_limit, rec.group_weight = of.group, of.group_limit, of.group_weight end
  return {
    join = join, leave = leave, hold = hold, end_hold = end_hold, choose = choose, peek = peek, is_full = is_full, repair = repair, view = view,
    all_full = function() return call('ZCARD', groups) == 0 end, begin = begin, keep = keep, assign = assign, line_of = function(rec) return line_of(rec.group or '') end,
    renew = function(rec, lease)
      local running = running_of(rec.group or '')
      call('PEXPIRE', running, digits(math.max(call('PTTL', running), lease + GRACE_MS)))
    end,
  }
end
