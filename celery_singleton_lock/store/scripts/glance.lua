-- glance: some locks in short. Writes nothing; lapsed leases are left out.
-- KEYS: meta*
-- ARGV: most_holders
-- REPLY: per lock a text: numbers, then token, lease left (ms) and record of its first holders, then its name
local now_us = server_time()
local now = math.floor(now_us / 1000)
local most = tonumber(most_holders)

-- The other keys of a lock lie in the slot of its meta, and are named after it: a list of 100,000
-- locks would otherwise send a million keys.
local function glance(meta)
  local base = string.sub(meta, 1, -5)
  local holders, queue, record = base .. 'holders', base .. 'queue', base .. 'record'
  local m = redis.call('HMGET', meta, 'name', 'limit', 'ruled', 'paused')
  if not m[1] then return nil end
  local held = redis.call('ZRANGEBYSCORE', holders, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
  local holding, waiting, adrift, bodies, oldest = #held / 2, 0, 0, 0, 0
  if holding == most then holding = redis.call('ZCOUNT', holders, '(' .. now, '+inf') end
  if redis.call('EXISTS', queue, base .. 'bodies', base .. 'adrift') > 0 then
    waiting, adrift = redis.call('ZCARD', queue), redis.call('ZCARD', base .. 'adrift')
    bodies = redis.call('HLEN', base .. 'bodies')
    local first = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')[2]
    oldest = first and math.floor((now_us - tonumber(first)) / 1000) or 0
  end
  local numbers = {holding, waiting, adrift, bodies, m[3] or m[2] or 0, m[4] and 1 or 0, oldest, #held / 2}
  local text = {table.concat(numbers, ' ')}
  for i = 1, #held, 2 do
    text[#text + 1] = held[i]
    text[#text + 1] = string.format('%.0f', tonumber(held[i + 1]) - now)
    text[#text + 1] = redis.call('HGET', record, held[i]) or '{}'
  end
  text[#text + 1] = m[1]
  return table.concat(text, '\n')
end

-- Keys that another program has put there must not hide all other locks.
local found = {}
for _, meta in ipairs(KEYS) do
  local ran, text = pcall(glance, meta)
  if not ran then
    found[#found + 1] = '! ' .. meta
  elseif text then
    found[#found + 1] = text
  end
end
return found
