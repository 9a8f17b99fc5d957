"""No period has more starts than its rate, and nobody waits without need; mutants are found."""

from __future__ import annotations

import pytest

from support.rate_simulation import HISTORIES, MUTANTS, RATES, Broken, World, scripts_of, walk

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the clock of the scripts is set")]

WALKS, FULL_WALKS = 3, 30


def play(client, scripts=None, walks=WALKS):
    for history in HISTORIES:
        history(World(client, (), scripts=scripts))
    for seed in range(walks):
        for rates in RATES:
            walk(World(client, rates, limit=1 + seed % 4, scripts=scripts), seed)


def test_no_period_has_more_starts_than_the_rate(redis_client, full):
    """Whoever claims late, dies, goes away or sets the clock back."""
    play(redis_client, walks=FULL_WALKS if full else WALKS)


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_an_invariant(mutant, redis_client):
    """An error of a script does not count."""
    with pytest.raises(Broken):
        play(redis_client, scripts_of(mutant))
