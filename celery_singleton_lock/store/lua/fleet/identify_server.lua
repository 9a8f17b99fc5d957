-- identify: tell which server this is, and whether it still has its data: a marker is written once.
-- KEYS: fleet
-- ARGV: fresh
-- REPLY: list of the marker (empty: a full Redis refused it) and the run id (empty: not allowed)
local MARKER_MS = 86400000 -- workers ask every few seconds; after the last one has gone, it ends

local marker = KEYS[1] .. ':marker'
redis.pcall('SET', marker, fresh, 'NX')
redis.pcall('PEXPIRE', marker, MARKER_MS)
local info = redis.pcall('INFO', 'server')
local run = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or ''
return {redis.call('GET', marker) or '', run}
