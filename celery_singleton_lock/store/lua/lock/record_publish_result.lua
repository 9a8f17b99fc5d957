-- record_publish_result: delete or queue again messages that were taken out of the queue for publishing.
-- KEYS: lock
-- ARGV: name worker seal sent claim_ms token*
--   seal = id of the call that took them out (sweep_and_grant, take_out_messages); sent 1 = the broker has
--   them: delete them, except those whose copy a worker has acknowledged as a duplicate, which queue again;
--   sent 0 = all queue again, and are published later
-- REPLY: how many were deleted
lock = name
check()
write_though_full()

local forgotten = 0
for i = 6, #ARGV do
  local token = ARGV[i]
  local rec = load(token)
  if is_leaving_under(rec, seal) then
    if sent == '1' and not rec.copied then
      unqueue(token, rec)
      forget(token, rec, true)
      forgotten = forgotten + 1
    else
      local pause = tonumber(rec.publish_every or PUBLISH_MS)
      rec.publish_at = sent == '0' and digits(now + pause) or nil
      rec.publish_every = digits(math.min(pause * 2, 3600000))
      stop_leaving(token, rec)
    end
  end
end
sweep(worker) -- after the loop above: a message whose time is over would queue again, and run twice
grant_waiters(worker)
finish()
return forgotten
