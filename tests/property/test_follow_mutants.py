"""Each line of the scripts for duplicates that follow matters: without it a scene fails."""

from __future__ import annotations

import inspect

import pytest
from contract import test_follow
from property.test_preempt_mutants import load  # noqa: F401  # a fixture

from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.script_model.mutants import Mutant

pytestmark = [
    pytest.mark.property,
    pytest.mark.full,
    pytest.mark.needs_real_redis("the scenes are those of the contract"),
]
LIBRARY = "shared"
MUTANTS = (
    Mutant("it queues", "lock/park.lua", "if rec.follows and not where then", "if false then"),
    Mutant("it needs room", "lock/park.lua", " or follows or settles", " or settles"),
    Mutant("nothing wakes it", LIBRARY, "  wake_followers(id, BATCH)\n", ""),
    Mutant("a sweep does not come", LIBRARY,
           "then redis.call('ZADD', deadlines, 'XX', now, token) end", "then end"),
    Mutant("none wakes the next one", LIBRARY, "    wake_followers(first, 1)\n", ""),
    Mutant("one to be ended is no backlog", LIBRARY,
           "    list_parked(token, rec)\n    rec.ended_by = nil\n", "    rec.ended_by = nil\n"),
    Mutant("one that looked is woken", LIBRARY,
           "    redis.pcall('ZREM', list, token) -- it may have looked by itself\n", ""),
    Mutant("each looks often", LIBRARY, "local LOOK_MS = 50 --", "local LOOK_MS = 0 --"),
    Mutant("what is to be ended is woken", LIBRARY, "rec.follows and rec.delayed then redis.call(",
           "rec.follows then redis.call("),
    Mutant("any call counts as the first one", LIBRARY,
           "if id_that_counts(rec.follows[1]) == first then",
           "if id_that_counts(rec.follows[1]) then"),
    Mutant("a running task has ended", LIBRARY,
           "(entry.state ~= 'here' or find(entry.attempt) ~= nil)", "entry.state ~= 'here'"),
    Mutant("it waits beyond its timeout", LIBRARY,
           "till = math.min(till or math.huge, tonumber(rec.deadline or math.huge))",
           "till = till or math.huge"),
    Mutant("a timeout is no end", LIBRARY,
           "if follows and (not rec.deadline or tonumber(rec.deadline) > now) then",
           "if follows then"),
    Mutant("it is delivered once", LIBRARY, "till = now + offered_again_in(rec)",
           "till = now + 1e12"),
    Mutant("a stopped worker returns it at once", LIBRARY,
           "if rec.follows and not wait_goes_on then --",
           "if false then --"),
    Mutant("it never runs itself", "lock/release_and_grant_next.lua",
           "    if rec.follows then run_or_follow_another(rec) end\n", ""),
    Mutant("each one runs", LIBRARY, "if another and another ~= me then", "if false then"),
    Mutant("they follow each other for ever", LIBRARY, "not rec.follows_another and until_start",
           "until_start"),
    Mutant("one that runs does not count", LIBRARY,
           "another and {key, until_start, most, late} or nil", "nil"),
    Mutant("a first task that counts again is left", LIBRARY,
           "  if other == first then return end\n", ""),
    Mutant("each one counts for itself", LIBRARY,
           "  return type(known) == 'string' and known or id\n", "  return id\n"),
    Mutant("one that follows queues", LIBRARY,
           "if rec.follows then return keep_out(token, rec, 0) end", ""),
    Mutant("it is never adrift", LIBRARY,
           "      set_adrift(token, rec)\n    end\n", "    end\n"),
    Mutant("one that is adrift has no timeout", LIBRARY, "tonumber(rec.deadline or math.huge))",
           "tonumber(rec.delayed and rec.deadline or math.huge))"),
    Mutant("one that leaves is woken", LIBRARY,
           "rec.copied, rec.delayed = seal, nil, nil", "rec.copied = seal, nil"),
    Mutant("it cannot be drained", "operator/take_out_messages.lua",
           " or rec.follows and rec.delayed and not rec.ended_by", ""),
    Mutant("it can be drained while it ends", "operator/take_out_messages.lua",
           "rec.delayed and not rec.ended_by", "rec.delayed"),
    Mutant("it can be purged while it ends", "operator/drop_waiters.lua",
           " and not rec.ended_by", ""),
    Mutant("it ends while it is sent off", "lock/claim.lua", "if sent_off or ", "if "),
    Mutant("the first one has ended when it waits to run later", LIBRARY,
           "end_unique(rec, wait_goes_on or ", "end_unique(rec, "),
    Mutant("one that is overdue is shown as following", LIBRARY,
           "  rec.delayed, rec.ended_by = nil, nil\n  local ended", "  local ended"),
    Mutant("its worker does not know whom it follows", LIBRARY,
           "verdict == 'following' and rec.follows[2] or ''", "''"),
    Mutant("nobody is told why it waits", LIBRARY,
           "if mine and mine.follows and mine.delayed then", "if false then"),
    Mutant("each process may end it", "lock/claim.lua",
           "if sent_off or (rec.ended_by or process) ~= process", "if sent_off"),
    Mutant("a claim whose reply was lost is refused", "lock/claim.lua",
           "(rec.ended_by or process) ~= process then", "rec.ended_by then"),
    Mutant("a worker that stops takes it back", "lock/release_and_grant_next.lua",
           " or where and returns and rec.ended_by\n", "\n"),
    Mutant("one that runs itself cannot be given back", LIBRARY,
           ", rec.ended_by = nil, '', '1', nil, nil, nil", " = nil, '', '1', nil, nil"),
    Mutant("nobody may end it after a worker died", LIBRARY, "    rec.ended_by = nil\n", ""),
    Mutant("its claim does not delay the next delivery", "lock/claim.lua",
           "    redis.call('ZADD', deadlines, now + tonumber(lease_ms), token) --", "    --"),
    Mutant("the set stays", LIBRARY,
           "  redis.call('ZREM', followers_of(id), unpack(tokens))\n", ""),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_a_scene(mutant, redis_client, load):  # noqa: F811  # the fixture
    load(mutant)

    def fails(scene):
        redis_client.flushall()
        store = RedisAdminStore(redis_client, claim_lease=50_000.0)
        store.worker_heartbeat("w", test_follow.REALM, ["q"], 60_000.0, 99)
        given = {"store": store, "lock_client": redis_client, "all_keys": redis_client.keys}
        try:
            scene(**{name: given[name] for name in inspect.signature(scene).parameters})
        except (AssertionError, TypeError, ValueError, SingletonLockError):
            return True
        return False

    scenes = [scene for name, scene in vars(test_follow).items() if name.startswith("test_")]
    assert any(map(fails, scenes))
