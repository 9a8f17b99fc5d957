"""Each line of the scripts for unique calls matters: without it a scene fails."""

from __future__ import annotations

import inspect
import itertools

import pytest
from contract import test_unique

from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import (
    FLOW_VERBS,
    VERBS,
    assemble,
    file_of,
    read,
    with_flow,
)
from support.script_model.mutants import Mutant

pytestmark = [
    pytest.mark.property,
    pytest.mark.full,
    pytest.mark.needs_real_redis("the scenes are those of the contract"),
]

LIBRARY = "shared"
ANNOUNCE = "lock/announce.lua"
CONFIRM = "lock/confirm_sent.lua"
WITHDRAW = "lock/withdraw.lua"
DEATH = "wait_goes_on or rec.unique[4] == 1 or rec.state == 'waiting'"
VALUES = {
    "value": test_unique.FOREIGN,
    "until_start": (False, True),
    "confirmed": ("before", "after"),
    "ends": ("confirm", "withdraw"),
}
"""Parameters of the scenes."""

MUTANTS = (
    Mutant("any caller is told to send", ANNOUNCE,
           "if entry and entry.id ~= task_id and not dead then", "if false then"),
    Mutant("a retry is a duplicate of itself", ANNOUNCE, "entry.id ~= task_id and not dead",
           "not dead"),
    Mutant("nobody takes the place of a dead sender", ANNOUNCE,
           "entry.state == 'pending' and entry.id == instead_of", "false"),
    Mutant("all take the place of a dead sender", ANNOUNCE,
           "entry.state == 'pending' and entry.id == instead_of", "instead_of ~= ''"),
    Mutant("who was waited for loses its place, sent or not", ANNOUNCE,
           "entry.state == 'pending' and entry.id == instead_of", "entry.id == instead_of"),
    Mutant("nobody is counted as waiting", ANNOUNCE, "(entry.waits or 0) + 1", "0"),
    Mutant("who asks prolongs the announcement", ANNOUNCE,
           "write_unique(unique_key, entry, 'keep')", "write_unique(unique_key, entry)"),
    Mutant("an announcement is for ever", ANNOUNCE, "retries = 0}, tonumber(pending_ms))",
           "retries = 0})"),
    Mutant("an entry without a record counts", ANNOUNCE, "dead = not find(entry.attempt)",
           "dead = false"),
    Mutant("whoever confirms is heard", CONFIRM, "or entry.id ~= task_id then", "then"),
    Mutant("a confirmation takes a running task for a sent one", CONFIRM,
           "if entry.state == 'here' then", "if false then"),
    Mutant("a late confirmation is a retry", CONFIRM,
           "if tonumber(retries) > math.max(entry.retries, entry.over or 0) then",
           "if true then"),
    Mutant("a retry is no retry", CONFIRM,
           "if tonumber(retries) > math.max(entry.retries, entry.over or 0) then",
           "if false then"),
    Mutant("a confirmation wakes nobody", CONFIRM, "end_pending(entry)\n", ""),
    Mutant("a sent call counts for ever", CONFIRM,
           "retries = tonumber(retries)}, tonumber(kept_ms))",
           "retries = tonumber(retries)})"),
    Mutant("whoever withdraws is heard", WITHDRAW, "(entry.id ~= task_id or", "("),
    Mutant("nobody withdraws for another", WITHDRAW, "task_id ~= '' and ", ""),
    Mutant("a running task is withdrawn", WITHDRAW, "entry.state == 'here'", "false"),
    Mutant("a sent retry is withdrawn", WITHDRAW, " or entry.retries > tonumber(retries)", ""),
    Mutant("a withdrawal wakes nobody", WITHDRAW, "end_pending(entry)\n", ""),
    Mutant("a withdrawn call stays", WITHDRAW, "drop_unique(unique_key, entry.id)\n", ""),
    Mutant("a granted task has no entry", LIBRARY,
           "  if rec.unique then keep_unique(rec) end\n  if rec.unique and not starts_later",
           "  if rec.unique and not starts_later"),
    Mutant("a start does not end it", LIBRARY,
           "  if rec.unique and not starts_later then start_unique(rec) end\n"
           "  save(token, rec)\nend\n\n",
           "  save(token, rec)\nend\n\n"),
    Mutant("a claim does not end it", LIBRARY,
           "  if rec.unique and not starts_later then start_unique(rec) end\n  rec.ends_at_rate",
           "  rec.ends_at_rate"),
    Mutant("each start ends it", LIBRARY, "if rec.unique and rec.unique[2] == 1 then",
           "if rec.unique then"),
    Mutant("a parked task expires", LIBRARY,
           "  if rec.unique then keep_unique(rec) end\n  save(token, rec)",
           "  save(token, rec)"),
    Mutant("an end leaves it", LIBRARY, "  if rec.unique then end_unique(rec, left) end\n", ""),
    Mutant("a return to the broker ends it", LIBRARY, "end_unique(rec, left) end\n",
           "end_unique(rec) end\n"),
    Mutant("a death leaves it", LIBRARY,
           f"    end_unique(rec, {DEATH})\n", ""),
    Mutant("a death ends it", LIBRARY, f"end_unique(rec, {DEATH})", "end_unique(rec)"),
    Mutant("who was acknowledged is waited for", LIBRARY, f"end_unique(rec, {DEATH})",
           "end_unique(rec, true)"),
    Mutant("a death in its slot ends it", LIBRARY, DEATH, "wait_goes_on or rec.unique[4] == 1"),
    Mutant("no sweeper comes", LIBRARY, "rec and (rec.indexed or rec.unique)",
           "rec and rec.indexed"),
    Mutant("no sweeper is called", LIBRARY,
           "  index_changed = true -- then the lock is swept when its lease has ended: see "
           "keep_indexed_due\n",
           ""),
    Mutant("the entry of another call is taken", LIBRARY, "  if entry.id ~= id then\n",
           "  if false then\n"),
    Mutant("a retry ends with the first attempt", LIBRARY,
           "(not left or entry.ended) and not entry.again", "(not left or entry.ended)"),
    Mutant("a retry has no number", LIBRARY, "entry.again and retries + 1 or retries", "retries"),
    Mutant("a retry stays as long as a first attempt", LIBRARY, "tonumber(entry.again or most)",
           "tonumber(most)"),
    Mutant("another program's key stops the lock", LIBRARY,
           "local raw = redis.pcall('GET', unique_entry(key))",
           "local raw = redis.call('GET', unique_entry(key))"),
    Mutant("what is no object stops it", LIBRARY, " or type(entry) ~= 'table'", ""),
    Mutant("what has no text as id counts", LIBRARY, "type(entry.id) ~= 'string' or not", "not"),
    Mutant("what has no attempts counts", LIBRARY, " or not tonumber(entry.retries)", ""),
    Mutant("what has no attempt is here", LIBRARY,
           "entry.state == 'here' and type(entry.attempt) == 'string'", "entry.state == 'here'"),
    Mutant("any state counts", LIBRARY,
           "return (entry.state == 'pending' or entry.state == 'sent') and entry or nil",
           "return entry"),
)  # fmt: skip


def scenes(client):
    """Yield each scene of the contract with each value of its parameters."""
    for name, scene in vars(test_unique).items():
        if not name.startswith("test_"):
            continue
        free = [each for each in inspect.signature(scene).parameters if each in VALUES]
        needs_client = "client" in inspect.signature(scene).parameters
        for values in itertools.product(*(VALUES[each] for each in free)):
            given = dict(zip(free, values, strict=True))
            yield scene, given | ({"client": client} if needs_client else {})


def scripts_of(mutant):
    files = {file_of(verb) for verb in VERBS} | {LIBRARY}
    texts = {file: read(file) for file in files}
    texts[mutant.file] = mutant.patch(texts[mutant.file])
    bodies = {verb: texts[file_of(verb)] for verb in VERBS}
    bodies |= {f"{verb}_with_flow": with_flow(bodies[verb]) for verb in FLOW_VERBS}
    clock = read("_clock.lua")
    return {verb: assemble(verb, clock, texts[LIBRARY], body) for verb, body in bodies.items()}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_a_scene(mutant, redis_client, monkeypatch):
    scripts = scripts_of(mutant)
    monkeypatch.setattr(RedisStore, "wait", _not_for_long(RedisStore.wait))

    def fails(scene, given):
        redis_client.flushall()
        store = RedisStore(redis_client, scripts=scripts)
        store.worker_heartbeat("w", test_unique.REALM, [test_unique.QUEUE], 600.0, 9)
        try:
            scene(store, **given)
        except (AssertionError, ValueError, SingletonLockError):
            return True
        return False

    assert any(fails(*each) for each in scenes(redis_client))


def _not_for_long(wait):
    return lambda self, name, token, _timeout: wait(self, name, token, 0.3)
