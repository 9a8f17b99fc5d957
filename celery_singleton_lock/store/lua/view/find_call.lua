-- find_call: return the unique call with a key, if one counts as sent (lock_unique). Only a quarantine may write.
-- KEYS: lock
-- ARGV: name unique_key
-- REPLY: its state (pending, sent or here), the id of its task, and for how long (ms) it counts (-1: while it is here); nothing if there is none
lock = name
check()
local entry = read_unique(unique_key)
if not entry or entry.state == 'here' and not find(entry.attempt) then return {} end
return {entry.state, entry.id, redis.call('PTTL', unique_entry(unique_key))}
