-- The rates of observe mode: which starts they allow, simulated from the times at which earlier runs would have begun.

local MOST_BEGUN = 10000 -- most of these times: a sliding rate needs no more
local MOST_COSTS = 1000  -- most starts whose costs are added up
local function open_observed_rates(in_force, begun)
  local function begun_at(rate) return begun .. ':' .. rate[1] end
  local function cost_of(entry, rate) return entry.costs and entry.costs[rate[1]] or 1 end
  local function burst_of(rate) return rate[4] > 0 and rate[4] or rate[2] end
  local function gap_ms(rate) return rate[3] / rate[2] / 1000 end
  local function on_time(rate) return tonumber(redis.call('GET', begun_at(rate)) or 0) end -- of a smooth rate, as in rates.lua
  local function allowed_by_costs(entry, from, rate)
    local cost, most, per_ms = cost_of(entry, rate), burst_of(rate), rate[3] / 1000
    if rate[4] > 0 then return math.max(from, math.ceil(on_time(rate) + (cost - most) * gap_ms(rate))) end
    local left, since = most - cost, '(' .. digits(from - per_ms)
    local seen = redis.call('ZREVRANGEBYSCORE', begun_at(rate), '+inf', since, 'WITHSCORES', 'LIMIT', 0, MOST_COSTS)
    for i = 1, #seen, 2 do
      left = left - tonumber(string.match(seen[i], '^%d+'))
      if left < 0 then return math.max(from, math.ceil(tonumber(seen[i + 1]) + per_ms)) end
    end
    return from
  end
  local function allowed_by_count(from, rate)
    local most, per_ms = burst_of(rate), rate[3] / 1000
    if rate[4] > 0 then per_ms = rate[4] * rate[3] / rate[2] / 1000 end
    local nth = redis.call('ZREVRANGE', begun, most - 1, most - 1, 'WITHSCORES')[2]
    return nth and math.max(from, math.ceil(tonumber(nth) + per_ms)) or from
  end
  local function allowed_from(entry, from)
    for _, rate in ipairs(in_force) do
      from = rate[5] and allowed_by_costs(entry, from, rate) or allowed_by_count(from, rate)
    end
    return from
  end
  local function costs_too_much(entry)
    for _, rate in ipairs(in_force) do
      if rate[5] and cost_of(entry, rate) > burst_of(rate) then return true end
    end
    return false
  end
  local function note_cost(entry, rate)
    local key, cost = begun_at(rate), cost_of(entry, rate)
    if rate[4] > 0 then
      redis.call('SET', key, digits(math.max(on_time(rate), entry.begins) + cost * gap_ms(rate)), 'PX', REPORT_MS)
      return
    end
    redis.call('ZADD', key, entry.begins, digits(cost) .. ' ' .. entry.token)
    redis.call('ZREMRANGEBYRANK', key, 0, -MOST_COSTS - 1)
    redis.call('PEXPIRE', key, REPORT_MS)
  end
  local function note_begin(entry)
    if #in_force == 0 then return end
    for _, rate in ipairs(in_force) do
      if rate[5] then note_cost(entry, rate) end
    end
    redis.call('ZADD', begun, entry.begins, entry.token)
    redis.call('ZREMRANGEBYRANK', begun, 0, -MOST_BEGUN - 1)
    redis.call('PEXPIRE', begun, REPORT_MS)
  end
  return {allowed_from = allowed_from, costs_too_much = costs_too_much, note_begin = note_begin}
end
