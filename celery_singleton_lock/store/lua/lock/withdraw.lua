-- withdraw: end the entry of a unique call that was not sent, or whose task has ended without a start.
-- KEYS: lock
-- ARGV: name unique_key task_id retries ended
--   task_id = of the call; empty = of any call; ended 1 = its task has ended
-- REPLY: 1 if the entry has ended, else 0
lock = name
local entry = read_unique(unique_key)
if not entry then return 0 end
if task_id ~= '' and (entry.id ~= task_id or entry.retries > tonumber(retries)) then return 0 end
if entry.state == 'here' then
  -- The release of its lock ends the entry; or the end of its lease, if that is earlier.
  entry.ended = ended == '1' or nil
  -- The running attempt has sent its retry, and that one has ended first: a worker has discarded it, since it is revoked.
  if entry.ended and tonumber(retries) > entry.retries then entry.again, entry.over = nil, tonumber(retries) end
  if entry.ended then redis.pcall('SET', unique_entry(unique_key), cjson.encode(entry)) end
  return 0
end
end_pending(entry)
drop_unique(unique_key, entry.id)
return 1
