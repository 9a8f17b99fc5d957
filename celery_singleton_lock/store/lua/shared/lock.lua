-- Reading and checking the keys of a lock, and what operators have set.

local function close(ms, why)
  rates = rates or open_rates()
  rates.close(ms, why)
end

-- One string, since clients parse it faster than a list.
local function line(verdict, fence, left_ms, rank, look_ms, reason, who)
  return table.concat({verdict, fence, left_ms, rank, look_ms, limit, reason, who}, '\n')
end

-- For scripts about several locks: select the lock whose keys follow KEYS[offset].
local function use(offset, lock_name)
  lock = lock_name
  holders, queue, record, meta, bodies, deadlines, adrift, done, flow, due, index, fleet = unpack(KEYS, offset + 1, offset + 12)
end

-- QUARANTINE
-- Without quarantine. quarantine.lua replaces these two functions.
local function quarantined_until() return false end

local function note_lease() end
-- END OF QUARANTINE

-- The pause and the limit that an operator has set, as read from `meta`. If their time has ended, they are not in
-- force, and the next sweep deletes them.
local function read_rulings(reason, pause_till, number, limit_till)
  ruling = {pause = tonumber(pause_till or nil), limit = tonumber(limit_till or nil)}
  local pause_ended, limit_ended = reason and ruling.pause, number and ruling.limit
  pause_ended, limit_ended = pause_ended and pause_ended <= now, limit_ended and limit_ended <= now
  paused, ruled = not pause_ended and reason, not limit_ended and number and tonumber(number)
  ruling.pause_ended, ruling.limit_ended = pause_ended, limit_ended
end

-- Until when (ms) `meta` must keep the values that operators have set; 0: there are none.
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
  quarantined_until()
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
