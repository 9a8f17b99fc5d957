-- What the scripts for operators share, in addition to _lock.lua.
local AUDITED = 1000 -- entries of the audit log
local LOCKS = 20     -- most entries of one operation; its last one sums up all further locks

-- Like every key of a lock, it is read before the first write.
local function check_audit() redis.call('LLEN', fleet .. ':audit') end

-- Write who did what to this lock. Steps of one operation on one lock share an entry, unless another
-- entry comes between them: a purge of 200,000 tasks or locks must not push all other entries out.
local function note(steps, token, rec)
  local audit, entry = fleet .. ':audit', cjson.decode(who)
  entry.at, entry.lock, entry.count, entry.token = digits(now), lock, steps, token
  entry.task, entry.attempt = rec and rec.task, rec and rec.attempt
  local newest = redis.call('LINDEX', audit, 0)
  local last = newest and cjson.decode(newest)
  if last and last.op == entry.op and last.action == entry.action then
    local same = (last.latest or last.lock) == lock
    local nth = last.nth or 1
    if same or nth >= LOCKS then
      last.count, last.at, last.token, last.attempt = last.count + steps, entry.at, nil, nil
      if not same then last.more, last.latest = (last.more or 0) + 1, lock end
      return redis.call('LSET', audit, 0, cjson.encode(last))
    end
    entry.nth = nth + 1
  end
  redis.call('LPUSH', audit, cjson.encode(entry))
  redis.call('LTRIM', audit, 0, AUDITED - 1)
end
