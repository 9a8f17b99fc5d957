-- server_state: return who has this server's vote, its clock, and for how long it counts as new.
-- KEYS: vote gone marker
-- ARGV: longest_ms
-- REPLY: [token or nothing, fence, ms left of its lease, server ms, run id, ms for which it is new]
local new_for = newness(KEYS[3], longest_ms)
local holder, _, left, last = read_vote(KEYS[1])
return {holder, digits(last), digits(left), digits(now), run, digits(new_for)}
