-- withdraw_vote: take a vote back, and refuse later requests of this and earlier rounds.
-- KEYS: vote gone marker
-- ARGV: token round keep_ms
-- REPLY: [1 if the token had this server's vote, server ms]
local holder, last_round = read_vote(KEYS[1])
local gone = tonumber(redis.call('GET', KEYS[2]) or 0)
local ours = holder == token and last_round <= tonumber(round)
-- The first write, since a full Redis does not refuse it.
redis.call('PERSIST', KEYS[1])
if ours then redis.call('HDEL', KEYS[1], 'token', 'round', 'till') end
if ours or holder == '' then redis.call('PEXPIRE', KEYS[1], GRACE_MS) end
if not ours and holder ~= '' then
  redis.call('PEXPIRE', KEYS[1], math.max(0, tonumber(redis.call('HGET', KEYS[1], 'till')) - now) + GRACE_MS)
end
redis.pcall('SET', KEYS[2], digits(math.max(gone, tonumber(round))), 'PX', keep_ms)
return {ours and 1 or 0, digits(now)}
