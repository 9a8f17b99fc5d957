-- Functions that the scripts of a quorum's server share. Like the scripts about locks, these read before they write.
local GRACE_MS = 60000 -- how long a server remembers the last fencing token of a lock

local now_us = tonumber(server_time())
local now = math.floor(now_us / 1000)

local function digits(n) return string.format('%.0f', n) end

-- Redis gets a new run id at each start, after which it may have forgotten votes. Without a run id, such
-- a loss would go unnoticed.
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
if not run then return redis.error_reply('ERR INFO tells no run_id, so this server cannot be one of a quorum') end

-- Milliseconds for which this server votes for no new token. A server that was restarted, or has lost the
-- marker, may have lost a vote. The lease of that vote ends within longest_ms.
local function newness(marker, longest_ms)
  local mark = redis.call('HMGET', marker, 'run', 'since')
  if mark[1] ~= run then
    redis.call('HSET', marker, 'run', run, 'since', digits(now))
    mark[2] = now
  end
  return math.max(0, tonumber(mark[2]) + tonumber(longest_ms) - now)
end

-- Returns token and round of the current vote, ms left of it, and the last fencing token; an empty token
-- if the vote has lapsed.
local function read_vote(key)
  local v = redis.call('HMGET', key, 'token', 'round', 'till', 'fence')
  local left = tonumber(v[3] or 0) - now
  return left > 0 and v[1] or '', tonumber(v[2] or 0), math.max(0, left), tonumber(v[4] or 0)
end
