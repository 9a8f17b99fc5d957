-- The index: finding a message by its attempt.

-- The index has an entry for the attempt of each waiter. If that is not the first attempt of its task, a
-- second entry is the task id with @ before it. Older versions write both for each waiter.
local function names_in_index(rec, by_older)
  local id, tries = string.match(rec.attempt, '^(.*)/(%d+/%d+)$')
  if tries == '0/0' and not by_older then return {rec.attempt} end
  return {rec.attempt, '@' .. (id or rec.attempt)}
end

-- The entries of the index under one name. One entry is plain text, which contains a line feed. Several,
-- for a task id that was used twice, are a JSON list, which contains none.
local function entries_in_index(known)
  local raw = redis.call('HGET', index, known)
  if not raw then return {} end
  return string.find(raw, '\n', 1, true) and {raw} or cjson.decode(raw)
end

-- Write the entries of a name: without the entry of the message `but`, and with `added`, if given.
local function put_entries(known, entries, but, added)
  local left = {}
  for _, entry in ipairs(entries) do
    if base_of(entry) ~= base_of(but) then left[#left + 1] = entry end
  end
  left[#left + 1] = added
  if #left > BATCH then table.remove(left, 1) end
  if #left == 0 then return redis.call('HDEL', index, known) end
  redis.call('HSET', index, known, #left == 1 and left[1] or cjson.encode(left))
end

local function put_in_index(token, rec)
  if rec.attempt == '' then return end
  rec.indexed, index_changed = '1', true
  local mine = lock .. '\n' .. token
  for _, known in ipairs(names_in_index(rec)) do
    if redis.call('HSETNX', index, known, mine) == 0 then put_entries(known, entries_in_index(known), mine, mine) end
  end
end

local function unindex(token, rec)
  if not rec.indexed then return end
  index_changed = true
  for _, known in ipairs(names_in_index(rec, true)) do
    local entries = entries_in_index(known)
    if #entries > 0 then put_entries(known, entries, lock .. '\n' .. token) end
  end
end
