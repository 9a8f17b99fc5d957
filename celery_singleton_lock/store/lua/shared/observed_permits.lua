-- The permits of observe mode: when each becomes free. The lock has a pool of them, and each group with a limit has
-- its own. The order in which groups start is not simulated.

local function open_observed_permits(free, saved_groups)
  local pool_of_lock, pool_of_group, pools = {free = free, in_use = 0}, {}, {}
  local function later(one, other) return one > other end
  local function add_pool(group, free_from)
    pool_of_group[group] = {free = free_from, in_use = 0, group = group}
    pools[#pools + 1] = pool_of_group[group]
  end
  for _, saved in ipairs(saved_groups) do add_pool(saved.group, saved.free) end
  local function pools_of(entry)
    if not entry.group then return {pool_of_lock} end
    if not pool_of_group[entry.group] then add_pool(entry.group, {}) end
    return {pool_of_lock, pool_of_group[entry.group]}
  end
  -- When the first permit of a pool becomes free. Returns nil if a run that has not ended may free its permit before
  -- that.
  local function first_free(pool, most, runs)
    local times = pool.free
    if #times + pool.in_use < most then times[#times + 1] = 0 end
    if #times == 0 then return nil end
    table.sort(times, later)
    for _, entry in ipairs(runs) do
      local uses_it = not pool.group or entry.group == pool.group
      if uses_it and entry.begins and not entry.took and times[#times] > entry.begins + now - entry.start then return nil end
    end
    return times[#times]
  end
  -- A run that begins later, for its group or a rate, does not take a permit that an earlier one could use.
  local function take(entry)
    for _, pool in ipairs(pools_of(entry)) do
      pool.in_use = pool.in_use + 1
      table.sort(pool.free, later)
      local last = 1
      while pool.free[last] > entry.begins do last = last + 1 end
      table.remove(pool.free, last)
    end
  end
  local function give_back(entry)
    for _, pool in ipairs(pools_of(entry)) do
      pool.in_use = pool.in_use - 1
      pool.free[#pool.free + 1] = entry.begins + entry.took
    end
  end
  -- What to save: the times of the lock, the latest of them, and the times of the groups.
  local function to_save()
    local last, groups = 0, {}
    for _, at in ipairs(free) do last = math.max(last, at) end
    for _, pool in ipairs(pools) do -- a permit that is free by now is added again when it is wanted
      local ahead = {}
      for _, at in ipairs(pool.free) do
        if at > now then ahead[#ahead + 1] = at end
      end
      if #ahead > 0 then groups[#groups + 1] = {group = pool.group, free = ahead} end
    end
    return free, last, groups
  end
  return {
    first_of_lock = function(most, runs) return first_free(pool_of_lock, most, runs) end,
    first_of_group = function(entry, runs) return first_free(pools_of(entry)[2], entry.group_limit, runs) end,
    count = function(entry)
      for _, pool in ipairs(pools_of(entry)) do pool.in_use = pool.in_use + 1 end
    end,
    take = take, give_back = give_back, to_save = to_save,
  }
end
