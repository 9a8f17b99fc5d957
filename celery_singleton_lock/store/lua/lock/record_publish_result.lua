-- left: messages that kick or seal took out of the line are with the broker, or could not be sent.
-- KEYS: lock
-- ARGV: name worker seal sent claim_ms token*
--   sent 1 = forget them; one of which the copy was told TWIN, and acknowledged, queues again; 0 = they
--   queue again, and are not published for a while
-- REPLY: how many were forgotten
lock = name
check()
write_though_full()
sweep(worker)

local forgotten = 0
for i = 6, #ARGV do
  local token = ARGV[i]
  local rec = load(token)
  if has_left_under(rec, seal) then
    if sent == '1' and not rec.copied then
      unqueue(token, rec)
      forget(token, rec)
      forgotten = forgotten + 1
    else
      local pause = tonumber(rec.publish_every or PUBLISH_MS)
      rec.publish_at = sent == '0' and digits(now + pause) or nil
      rec.publish_every = digits(math.min(pause * 2, 3600000))
      stay(token, rec)
    end
  end
end
grant_waiters(worker)
finish()
return forgotten
