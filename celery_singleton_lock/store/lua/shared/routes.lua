-- Parked messages by route: counts, bytes, and messages adrift, which no live worker takes.

-- Messages adrift are sorted by route, then by place: so those of one route are found
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

-- The first messages of a route, and a page of the others, which starts at another message in each call.
local function some_adrift(route)
  local tokens = adrift_of(route, 0, BATCH)
  if #tokens < BATCH then return tokens end
  local others = redis.call('ZLEXCOUNT', adrift, '[' .. route .. '\n', '(' .. route .. '\n\255') - BATCH
  if others == 0 then return tokens end
  for _, token in ipairs(adrift_of(route, BATCH + now_us % others, BATCH)) do tokens[#tokens + 1] = token end
  return tokens
end

local function route_in(member) return string.match(member, '^(.*)\n%d+\n[^\n]*$') end

-- At most `most` routes of messages adrift. There may be more, so each call starts at another route, and continues
-- with the first after the last.
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
