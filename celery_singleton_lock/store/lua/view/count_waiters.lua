-- count_waiters: return some locks of a bucket that have waiters, or lately had, with their numbers. Writes nothing.
-- KEYS: due*
-- ARGV: first most order
--   first = number of the first lock, from 0; most = how many; order = what the last number of a lock is:
--   oldest = ms for which its first waiter has waited, held = its holders, lease = ms until its first lease
--   ends, else 0
-- REPLY: a JSON list: how many there are in all, then per lock: name, waiters (-1 for a name of over 200 bytes), number
local now_us = tonumber(server_time())
local now = math.floor(now_us / 1000)

-- A lock with a waiter is always due at some time, so it is found in this sorted set. The names of its keys follow
-- from its own, and they are in the same slot; those of a long name contain a digest that Lua cannot make.
local LONGEST = 200
local bucket = string.sub(KEYS[1], 1, -4)

local call = redis.call

local function number_of(base)
  if order == 'oldest' then
    local first = call('ZRANGE', base .. 'queue', 0, 0, 'WITHSCORES')
    local raw = first[1] and call('HGET', base .. 'record', first[1]) or ''
    local arrived = string.match(raw, '"arrived":"(%d+)"') or first[2] -- of a waiter with priority, or promoted
    return arrived and math.floor((now_us - tonumber(arrived)) / 1000) or 0
  elseif order == 'held' then
    return call('ZCOUNT', base .. 'holders', '(' .. now, '+inf')
  elseif order == 'lease' then
    local till = call('ZRANGE', base .. 'holders', 0, 0, 'WITHSCORES')[2]
    return till and math.max(0, tonumber(till) - now) or 0
  end
  return 0
end

local ADRIFT_MS = 5000 -- as in shared/state.lua: a lock with messages adrift is due within this time
local names = call('ZRANGE', KEYS[1], first, string.format('%.0f', first + most - 1), 'WITHSCORES')
local found = {call('ZCARD', KEYS[1])}
local has_number = order ~= 'waiting' and order ~= 'name'
local at = -1
local function count_next()
  for i = at + 2, #names, 2 do
    at = i
    local base, waiting = bucket .. names[i], -1
    if #names[i] <= LONGEST then
      waiting = call('ZCARD', base .. ':queue')
      if tonumber(names[i + 1]) <= now + ADRIFT_MS then waiting = waiting + call('ZCARD', base .. ':adrift') end
    end
    if waiting ~= 0 or call('EXISTS', base .. ':holders', base .. ':bodies') > 0 then
      local n = #found
      found[n + 1], found[n + 2] = names[i], waiting
      found[n + 3] = has_number and waiting >= 0 and number_of(base .. ':') or 0
    end
  end
end

-- A lock whose keys are of another type is left out. While a slot of a Cluster moves, nothing is known.
while at < #names - 1 do
  local ran, failure = pcall(count_next)
  failure = not ran and (type(failure) == 'table' and failure.err or tostring(failure))
  if failure and string.find(failure, 'non local key', 1, true) then
    return redis.error_reply('TRYAGAIN the slot of these locks is moving')
  end
end
return cjson.encode(found)
