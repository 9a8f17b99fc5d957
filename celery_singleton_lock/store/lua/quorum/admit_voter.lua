-- admit: let this server vote at once, for the caller knows that it has forgotten nobody's vote.
-- KEYS: marker
-- ARGV: (none)*
-- REPLY: run id
redis.call('HSET', KEYS[1], 'run', run, 'since', 0)
return run
