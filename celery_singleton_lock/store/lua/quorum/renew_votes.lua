-- renew: keep votes for longer. Never gives one, never revives one that has lapsed.
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
    redis.call('PERSIST', key) -- first, since a full Redis would refuse the next one
    redis.call('HSET', key, 'till', digits(now + lease))
    redis.call('PEXPIRE', key, lease + GRACE_MS)
  end
  replies[i] = {held and 1 or 0, digits(last)}
end
return replies
