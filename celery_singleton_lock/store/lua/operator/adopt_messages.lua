-- adopt_messages: assign waiting messages to another broker. Each keeps its place, and its deadline.
-- KEYS: lock
-- ARGV: name realm claim_ms who token*
--   realm = of the broker. Not changed are messages whose queue a live worker of their broker consumes. Those that a
--   worker has to end are delivered to a worker of the new broker
-- REPLY: list of the tokens that wait for that broker now; the same if the call is repeated
lock = name
check()
check_audit()
write_though_full()

local adopted, steps, last, last_token = {}, 0, nil, nil
for i = 5, #ARGV do
  local token = ARGV[i]
  local rec = load(token)
  local where = standing(token, rec)
  local ends = rec and where == 'overdue' and rec.state ~= 'leaving'
  local waits = rec and rec.parked and (where == 'queue' or where == 'adrift' or rec.delayed or ends)
  if waits and rec.realm ~= realm and #live_of(route_of(rec), 0) == 0 then
    local deadline = rec.delayed and redis.call('ZSCORE', deadlines, token) -- the end of its delay
    local settles = rec.settles and rates and rates.settling(source_of(rec)) == token
    if settles then rates.note_settling(source_of(rec), nil) end
    unqueue(token, rec)
    rec.realm, rec.publish_at, rec.publish_every = realm, nil, nil
    if settles and not rates.settling(source_of(rec)) then rates.note_settling(source_of(rec), token) end
    if ends then
      rec.offer_every = nil
      save(token, rec)
      deliver_to_end(token, '')
    elseif deadline then
      redis.call('ZADD', deadlines, deadline, token)
      save(token, rec)
    else
      enqueue(token, rec, 'parked')
    end
    steps, last, last_token = steps + 1, rec, token
  end
  if waits and rec.realm == realm then adopted[#adopted + 1] = token end
end
if last then note(steps, steps == 1 and last_token or nil, last) end
sweep('')
grant_waiters('')
finish()
return adopted
