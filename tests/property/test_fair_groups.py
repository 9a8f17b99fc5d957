"""Groups of a lock start in the order of a model of start-time fair queueing; mutants are found."""

from __future__ import annotations

import pytest

from support.fair_simulation import GROUPS, HISTORIES, MUTANTS, Broken, World, scripts_of, walk

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the clock of the scripts is set")]

WALKS, FULL_WALKS = 8, 60


def play(client, scripts=None, walks=WALKS):
    for history in HISTORIES:
        history(World(client, scripts=scripts))
    for seed in range(walks):
        walk(World(client, 1 + seed % 4, GROUPS, scripts), seed)


def test_groups_start_as_the_model_says(redis_client, full):
    """Whoever claims late, is retried, returns, dies or goes away."""
    play(redis_client, walks=FULL_WALKS if full else WALKS)


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_an_invariant(mutant, redis_client):
    """An error of a script does not count."""
    with pytest.raises(Broken):
        play(redis_client, scripts_of(mutant), walks=4 * WALKS)
