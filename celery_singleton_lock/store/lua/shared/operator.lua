-- The audit log: what only the scripts for operators share.
local AUDITED = 1000 -- entries of the audit log
local LOCKS = 20     -- most entries of one operation; the last one counts all further locks

-- Like every key of a lock, it is read before the first write. So is the new entry: JSON that this Lua
-- refuses, such as a lone surrogate, must not leave the lock half changed.
local new_entry, newest_entry, newest_op
local function check_audit()
  new_entry = cjson.decode(who)
  newest_entry = cjson.decode(redis.call('LINDEX', fleet .. ':audit', 0) or '{}')
  newest_op = newest_entry.op -- an error if it is not an object
end

-- Write who did what to this lock; once in a script. Steps of one operation on one lock share an entry,
-- unless another entry comes between them: a purge of 200,000 tasks or locks must not remove all other entries from
-- the log.
local function note(steps, token, rec)
  local audit, entry, last = fleet .. ':audit', new_entry, newest_entry
  entry.at, entry.lock, entry.count, entry.token = digits(now), lock, steps, token
  entry.task, entry.attempt = rec and rec.task, rec and rec.attempt
  if newest_op == entry.op and last.action == entry.action then
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

-- What `done` remembers of a dropped waiter, in addition to its end: it has not run.
local function drop_of(token) return 'dropped:' .. base_of(token) end
local function drop_of_attempt(attempt) return 'dropped:' .. attempt end

-- Whether the end of an attempt is remembered, but only since its waiter was dropped.
local function was_only_dropped(attempt)
  local till = redis.call('ZSCORE', done, attempt)
  return till and till == redis.call('ZSCORE', done, drop_of_attempt(attempt))
end
