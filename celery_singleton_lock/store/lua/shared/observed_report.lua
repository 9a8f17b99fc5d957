-- The report of observe mode: which tasks and which locks of a bucket would have been blocked, and how long.

local REPORT_MS = 604800000 -- how long the report lives after the last run

local MOST_LOCKS = 32  -- locks in the report, per bucket: those that would have blocked most often
local MOST_TASKS = 128 -- tasks in the report, per bucket
local function open_report(bucket)
  local by_task, by_lock, ranks = bucket .. 'observed:tasks', bucket .. 'observed:locks', bucket .. 'observed:ranks'
  local shown = string.sub(lock, 1, 200)
  local function add_up(key, field, sums)
    local old = redis.call('HGET', key, field)
    if not old and key == by_task and redis.call('HLEN', key) >= MOST_TASKS then return end
    local sum = old and cjson.decode(old) or {longest = 0}
    for _, what in ipairs({'runs', 'blocked', 'waited', 'paused', 'replaced'}) do
      sum[what] = (sum[what] or 0) + (sums[what] or 0)
    end
    sum.longest = math.max(sum.longest, sums.waited or 0)
    redis.call('HSET', key, field, cjson.encode(sum))
    redis.call('PEXPIRE', key, REPORT_MS)
  end
  local function rank_lock()
    redis.call('ZINCRBY', ranks, 1, shown)
    redis.call('PEXPIRE', ranks, REPORT_MS)
    local over = redis.call('ZCARD', ranks) - MOST_LOCKS
    for _, least in ipairs(over > 0 and redis.call('ZRANGE', ranks, 0, -1) or {}) do
      if over > 0 and least ~= shown then
        redis.call('ZREM', ranks, least)
        redis.call('HDEL', by_lock, least)
        over = over - 1
      end
    end
  end
  local function add_to_both(task, sums)
    add_up(by_task, task, sums)
    rank_lock()
    add_up(by_lock, shown, sums)
  end
  local function run(task) add_up(by_task, task, {runs = 1}) end
  local function blocked(entry, wait)
    add_to_both(entry.task, {blocked = 1, waited = wait, paused = entry.met == 'pause' and 1 or 0})
  end
  local function replaced(entry) add_to_both(entry.task, {replaced = 1}) end
  return {run = run, blocked = blocked, replaced = replaced}
end
