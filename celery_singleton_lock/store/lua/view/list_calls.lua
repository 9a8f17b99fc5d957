-- list_calls: return the unique calls of a lock that count as sent (lock_unique). Only a quarantine may write.
-- KEYS: lock
-- ARGV: name most key*
--   most = how many holders, waiters, and messages out of the queue are read, to find the keys of their calls;
--   key = further keys
-- REPLY: now_ms, list of key, its state (pending, sent or here), the id of its task, for how long (ms) it counts (-1: while it is here), number of its followers that wait, and its record (empty: the broker has it)
lock = name
check()
local asked, known = {}, {}
local function ask(key)
  if not key or known[key] then return end
  known[key] = true
  asked[#asked + 1] = key
end
for i = 3, #ARGV do ask(ARGV[i]) end

for _, place in ipairs({holders, queue, adrift, deadlines}) do
  local tokens = redis.call('ZRANGE', place, 0, tonumber(most) - 1)
  for i, member in ipairs(tokens) do tokens[i] = string.match(member, '[^\n]*$') end
  for _, raw in ipairs(#tokens > 0 and redis.call('HMGET', record, unpack(tokens)) or {}) do
    local rec = raw and cjson.decode(raw) or {}
    ask(rec.unique and rec.unique[1] or rec.follows and rec.follows[1])
  end
end

local found = {}
for _, key in ipairs(asked) do
  local entry, token, rec = read_unique(key), nil, nil
  if entry and entry.state == 'here' then token, rec = find(entry.attempt) end
  if entry and (entry.state ~= 'here' or token) then
    local followers = redis.pcall('ZCARD', followers_of(entry.id))
    for _, value in ipairs({
      key, entry.state, entry.id, redis.call('PTTL', unique_entry(key)),
      type(followers) == 'number' and followers or 0, rec and cjson.encode(rec) or '',
    }) do found[#found + 1] = value end
  end
end
return {digits(now), found}
