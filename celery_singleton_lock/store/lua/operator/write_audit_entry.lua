-- remark: put into the audit what an operator did to a lock elsewhere.
-- KEYS: lock
-- ARGV: name token steps who
-- REPLY: 1
lock = name
check()
check_audit()
write_though_full()
note(tonumber(steps), token ~= '' and token or nil, load(token))
return 1
