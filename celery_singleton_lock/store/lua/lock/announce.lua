-- announce: record that a unique call is about to be sent; or return which task was sent for it before.
-- KEYS: lock
-- ARGV: name unique_key task_id instead_of pending_ms
--   instead_of = id of a task whose sending the caller has waited for. If the entry is of this task and is still
--   pending, the new call replaces it; may be empty
-- REPLY: the state (announced, pending, sent or here) and the id of the task, in two lines
lock = name
local entry = read_unique(unique_key)
local dead = entry and entry.state == 'pending' and entry.id == instead_of
if entry and entry.state == 'here' then
  check()
  dead = not find(entry.attempt) -- its record was lost
end
if entry and entry.id ~= task_id and not dead then
  if entry.state == 'pending' then
    entry.waits = (entry.waits or 0) + 1
    write_unique(unique_key, entry, 'keep')
  end
  return entry.state .. '\n' .. entry.id
end
if not entry or dead then
  write_unique(unique_key, {id = task_id, state = 'pending', retries = 0}, tonumber(pending_ms))
end
return 'announced\n' .. task_id
