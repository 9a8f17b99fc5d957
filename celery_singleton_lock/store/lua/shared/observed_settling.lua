-- Runs that would settle in observe mode (lock_debounce), by task: the last one, and when the quiet period after the
-- last call ends. A run enters the simulated queue when it has settled, unless a later one replaces it.

local function open_settling(key)
  local last_of, tasks = {}, {}
  local function keep(task, last)
    if not last_of[task] then tasks[#tasks + 1] = task end
    last_of[task] = last
  end
  -- Reads the runs. The run `token` has ended after `took`. Returns those that have settled.
  local function read(token, took)
    local raw, settled = redis.call('HGETALL', key), {}
    for i = 1, #raw, 2 do
      local last = cjson.decode(raw[i + 1])
      local entry = last.entry
      if entry and entry.token == token and took then entry.took = took end
      if entry and entry.till <= now then
        entry.start, last.entry = entry.till, nil
        settled[#settled + 1] = entry
      end
      if last.entry or last.quiet_till > now then keep(raw[i], last) end
    end
    if #raw > 0 then redis.call('DEL', key) end
    return settled
  end
  local function save()
    for _, task in ipairs(tasks) do redis.call('HSET', key, task, cjson.encode(last_of[task])) end
    if #tasks > 0 then redis.call('PEXPIRE', key, REPORT_MS) end
  end
  -- Whether a new run would settle, and the run that it would replace.
  local function would_settle(entry, option)
    if not option or not string.find(entry.attempt, '/0/%d+$') then return false end -- a retry does not settle
    local quiet_ms, most_ms, run_first = unpack(option)
    local last = last_of[entry.task] or {quiet_till = 0}
    local older, was_quiet = last.entry, last.quiet_till <= now
    last.quiet_till = now + quiet_ms
    keep(entry.task, last)
    if not older and run_first == 1 and was_quiet then return false end
    entry.from, entry.till = older and older.from or now, now + quiet_ms
    if most_ms > 0 then entry.till = math.min(entry.till, entry.from + most_ms) end
    last.entry = entry
    return true, older
  end
  return {read = read, save = save, would_settle = would_settle}
end
