-- forget_call: delete the entry of a unique call whose message is lost, so that a call like it is sent (lock_unique).
-- KEYS: lock
-- ARGV: name unique_key who
-- REPLY: 1 if the entry was deleted, else 0: there is none, or its task is parked or holds the lock
lock = name
check()
check_audit()
local entry = read_unique(unique_key)
if not entry or entry.state == 'here' then return 0 end
write_though_full()
end_pending(entry)
drop_unique(unique_key, entry.id)
note(1)
finish()
return 1
