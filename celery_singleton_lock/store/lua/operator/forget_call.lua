-- forget_call: let a call be sent again that is like one whose message is lost (lock_unique).
-- KEYS: lock
-- ARGV: name unique_key who
-- REPLY: 1 if a call like it counted, else 0; one that is parked or holds the lock still counts
lock = name
check()
check_audit()
local entry = read_unique(unique_key)
if not entry or entry.state == 'here' then return 0 end
write_though_full()
end_pending(entry)
redis.call('DEL', unique_entry(unique_key))
note(1)
finish()
return 1
