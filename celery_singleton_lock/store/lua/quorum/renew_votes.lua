-- renew_votes: renew votes. It never gives a vote, and never revives a lapsed one.
-- KEYS: vote*
-- ARGV: (token lease_ms)*
-- REPLY: list of [1 if held, fence]
local replies = {}
for i, key in ipairs(KEYS) do
  local token, lease = ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  local holder, _, left, last = read_vote(key)
  local held = holder == token
  if held then
    lease = math.max(left, lease)
    redis.call('PERSIST', key) -- the first write, since a full Redis would refuse HSET
    redis.call('HSET', key, 'till', digits(now + lease))
    redis.call('PEXPIRE', key, lease + GRACE_MS)
  end
  replies[i] = {held and 1 or 0, digits(last)}
end
return replies
