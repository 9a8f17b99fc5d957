-- find_contradictions: find contradictions between a lock's records, queue and holders. Writes nothing.
-- KEYS: lock
-- ARGV: name after most
--   after = the end that the last call returned, empty for the first call
-- REPLY: end (empty: all was read), list of token, what is wrong
lock = name
local vt = redis.call('HGET', flow, 'vt')
local lines = vt and open_groups(vt)
local PLACES = {'record', 'queue', 'holders'}
local place, cursor = 1, '0'
if after ~= '' then
  local number, rest = string.match(after, '^(%d):(%d+)$')
  place, cursor = tonumber(number), rest
end
local wrong, looked = {}, 0

local function found(token, what)
  wrong[#wrong + 1] = token
  wrong[#wrong + 1] = what
end

local function see_record(token, raw)
  local rec = cjson.decode(raw)
  local state = rec.state
  local where = WAITS[state]
  if where == 'queue' and not redis.call('ZSCORE', queue, token) then
    found(token, 'its record says ' .. state .. ', and it is not in the queue')
  elseif where == 'queue' and lines and not redis.call('ZSCORE', lines.line_of(rec), token) then
    found(token, 'it is in the queue, and not in the line of its group')
  elseif where == 'overdue' and not redis.call('ZSCORE', deadlines, token) then
    found(token, 'its record says ' .. state .. ', and it has no deadline')
  elseif not where and not lease_end(token) then
    found(token, 'its record says ' .. tostring(state) .. ', and it does not hold the lock')
  end
end

local function see_standing(token)
  if redis.call('HEXISTS', record, token) == 0 then found(token, 'it is in ' .. PLACES[place] .. ' without a record') end
end

while place <= #PLACES and looked < tonumber(most) do
  local step
  if place == 1 then
    step = redis.call('HSCAN', record, cursor, 'COUNT', most)
    for i = 1, #step[2], 2 do see_record(step[2][i], step[2][i + 1]) end
  else
    step = redis.call('ZSCAN', place == 2 and queue or holders, cursor, 'COUNT', most)
    for i = 1, #step[2], 2 do see_standing(step[2][i]) end
  end
  looked, cursor = looked + #step[2] / 2, step[1]
  if cursor == '0' then place = place + 1 end
end
return {place > #PLACES and '' or place .. ':' .. cursor, wrong}
