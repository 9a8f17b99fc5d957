"""What an operator sets, and what arguments give, is in force exactly as long as it should be."""

from __future__ import annotations

import pytest

from support.ruling_simulation import HISTORIES, MUTANTS, Broken, World, scripts_of, walk

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the clock of the scripts is set")]

WALKS, FULL_WALKS = 10, 80


def play(client, scripts=None, walks=WALKS):
    for history in HISTORIES:
        history(World(client, scripts))
    for seed in range(walks):
        walk(World(client, scripts), seed)


def test_the_value_in_force_is_that_of_the_model(redis_client, full):
    """Whoever declares, computes, sets and clears, and however the clock is set."""
    play(redis_client, walks=FULL_WALKS if full else WALKS)


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_an_invariant(mutant, redis_client):
    """An error of a script does not count."""
    with pytest.raises(Broken):
        play(redis_client, scripts_of(mutant), walks=40)
