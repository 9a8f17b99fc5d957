-- admit_voter: let this server vote at once; the caller knows that it has lost no vote.
-- KEYS: marker
-- ARGV: (none)*
-- REPLY: run id
redis.call('HSET', KEYS[1], 'run', run, 'since', 0)
return run
