-- What the verbs share: one lock's state, and the few ways in which it changes.
--
-- Lua has no roll-back, so a verb reads (and so checks the type of) everything before it writes.
-- What is not the lock's own (inboxes, wake lists, routes) is touched with pcall: if another program
-- owns such a key, a wake-up or a route is missing, and no change of the lock is left half done.
-- Numbers of 16 digits are written with %.0f: tostring would round them to 14.
local GRACE_MS = 60000   -- how long keys outlive the last lease, so that fences go on
local ADRIFT_MS = 5000   -- a lock with messages that nobody consumes is looked at after this
local PUBLISH_MS = 2000  -- pause after such a message could not be published; it doubles
local BATCH = 100        -- most waiters that one script moves
local INBOX_BODY = 65536 -- longer bodies do not travel through the inbox
local INBOX_MS = 600000  -- inbox of a worker that went away
local DELAY_MS = 1000    -- first delay of a message that keeps coming back; it doubles
local MOST_DELAY_MS = 60000

local WAITS = {
  waiting = 'queue', parked = 'queue', adrift = 'adrift',
  overdue = 'overdue', replaced = 'overdue', revoked = 'overdue', rejected = 'overdue',
  leaving = 'overdue', -- out of the line until its deadline, then it queues again
}

local now_text = server_time()
local now_us = tonumber(now_text)
local now = math.floor(now_us / 1000)

local lock -- the name of the one that the functions below work on; a verb's first line says it
local holders, queue, record, meta, bodies, deadlines, adrift, done, due, index, fleet = unpack(KEYS, 1, 11)
local limit, last_fence, grants
local declared        -- the lowest limit that who holds or waits has declared
local paused, ruled   -- set by operators: no grants, and a limit that goes before the declared ones
local alone      -- nobody waits and no message is kept: what concerns the queue can be left out
local remembers  -- some ended attempts are remembered
local unnamed    -- the index has forgotten one
local sweeping   -- this look is a sweeper's
local strayed    -- a message has gone adrift in it

local function digits(n) return string.format('%.0f', n) end

-- One text, since a client reads that in one go.
local function line(verdict, fence, left_ms, rank, look_ms, who)
  return table.concat({verdict, fence, left_ms, rank, look_ms, limit, who}, '\n')
end

-- For a verb about many locks: work on the one whose keys start behind KEYS[offset] from here on.
local function use(offset, lock_name)
  lock = lock_name
  holders, queue, record, meta, bodies, deadlines, adrift, done, due, index, fleet = unpack(KEYS, offset + 1, offset + 11)
end

-- GATE
-- The gate is open: see _quarantine.lua, which takes the place of these two.
local function closed_until() return false end

local function note_lease() end
-- END OF GATE

-- Read every key once, so that a key of another type fails the script before it has written.
local function check()
  closed_until()
  alone = redis.call('EXISTS', queue, bodies, deadlines, adrift) == 0
  redis.call('ZCARD', holders)
  redis.call('HLEN', record)
  remembers = redis.call('ZCARD', done) > 0
  local m = redis.call('HMGET', meta, 'limit', 'fence', 'grants', 'paused', 'ruled')
  declared, last_fence, grants = tonumber(m[1] or 1), tonumber(m[2] or 0), tonumber(m[3] or 0)
  paused, ruled = m[4], m[5] and tonumber(m[5])
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

-- A full Redis refuses only a script's first write. Verbs that take memory begin with this one ...
local function refuse_if_full() redis.call('HSET', meta, 'name', lock, 'schema', '1') end

-- ... and verbs that must work on a full Redis with this no-op, which is not refused.
local function write_though_full() redis.call('PERSIST', holders) end

local function load(token)
  local raw = redis.call('HGET', record, token)
  return raw and cjson.decode(raw) or nil
end

local function become(rec, state)
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

-- End of a token's lease, even of a lapsed one; nil if it does not hold the lock.
local function lease_end(token) return tonumber(redis.call('ZSCORE', holders, token) or nil) end

-- Where a token stands: 'holder', 'queue', 'adrift', 'overdue' or nil.
local function standing(token, rec)
  if not rec then return nil end
  return WAITS[rec.state] or lease_end(token) and 'holder' or nil
end

-- The lowest limit that any holder or waiter declared; an idle lock takes the newcomer's.
local function declare(wanted)
  local idle = redis.call('EXISTS', holders) == 0 and (alone or redis.call('EXISTS', queue, bodies, deadlines) == 0)
  if wanted < declared or idle and wanted ~= declared then
    declared = wanted
    limit = ruled or declared
    redis.call('HSET', meta, 'limit', declared)
  end
end

-- Whether a permit is free, and operators let it be granted.
local function has_permit() return not paused and not closed_until() and redis.call('ZCARD', holders) < limit end

-- Who names no place goes behind everybody, whatever the clock says.
local function place_of(wanted)
  if wanted > 0 then return digits(math.min(wanted, now_us)) end
  local tail = not alone and redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')[2]
  return digits(math.max(now_us, tonumber(tail or 0) + 1))
end

local function new_fence()
  last_fence = math.max(last_fence + 1, now_us)
  grants = grants + 1
  redis.call('HSET', meta, 'fence', digits(last_fence), 'grants', digits(grants), 'limit', declared)
  return digits(last_fence)
end

-- Messages that nobody consumes are sorted by route, then by place: a route whose worker is back is
-- found without a look at the others.
local function route_of(rec) return rec.realm .. ':' .. rec.queue end

-- How many messages of a route wait, and since when, is what autoscalers ask: so they are listed by
-- route too, wherever their lock lives. Nothing is decided by that.
local function list_parked(token, rec)
  if not rec.parked then return end
  redis.pcall('ZADD', fleet .. ':parked:' .. route_of(rec), rec.place, token)
  redis.pcall('SADD', fleet .. ':parked', route_of(rec))
end

local function unlist_parked(token, rec)
  if not (rec and rec.parked) then return end
  local list = fleet .. ':parked:' .. route_of(rec)
  if redis.pcall('ZREM', list, token) == 1 and redis.pcall('EXISTS', list) == 0 then
    redis.pcall('SREM', fleet .. ':parked', route_of(rec))
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

local LOOKED = 1000 -- most messages that one script looks at in search of some

-- The first messages of a route, and others of it, from another start each time.
local function some_adrift(route)
  local tokens = adrift_of(route, 0, BATCH)
  if #tokens < BATCH then return tokens end
  local others = redis.call('ZLEXCOUNT', adrift, '[' .. route .. '\n', '(' .. route .. '\n\255') - BATCH
  if others == 0 then return tokens end
  for _, token in ipairs(adrift_of(route, BATCH + now_us % others, BATCH)) do tokens[#tokens + 1] = token end
  return tokens
end

local function route_in(member) return string.match(member, '^(.*)\n%d+\n[^\n]*$') end

-- The routes of messages adrift, at most so many. They are walked in a circle, from another start
-- each time, since there may be more of them.
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

-- The routes that a worker has told that it consumes.
local function routes_of(worker)
  local raw = worker ~= '' and redis.pcall('GET', fleet .. ':worker:' .. worker)
  if type(raw) ~= 'string' then return {} end
  local about, routes = cjson.decode(raw), {}
  for i, name in ipairs(about.queues) do routes[i] = about.realm .. ':' .. name end
  return routes
end

-- Those of the caller first, whatever else is adrift; then others.
local function routes_to_look_at(own)
  local others, routes, known = routes_adrift(BATCH), {}, {}
  if #others == 0 then return others end
  for _, each in ipairs({#others == BATCH and routes_of(own) or {}, others}) do
    for _, route in ipairs(each) do
      if not known[route] then routes[#routes + 1] = route end
      known[route] = true
    end
  end
  return routes
end

-- Take a token out of the line; its record stays.
local function unqueue(token, rec)
  if alone then return end
  redis.call('ZREM', queue, token)
  redis.call('ZREM', deadlines, token)
  unlist_parked(token, rec)
  if rec and rec.state == 'adrift' then redis.call('ZREM', adrift, adrift_member(token, rec)) end
end

local PAGE = 16 -- live workers that are looked at together

-- Some of the live workers that consume a route.
local function live_of(route, skip)
  return redis.pcall('ZREVRANGEBYSCORE', fleet .. ':route:' .. route, '+inf', '(' .. now, 'LIMIT', skip, PAGE)
end

-- Whether a worker locks a task. One that has told nothing is of an older version, and takes all.
local function declares(worker, task)
  local tasks = fleet .. ':tasks:' .. worker
  return redis.pcall('SISMEMBER', tasks, task) == 1 or redis.pcall('EXISTS', tasks) == 0
end

-- Live workers that consume a message's queue and lock its task, and whether the caller's own is one.
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

-- Free slots that a worker told with its last heartbeat, less what it was granted since.
local slots = {}
local freed = 0 -- slots of the caller's own worker that this very call frees
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

-- A taker of a message with a free slot: the caller's own, else any, else nil.
local function idle_worker(rec, own)
  local live = takers(rec, own)
  if live.own and free_slots(own) + freed > 0 then return own end
  for i = 1, #live do
    local other = live[1 + (now_us + i) % #live]
    if other ~= own and free_slots(other) > 0 then return other end
  end
end

-- The worker that gets a message: a taker with a free slot, else the caller's own, else any, else
-- false.
local function worker_for(rec, own)
  local live = takers(rec, own)
  return idle_worker(rec, own) or live.own and own or live[1 + now_us % math.max(#live, 1)] or false
end

-- Hand a parked message to a live worker that consumes its queue, if there is one.
local function deliver(token, rec, verdict, own)
  local worker = worker_for(rec, own)
  if not worker then return end
  local body = redis.call('HGET', bodies, base_of(token)) or ''
  local head = cjson.encode({
    lock = lock, token = token, fence = rec.fence or '0', verdict = verdict, by = rec.by or '',
    whole = #body <= INBOX_BODY and '1' or '0',
    waited = digits(math.max(0, now_us - tonumber(rec.place)) / 1000),
    returns = rec.returns, queue = rec.queue,
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

-- Write a token in as holder, with the next fence.
local function write_in(token, rec, state, lease)
  rec.fence = new_fence()
  become(rec, state)
  redis.call('ZADD', holders, now + lease, token)
end

-- Begin to use what is held, with a full lease from now.
local function start(token, rec)
  become(rec, 'running')
  redis.call('ZADD', holders, now + tonumber(rec.lease), token)
  save(token, rec)
end

-- A waiter gets a short lease, in which it must claim (or its worker renew) its grant.
local function grant(token, rec, own)
  unqueue(token, rec)
  write_in(token, rec, 'granted', math.min(tonumber(claim_ms), tonumber(rec.lease)))
  if rec.parked then deliver(token, rec, 'granted', own) else wake(token) end
  save(token, rec)
end

-- Under which names the index knows who waits: its attempt, and its task id for who knows no more.
local function names_in_index(rec)
  return {rec.attempt, '@' .. (string.match(rec.attempt, '^(.*)/%d+/%d+$') or rec.attempt)}
end

-- What the index knows under a name: as a rule one entry, as plain text. A task id that was used twice
-- has several, as a JSON list, in which no line ends.
local function entries_in_index(known)
  local raw = redis.call('HGET', index, known)
  if not raw then return {} end
  return string.find(raw, '\n', 1, true) and {raw} or cjson.decode(raw)
end

-- Write the entries of a name anew, without that of one message.
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
  rec.indexed = '1'
  local mine = lock .. '\n' .. token
  for _, known in ipairs(names_in_index(rec)) do
    if redis.call('HSETNX', index, known, mine) == 0 then put_entries(known, entries_in_index(known), mine, mine) end
  end
end

local function enqueue(token, rec, state)
  alone = false
  become(rec, state)
  redis.call('ZADD', queue, rec.place, token)
  if rec.deadline then redis.call('ZADD', deadlines, rec.deadline, token) end
  put_in_index(token, rec)
  list_parked(token, rec)
  save(token, rec)
end

-- One that follows others of its task has waited for a worker as long as they have.
local function set_adrift(token, rec)
  strayed = true
  redis.call('ZREM', queue, token)
  become(rec, 'adrift')
  local first = adrift_of(route_of(rec), 0, 1)[1]
  local before = first and load(first)
  if before and before.task == rec.task then rec.since = before.since end
  rec.publish_at = rec.publish_at or digits(now)
  rec.publish_every = rec.publish_every or digits(PUBLISH_MS)
  redis.call('ZADD', adrift, 0, adrift_member(token, rec))
  save(token, rec)
end

-- Take a message out of the line: it leaves for the broker. From now on `copied` tells whether a copy
-- has come to a worker that locks, which was told TWIN and has acknowledged it.
local function send_off(token, rec, seal, hold_ms)
  unqueue(token, rec)
  become(rec, 'leaving')
  rec.seal, rec.copied = seal, nil
  save(token, rec)
  redis.call('ZADD', deadlines, now + tonumber(hold_ms), token)
end

local function has_left_under(rec, seal) return rec and rec.state == 'leaving' and rec.seal == seal end

-- It does not leave: it queues again at its place.
local function stay(token, rec)
  unqueue(token, rec)
  rec.seal = nil
  enqueue(token, rec, 'parked')
end

local function unindex(token, rec)
  if not rec.indexed then return end
  unnamed = true
  for _, known in ipairs(names_in_index(rec)) do
    local entries = entries_in_index(known)
    if #entries > 0 then put_entries(known, entries, lock .. '\n' .. token) end
  end
end

local function drop_record(token, rec)
  redis.call('HDEL', record, token)
  unindex(token, rec)
end

-- The token under which the kept message of a delivery stands next, and whether it is that of its twin.
local function next_kept(token, rec)
  local own = has_body(base_of(token))
  local kept = own and token or rec.twin and has_body(base_of(rec.twin)) and rec.twin
  if not kept then return nil end
  if not own then rec.twin = nil end
  rec.fence, rec.worker, rec.parked, rec.delayed = nil, '', '1', nil
  return next_token(kept), not own
end

-- The delivery `token` is over, the task is not: its body, or its twin, queues at the old place,
-- under a token that nobody has held yet; or it stays out of the line for a while first.
local function go_back(token, rec, delay)
  drop_record(token, rec)
  local following, is_twin = next_kept(token, rec)
  if not following then return end
  if is_twin or rec.state == 'running' then -- its wait is another one; copies that were on their way have arrived
    rec.deadline = rec.wait and digits(now + tonumber(rec.wait)) or nil
    rec.publish_at, rec.publish_every = nil, nil
  end
  if rec.by or rec.revoked or rec.rejected then rec.deadline, delay = digits(now), nil end -- it may not run
  if not delay then return enqueue(following, rec, 'parked') end
  alone, rec.delayed = false, '1'
  become(rec, 'leaving') -- a state that workers of a former version have queue again, too
  put_in_index(following, rec)
  save(following, rec)
  redis.call('ZADD', deadlines, now + delay, following)
end

-- A delivery that had begun comes back, or one of which no worker could make a task. The first time it
-- keeps its place: its worker was stopped, or crashed. After that others pass, for a growing delay.
local function come_back(token, rec, unread)
  if rec.state ~= 'running' and not unread then return go_back(token, rec) end
  local times = tonumber(rec.returns or 0) + 1
  rec.returns = digits(times)
  local before = unread and times - 1 or times - 2
  go_back(token, rec, before >= 0 and math.min(DELAY_MS * 2 ^ before, MOST_DELAY_MS) or nil)
end

local function remember(till, ...)
  redis.call('ZREMRANGEBYSCORE', done, '-inf', now)
  for _, member in ipairs({...}) do redis.call('ZADD', done, till, member) end
  local last = redis.call('ZRANGE', done, -1, -1, 'WITHSCORES')[2]
  redis.call('PEXPIRE', done, tonumber(last) - now + GRACE_MS)
end

-- Remember that an attempt has ended for good, where copies of it are known or feared.
local function remember_end(token, rec, done_ms, feared)
  if rec.attempt == '' or not (rec.parked or rec.twin or rec.copied or feared) then return end
  local till = now + done_ms
  remember(till, base_of(token))
  -- Of a rejected one a broker may bring the message back, and then it is to run.
  if not rec.rejected or rec.publish_at then remember(till, rec.attempt) end
end

-- The task is settled: drop all that is kept of it.
local function forget(token, rec)
  drop_record(token, rec)
  if not alone then redis.call('HDEL', bodies, base_of(token), base_of(rec.twin or token)) end
end

local function lapse(token)
  redis.call('ZREM', holders, token)
  local rec = load(token)
  if not rec or rec.state ~= 'held_after' then count('lapses') end
  if rec then come_back(token, rec) end
end

-- A message that was out of the line for a while; one that was delayed comes behind those who wait.
local function queue_again(token, rec)
  rec.seal = nil
  if rec.delayed then
    rec.delayed, rec.place = nil, place_of(0)
    rec.deadline = rec.wait and digits(now + tonumber(rec.wait)) or nil
  end
  enqueue(token, rec, 'parked')
end

-- A waiter whose time has come: a client that went away is dropped; a message is never dropped, it
-- is delivered with a verdict, again and again until a worker settles it.
local function expire(token, own)
  local rec = load(token)
  unqueue(token, rec)
  if not rec then return end
  if not rec.parked then return go_back(token, rec) end
  if rec.state == 'leaving' then return queue_again(token, rec) end
  become(rec, rec.rejected and 'rejected' or rec.revoked and 'revoked' or rec.by and 'replaced' or 'overdue')
  deliver(token, rec, rec.state, own)
  save(token, rec)
  redis.call('ZADD', deadlines, now + tonumber(claim_ms), token)
end

-- A message that is kept was acknowledged, so its task could not reject it: a worker publishes it to
-- be rejected. Until then it is delivered with that verdict. Returns whether one is kept.
local function have_rejected(token, rec, own)
  local following = next_kept(token, rec)
  if not following then return false end
  drop_record(token, rec)
  alone, rec.rejected, rec.state = false, '1', 'parked'
  put_in_index(following, rec)
  save(following, rec)
  expire(following, own)
  return true
end

-- Let the oldest message of a task (and a broker) make room for a later one. It does not run, and is
-- no more lost than one whose wait is over: it is delivered with a verdict until a worker has ended it.
local function replace_oldest(task, attempt, realm, queue_name, own)
  local name_of_task = '"task":' .. cjson.encode(task)
  local function oldest_in(page) -- in the order of the places; most records are not decoded
    local skip, tokens = 0, page(0)
    while #tokens > 0 do
      for i, raw in ipairs(redis.call('HMGET', record, unpack(tokens))) do
        local rec = raw and string.find(raw, name_of_task, 1, true) and cjson.decode(raw)
        if rec and rec.parked and rec.task == task and rec.realm == realm then return tokens[i], rec end
      end
      skip = skip + BATCH
      tokens = #tokens == BATCH and page(skip) or {}
    end
  end
  local oldest, first = oldest_in(function(skip) return redis.call('ZRANGE', queue, skip, skip + BATCH - 1) end)
  local route = realm .. ':' .. queue_name
  local other, rec = oldest_in(function(skip) return adrift_of(route, skip, BATCH) end)
  if other and not (first and tonumber(first.place) <= tonumber(rec.place)) then oldest, first = other, rec end
  if not oldest then return false end
  unqueue(oldest, first)
  first.by = attempt
  save(oldest, first)
  expire(oldest, own)
  count('replaced')
  return true
end

-- Messages for which a worker has come (back) queue again at their place.
local function recall(own)
  local looked = 0
  for _, route in ipairs(routes_to_look_at(own)) do
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
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', now)) do lapse(token) end
  if alone then return end
  local late = redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, BATCH)
  for _, token in ipairs(late) do expire(token, own) end
  recall(own)
end

-- Grant free permits in order of arrival, passing by only what no live worker consumes.
-- `me` asks itself in this very call: it gets its full lease, and no wake-up.
local function grant_waiters(own, me, my_record)
  if alone then return end
  if paused or closed_until() then return end
  local free = limit - redis.call('ZCARD', holders)
  local moved = 0
  while free > 0 do
    local head = redis.call('ZRANGE', queue, 0, 0)[1]
    if not head then return end
    local rec = head == me and my_record or load(head)
    local deadline = redis.call('ZSCORE', deadlines, head)
    if head == me then
      unqueue(head, rec)
      write_in(head, rec, 'running', tonumber(rec.lease))
      save(head, rec)
      free = free - 1
    elseif moved == BATCH then
      return -- the next one goes on: see next_look
    elseif not rec or deadline and tonumber(deadline) <= now then
      expire(head, own)
      moved = moved + 1
    elseif rec.parked and not worker_for(rec, own) then
      set_adrift(head, rec)
      moved = moved + 1
    else
      grant(head, rec, own)
      free = free - 1
    end
  end
end

-- What operators have set lives in meta, which then outlives the lock, until they take it back.
local function live_until(until_ms, ...)
  for _, key in ipairs({...}) do
    if key ~= meta or not (paused or ruled) then redis.call('PEXPIRE', key, until_ms - now + GRACE_MS) end
  end
end

-- When a sweeper must look again. What others set adrift it looks at without delay: after Redis was
-- away no worker has told yet that it lives, and all are about to. Only a sweeper puts a look off.
local function next_look(first)
  local look = tonumber(first or now + ADRIFT_MS)
  local deadline = redis.call('ZRANGE', deadlines, 0, 0, 'WITHSCORES')[2]
  if deadline then look = math.min(look, tonumber(deadline)) end
  if redis.call('ZCARD', adrift) > 0 then
    local planned = strayed and now or redis.call('ZSCORE', due, lock)
    look = math.min(look, tonumber(not sweeping and planned or now + ADRIFT_MS))
  end
  -- A free permit beside waiters: more had to be moved than one script may.
  if redis.call('ZCARD', queue) > 0 then
    if has_permit() then look = math.min(look, now) end
    look = math.min(look, closed_until() or look)
  end
  return look
end

-- The keys of a lock for which nobody waits live a while longer than its last lease. No sweeper
-- wants to look at it, since whoever asks next sweeps.
local function finish_alone()
  local last = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
  if last then live_until(tonumber(last), holders, record, meta) else live_until(now, meta) end
end

-- Who has waited is named in the index as long as it runs. Should it die with nobody behind it, the
-- lock's keys expire, and the index, which many locks share, does not: so a sweeper looks.
local function mind_the_named()
  local held = redis.call('ZRANGE', holders, 0, BATCH - 1)
  for i, token in ipairs(held) do
    local rec = load(token)
    if rec and rec.indexed or i == BATCH then return redis.call('ZADD', due, lease_end(token), lock) end
  end
  redis.call('ZREM', due, lock)
end

-- Set until when the keys live, and when a sweeper looks. A kept body keeps them for ever.
local function finish()
  if alone and not unnamed then return finish_alone() end
  if redis.call('EXISTS', queue, deadlines, adrift, bodies) == 0 then
    mind_the_named()
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

local function describe(token)
  local raw = token and redis.call('HGET', record, token)
  local who = raw and token .. '\n' .. raw or ''
  if paused then return (raw and who or '\n') .. '\n' .. paused end
  return who
end

local function answer(verdict, token, rec)
  local first = redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')
  local next_look_ms = first[2] and tonumber(first[2]) - now or 0
  if verdict == 'granted' then
    return line(verdict, rec.fence, lease_end(token) - now, 0, next_look_ms, '')
  end
  if verdict == 'released' then return line(verdict, '0', 0, 0, next_look_ms, '') end
  local rank = not alone and redis.call('ZRANK', queue, token)
  return line(verdict, '0', 0, rank and rank + 1 or 0, next_look_ms, describe(first[1]))
end

-- The token and record of an attempt that waits, or waited before it was granted, or nil.
-- `fits` says of which message; without it, of any.
local function indexed(attempt, fits)
  for _, entry in ipairs(attempt ~= '' and entries_in_index(attempt) or {}) do
    local of, token = string.match(entry, '^(.*)\n([^\n]*)$')
    local rec = of == lock and load(token)
    if rec and standing(token, rec) then
      if not fits or fits(token, rec) then return token, rec end
    elseif of == lock then
      put_entries(attempt, entries_in_index(attempt), entry) -- of a lock whose keys have expired
    end
  end
end

-- The token and record under which an attempt is here already, or nil.
local function find(attempt, fits)
  if attempt == '' then return nil end
  for _, token in ipairs(redis.call('ZRANGE', holders, 0, -1)) do
    local rec = load(token)
    local same = rec and rec.attempt == attempt and rec.state ~= 'reserved'
    if same and (not fits or fits(token, rec)) then return token, rec end
  end
  return indexed(attempt, fits)
end

-- Another delivery of the same message: one of the two is marked as such, or both have one base. Any
-- other message with this attempt is a call of its own.
local function twin_of(token, attempt, copy)
  return find(attempt, function(other, rec)
    return copy ~= '0' or rec.copy or base_of(other) == base_of(token)
  end)
end

-- A retried task keeps its permit for its next attempt: a holder that nobody can claim, which lapses
-- like any other. If that attempt is here before this release, it is granted, or has its permit.
local function reservation_of(attempt) return 'keep:' .. attempt end

local function reserve(attempt, ms, rec, own)
  if redis.call('ZCARD', holders) >= limit then return end
  local token, waits = find(attempt)
  if token then
    local deadline = redis.call('ZSCORE', deadlines, token)
    local lives = not waits.parked or worker_for(waits, own)
    if standing(token, waits) == 'queue' and lives and not (deadline and tonumber(deadline) <= now) then
      grant(token, waits, own)
    end
    return
  end
  token = reservation_of(attempt)
  local reserved = {attempt = attempt, task = rec.task, lease = digits(ms), place = rec.place}
  write_in(token, reserved, 'reserved', ms)
  save(token, reserved)
end

-- End the reservation of an attempt that has come; whether its permit is there for it.
local function take_reservation(attempt)
  local token = reservation_of(attempt)
  if attempt == '' or not lease_end(token) then return false end
  redis.call('ZREM', holders, token)
  redis.call('HDEL', record, token)
  return redis.call('ZCARD', holders) < limit and not closed_until()
end

-- Whether a message is here already, under this or another number of its token.
local function is_kept(token, attempt)
  if has_body(base_of(token)) then return true end
  local other = indexed(attempt, function(other, rec) return rec.parked and base_of(other) == base_of(token) end)
  return other ~= nil
end

local function is_done(member)
  if not remembers or member == '' then return false end
  local till = redis.call('ZSCORE', done, member)
  return till and tonumber(till) > now
end

-- Whether a queue may not take one more.
local function is_full(most)
  if most == '' or alone and tonumber(most) > 0 then return false end
  return redis.call('ZCARD', queue) + redis.call('ZCARD', adrift) >= tonumber(most)
end
