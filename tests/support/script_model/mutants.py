"""Script mutants: each removes one guarantee, and an invariant must detect it.

(name, file, old text, new text): a patch that does not apply is an error, so the list cannot rot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from celery_singleton_lock.store.scripts import (
    FLOW_VERBS,
    VERBS,
    Script,
    assemble,
    file_of,
    read,
    with_flow,
)
from support.script_model.world import CLOCK

LIBRARY = "shared"
OPERATORS_VERBS = ("pause", "reopen", "set_limit", "set_rates")
"""Those that the moves call."""
SEARCH_MANY = ("local FEW = 10 ", "local FEW = 0 ")
"""Patch of the library: a lock with one holder has many. Those of the model have at most two."""
_assembled = cache(assemble)  # most scripts of most mutants are those of the next one


@dataclass(frozen=True)
class Mutant:
    """One wrong line.

    Args:
        name: what is wrong.
        file: the script that is patched.
        old: text that must be there exactly once.
        new: what stands there instead.
        also: further (old, new) of the same file, where one line has a second one behind it.
    """

    name: str
    file: str
    old: str
    new: str
    also: tuple[tuple[str, str], ...] = ()

    def patched(self) -> str:
        return self.patch(read(self.file))

    def patch(self, text: str) -> str:
        for old, new in ((self.old, self.new), *self.also):
            if text.count(old) != 1:
                msg = f"{self.name}: {old!r} is {text.count(old)} times in {self.file}"
                raise LookupError(msg)
            text = text.replace(old, new)
        return text

    def scripts(self) -> dict[str, Script]:
        verbs = (*VERBS, *OPERATORS_VERBS)
        texts = {f: read(f) for f in (LIBRARY, *(file_of(verb) for verb in verbs))}
        texts[self.file] = self.patched()
        shared = dict.fromkeys(VERBS, texts[LIBRARY])
        shared |= dict.fromkeys(
            OPERATORS_VERBS, f"{texts[LIBRARY]}\n\n{read('shared/operator.lua')}"
        )
        bodies = {verb: texts[file_of(verb)] for verb in verbs}
        bodies |= {f"{verb}_with_flow": with_flow(bodies[verb]) for verb in FLOW_VERBS}
        shared |= {f"{verb}_with_flow": texts[LIBRARY] for verb in FLOW_VERBS}
        return {v: _assembled(v, CLOCK, shared[v], body) for v, body in bodies.items()}


MUTANTS = (
    Mutant(
        "a paused lock is granted",
        LIBRARY,
        "if paused then return 'pause',",
        "if false then return 'pause',",
    ),
    Mutant(
        "a retry keeps a permit that is not there",
        LIBRARY,
        "if redis.call('ZCARD', holders) >= limit then return end -- no permit",
        "if waits_for() == 'holder' then return end -- no permit",
    ),
    Mutant(
        "a retry loses its turn while its lock is paused",
        LIBRARY,
        "local place = later and place_before_all(load(token)) or nil",
        "local place",
    ),
    Mutant(
        "a retry of a paused lock needs room",
        "lock/park.lua",
        "local room = reserved or first or not",
        "local room = reserved or not",
    ),
    Mutant(
        "messages of a paused lock leave",
        "lock/sweep_and_grant.lua",
        "and reason ~= 'pause' and reason ~= 'redis'",
        "",
    ),
    Mutant("no sweep of lapsed holders", LIBRARY, "do lapse(token) end", "do local _ = token end"),
    Mutant(
        "a newcomer barges in",
        "lock/acquire.lua",
        "if alone then\n",
        "if alone or redis.call('ZCARD', holders) < limit then\n",
    ),
    Mutant(
        "last in, first out",
        LIBRARY,
        "  return redis.call('ZRANGE', queue, 0, 0)[1]\n",
        "  return redis.call('ZRANGE', queue, -1, -1)[1]\n",
    ),
    Mutant(
        "release does not look whose it is",
        "lock/release_and_grant_next.lua",
        "local where = standing(token, rec)",
        "local first = redis.call('ZRANGE', holders, 0, 0)[1]\n"
        "if not rec and first then token = first; rec = load(token) end\n"
        "local where = standing(token, rec)",
    ),
    Mutant(
        "extend revives a lapsed lease",
        "lock/extend_leases.lua",
        "local held = till and till > now",
        "local held = till",
    ),
    Mutant(
        "extend creates a lease",
        "lock/extend_leases.lua",
        "local held = till and till > now",
        "local held = true; till = till or 0",
    ),
    Mutant(
        "extend shortens",
        "lock/extend_leases.lua",
        "math.max(till, now + lease_ms)",
        "now + math.min(lease_ms, 500)",
    ),
    Mutant(
        "a message whose wait is over queues again",
        LIBRARY,
        "if not rec.deadline or tonumber(rec.deadline) > now then return end",
        "do return end",
    ),
    Mutant(
        "a renewal lets a paused lock expire",
        "lock/extend_leases.lua",
        "held and not set[1] and not set[2]",
        "held",
    ),
    Mutant(
        "a renewal forgets the waiters",
        "lock/extend_leases.lua",
        "redis.call('EXISTS', queue, bodies, deadlines, adrift, flow) == 0",
        "true",
    ),
    Mutant(
        "no lock is due",
        "fleet/take_due_locks.lua",
        "redis.call('EXISTS', unpack(KEYS)) == 0",
        "true",
    ),
    Mutant(
        "a grant waits beside a worker with a free slot",
        LIBRARY,
        "return idle_worker(rec, own) or",
        "return",
    ),
    Mutant(
        "one free slot is granted twice",
        LIBRARY,
        "slots[worker] = free_slots(worker) - 1",
        "slots[worker] = free_slots(worker)",
    ),
    Mutant(
        "nobody else hears that a slot was taken",
        LIBRARY,
        "    redis.pcall('SET', fleet .. ':free:' .. worker, slots[worker], 'XX', 'KEEPTTL')\n",
        "",
    ),
    Mutant(
        "a grant that has begun is passed on",
        "lock/release_and_grant_next.lua",
        "held_it and not (rec.state == 'granted' and rec.parked)",
        "held_it and not rec.parked",
    ),
    Mutant(
        "a grant is passed on though nobody has a slot",
        "lock/release_and_grant_next.lua",
        "not begun and idle_worker(rec, own)",
        "not begun",
    ),
    Mutant("no grant on release", "lock/release_and_grant_next.lua", "grant_waiters(own)\n", ""),
    Mutant(
        "a dead waiter is granted",
        LIBRARY,
        "redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, BATCH)",
        "{}",
        also=(
            (
                "elseif not rec or deadline and tonumber(deadline) <= now then",
                "elseif not rec then",
            ),
        ),
    ),
    Mutant(
        "nobody is told that a wait is over",
        LIBRARY,
        "redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, BATCH)",
        "{}",
    ),
    Mutant(
        "back to the tail",
        LIBRARY,
        "  return next_token(stored), not own\n",
        "  rec.place = digits(now_us)\n  return next_token(stored), not own\n",
    ),
    Mutant(
        "a record is leaked",
        LIBRARY,
        "  redis.call('HDEL', record, token)\n  unindex(token, rec)\n",
        "  unindex(token, rec)\n",
    ),
    Mutant(
        "the fence starts anew",
        LIBRARY,
        "math.max(last_fence + 1, now_us)",
        "math.max(last_fence % 1000 + 1, 1)",
    ),
    Mutant(
        "the fence stands still",
        LIBRARY,
        "math.max(last_fence + 1, now_us)",
        "math.max(last_fence, now_us)",
    ),
    Mutant(
        "a waiter claims without a grant",
        "lock/claim.lua",
        "if where == 'holder' then start(token, rec) end",
        "rec.fence = rec.fence or digits(last_fence); start(token, rec)",
    ),
    Mutant(
        "the body is dropped at the claim",
        "lock/claim.lua",
        "and delete_message ~= '0' then redis",
        "then redis",
    ),
    Mutant(
        "the twin is dropped at a requeue",
        LIBRARY,
        "local own = has_body(base_of(token))\n",
        "local own = has_body(base_of(token))\n"
        "  if rec.twin then redis.call('HDEL', bodies, base_of(rec.twin)) end\n",
    ),
    Mutant(
        "no done mark",
        LIBRARY,
        "if rec.attempt == '' or not (rec.parked or rec.twin or rec.copied or feared)"
        " then return end",
        "if done_ms then return end",
    ),
    Mutant(
        "the end of a copied attempt is not remembered",
        "lock/acquire.lua",
        "save(other, others)\n",
        "",
    ),
    Mutant(
        "the token is used again",
        LIBRARY,
        "  return next_token(stored), not own\n",
        "  return stored, not own\n",
    ),
    Mutant(
        "one permit too many",
        LIBRARY,
        "  while next_may_start(own) do",
        "  while next_may_start(own) or redis.call('ZCARD', holders) == limit do",
    ),
    Mutant(
        "one permit too many for newcomers",
        "lock/acquire.lua",
        "if not waits_for(nil, rec) and not (fair",
        "if (not waits_for(nil, rec) or redis.call('ZCARD', holders) == limit) and not (fair",
    ),
    Mutant(
        "an overdue message is dropped",
        LIBRARY,
        "if not rec.parked then return end_delivery(token, rec) end",
        "redis.call('HDEL', bodies, base_of(token))\n  redis.call('HDEL', record, token)\n"
        "  if true then return end",
    ),
    Mutant(
        "a cancel drops the grant",
        "lock/release_and_grant_next.lua",
        "if held_it and (ending == 'cancel' or",
        "if held_it and (",
    ),
    Mutant(
        "an acquire without wait stays in the queue",
        "lock/acquire.lua",
        "    leave_queue(token, rec)\n",
        "    local _ = token\n",
    ),
    Mutant(
        "the usual holder stays for ever",
        "lock/acquire.lua",
        "  redis.call('PEXPIRE', holders, life)\n",
        "",
    ),
    Mutant(
        "the usual record stays for ever",
        "lock/acquire.lua",
        "  redis.call('PEXPIRE', record, life)\n",
        "",
    ),
    Mutant(
        "the usual memory stays for ever",
        "lock/acquire.lua",
        "  redis.call('PEXPIRE', meta, life)\n",
        "",
    ),
    Mutant(
        "the usual release passes by who waits",
        "lock/release_and_grant_next.lua",
        "redis.call('EXISTS', queue, bodies, deadlines, adrift) == 0",
        "true",
    ),
    Mutant(
        "the usual release leaves its record",
        "lock/release_and_grant_next.lua",
        "    redis.call('HDEL', record, token)\n",
        "",
    ),
    Mutant(
        "the usual grant repeats a fence",
        "lock/acquire.lua",
        "last_fence < now_us and now_text or digits(last_fence + 1)",
        "now_text",
    ),
    Mutant(
        "the usual grant keeps a place in the future",
        "lock/acquire.lua",
        "tonumber(place_us) <= now_us and place_us or now_text",
        "place_us or now_text",
    ),
    Mutant(
        "a place in the future is kept",
        LIBRARY,
        "return math.min(wanted, now_us)",
        "return wanted",
    ),
    Mutant(
        "a reset gives the lock back to whom it was taken from",
        "operator/reset.lua",
        "    move_behind_all(rec)\n",
        "",
    ),
    Mutant(
        "asking again takes a new place", "lock/acquire.lua", "if not rec then\n", "if true then\n"
    ),
    Mutant(
        "parking twice enqueues twice",
        "lock/park.lua",
        "elseif is_stored(token, attempt) then",
        "elseif false then",
    ),
    Mutant("park does not grant", "lock/park.lua", "grant_waiters(worker)\n", ""),
    Mutant("messages adrift are not recalled", LIBRARY, "  recall(own)\n  if fair", "  if fair"),
    Mutant(
        "what goes adrift is looked at late", LIBRARY, "became_adrift and now or redis", "redis"
    ),
    Mutant(
        "who comes by puts the look off",
        LIBRARY,
        "tonumber(not sweeping and planned or now",
        "tonumber(became_adrift and planned or now",
    ),
    Mutant(
        "nobody looks again",
        LIBRARY,
        "redis.call('ZADD', due, next_look(first), lock)",
        "redis.call('ZADD', due, next_look(first) + 60000, lock)",
    ),
    Mutant(
        "keys expire beside a body",
        LIBRARY,
        "if redis.call('EXISTS', bodies) == 1 then",
        "if false then",
    ),
    Mutant(
        "a line of clients lives for ever",
        LIBRARY,
        "if call('PTTL', line_of(group)) == -1 then",
        "if false then",
    ),
    Mutant(
        "keys stay for ever", LIBRARY, "live_until(tonumber(last), holders, record, meta)", "return"
    ),
    Mutant(
        "the index leaks",
        LIBRARY,
        "  redis.call('HDEL', record, token)\n  unindex(token, rec)\n",
        "  redis.call('HDEL', record, token)\n",
    ),
    Mutant(
        "who dies alone stays in the index",
        LIBRARY,
        "if rec and (rec.indexed or rec.unique) or i == BATCH then return",
        "if not rec then return",
    ),
    Mutant(
        "a lease without end",
        LIBRARY,
        "redis.call('ZADD', holders, now + lease, token)",
        "redis.call('ZADD', holders, now + lease * 100, token)",
    ),
    Mutant(
        "a claim keeps the short lease",
        "lock/claim.lua",
        "if where == 'holder' then start(token, rec) end",
        "if where == 'holder' then rec.state = 'running' end",
    ),
    Mutant(
        "anybody takes a reservation",
        LIBRARY,
        "  if (held or redis.call('ZCARD', holders)) < limit then\n",
        "  held = held or redis.call('ZCARD', holders)\n"
        "  for _, t in ipairs(redis.call('ZRANGE', holders, 0, -1)) do\n"
        "    if string.sub(t, 1, 5) == 'keep:' then held = held - 1 end\n  end\n"
        "  if held < limit then\n",
    ),
    Mutant(
        "a lock does not stay taken after a success",
        "lock/release_and_grant_next.lua",
        "  add_holder('held:' .. token, held, 'held_after', ms)\n  save('held:' .. token, held)\n",
        "",
    ),
    Mutant(
        "the next attempt does not take its reservation",
        "lock/acquire.lua",
        "if reserved then",
        "if false then",
    ),
    Mutant(
        "nothing is reserved",
        LIBRARY,
        "  add_holder(token, reserved, 'reserved', ms)\n  save(token, reserved)\n",
        "",
    ),
    Mutant(
        "a replaced message runs after all",
        LIBRARY,
        "if rec.by or rec.revoked or rec.rejected or rec.excess or rec.above_rate then "
        "rec.deadline, delay = digits(now), nil end",
        "rec.deadline = rec.deadline",
    ),
    Mutant(
        "a replaced message is dropped",
        LIBRARY,
        "  replace(oldest, first, attempt, own)\n",
        "  unqueue(oldest, first)\n  forget(oldest, first)\n",
    ),
    Mutant(
        "the newest is replaced",
        LIBRARY,
        "return redis.call('ZRANGE', queue, skip, skip + BATCH - 1) end",
        "return redis.call('ZREVRANGE', queue, skip, skip + BATCH - 1) end",
    ),
    Mutant(
        "another task's message is replaced",
        LIBRARY,
        "rec.parked and rec.task == task and",
        "rec.parked and task and",
        also=(("string.find(raw, name_of_task, 1, true) and cjson", "cjson"),),
    ),
    Mutant(
        "a revoked message is told that it is late",
        "lock/deliver_revoked.lua",
        "rec.revoked, rec.delayed, rec.state = '1', nil, 'parked'",
        "rec.delayed, rec.state = nil, 'parked'",
    ),
    Mutant(
        "a revoked message that was given back runs after all",
        LIBRARY,
        "if rec.by or rec.revoked or rec.rejected or rec.excess or rec.above_rate then "
        "rec.deadline, delay = digits(now), nil end",
        "if rec.by then rec.deadline = digits(now) end",
    ),
    Mutant(
        "a revoked message is dropped",
        "lock/deliver_revoked.lua",
        "  deliver_to_end(token, worker)",
        "  forget(token, rec)",
    ),
    Mutant(
        "a revoke ends a client's wait",
        "lock/deliver_revoked.lua",
        "waits = waits and rec.parked and rec.realm == realm",
        "waits = waits and (rec.realm or realm) == realm",
    ),
    Mutant(
        "others wait for who keeps coming back",
        LIBRARY,
        "end_delivery(token, rec, before >= 0 and",
        "end_delivery(token, rec, false and",
    ),
    Mutant(
        "the first return loses its place",
        LIBRARY,
        "local before = unread and times - 1 or times - 2",
        "local before = times - 1",
    ),
    Mutant(
        "a task one of whose locks is refused is not delayed",
        "lock/release_and_grant_next.lua",
        "end_delivery(token, rec, tonumber(keep_ms))",
        "end_delivery(token, rec)",
    ),
    Mutant(
        "a task one of whose locks is refused comes back too often",
        "lock/release_and_grant_next.lua",
        "end_delivery(token, rec, tonumber(keep_ms))",
        "return_delivery(token, rec, true)",
    ),
    Mutant(
        "a delay has no bound",
        LIBRARY,
        "math.min(DELAY_MS * 2 ^ before, MOST_DELAY_MS)",
        "DELAY_MS * 2 ^ before",
    ),
    Mutant(
        "who was delayed comes before who waits",
        LIBRARY,
        "end_settling(token, rec) else move_behind_all(rec) end",
        "end_settling(token, rec) end",
    ),
    Mutant("returns are not counted", LIBRARY, "  rec.returns = digits(times)\n", ""),
    Mutant(
        "a rejected message is dropped",
        "lock/release_and_grant_next.lua",
        "elseif not have_rejected(token, rec, own) then",
        "else",
    ),
    Mutant(
        "a rejected message that was given back runs after all",
        LIBRARY,
        "if rec.by or rec.revoked or rec.rejected or rec.excess or",
        "if rec.by or rec.revoked or rec.excess or",
    ),
    Mutant(
        "the end of a rejected message is remembered",
        LIBRARY,
        "  if rec.rejected and not rec.publish_at then return end\n",
        "",
    ),
    Mutant(
        "a later call is taken for a copy of the ended one with its id",
        LIBRARY,
        "if first == 1 or not earlier then return true end",
        "if true then return true end",
    ),
    Mutant(
        "a copy whose first arrival is known runs after its end",
        LIBRARY,
        "return ended >= math.floor(first / 1000) - CLOCK_MS",
        "return false",
    ),
    Mutant(
        "a marked delivery runs beside its message",
        LIBRARY,
        "if copy ~= '0' or attempt == '' then return find(attempt) end\n",
        "if attempt == '' then return nil end\n",
    ),
    Mutant(
        "an unmarked delivery runs beside a marked one",
        LIBRARY,
        "return rec.copy or base_of(other) == base end)",
        "return base_of(other) == base end)",
    ),
    Mutant(
        "a stored message has the deadline of its waiter in a slot",
        LIBRARY,
        "if is_duplicate or not was_parked or rec.state",
        "if is_duplicate or rec.state",
    ),
    Mutant(
        "a copy that is granted at once is not in the index",
        LIBRARY,
        "if rec.copy and not rec.indexed then put_in_index(token, rec) end\n",
        "",
    ),
    Mutant(
        "a lock with a new entry in the index is not swept",
        LIBRARY,
        "rec.indexed, index_changed = '1', true",
        "rec.indexed = '1'",
    ),
    Mutant(
        "a delivery that the broker does not mark runs beside its message",
        LIBRARY,
        "string.find(token, start, 1, true) == 1",
        "false",
    ),
    Mutant(
        "a copy of one of many holders runs if the holder came after the last search",
        LIBRARY,
        "if not known or tonumber(known) ~= last_fence then",
        "if not known then",
        also=(SEARCH_MANY,),
    ),
    Mutant(
        "a holder among many is searched by the attempt of another",
        LIBRARY,
        "scored[#scored + 1] = page[i]",
        "scored[#scored + 1] = page[1]",
        also=(SEARCH_MANY,),
    ),
    Mutant(
        "only the first of many new holders is read",
        LIBRARY,
        "    if #page == BATCH then add_page() end\n",
        "    if #page == 1 then break end\n",
        also=(SEARCH_MANY,),
    ),
    Mutant(
        "a delivery that the broker does not mark is queued beside its message",
        LIBRARY,
        "return rec.copy or base_of(other) == base end)",
        "return rec.copy end)",
    ),
    Mutant(
        "the index knows the last of two calls with one id",
        LIBRARY,
        "redis.call('HSETNX', index, known, mine) == 0",
        "redis.call('HSET', index, known, mine) == 2",
    ),
    Mutant(
        "a retry is not found by its task id",
        LIBRARY,
        "if tries == '0/0' and not by_older then",
        "if tries and not by_older then",
    ),
    Mutant(
        "another broker's message is revoked",
        "lock/deliver_revoked.lua",
        "waits and rec.parked and rec.realm == realm",
        "waits and rec.parked",
    ),
    Mutant(
        "another broker's granted message is revoked",
        "lock/deliver_revoked.lua",
        "unbegun = unbegun and rec.realm == realm\n",
        "",
    ),
    Mutant(
        "who has begun loses its lock when it is revoked",
        "lock/deliver_revoked.lua",
        " and rec.state == 'granted'",
        "",
    ),
    Mutant(
        "a granted message that is revoked keeps its lock",
        "lock/deliver_revoked.lua",
        "if unbegun then",
        "if false then",
    ),
    Mutant(
        "a revoke takes who holds the lock",
        "lock/deliver_revoked.lua",
        "where == 'adrift' or",
        "where or",
    ),
    Mutant(
        "a delayed message is not revoked",
        "lock/deliver_revoked.lua",
        " or where == 'overdue' and rec.delayed",
        "",
    ),
    Mutant(
        "a revoke does not know the grant that it has taken",
        "lock/deliver_revoked.lua",
        "remember(now + TAKEN_MS, 'taken:' .. token)",
        "",
    ),
    Mutant(
        "who asks whether a revoke took a grant is told so for ever",
        "lock/deliver_revoked.lua",
        "now + TAKEN_MS",
        "now + 2 * TAKEN_MS",
    ),
    Mutant("no grant on revoke", "lock/deliver_revoked.lua", "grant_waiters(worker)\n", ""),
    Mutant(
        "a reset drops the parked",
        "operator/reset.lua",
        "    end_delivery(token, rec)\n",
        "    redis.call('HDEL', record, token)\n",
    ),
    Mutant(
        "a newcomer is queued on a full server",
        "lock/acquire.lua",
        "check()\nrefuse_if_full()\n",
        "check()\nwrite_though_full()\n",
    ),
    Mutant(
        "a message is kept on a full server",
        "lock/park.lua",
        "check()\nrefuse_if_full()\n",
        "check()\nwrite_though_full()\n",
    ),
    Mutant(
        "a newcomer is refused when half of its script has run",
        "lock/acquire.lua",
        "check()\nrefuse_if_full()\nsweep(worker)\n",
        "check()\nlocal written = redis.pcall('HSET', meta, 'name', lock, 'schema', '1')\n"
        "sweep(worker)\nif type(written) == 'table' then return written end\n",
    ),
    Mutant(
        "a message is kept on a full server if there is something to sweep",
        "lock/park.lua",
        "check()\nrefuse_if_full()\nsweep(worker)\n",
        "check()\nsweep(worker)\nrefuse_if_full()\n",
    ),
    Mutant("a full server ends leases", "lock/extend_leases.lua", "  write_though_full()\n", ""),
    Mutant("a full server takes no claim", "lock/claim.lua", "write_though_full()\n", ""),
    Mutant(
        "a full server cannot be swept",
        "fleet/take_due_locks.lua",
        "    if #names == 0 then redis.call('PERSIST', key) end",
        "    --",
    ),
    Mutant(
        "a full server is swept and does not grant",
        "lock/sweep_and_grant.lua",
        "write_though_full()\n",
        "",
    ),
    Mutant(
        "a full server cannot be reset",
        "operator/reset.lua",
        "write_though_full()\n",
        "count('resets')\n",
    ),
    Mutant(
        "a full server keeps what is revoked",
        "lock/deliver_revoked.lua",
        "check()\nwrite_though_full()\n",
        "check()\nrefuse_if_full()\n",
    ),
    Mutant(
        "a full server takes nothing back",
        "lock/release_and_grant_next.lua",
        "check()\nwrite_though_full()\n",
        "check()\nrefuse_if_full()\n",
    ),
    Mutant(
        "a lower limit is ignored",
        LIBRARY,
        "local lowest = (wanted < before or idle) and wanted or before",
        "local lowest = idle and wanted or before",
    ),
    Mutant(
        "a lower limit stays for ever",
        LIBRARY,
        "local lowest = (wanted < before or idle) and wanted or before",
        "local lowest = (wanted < before or last_fence == 0) and wanted or before",
    ),
    Mutant(
        "the last declared limit wins",
        LIBRARY,
        "local lowest = (wanted < before or idle) and wanted or before",
        "local lowest = wanted",
    ),
    Mutant(
        "a kept permit is kept for ever",
        LIBRARY,
        "  add_holder(token, reserved, 'reserved', ms)\n",
        "  add_holder(token, reserved, 'reserved', ms * 1000)\n",
    ),
    Mutant(
        "a kept permit stays beside its attempt",
        LIBRARY,
        "  leave_holders(token, fair and load(token))\n  redis.call('HDEL', record, token)\n"
        "  return not reason, place\n",
        "  return not reason or reason == 'holder', place\n",
    ),
    Mutant(
        "the record of a kept permit leaks",
        LIBRARY,
        "  redis.call('HDEL', record, token)\n  return not reason, place\n",
        "  return not reason, place\n",
    ),
    Mutant(
        "a kept permit is given to a message that nobody can run",
        "lock/park.lua",
        "elseif reserved and worker_for(rec, worker) then",
        "elseif reserved then",
    ),
    Mutant(
        "the body of a replaced message stays",
        LIBRARY,
        "if not alone then redis.call('HDEL', bodies, base_of(token), base_of(rec.twin",
        "if not (alone or rec.by) then redis.call('HDEL', bodies, base_of(token), base_of(rec.twin",
    ),
    Mutant(
        "the body of a twin stays",
        LIBRARY,
        "base_of(token), base_of(rec.twin or token)) end",
        "base_of(token)) end",
    ),
    Mutant(
        "a replaced message is told once",
        LIBRARY,
        "  deliver(token, rec, rec.state, own)\n",
        "  if not rec.told then deliver(token, rec, rec.state, own) end\n  rec.told = '1'\n",
    ),
    Mutant(
        "a message's deadline is ignored",
        "lock/park.lua",
        "rec.deadline = rec.wait and digits(now + tonumber(wait_ms)) or nil",
        "rec.deadline = nil",
    ),
    Mutant(
        "a client's deadline is ignored",
        "lock/acquire.lua",
        "rec.deadline = digits(now + tonumber(wait_ms))",
        "rec.deadline = digits(now + tonumber(wait_ms) + 60000)",
    ),
    Mutant(
        "a wait begins anew whenever a worker dies",
        LIBRARY,
        "if is_duplicate or not was_parked or rec.state == 'running' then",
        "if true then",
    ),
    Mutant(
        "a wait is over at once",
        LIBRARY,
        "redis.call('ZADD', deadlines, rec.deadline, token)",
        "redis.call('ZADD', deadlines, rec.parked and now or rec.deadline, token)",
    ),
    Mutant(
        "two brokers share a queue of the same name",
        LIBRARY,
        "local function route_of(rec) return rec.realm .. ':' .. rec.queue end",
        "local function route_of(rec) return 'R:' .. rec.queue end",
    ),
    Mutant(
        "the releaser gets what it does not consume",
        LIBRARY,
        "found.own = till and tonumber(till) > now and declares(own, task)",
        "found.own = #live > 0 and own ~= '' and declares(own, task)",
    ),
    Mutant(
        "the releaser gets a task that it does not lock",
        LIBRARY,
        "found.own = till and tonumber(till) > now and declares(own, task)",
        "found.own = till and tonumber(till) > now",
    ),
    Mutant(
        "a worker gets a task that it does not lock",
        LIBRARY,
        "if declares(worker, task) then found[#found + 1] = worker end",
        "found[#found + 1] = worker",
    ),
    Mutant(
        "a worker of an older version gets nothing",
        LIBRARY,
        "== 1 or redis.pcall('EXISTS', tasks) == 0",
        "== 1",
    ),
    Mutant(
        "a dead worker gets a grant",
        LIBRARY,
        "fleet .. ':route:' .. route, '+inf', '(' .. now, 'LIMIT', skip, PAGE)",
        "fleet .. ':route:' .. route, '+inf', '-inf', 'LIMIT', skip, PAGE)",
    ),
    Mutant(
        "another broker gets a message", "lock/sweep_and_grant.lua", "rec.realm ~= realm or ", ""
    ),
    Mutant(
        "a copy that came back is not noted on the message that leaves",
        LIBRARY,
        "if rec and rec.state == 'leaving' and not rec.copied then",
        "if false then",
    ),
    Mutant(
        "what queues again is not swept",
        "lock/record_publish_result.lua",
        "sweep(worker) -- after the loop above",
        "-- not before",
    ),
    Mutant(
        "a message leaves at once",
        "lock/sweep_and_grant.lua",
        "since + tonumber(patience_ms) > now",
        "since > now",
    ),
    Mutant(
        "a message that was refused leaves again at once",
        "lock/sweep_and_grant.lua",
        " or at > now",
        "",
    ),
    Mutant(
        "no message leaves",
        "lock/sweep_and_grant.lua",
        "local leave = seal ~= ''",
        "local leave = seal == 'no'",
    ),
    Mutant(
        "a message that came back is forgotten",
        "lock/record_publish_result.lua",
        "sent == '1' and not rec.copied",
        "true",
    ),
    Mutant(
        "a message that the broker refused is forgotten",
        "lock/record_publish_result.lua",
        "sent == '1' and not rec.copied",
        "not rec.copied",
    ),
    Mutant(
        "a message that has left stays",
        "lock/record_publish_result.lua",
        "sent == '1' and not rec.copied",
        "false",
    ),
    Mutant(
        "a message that nobody published is gone",
        LIBRARY,
        "    queue_again(token, rec)\n",
        "    do return forget(token, rec) end\n",
    ),
    Mutant(
        "who came late forgets what left again",
        LIBRARY,
        "rec.state == 'leaving' and rec.seal == seal end",
        "rec.state == 'leaving' end",
    ),
    Mutant(
        "what began is kept a second time",
        "lock/park.lua",
        "if not others.settled and not",
        "if not",
    ),
    Mutant(
        "what began keeps its twin",
        "lock/claim.lua",
        "and twin then redis.call('HDEL', bodies, base_of(twin)) end",
        "and false then end",
    ),
    Mutant(
        "a grant is not delivered",
        LIBRARY,
        "if rec.parked then deliver(token, rec, 'granted', own) else wake(token) end",
        "if not rec.parked then wake(token) end",
    ),
    Mutant(
        "a grant wakes nobody",
        LIBRARY,
        "if rec.parked then deliver(token, rec, 'granted', own) else wake(token) end",
        "if rec.parked then deliver(token, rec, 'granted', own) end",
    ),
    Mutant(
        "a delivery has another's body",
        LIBRARY,
        "local body = redis.call('HGET', bodies, base_of(token)) or ''",
        "local body = redis.call('HVALS', bodies)[1] or ''",
    ),
    Mutant(
        "a twin inherits the deadline of a client that died",
        LIBRARY,
        "if is_duplicate or not was_parked or rec.state == 'running' then",
        "if rec.state == 'running' then",
    ),
    Mutant(
        "a message adrift asks, and nobody else is granted",
        "lock/acquire.lua",
        "elseif where == 'adrift' or where == 'overdue' then\n  grant_waiters(worker)\n",
        "elseif where == 'adrift' or where == 'overdue' then\n",
    ),
    Mutant(
        "a message that was acknowledged at its start is kept again",
        "lock/park.lua",
        "elseif is_stored(token, attempt) then",
        "elseif has_body(base) then",
    ),
    Mutant(
        "a copy that holds the lock is the twin of another that does",
        "lock/park.lua",
        "elseif not where then",
        "else",
    ),
    Mutant(
        "only a marked copy is looked up",
        "lock/acquire.lua",
        "  else\n    local other",
        "  elseif copy == '1' then\n    local other",
    ),
    Mutant(
        "only a marked copy is looked up when it is parked",
        "lock/park.lua",
        "elseif not where then",
        "elseif copy == '1' and not where then",
    ),
    Mutant(
        "who claims in its turn gets its own delivery",
        "lock/claim.lua",
        "grant_waiters(worker, token, rec)\n",
        "grant_waiters(worker)\nrec = load(token) or rec\n",
    ),
)


MANY_HOLDERS = Mutant("no mutant: each lock has many holders", LIBRARY, *SEARCH_MANY)
"""No invariant may detect it: a search of many holders finds what a search of few does."""


def mutant(name: str) -> Mutant:
    """Return the mutant of that name."""
    return next(each for each in MUTANTS if each.name == name)
