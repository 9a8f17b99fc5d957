-- Replaces the functions between QUARANTINE and END OF QUARANTINE in lock.lua, for
-- singleton_lock_quarantine.
--
-- A server that was promoted or restarted may not have the last grants. So it grants nothing until the leases of
-- those grants have ended. The quarantine begins when a script first reads a run id that differs from the
-- stored one, or when none is stored. It lasts for the longest lease.
-- `fleet:server` is a HASH: run (run id), since (when that was first seen), till (when the quarantine
-- ends), longest (the longest lease so far), all times in ms.
local UNKNOWN_MS = 30000 -- if no lease is stored: the default lease
local ALWAYS = true      -- false: only if another client has stored a run id (commands without the setting)
local quarantine = nil

-- A replica only reads the decision of its master, since it grants nothing.
local function is_replica() return string.find(redis.call('INFO', 'replication'), 'role:slave', 1, true) end

local function read_quarantine()
  if quarantine then return quarantine end
  local key = fleet .. ':server'
  local noted = redis.call('HMGET', key, 'run', 'since', 'till', 'longest')
  quarantine = {
    key = key, since = tonumber(noted[2] or 0), till = tonumber(noted[3] or 0), longest = tonumber(noted[4] or 0),
  }
  quarantine.unused = not (ALWAYS or noted[1])
  if quarantine.unused then return quarantine end
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  if noted[1] ~= run and not is_replica() then
    quarantine.since, quarantine.till = now, now + (noted[4] and quarantine.longest or UNKNOWN_MS)
    -- If these writes fail, the quarantine holds for this script, and the next one tries again.
    redis.pcall('PERSIST', key) -- a no-op; a full Redis refuses only the first write
    redis.pcall('HSET', key, 'run', run, 'since', digits(quarantine.since), 'till', digits(quarantine.till))
  end
  return quarantine
end

-- When the quarantine ends (ms), or false if there is none.
local function quarantined_until()
  local found = read_quarantine()
  return found.till > now and found.till
end

-- Store the longest lease. During the quarantine a longer lease may be that of a lost grant, so it
-- prolongs the quarantine.
local function note_lease(lease_ms)
  local found, lease = read_quarantine(), tonumber(lease_ms)
  if found.unused or lease <= found.longest then return end
  found.longest = lease
  if quarantined_until() then found.till = math.max(found.till, found.since + lease) end
  redis.call('PERSIST', found.key)
  redis.call('HSET', found.key, 'longest', digits(lease), 'till', digits(found.till))
end
