-- The server's clock, read once per script. Test builds replace this file by one that reads a key.
local function server_time()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end
