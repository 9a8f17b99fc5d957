-- identify: return the server's run id, and a marker that is written once: its loss shows a loss of data.
-- KEYS: fleet
-- ARGV: fresh
--   fresh = the marker to write if there is none
-- REPLY: list of the marker (empty: a full Redis refused it) and the run id (empty: not allowed)
local MARKER_MS = 86400000 -- it expires after the last worker has stopped; workers call every few seconds

local marker = KEYS[1] .. ':marker'
local known = redis.pcall('GETEX', marker, 'PX', MARKER_MS)
if type(known) ~= 'string' then
  redis.pcall('SET', marker, fresh, 'NX', 'PX', MARKER_MS)
  known = redis.call('GET', marker)
end
local info = redis.pcall('INFO', 'server')
local run = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or ''
return {known or '', run}
