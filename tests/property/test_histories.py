"""Directed histories, on the real scripts and on mutants."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from support.script_model.histories import HISTORIES
from support.script_model.invariants import InvariantBroken, check
from support.script_model.kept_examples import HOLES
from support.script_model.moves import play, walk
from support.script_model.mutants import MANY_HOLDERS, MUTANTS, Mutant
from support.script_model.outcomes import count, unseen
from support.script_model.world import World

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the invariants are the scripts'")]

SEEDS, USUAL_SEEDS = 120, 5
"""Random walks that look for a hole, in the full run and in the usual one."""

WALKS = 12
"""Random walks tried at a mutant that survives the histories."""


@pytest.mark.parametrize("name", HISTORIES)
def test_history_keeps_the_invariants(name, redis_client):
    HISTORIES[name](World(redis_client, check))


@pytest.mark.full
@pytest.mark.parametrize("name", HISTORIES)
def test_history_keeps_the_invariants_if_each_lock_has_many_holders(name, redis_client):
    HISTORIES[name](World(redis_client, check, MANY_HOLDERS.scripts()))


def test_walks_keep_the_invariants_and_meet_every_outcome(redis_client, full):
    """A search whose moves never led to a case has said nothing about it."""
    tally: Counter[str] = Counter()
    for seed in range(SEEDS if full else USUAL_SEEDS):
        scripts = MANY_HOLDERS.scripts() if seed % 2 else None
        walk(World(redis_client, check, scripts, watch=partial(count, tally)), seed, 200)
    assert unseen(tally) == [] or not full


def test_there_are_enough_mutants():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed_by_an_invariant(mutant, redis_client):
    """A script error or a failed assertion of a history does not count."""
    assert killer(mutant, redis_client), f"the mutant {mutant.name!r} survives"


def killer(mutant: Mutant, client) -> str | None:
    """Return the invariant that notices the mutant first, and in which history."""
    scripts = mutant.scripts()
    runs = {name: (history, ()) for name, history in HISTORIES.items()}
    runs |= {hole.file: (play, (hole.load()["moves"],)) for hole in HOLES}
    runs |= {f"walk {seed}": (walk, (seed, 150)) for seed in range(WALKS)}
    for name, (run, arguments) in runs.items():
        found = broken_by(
            lambda run=run, with_=arguments: run(World(client, check, scripts), *with_)
        )
        if found:
            return f"{found} in {name}"
    return None


def broken_by(run) -> str | None:
    """Return the invariant that a run breaks; another error is no answer, a later run may be."""
    try:
        run()
    except InvariantBroken as found:
        return found.invariant
    except Exception:  # noqa: BLE001
        pass
    return None
