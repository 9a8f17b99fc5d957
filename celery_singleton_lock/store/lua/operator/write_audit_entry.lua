-- write_audit_entry: write into the audit log what an operator did to a lock outside of Redis.
-- KEYS: lock
-- ARGV: name token steps who
-- REPLY: 1
lock = name
check()
check_audit()
write_though_full()
note(tonumber(steps), token ~= '' and token or nil, load(token))
finish() -- write_though_full() has removed the expiry of the holders
return 1
