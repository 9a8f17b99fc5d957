-- Grants and claims.

-- Make a token a holder, with the next fencing token.
local function add_holder(token, rec, state, lease)
  rec.fence = new_fence()
  set_state(rec, state)
  redis.call('ZADD', holders, now + lease, token)
  if fair then fair.hold(token, rec, state == 'granted' or state == 'running', lease) end
end

-- A holder claims its grant: its full lease begins.
local function start(token, rec)
  if rates and rec.state ~= 'running' and not starts_later then rates.note_start(token, rec) end
  if not starts_later then set_state(rec, 'running') end
  if rec.unique and not starts_later then start_unique(rec) end
  rec.ends_at_rate = nil -- what has started once waits, if it comes back
  redis.call('ZADD', holders, now + tonumber(rec.lease), token)
  if fair then fair.renew(rec, tonumber(rec.lease)) end
  save(token, rec)
end

-- A waiter gets a short lease. Within it, it must claim the grant, or its worker must renew it.
local function grant(token, rec, own)
  unqueue(token, rec)
  add_holder(token, rec, 'granted', math.min(tonumber(claim_ms), tonumber(rec.lease)))
  if rates then rates.note_grant(token, rec) end
  if rec.parked then deliver(token, rec, 'granted', own) else wake(token) end
  save(token, rec)
end

-- The caller becomes a holder, and needs no claim. A copy is found by the index: see duplicate_of.
local function grant_caller(token, rec, lease)
  add_holder(token, rec, starts_later and 'granted' or 'running', lease)
  if rates and starts_later then rates.note_grant(token, rec) end
  if rates and not starts_later then rates.note_start(token, rec) end
  if rec.copy and not rec.indexed then put_in_index(token, rec) end
  if rec.unique then keep_unique(rec) end
  if rec.unique and not starts_later then start_unique(rec) end
  save(token, rec)
end
