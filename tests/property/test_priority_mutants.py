"""The queue of a lock with priorities is that of a model; mutants of the scripts are found."""

from __future__ import annotations

import pytest

from support.priority_simulation import MUTANTS, Broken, World, scripts_of, walk

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the clock of the scripts is set")]

WALKS, FULL_WALKS = 4, 50


def play(client, scripts=None, walks=WALKS):
    for seed in range(walks):
        walk(World(client, scripts), seed)


def test_the_queue_is_in_the_order_of_arrival_minus_head_start(redis_client, full):
    """Whoever returns, is promoted, replaced or paused, and whatever the clock says."""
    play(redis_client, walks=FULL_WALKS if full else WALKS)


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_about_places_is_found_by_the_model(mutant, redis_client):
    """An error of a script does not count."""
    with pytest.raises(Broken):
        play(redis_client, scripts_of(mutant), walks=20)
