-- What the verbs of operators share, besides _lock.lua.
local AUDITED = 1000 -- entries that are kept
local LOCKS = 20     -- entries of one operation; its last sums up what it does to further locks

-- Read it before anything is written, like every key of a lock.
local function check_audit() redis.call('LLEN', fleet .. ':audit') end

-- Note who did what to this lock. The steps of one operation on one lock are one entry, as long as no
-- other comes between them: a purge of 200,000 tasks, or of as many locks, must not push all others out.
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
