-- Unique calls: the entry of a call that was sent, so that a second one like it need not be sent.

-- The entry is JSON: `id` of the task, `retries` of its attempt, and `state`:
--   pending   its sender has announced it, and may not have sent it yet
--   sent      the broker has its message
--   here      its message is parked, or its task holds the lock: the entry does not expire
-- `waits` counts senders that wait until it is no longer pending. `again` is for how long (ms) the entry stays after
-- the end of this attempt, since the task has sent its retry. `ended`: the worker has said that the task has ended.
-- `over` is the number of the retry whose end it has said before the end of this attempt.
-- Its key ends in `:call`. No other key of a lock does, so no text of a caller can name another key.
-- The part `unique` also ends the name of the lock. A text that contains it itself could be that of another lock, so
-- its length follows: then each key of Redis belongs to one lock and one text.
local function unique_part(text, what)
  local start = string.sub(holders, 1, -8) .. 'unique:' .. text .. ':'
  if not string.find(':' .. text, ':unique:', 1, true) then return start .. what end
  return start .. #text .. ':long-' .. what
end

local function unique_entry(key) return unique_part(key, 'call') end

-- nil also if another program uses the key.
local function read_unique(key)
  local raw = redis.pcall('GET', unique_entry(key))
  local ran, entry = pcall(cjson.decode, raw)
  if not ran or type(entry) ~= 'table' or type(entry.id) ~= 'string' or not tonumber(entry.retries) then return nil end
  if entry.state == 'here' and type(entry.attempt) == 'string' then return entry end
  return (entry.state == 'pending' or entry.state == 'sent') and entry or nil
end

-- Without `ms` the entry does not expire; with 'keep' its expiry does not change.
local function write_unique(key, entry, ms)
  local raw = cjson.encode(entry)
  if ms == 'keep' then return redis.call('SET', unique_entry(key), raw, 'KEEPTTL') end
  if ms then return redis.call('SET', unique_entry(key), raw, 'PX', digits(ms)) end
  redis.call('SET', unique_entry(key), raw)
end

-- Followers of a task: stored messages that are out of the queue until it has ended. See follow().
local function followers_of(id) return unique_part(id, 'followers') end

-- Make followers check again now: the next sweep reads them, in order of arrival.
local function wake_followers(id, most)
  if alone then return end
  local tokens = redis.pcall('ZRANGE', followers_of(id), 0, most - 1)
  if #tokens == 0 then return end -- also if another program uses the key
  redis.call('ZREM', followers_of(id), unpack(tokens))
  for _, token in ipairs(tokens) do
    local rec = load(token)
    if rec and rec.follows and rec.delayed then redis.call('ZADD', deadlines, 'XX', now, token) end
  end
  redis.call('ZADD', due, now, lock)
end

-- The call no longer counts. One script wakes only some of its followers; each of these wakes another one.
local function drop_unique(key, id)
  redis.call('DEL', unique_entry(key))
  wake_followers(id, BATCH)
end

-- Senders wait for it as clients wait for a lock.
local function end_pending(entry)
  local list = string.sub(holders, 1, -8) .. 'wake:unique:' .. entry.id
  for _ = 1, tonumber(entry.waits or 0) do redis.pcall('RPUSH', list, '1') end
  redis.pcall('PEXPIRE', list, MOST_PENDING_MS)
  entry.waits = nil
end

-- Returns the task id in an attempt, and the number of retries. In a comparison only the task id counts.
local function retries_of(attempt)
  local id, retries = string.match(attempt, '^(.*)/(%d+)/%d+$')
  return id or attempt, tonumber(retries or 0)
end

-- Note that the task of a record is parked or holds the lock. An entry of another task is not changed. `rec.unique`:
--   1  the key
--   2  1 if the entry ends at the start of the task
--   3  the longest time (ms) for which the broker may have the message
--   4  1 if the broker has the message while the task runs
local function keep_unique(rec)
  local id, retries = retries_of(rec.attempt)
  local entry = read_unique(rec.unique[1]) or {id = id}
  if entry.id ~= id then
    rec.unique = nil
    return
  end
  index_changed = true -- then the lock is swept when its lease has ended: see keep_indexed_due
  end_pending(entry)
  write_unique(rec.unique[1], {id = id, state = 'here', retries = retries, attempt = rec.attempt})
end

-- Note that the task is neither parked nor holds the lock. `left`: its message went back to the broker.
local function end_unique(rec, left)
  local key, most = rec.unique[1], rec.unique[3]
  local id, retries = retries_of(rec.attempt)
  local entry = read_unique(key)
  rec.unique = nil
  -- Its retry may be parked already.
  if not entry or entry.id ~= id or entry.state ~= 'here' or entry.attempt ~= rec.attempt then return end
  if (not left or entry.ended) and not entry.again then return drop_unique(key, id) end
  entry.state, entry.retries = 'sent', entry.again and retries + 1 or retries
  entry.attempt = nil
  write_unique(key, entry, tonumber(entry.again or most))
end

-- A task whose uniqueness ends at its start begins.
local function start_unique(rec)
  if rec.unique and rec.unique[2] == 1 then end_unique(rec) end
end
