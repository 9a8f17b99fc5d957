-- Searching for another delivery of a message, and for remembered ends.

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

local FEW = 10 -- the records of as many holders are all read in a search; of their tokens, ten times as many

-- 47 bits, so that each product is exact. Two attempts with one digest only cost time.
local function digest_of(attempt)
  local digest = 0
  for i = 1, #attempt do digest = (31 * digest + string.byte(attempt, i)) % 2 ^ 47 end
  return digits(digest)
end

-- Add the holders that `attempts` misses. Remove former holders when they are many.
local function read_new_holders(attempts)
  local held, page = redis.call('ZCARD', holders), {}
  if redis.call('ZCARD', attempts) > 2 * held + BATCH then
    redis.call('ZINTERSTORE', attempts, 2, attempts, holders, 'WEIGHTS', 1, 0)
  end
  local function add_page()
    local scored = {}
    for i, raw in ipairs(redis.call('HMGET', record, unpack(page))) do
      if raw then
        scored[#scored + 1] = digest_of(cjson.decode(raw).attempt)
        scored[#scored + 1] = page[i]
      end
    end
    if #scored > 0 then redis.call('ZADD', attempts, unpack(scored)) end
    page = {}
  end
  for _, token in ipairs(redis.call('ZDIFF', 2, holders, attempts)) do
    page[#page + 1] = token
    if #page == BATCH then add_page() end
  end
  if #page > 0 then add_page() end
  redis.call('ZADD', attempts, digits(last_fence), '')
  redis.call('PEXPIRE', attempts, GRACE_MS)
end

-- Returns tokens that include each holder with this attempt. If there are many holders, `attempts` (ZSET, token ->
-- digest of its attempt) has the holders that an earlier search has read, so that a search reads only later ones.
-- Searches write it and grants do not, so grants of an older version are found, too. The score of its member '' is
-- the fencing token of the last grant at the time of that search: while the fencing token has not changed, no holder
-- is missing. It may contain former holders, whose records are gone.
local function among_holders(attempt, few)
  local tokens = redis.call('ZRANGE', holders, 0, few)
  if #tokens <= few then return tokens end
  local attempts = string.sub(holders, 1, -8) .. 'attempts'
  local known = redis.pcall('ZSCORE', attempts, '')
  if type(known) == 'table' then return redis.call('ZRANGE', holders, 0, -1) end -- the key of another program
  if not known or tonumber(known) ~= last_fence then read_new_holders(attempts) end
  local digest = digest_of(attempt)
  return redis.call('ZRANGEBYSCORE', attempts, digest, digest)
end

-- The token and record of the holder with this attempt whose token begins with `start`, or nil.
local function holder_of(attempt, start)
  for _, token in ipairs(among_holders(attempt, start == '' and FEW or 10 * FEW)) do
    local rec = string.find(token, start, 1, true) == 1 and load(token)
    if rec and rec.attempt == attempt and rec.state ~= 'reserved' then return token, rec end
  end
end

-- The token and record of an attempt that holds or waits already, or nil.
local function find(attempt)
  if attempt == '' then return nil end
  local token, rec = holder_of(attempt, '')
  if token then return token, rec end
  return indexed(attempt)
end

-- The token and record of another delivery of the same message: one of the two is marked as a copy, or
-- both have the same base. Any other message with this attempt is a separate call. For a copy, all holders
-- are searched. For any other message only those with its base are searched, since the index has every copy.
local function duplicate_of(token, attempt, copy)
  if copy ~= '0' or attempt == '' then return find(attempt) end
  local base = base_of(token)
  local other, rec = holder_of(attempt, base .. '.')
  if other then return other, rec end
  return indexed(attempt, function(other, rec) return rec.copy or base_of(other) == base end)
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

-- The token and record of a run that ended before its message was parked again as `token`, or nil. Redis has lost that end.
local function run_before(token, attempt)
  local base, parked_us = split(token) -- the number of such a token is the time at which it was parked
  local other, rec = holder_of(attempt, base .. '.')
  if other and rec.state == 'running' and tonumber(rec.since) * 1000 < parked_us then return other, rec end
end

local function is_done(member)
  if not remembers or member == '' then return false end
  local till = redis.call('ZSCORE', done, member)
  return till and tonumber(till) > now
end

-- Whether a delivery without a record has left a trace: its task has ended, or its message was sent, or is stored under
-- a later token, or has returned to the queue before the delivery began. Without a trace, Redis has lost its data.
local function has_trace(token)
  local base = base_of(token)
  return is_done(base) or is_done('sent:' .. base) or is_done('returned:' .. token) or has_body(base)
end

local CLOCK_MS = 1000 -- the clocks of a worker and of this server differ by less

-- Whether the attempt of a message that may be a copy has ended. If `copy` is not 1 but a time in microseconds, the
-- message is known to have arrived first then. An end before that is the end of another call with its id.
local function has_ended(attempt, copy)
  local first = tonumber(copy)
  if first == 0 or not is_done(attempt) then return false end
  local earlier = redis.call('ZSCORE', done, 'end:' .. attempt)
  if first == 1 or not earlier then return true end
  local till = tonumber(redis.call('ZSCORE', done, attempt))
  local ended = till - END_SHARE * (till - earlier)
  return ended >= math.floor(first / 1000) - CLOCK_MS
end

-- Whether the queue has reached its limit.
local function is_full(most)
  if most == '' or alone and tonumber(most) > 0 then return false end
  return redis.call('ZCARD', queue) + redis.call('ZCARD', adrift) >= tonumber(most)
end
