"""Each line of the scripts that closes a lock for a time matters: without it a scene fails."""

from __future__ import annotations

import inspect

import pytest
from contract import test_timed_close

from celery_singleton_lock.store.scripts import (
    ADMIN_VERBS,
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
    pytest.mark.needs_real_redis("the clock of the scripts is set"),
]

LIBRARY = "shared"
RELEASE = "lock/release_and_grant_next.lua"
SCENES = {
    name: scene
    for name, scene in vars(test_timed_close).items()
    if name.startswith("test_") and [*inspect.signature(scene).parameters] == ["world"]
}

MUTANTS = (
    Mutant("a close does not end", LIBRARY, "return till > now and till or nil",
           "return till > 0 and till or nil"),
    Mutant("a close ends a second late", LIBRARY, "return till > now and till or nil",
           "return till > now - 1000 and till or nil"),
    Mutant("the later close counts, not the longer one", LIBRARY,
           "    if now + ms <= tonumber(kept.closed or 0) then return end\n", ""),
    Mutant("nobody knows who has closed it", LIBRARY,
           "'closed', kept.closed, 'closed_why', why)", "'closed', kept.closed)"),
    Mutant("a close is forgotten after a minute", LIBRARY,
           "math.max(closed_ms, kept_ms + GRACE_MS)", "kept_ms + GRACE_MS"),
    Mutant("a close never expires", LIBRARY,
           "    if redis.call('PTTL', flow) < ms then live(flow) end\n", ""),
    Mutant("lists do not know of it", LIBRARY,
           "    redis.call('HSET', meta, 'closed', kept.closed)", ""),
    Mutant("lists forget it", LIBRARY, "math.max(until_ms, closed, rulings_end())",
           "math.max(until_ms, rulings_end())"),
    Mutant("an end by an operator is no end", LIBRARY,
           "    redis.call('HDEL', flow, 'closed', 'closed_why')\n", ""),
    Mutant("lists show an ended close", LIBRARY, "    redis.call('HDEL', meta, 'closed')\n", ""),
    Mutant("a closed lock is granted", LIBRARY, "if closed then return 'pause', closed end",
           ""),
    Mutant("nobody is told until when", LIBRARY, "if closed then return 'pause', closed end",
           "if closed then return 'pause' end"),
    Mutant("a close looks like a pause", LIBRARY,
           "return reason == 'pause' and till and not paused and 'closed' or reason, till",
           "return reason, till"),
    Mutant("a pause looks like a close", LIBRARY,
           "return reason == 'pause' and till and not paused and 'closed' or reason, till",
           "return reason == 'pause' and 'closed' or reason, till"),
    Mutant("who asks is not told why", LIBRARY,
           "paused or reason == 'closed' and rates.closed_why()", "paused"),
    Mutant("who releases is not told until when", LIBRARY, "or reason == 'closed' or", "or"),
    Mutant("a lock without rates logs its grants", LIBRARY,
           "  local function note_grant(token, rec)\n    if #known == 0 then return end\n",
           "  local function note_grant(token, rec)\n"),
    Mutant("a grant does not count for rates that an operator sets", "operator/set_rates.lua",
           "if rec and rec.state == 'granted' then rates.note_grant(token, rec) end", ""),
    Mutant("a wait begins anew", LIBRARY,
           "local from = wait_goes_on and math.floor(arrival_of(rec) / 1000) or now",
           "local from = now", (("if not (wait_goes_on and was_parked) then ", "if true then "),)),
    Mutant("the wait of a duplicate is that of its slot", LIBRARY,
           "if not (wait_goes_on and was_parked) then ", "if not wait_goes_on then "),
    Mutant("a renewal forgets the close", "lock/extend_leases.lua", "adrift, flow) == 0",
           "adrift) == 0"),
    Mutant("the release does not close", RELEASE,
           "if ending == 'later' and keep_ms ~= '' then close(tonumber(keep_ms), keep_for) end",
           "if ending == 'later' then close(1, keep_for) end"),
    Mutant("a return is counted and delayed", RELEASE, "    end_delivery(token, rec, nil, true)\n",
           "    return_delivery(token, rec)\n"),
    Mutant("the task is forgotten", RELEASE, "    end_delivery(token, rec, nil, true)\n",
           "    forget(token, rec)\n"),
    Mutant("the wait does not go on", RELEASE, "    end_delivery(token, rec, nil, true)\n",
           "    end_delivery(token, rec)\n"),
    Mutant("nobody looks again", "lock/close_for.lua", "finish()\n", ""),
    Mutant("an operator ends the pause, too", "operator/reopen.lua", "  rates.reopen()\n",
           "  rates.reopen()\n  paused = false\n  redis.call('HDEL', meta, 'paused')\n"),
    Mutant("an operator grants nothing", "operator/reopen.lua", "grant_waiters('')\n", ""),
    Mutant("an operator is not audited", "operator/reopen.lua", "  note(1)\n", ""),
    Mutant("a view does not know", "view/inspect.lua",
           "digits(rates and rates.reopens_at() or 0)", "'0'"),
)  # fmt: skip


def scripts_of(mutant):
    """All verbs, one line of them wrong."""
    files = {file_of(verb) for verb in (*VERBS, *ADMIN_VERBS)} | {LIBRARY}
    texts = {file: read(file) for file in files}
    texts[mutant.file] = mutant.patch(texts[mutant.file])
    shared, clock = texts[LIBRARY], test_timed_close.CLOCK
    bodies = {verb: texts[file_of(verb)] for verb in VERBS}
    bodies |= {f"{verb}_with_flow": with_flow(bodies[verb]) for verb in FLOW_VERBS}
    operators = f"{shared}\n\n{read('shared/operator.lua')}"
    return (
        {verb: assemble(verb, clock, shared, body) for verb, body in bodies.items()},
        {verb: assemble(verb, clock, operators, texts[file_of(verb)]) for verb in ADMIN_VERBS},
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_a_scene(mutant, redis_client):
    """An error of a script does not count."""
    scripts = scripts_of(mutant)

    def fails(scene):
        redis_client.flushall()
        try:
            scene(test_timed_close.World(redis_client, *scripts))
        except (AssertionError, AttributeError, pytest.fail.Exception):  # None was received
            return True
        return False

    assert any(fails(scene) for scene in SCENES.values())
