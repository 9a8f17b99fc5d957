-- Records and tokens.

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

-- The end of a token's lease, which may be past; nil if the token does not hold the lock.
local function lease_end(token) return tonumber(redis.call('ZSCORE', holders, token) or nil) end

-- In which collection a token is: 'holder', 'queue', 'adrift', 'overdue' or nil.
local function standing(token, rec)
  if not rec then return nil end
  return WAITS[rec.state] or lease_end(token) and 'holder' or nil
end
