-- What the scripts of one server of a quorum share. Read before any writes, as in _lock.lua.
local GRACE_MS = 60000 -- how long a server remembers the last fence of a lock

local now_us = tonumber(server_time())
local now = math.floor(now_us / 1000)

local function digits(n) return string.format('%.0f', n) end

-- Redis has another run id after each start: what it had promised before may be forgotten. Who does
-- not tell one could forget unnoticed.
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
if not run then return redis.error_reply('ERR INFO tells no run_id, so this server cannot be one of a quorum') end

-- Milliseconds for which this server gives no vote to anybody new. A server that has started anew,
-- or in which our mark is missing, may have lost a vote, of which the lease lasts at most so long.
local function newness(marker, longest_ms)
  local mark = redis.call('HMGET', marker, 'run', 'since')
  if mark[1] ~= run then
    redis.call('HSET', marker, 'run', run, 'since', digits(now))
    mark[2] = now
  end
  return math.max(0, tonumber(mark[2]) + tonumber(longest_ms) - now)
end

-- Who has this server's vote, and the number of the last one; nobody if it has lapsed.
local function read_vote(key)
  local v = redis.call('HMGET', key, 'token', 'round', 'till', 'fence')
  local left = tonumber(v[3] or 0) - now
  return left > 0 and v[1] or '', tonumber(v[2] or 0), math.max(0, left), tonumber(v[4] or 0)
end
