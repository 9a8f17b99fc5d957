-- Takes the place of the open gate in _lock.lua, for singleton_lock_quarantine.
--
-- A server that was promoted, or restarted, may not know of the last grants of the one before. So it
-- grants nothing until they have ended: for one longest lease from when a script first found another
-- run id than the one that is noted. If none is noted, nobody can say what was lost, and it is the same.
-- `fleet:server` is a HASH: run (run id), since (when it was met), till (when the gate opens), longest
-- (lease that was asked for), all in ms.
local UNKNOWN_MS = 30000 -- for a server that knows of no lease: the default
local gate = nil

local function read_gate()
  if gate then return gate end
  local key = fleet .. ':server'
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local noted = redis.call('HMGET', key, 'run', 'since', 'till', 'longest')
  gate = {
    key = key, since = tonumber(noted[2] or 0), till = tonumber(noted[3] or 0), longest = tonumber(noted[4] or 0),
  }
  if noted[1] ~= run then
    gate.since, gate.till = now, now + (noted[4] and gate.longest or UNKNOWN_MS)
    redis.call('PERSIST', key) -- a no-op; a full Redis refuses only the first write
    redis.call('HSET', key, 'run', run, 'since', digits(gate.since), 'till', digits(gate.till))
  end
  return gate
end

-- When the gate opens, ms, or false if it is open.
local function closed_until()
  local found = read_gate()
  return found.till > now and found.till
end

-- A longer lease than any before it: while the gate is closed, that is perhaps one of those lost.
local function note_lease(lease_ms)
  local found, lease = read_gate(), tonumber(lease_ms)
  if lease <= found.longest then return end
  found.longest = lease
  if closed_until() then found.till = math.max(found.till, found.since + lease) end
  redis.call('PERSIST', found.key)
  redis.call('HSET', found.key, 'longest', digits(lease), 'till', digits(found.till))
end
