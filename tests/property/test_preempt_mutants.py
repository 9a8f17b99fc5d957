"""Each line of the scripts for preemption matters: without it a scene of the contract fails."""

from __future__ import annotations

import inspect

import pytest
from contract import test_preempt

from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.store import scripts
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.script_model.mutants import Mutant

pytestmark = [
    pytest.mark.property,
    pytest.mark.full,
    pytest.mark.needs_real_redis("the scenes are those of the contract"),
]

LIBRARY = "shared"
PARK = "lock/park.lua"
RELEASE = "lock/release_and_grant_next.lua"

MUTANTS = (
    Mutant("a retry is as new as it came", LIBRARY, "if retry ~= other then return retry end", ""),
    Mutant("none is older", LIBRARY,
           "  if retry ~= other then return retry end\n  return arrival_of(rec) < arrival_of(than)",
           "  if retry ~= other then return retry end\n  return false"),
    Mutant("one without a worker is not found", LIBRARY,
           "where == 'adrift' or where == 'overdue' and", "where == 'overdue' and"),
    Mutant("a delayed one is not found", LIBRARY, " or where == 'overdue' and other.delayed", ""),
    Mutant("an ended one is found", LIBRARY, "where == 'overdue' and other.delayed",
           "where == 'overdue'"),
    Mutant("the one that runs is found under its task id", LIBRARY,
           "    return where == 'queue' or where == 'adrift'", "    return where"),
    Mutant("one that comes back is as new as that", LIBRARY,
           "rec.preempt and (rec.arrived or rec.place) or nil", "nil"),
    Mutant("one that comes back waits for a newer run", LIBRARY,
           "  if newer then\n    replace(head", "  if false then\n    replace(head"),
    Mutant("other tasks are preempted", LIBRARY,
           "if other and other.preempt and other.task == rec.task then",
           "if other and other.preempt then"),
    Mutant("one is told after the other", LIBRARY,
           "ends = ends or other.preempted_by ~= nil", "ends = false"),
    Mutant("all that run are older", LIBRARY, "if not is_older(other, rec) then", "if false then"),
    Mutant("a first attempt replaces its retry", LIBRARY,
           "if is_known and retries_of(other.attempt) ~= retries_of(rec.attempt) then",
           "if is_known then"),
    Mutant("a call that comes back ends for a copy", LIBRARY,
           "local is_known = other.preempt[2] >= 0", "local is_known = true"),
    Mutant("the last run is preempted", LIBRARY,
           "tonumber(other.fence) < tonumber(older.fence)",
           "tonumber(other.fence) > tonumber(older.fence)"),
    Mutant("a newer one that waits is replaced", LIBRARY,
           "waits and is_older(rec, waits) and waits, nil", "nil, nil"),
    Mutant("an older one waits for a newer run", LIBRARY,
           "if not newer and waits_for(nil, rec) == 'holder' then", "if false then"),
    Mutant("an older one ends although a permit is free", LIBRARY,
           "if not newer and waits_for(nil, rec) == 'holder' then", "if not newer then"),
    Mutant("an older one is told nothing", LIBRARY,
           "    replace(token, rec, newer.attempt, own)\n    return true", "    return true"),
    Mutant("a newer one is the last", LIBRARY,
           "if tonumber(waits.place) < tonumber(rec.place) then move_to(rec, waits.place) end", ""),
    Mutant("the one that waits stays", LIBRARY,
           "    replace(other, waits, rec.attempt, own)\n  end\n  rates.note",
           "  end\n  rates.note"),
    Mutant("nobody knows who waits", LIBRARY,
           "rates.note_newest_call(source_of(rec), rec.attempt)", ""),
    Mutant("other brokers are replaced", LIBRARY, "store('newest:' .. source, attempt)",
           "store('newest:', attempt)",
           (("return kept['newest:' .. source] end,", "return kept['newest:'] end,"),)),
    Mutant("one that comes back runs first", LIBRARY,
           "rates and rec.preempt and rec.preempt[2] >= 0 and rec.parked and end_replaced",
           "false and end_replaced"),
    Mutant("an older one is taken for newer", LIBRARY,
           "if not other or not is_older(rec, waits) then return false end",
           "if not other then return false end"),
    Mutant("others are passed", LIBRARY,
           "local head = not fair and redis.call('ZRANGE', queue, 0, 0)[1]",
           "local head = redis.call('ZRANGE', queue, -1, -1)[1]"),
    Mutant("one without a message preempts", LIBRARY,
           "if not (rec and rec.parked and rec.preempt and rec.preempt[2] == 1)",
           "if not (rec and rec.preempt and rec.preempt[2] == 1)"),
    Mutant("a copy preempts", LIBRARY, "rec.parked and rec.preempt and rec.preempt[2] == 1)",
           "rec.parked and rec.preempt)"),
    Mutant("a rate does not matter", LIBRARY, "if rates.waits(rec) or rates.excess(rec) or",
           "if rates.excess(rec) or"),
    Mutant("a cost does not matter", LIBRARY, "if rates.waits(rec) or rates.excess(rec) or",
           "if rates.waits(rec) or"),
    Mutant("a worker is not needed", LIBRARY, " or not worker_for(rec, own) then return false",
           " then return false"),
    Mutant("it is told again and again", LIBRARY, "if ends or not older or row",
           "if not older or row"),
    Mutant("a row has no end", LIBRARY, " or row >= rec.preempt[1] then", " then"),
    Mutant("a row is longer by one", LIBRARY, "row >= rec.preempt[1] then",
           "row > rec.preempt[1] then"),
    Mutant("a row is not counted", LIBRARY, "rates.note_in_a_row(rec.task, row + 1)", ""),
    Mutant("one that has not begun is told", LIBRARY,
           "local unbegun = older.state == 'granted' and older.parked\n",
           "local unbegun = false\n"),
    Mutant("one without a message gives its permit back", LIBRARY,
           "older.state == 'granted' and older.parked\n", "older.state == 'granted'\n"),
    Mutant("one that has not begun queues again", LIBRARY, "    older.by = rec.attempt\n", ""),
    Mutant("one that has not begun is not counted", LIBRARY,
           "    count('replaced')\n    end_delivery(first, older)",
           "    end_delivery(first, older)"),
    Mutant("a permit that was given back stays free", LIBRARY,
           "so it is delivered to be ended\n    return true",
           "so it is delivered to be ended\n    return false"),
    Mutant("the run is not marked", LIBRARY, "  older.preempted_by = rec.attempt\n", ""),
    Mutant("the mark is not kept", LIBRARY, "  save(first, older)\n  count('preempted')",
           "  count('preempted')"),
    Mutant("preemptions are not counted", LIBRARY, "  count('preempted')\n", ""),
    Mutant("the worker is not told", LIBRARY, "  tell_worker(older.worker, {", "  local _ = ({"),
    Mutant("the permit is taken at once", LIBRARY, "  save(first, older)\n  count('preempted')\n",
           "  save(first, older)\n  count('preempted')\n  leave_holders(first, older)\n"),
    Mutant("a holder is never preempted", LIBRARY,
           "if reason == 'holder' and rates and rates.preempts() and preempt_for_next(own)",
           "if false and preempt_for_next(own)"),
    Mutant("a pause preempts", LIBRARY,
           "if reason == 'holder' and rates and rates.preempts() and",
           "if reason and rates and rates.preempts() and"),
    Mutant("a former preemption counts", LIBRARY,
           "rec.delayed, rec.preempted_by, rec.ended_by = nil, '', '1', nil, nil, nil",
           "rec.delayed = nil, '', '1', nil"),
    Mutant("the row is forgotten with the lock", LIBRARY, "(kept.preempts or unclaimed() > 0) and",
           "unclaimed() > 0 and"),
    Mutant("no call has the option", PARK, ", preempt = wanted_flow and wanted_flow.preempt,", ","),
    Mutant("no run has the option", "lock/acquire.lua",
           "wanted_flow and wanted_flow.unique, wanted_flow and wanted_flow.preempt",
           "wanted_flow and wanted_flow.unique, nil"),
    Mutant("a copy replaces the one that waits", PARK,
           "rec.preempt and rec.preempt[2] >= 0 and not where", "rec.preempt and not where"),
    Mutant("it needs room of its own", PARK, " or settles or takes_room", " or settles"),
    Mutant("a renewal tells nothing", "lock/extend_leases.lua",
           "  if rec and rec.preempted_by then return {rec.preempted_by} end\n", ""),
    Mutant("a row is never over", RELEASE, "    rates.note_in_a_row(rec.task, 0)\n", ""),
    Mutant("a return ends the row", RELEASE, "if by_itself and held_it and", "if held_it and"),
    Mutant("a preempted run ends the row", RELEASE,
           "rec.state == 'running' and not rec.preempted_by then", "rec.state == 'running' then"),
)  # fmt: skip


def scenes(store, client):
    """Yield each scene of the contract, ready to be played."""
    for name, scene in vars(test_preempt).items():
        if not name.startswith("test_"):
            continue
        given = {"store": store, "lock_client": client}
        needs = inspect.signature(scene).parameters
        for mark in getattr(scene, "pytestmark", ()):
            if mark.name == "parametrize" and mark.args[0] == ("holder", "caller"):
                for holder, caller in mark.args[1]:
                    yield scene, {"store": store, "holder": holder, "caller": caller}
                break
        else:
            yield scene, {each: given[each] for each in needs}


@pytest.fixture
def load(monkeypatch):
    """Have new stores load the scripts with one wrong line."""
    caches = (scripts.load_scripts, scripts.load_admin_scripts)

    original = scripts.read

    def load(mutant):
        def read(file):
            text = original(file)
            return mutant.patch(text) if file == mutant.file else text

        monkeypatch.setattr(scripts, "read", read)
        for cache in caches:
            cache.cache_clear()

    yield load
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_a_scene(mutant, redis_client, load):
    load(mutant)

    def fails(play, given):
        redis_client.flushall()
        store = RedisAdminStore(redis_client, claim_lease=50_000.0)
        store.worker_heartbeat("w", test_preempt.REALM, ["q"], 60_000.0, 99)
        try:
            play(**(given | {"store": store} if "store" in given else given))
        except (AssertionError, KeyError, StopIteration, SingletonLockError):
            return True
        return False

    assert any(fails(*each) for each in scenes(None, redis_client))
