-- summarise_locks: return a summary of some locks, without lapsed leases. Writes nothing.
-- KEYS: meta*
-- ARGV: most_holders
-- REPLY: a JSON list. Per lock: numbers, its name, then token, lease left (ms) and record of each of its first holders; or its meta key alone if its keys are of another type
local now_us = tonumber(server_time())
local now = math.floor(now_us / 1000)
local most = tonumber(most_holders)

-- The names of a lock's other keys follow from its meta key, and they are in the same slot. So the caller
-- sends one key per lock: a list of 100,000 locks would otherwise need a million. Records are JSON already,
-- so they go into the reply unchanged, and the client parses it as a whole.
-- What may keep the waiters of a lock with a free permit from starting: 1 = a rate, 2 = the limits of groups, 0 =
-- nothing.
local function held_back(flow)
  local rates, set, newest, groups = unpack(redis.call('HMGET', flow, 'rates', 'ruled_rates', 'newest', 'vt'))
  local computed = newest and string.find(newest, '"rates"', 1, true)
  if rates or set or computed then return 1 end
  return groups and 2 or 0
end

-- Stored messages that are out of the queue: those of no holder. Holders that were not read count as stored.
local function set_aside(stored, bodies, held, holding)
  local aside = bodies - (holding - #held / 2)
  for i = 1, #held, 2 do aside = aside - redis.call('HEXISTS', stored, string.match(held[i], '^(.*)%.%d+$') or held[i]) end
  return math.max(0, aside)
end

local function glance(meta)
  local base = string.sub(meta, 1, -5)
  local holders, queue, record = base .. 'holders', base .. 'queue', base .. 'record'
  local m = redis.call('HMGET', meta, 'name', 'limit', 'ruled', 'paused', 'ruled_until', 'paused_until', 'closed')
  if not m[1] then return nil end
  if m[5] and tonumber(m[5]) <= now then m[3] = false end
  if m[6] and tonumber(m[6]) <= now then m[4] = false end
  local held = redis.call('ZRANGEBYSCORE', holders, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, most + 1)
  local holding, shown = #held / 2, math.min(#held / 2, most)
  if holding > most then holding = redis.call('ZCOUNT', holders, '(' .. now, '+inf') end
  local waiting, adrift, bodies, aside, oldest, groups = 0, 0, 0, 0, 0, 0
  if redis.call('EXISTS', queue, base .. 'bodies', base .. 'adrift') > 0 then
    waiting, adrift = redis.call('ZCARD', queue), redis.call('ZCARD', base .. 'adrift')
    bodies = redis.call('HLEN', base .. 'bodies')
    if waiting + adrift == 0 then aside = set_aside(base .. 'bodies', bodies, held, holding) end
    groups = redis.call('ZCARD', base .. 'flow:groups') + redis.call('ZCARD', base .. 'flow:full')
    local first = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
    local raw = first[1] and redis.call('HGET', record, first[1]) or ''
    local arrived = string.match(raw, '"arrived":"(%d+)"') or first[2] -- of a waiter with priority, or promoted
    oldest = arrived and math.floor((now_us - tonumber(arrived)) / 1000) or 0
  end
  local limit = tonumber(m[3] or m[2] or 0)
  local rated = waiting > 0 and holding < limit and held_back(base .. 'flow') or 0
  -- 0: not paused; -1: until it is resumed; else for how long.
  local paused_ms = m[4] and (m[6] and tonumber(m[6]) - now or -1) or 0
  local closed_ms = math.max(0, tonumber(m[7] or 0) - now)
  local told = { -- joined once: each concatenation would copy all holders before it
    holding, waiting, adrift, bodies, limit, paused_ms, oldest, rated, closed_ms, groups, aside, cjson.encode(m[1]),
  }
  for i = 1, 2 * shown, 2 do
    told[#told + 1] = cjson.encode(held[i])
    told[#told + 1] = string.format('%.0f', tonumber(held[i + 1]) - now)
    told[#told + 1] = redis.call('HGET', record, held[i]) or '{}'
  end
  return '[' .. table.concat(told, ',') .. ']'
end

-- A lock whose keys are of another type is reported by its key; the others are still returned. While a
-- slot of a Cluster moves, keys that are not here may be on the other node: then nothing is known.
local found = {}
for _, meta in ipairs(KEYS) do
  local ran, told = pcall(glance, meta)
  local failure = not ran and (type(told) == 'table' and told.err or tostring(told))
  if failure and string.find(failure, 'non local key', 1, true) then
    return redis.error_reply('TRYAGAIN the slot of these locks is moving')
  elseif failure then
    found[#found + 1] = cjson.encode(meta)
  elseif told then
    found[#found + 1] = told
  end
end
return '[' .. table.concat(found, ',\n') .. ']'
