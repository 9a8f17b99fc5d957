-- The part that all scripts share: the state of one lock, and the functions that change it.
--
-- Lua has no roll-back. So a script reads every key, which checks its type, before it writes.
-- Keys of others (inboxes, wake lists, routes) are written with pcall: if another program uses such a
-- key, a wake-up or a route is missing, but the lock itself is not left half changed.
-- Numbers of 16 digits are written with %.0f, since tostring rounds them to 14.
--
-- A record is a JSON object per token. Its states, and what they mean:
--   waiting    a client or a blocking task waits in the queue, without a stored message
--   parked     a stored message waits in the queue
--   adrift     a stored message for which no live worker is known; it is not in the queue
--   leaving    a stored message that is being published, or delayed; it queues again at its deadline
--   overdue, replaced, revoked, rejected, too_costly, above_rate   a stored message that must not run: it is delivered
--              with this verdict until a worker has ended its task
--   granted    holds the lock, and has not claimed the grant yet
--   running    holds the lock, and has claimed the grant or needed no claim
--   reserved, held_after   the permit stays taken: for the next attempt, or for nobody
-- Fields of a record whose names do not say what they contain:
--   place      position in the queue: the time of arrival in microseconds, minus the head start
--   arrived    time of arrival in microseconds, if it is not the place
--   lease, wait, deadline, since   milliseconds
--   realm, queue   broker and queue of a stored message; together its route
--   twin       token of a duplicate delivery, whose message is stored with this record
--   copy       1 if this may be a duplicate delivery
--   copied     1 if a duplicate of this message was acknowledged
--   waited     1 if its task has waited in its slot
--   indexed    1 if the index has an entry for it
--   by         attempt whose message replaced this one
--   bytes      of its stored message, while they count in the sum of its route
--   returns    how many deliveries of the message came back
--   refused    another lock of its task, which Redis refuses, so that it is delayed
--   costs      cost of its start, by the id of a rate that counts costs; started = when it counted;
--              given = what charges have given back of it since then, by that id
--   excess     why it costs too much to start at all: cost, number, period and burst of a rate
--   ends_at_rate   true if it ends when it is next and above the rate (lock_on_rate); above_rate = it does
--   unique     its entry among the unique calls; see keep_unique()
--   seal       id of the call that took the message out of the queue for publishing
--   settles    1: it settles, or was replaced while it did; delayed and in the state leaving. See let_settle()
--   settles_from   when the first message of this burst came, milliseconds; ahead = its head start, microseconds
--   preempt    most calls of its task that are preempted in a row, and its age; see is_older()
--   ended_by   worker and process id of the process that ends its task, since it may not run
--   preempted_by   attempt for which its holder must end
--   follows    key of the unique calls, and id of the task whose result it waits for, then what `unique` has after the
--              key; see follow(). follows_another = 1: the first task has left no result, and this is the second
--   offer_every   after how many ms a replaced message is delivered again; it doubles
--   publish_at, publish_every   earliest time of the next attempt to publish, and the interval
local GRACE_MS = 60000   -- how long keys live after the last lease, so that fencing tokens continue to grow
local ADRIFT_MS = 5000   -- pause between two sweeps of a lock with messages that no worker consumes
local PUBLISH_MS = 2000  -- first pause after a failed attempt to publish such a message; it doubles
local BATCH = 100        -- most waiters that one script moves
local INBOX_BODY = 65536 -- longer bodies do not go through the inbox: the worker reads them itself
local INBOX_MS = 600000  -- how long the inbox of a worker lives
local DELAY_MS = 1000    -- first delay of a message that is returned repeatedly; it doubles
local MOST_DELAY_MS = 60000
local MOST_PENDING_MS = 5000 -- how long a sender may wait for another one of the same unique call

local WAITS = {
  waiting = 'queue', parked = 'queue', adrift = 'adrift',
  overdue = 'overdue', replaced = 'overdue', revoked = 'overdue', rejected = 'overdue', too_costly = 'overdue',
  above_rate = 'overdue',
  leaving = 'overdue', -- out of the queue until its deadline, then it queues again
}

local now_text = server_time()
local now_us = tonumber(now_text)
local now = math.floor(now_us / 1000)

local lock -- name of the lock that the functions below change; a script sets it in its first line
local holders, queue, record, meta, bodies, deadlines, adrift, done, flow, due, index, fleet = unpack(KEYS, 1, 12)
local limit, last_fence, grants
local declared        -- the limit that holders and waiters have declared
local paused, ruled   -- set by operators: no grants, and a limit that overrides the declared ones
local ruling = {}     -- when these end (ms), `pause` and `limit`; nil: only a call ends them
local alone      -- there are no waiters and no stored messages: the keys of the queue need not be read
local remembers  -- `done` has entries: ends of attempts are remembered
local index_changed   -- the index has gained or lost an entry
local sweeping   -- a sweeper runs this script
local became_adrift    -- a message has become adrift in this script
local rates        -- functions of open_rates(); nil: no caller has declared a rate
local kept_for_me  -- the caller's attempt has a reservation, and may not start yet
local wanted_flow  -- flow options of the caller; nil: none
local fair         -- functions of open_groups(); nil: no caller has declared a group
local starts_later -- the caller has other locks to acquire before it starts: another claim logs its start

local function digits(n) return string.format('%.0f', n) end
