-- confirm_sent: note that the broker has the message of a unique call that was announced.
-- KEYS: lock
-- ARGV: name unique_key task_id retries kept_ms
--   retries = of the attempt that was sent; kept_ms = for how long the entry stays
-- REPLY: '1' if the entry is that of the task, else '0'
lock = name
local entry = read_unique(unique_key)
if not entry or entry.id ~= task_id then return '0' end
if entry.state == 'here' then -- a worker was faster; or the running task has sent its retry
  if tonumber(retries) > math.max(entry.retries, entry.over or 0) then entry.again = kept_ms end
  write_unique(unique_key, entry, 'keep')
  return '1'
end
end_pending(entry)
write_unique(unique_key, {id = task_id, state = 'sent', retries = tonumber(retries)}, tonumber(kept_ms))
return '1'
