-- vote: give this server's vote for a lock to a token, unless another token has it or the server is new.
-- KEYS: vote gone marker
-- ARGV: token round lease_ms fence until_ms longest_ms
--   round grows with each attempt of a token; until_ms = time on this server after which the vote is late
-- REPLY: [yes busy new late gone, fence, ms until it may vote for the token (busy, new), server ms, run id]
local new_for = newness(KEYS[3], longest_ms)
local holder, last_round, left, last = read_vote(KEYS[1])
local gone = tonumber(redis.call('GET', KEYS[2]) or -1)
local function say(verdict, number, wait) return {verdict, digits(number), digits(wait), digits(now), run} end

if now > tonumber(until_ms) then return say('late', 0, 0) end
if tonumber(round) <= gone then return say('gone', 0, 0) end
if holder ~= '' and holder ~= token then return say('busy', 0, left) end
if holder == '' and new_for > 0 then return say('new', 0, new_for) end

-- A repeated call does not raise the number by itself, so that a majority can agree on one.
local number = math.max(holder == token and last or last + 1, tonumber(fence))
local lease = math.max(left, tonumber(lease_ms))
redis.call('HSET', KEYS[1], 'token', token, 'till', digits(now + lease), 'fence', digits(number),
  'round', digits(math.max(holder == token and last_round or 0, tonumber(round))))
redis.call('PEXPIRE', KEYS[1], lease + GRACE_MS)
return say('yes', number, 0)
