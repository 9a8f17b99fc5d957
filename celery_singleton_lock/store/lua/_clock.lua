-- The server's clock in microseconds, as text. Each script reads it once. Tests replace this file by one
-- that reads the time from a key.
local function server_time()
  local t = redis.call('TIME')
  return t[1] .. string.sub('00000' .. t[2], -6)
end
