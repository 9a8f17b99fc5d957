-- list_waiters: return a page of the waiters of a lock, in order. Writes nothing.
-- KEYS: lock
-- ARGV: name part after most
--   part = queue, adrift (ordered by route, then by place) or overdue (in no order); after = the end that
--   the last page returned, empty for the first page
-- REPLY: now_ms, end of this page (empty: the last one), list of token, record, bytes of its message, until when (ms) it may stay as it is (0: no limit)
lock = name
local tokens, till = {}, ''
local count = tonumber(most)

if part == 'queue' then
  local from = after == '' and '-inf' or '(' .. after
  local found = redis.call('ZRANGEBYSCORE', queue, from, '+inf', 'WITHSCORES', 'LIMIT', 0, count)
  for i = 1, #found, 2 do tokens[#tokens + 1] = found[i] end
  if #tokens == count then -- a page does not end between two tokens of the same place
    till = digits(tonumber(found[#found]))
    local taken = redis.call('ZCOUNT', queue, from, till)
    for _, token in ipairs(redis.call('ZRANGEBYSCORE', queue, from, till, 'LIMIT', count, taken)) do
      tokens[#tokens + 1] = token
    end
  end
elseif part == 'adrift' then
  local members = redis.call('ZRANGEBYLEX', adrift, after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, count)
  for i, member in ipairs(members) do tokens[i] = string.match(member, '[^\n]*$') end
  if #members == count then till = members[count] end
else
  local step = redis.call('HSCAN', record, after == '' and '0' or after, 'COUNT', count)
  for i = 1, #step[2], 2 do
    if WAITS[cjson.decode(step[2][i + 1]).state] == 'overdue' then tokens[#tokens + 1] = step[2][i] end
  end
  if step[1] ~= '0' then till = step[1] end
end

local found = {}
for _, token in ipairs(tokens) do
  found[#found + 1] = token
  found[#found + 1] = redis.call('HGET', record, token) or '{}'
  found[#found + 1] = redis.call('HSTRLEN', bodies, base_of(token))
  found[#found + 1] = redis.call('ZSCORE', deadlines, token) or '0'
end
return {digits(now), till, found}
