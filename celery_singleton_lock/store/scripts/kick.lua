-- kick: sweep and grant; tell which messages of a realm want a copy in the broker.
-- KEYS: lock
-- ARGV: name worker realm claim_ms
-- REPLY: list of token, queue, body
lock = name
check()
write_though_full()
sweeping = true
sweep(worker)
grant_waiters(worker)

-- Any copy wakes a worker, which recalls all of its route: as many copies as there are permits do.
local strays = {}
for _, route in ipairs(alone and {} or routes_adrift()) do
  for _, token in ipairs(adrift_of(route, limit)) do
    local rec = load(token)
    if rec.realm == realm and tonumber(rec.publish_at) <= now then
      rec.publish_at = digits(now + tonumber(rec.publish_every))
      rec.publish_every = digits(math.min(tonumber(rec.publish_every) * 2, 3600000))
      save(token, rec)
      strays[#strays + 1] = token
      strays[#strays + 1] = rec.queue
      strays[#strays + 1] = redis.call('HGET', bodies, base_of(token)) or ''
    end
  end
end
if alone then mind_the_named() end -- it was looked at for one of them, or its keys are gone
finish()
return strays
