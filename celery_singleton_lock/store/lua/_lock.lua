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
--   overdue, replaced, revoked, rejected   a stored message that must not run: it is delivered with this
--              verdict until a worker has ended its task
--   granted    holds the lock, and has not claimed the grant yet
--   running    holds the lock, and has claimed the grant or needed no claim
--   reserved, held_after   the permit stays taken: for the next attempt, or for nobody
-- Fields of a record whose names do not say what they contain:
--   place      position in the queue: the time of arrival in microseconds
--   lease, wait, deadline, since   milliseconds
--   realm, queue   broker and queue of a stored message; together its route
--   twin       token of a duplicate delivery, whose message is stored with this record
--   copy       1 if this may be a duplicate delivery
--   copied     1 if a duplicate of this message was acknowledged
--   indexed    1 if the index has an entry for it
--   by         attempt whose message replaced this one
--   returns    how many deliveries of the message came back
--   seal       id of the call that took the message out of the queue for publishing
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
  overdue = 'overdue', replaced = 'overdue', revoked = 'overdue', rejected = 'overdue',
  leaving = 'overdue', -- out of the queue until its deadline, then it queues again
}

local now_text = server_time()
local now_us = tonumber(now_text)
local now = math.floor(now_us / 1000)

local lock -- name of the lock that the functions below change; a script sets it in its first line
local holders, queue, record, meta, bodies, deadlines, adrift, done, due, index, fleet = unpack(KEYS, 1, 11)
local limit, last_fence, grants
local declared        -- the lowest limit that a holder or waiter has declared
local paused, ruled   -- set by operators: no grants, and a limit that overrides the declared ones
local alone      -- there are no waiters and no stored messages: the keys of the queue need not be read
local remembers  -- `done` has entries: ends of attempts are remembered
local index_changed   -- the index has gained or lost an entry
local sweeping   -- a sweeper runs this script
local became_adrift    -- a message has become adrift in this script

local function digits(n) return string.format('%.0f', n) end

-- One string, since clients parse it faster than a list.
local function line(verdict, fence, left_ms, rank, look_ms, reason, who)
  return table.concat({verdict, fence, left_ms, rank, look_ms, limit, reason, who}, '\n')
end

-- For scripts about several locks: select the lock whose keys begin behind KEYS[offset].
local function use(offset, lock_name)
  lock = lock_name
  holders, queue, record, meta, bodies, deadlines, adrift, done, due, index, fleet = unpack(KEYS, offset + 1, offset + 11)
end

-- QUARANTINE
-- Without quarantine. _quarantine.lua replaces these two functions.
local function closed_until() return false end

local function note_lease() end
-- END OF QUARANTINE

-- Read every key once, so that a key of another type ends the script before its first write.
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

-- The lowest limit that a holder or waiter declared is in force; an idle lock takes the new one.
local function declare(wanted)
  local idle = redis.call('EXISTS', holders) == 0 and (alone or redis.call('EXISTS', queue, bodies, deadlines) == 0)
  if wanted < declared or idle and wanted ~= declared then
    declared = wanted
    limit = ruled or declared
    redis.call('HSET', meta, 'limit', declared)
  end
end

-- The admission decision, which is made before every grant. Returns nil if the next waiter may start.
-- Otherwise returns what it waits for (redis, pause or holder), and the earliest time (ms) at which that
-- can end without a call to this lock. The time is nil if only a call can end it. `held` is the number of
-- holders, if the caller does not count all of them.
local function waits_for(held)
  local opens = closed_until()
  if opens then return 'redis', opens end
  if paused then return 'pause' end
  if (held or redis.call('ZCARD', holders)) < limit then return nil end
  return 'holder', tonumber(redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2])
end

-- The place for a time of arrival. 0 means behind all waiters, even if the clock was set back.
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

-- Messages that no worker consumes are sorted by route, then by place: so those of one route are found
-- without reading the others.
local function route_of(rec) return rec.realm .. ':' .. rec.queue end

-- Autoscalers ask how many messages of a route wait, and since when. So messages are also listed by
-- route, for all locks of a bucket. No decision depends on these lists.
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

-- Remove a token from the queue and from adrift; its record stays.
local function unqueue(token, rec)
  if alone then return end
  redis.call('ZREM', queue, token)
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

-- waits_for() for one waiter: a parked message also waits for a worker that takes it.
local function waiter_waits_for(rec, own)
  local reason, till = waits_for()
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

-- Make a token a holder, with the next fencing token.
local function add_holder(token, rec, state, lease)
  rec.fence = new_fence()
  set_state(rec, state)
  redis.call('ZADD', holders, now + lease, token)
end

-- A holder claims its grant: its full lease begins.
local function start(token, rec)
  set_state(rec, 'running')
  redis.call('ZADD', holders, now + tonumber(rec.lease), token)
  save(token, rec)
end

-- A waiter gets a short lease. Within it, it must claim the grant, or its worker must renew it.
local function grant(token, rec, own)
  unqueue(token, rec)
  add_holder(token, rec, 'granted', math.min(tonumber(claim_ms), tonumber(rec.lease)))
  if rec.parked then deliver(token, rec, 'granted', own) else wake(token) end
  save(token, rec)
end

-- The index has two entries per waiter: its attempt, and its task id with @ before it.
local function names_in_index(rec)
  return {rec.attempt, '@' .. (string.match(rec.attempt, '^(.*)/%d+/%d+$') or rec.attempt)}
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
  add_holder(token, rec, 'running', lease)
  if rec.copy and not rec.indexed then put_in_index(token, rec) end
  save(token, rec)
end

local function enqueue(token, rec, state)
  alone = false
  set_state(rec, state)
  redis.call('ZADD', queue, rec.place, token)
  if rec.deadline then redis.call('ZADD', deadlines, rec.deadline, token) end
  put_in_index(token, rec)
  list_parked(token, rec)
  save(token, rec)
end

-- A message behind another one of its route and task counts as adrift since the same time as that one.
local function set_adrift(token, rec)
  became_adrift = true
  redis.call('ZREM', queue, token)
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
  for _, known in ipairs(names_in_index(rec)) do
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
-- queues again at its place under the next token: at once, or after `delay` ms.
local function end_delivery(token, rec, delay)
  drop_record(token, rec)
  local was_parked = rec.parked
  local following, is_duplicate = next_stored(token, rec)
  if not following then return end
  -- Its wait begins anew. A waiter in a slot had a deadline of its own. Published copies have arrived by now.
  if is_duplicate or not was_parked or rec.state == 'running' then
    rec.deadline = rec.wait and digits(now + tonumber(rec.wait)) or nil
    rec.publish_at, rec.publish_every = nil, nil
  end
  if rec.by or rec.revoked or rec.rejected then rec.deadline, delay = digits(now), nil end -- it may not run
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
  redis.call('ZREM', holders, token)
  local rec = load(token)
  if not rec or rec.state ~= 'held_after' then count('lapses') end
  if rec then return_delivery(token, rec) end
end

-- Queue a message again at the end of its time out of the queue. A delayed one goes behind all waiters.
local function queue_again(token, rec)
  rec.seal = nil
  if rec.delayed then
    rec.delayed, rec.place = nil, place_of(0)
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
  if rec.state == 'leaving' then return queue_again(token, rec) end
  set_state(rec, rec.rejected and 'rejected' or rec.revoked and 'revoked' or rec.by and 'replaced' or 'overdue')
  deliver(token, rec, rec.state, own)
  save(token, rec)
  redis.call('ZADD', deadlines, now + tonumber(claim_ms), token)
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

-- Remove the oldest message of a task and broker from the queue, to make room for a later one. It does
-- not run: it is delivered with the verdict 'replaced' until a worker has ended its task.
local function replace_oldest(task, attempt, realm, queue_name, own)
  local name_of_task = '"task":' .. cjson.encode(task)
  local function oldest_in(page) -- in queue order; the search for the name spares decoding most records
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
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', now)) do lapse(token) end
  if alone then return end
  local late = redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, BATCH)
  for _, token in ipairs(late) do expire(token, own) end
  recall(own)
end

-- Grant free permits in queue order. Messages that no live worker takes become adrift.
-- `me` is the caller's token: it gets its full lease, and needs no wake-up.
local function grant_waiters(own, me, my_record)
  if alone then return end
  local moved = 0
  while not waits_for() do
    local head = redis.call('ZRANGE', queue, 0, 0)[1]
    if not head then return end
    local rec = head == me and my_record or load(head)
    local deadline = redis.call('ZSCORE', deadlines, head)
    if head == me then
      unqueue(head, rec)
      grant_caller(head, rec, tonumber(rec.lease))
    elseif moved == BATCH then
      return -- the next script continues: see next_look
    elseif not rec or deadline and tonumber(deadline) <= now then
      expire(head, own)
      moved = moved + 1
    elseif waiter_waits_for(rec, own) then
      set_adrift(head, rec)
      moved = moved + 1
    else
      grant(head, rec, own)
      moved = moved + 1
    end
  end
end

-- While `meta` holds a pause or a limit that an operator has set, it does not expire.
local function live_until(until_ms, ...)
  for _, key in ipairs({...}) do
    if key ~= meta or not (paused or ruled) then redis.call('PEXPIRE', key, until_ms - now + GRACE_MS) end
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
    local reason, till = waits_for()
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

-- Set when the keys expire, and when the lock is swept next. With a stored message they do not expire.
local function finish()
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
    return line(verdict, rec.fence, lease_end(token) - now, 0, next_look_ms, '', '')
  end
  if verdict == 'released' then return line(verdict, '0', 0, 0, next_look_ms, '', '') end
  local rank = not alone and redis.call('ZRANK', queue, token)
  local reason, till = '', nil
  if verdict == 'waiting' or verdict == 'blocked' or verdict == 'full' then
    reason, till = waits_for()
    reason = reason or 'queue'
  end
  if verdict == 'waiting' and not rank then -- adrift; or granted just now, or stored under a later number
    local mine = load(token)
    if not mine or mine.state ~= 'adrift' then reason = '' elseif reason == 'queue' then reason = 'worker' end
  end
  if till then next_look_ms = till - now end
  return line(verdict, '0', 0, rank and rank + 1 or 0, next_look_ms, reason, describe(first[1]))
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

-- The token and record of an attempt among these holders, or nil.
local function holder_of(attempt, tokens)
  for _, token in ipairs(tokens) do
    local rec = load(token)
    if rec and rec.attempt == attempt and rec.state ~= 'reserved' then return token, rec end
  end
end

-- The token and record of an attempt that holds or waits already, or nil.
local function find(attempt)
  if attempt == '' then return nil end
  local token, rec = holder_of(attempt, redis.call('ZRANGE', holders, 0, -1))
  if token then return token, rec end
  return indexed(attempt)
end

local function holders_with(start)
  local found = {}
  for _, token in ipairs(redis.call('ZRANGE', holders, 0, -1)) do
    if string.find(token, start, 1, true) == 1 then found[#found + 1] = token end
  end
  return found
end

-- The token and record of another delivery of the same message: one of the two is marked as a copy, or
-- both have the same base. Any other message with this attempt is a call of its own. Only for a copy are
-- all holders read, since the index has every copy.
local function duplicate_of(token, attempt, copy)
  if copy ~= '0' or attempt == '' then return find(attempt) end
  local base = base_of(token)
  local other, rec = holder_of(attempt, holders_with(base .. '.'))
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
    local reason = waiter_waits_for(waits, own)
    if not reason then return grant(token, waits, own) end
    if reason == 'worker' then return end
    unqueue(token, waits)
    waits.place = place_before_all(rec)
    return enqueue(token, waits, waits.state)
  end
  token = reservation_of(attempt)
  local reserved = {attempt = attempt, task = rec.task, lease = digits(ms), place = rec.place}
  add_holder(token, reserved, 'reserved', ms)
  save(token, reserved)
end

-- End the reservation of an attempt that has arrived. Returns whether the attempt may start with that
-- permit. In a pause or a quarantine it may not: then the second result is the place at which it queues,
-- before all others. If it does not queue (`queues` is false), the reservation stays.
local function take_reservation(attempt, queues)
  local token = reservation_of(attempt)
  if attempt == '' or not lease_end(token) then return false end
  local reason = waits_for(redis.call('ZCARD', holders) - 1)
  local later = reason == 'pause' or reason == 'redis'
  if later and not queues then return false end
  local place = later and place_before_all(load(token)) or nil
  redis.call('ZREM', holders, token)
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
