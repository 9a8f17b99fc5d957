"""Locks with rates that are acquired together: no period has too many starts; all clients end."""

from __future__ import annotations

import pytest

from support.rate_set_simulation import HISTORIES, MUTANTS, walk
from support.rate_simulation import Broken, scripts_of

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the clock of the scripts is set")]

WALKS, FULL_WALKS = 4, 40


def play(client, scripts=None, walks=WALKS):
    for history in HISTORIES:
        history(client, scripts)
    return [walk(client, seed, scripts) for seed in range(walks)]


def test_no_period_has_more_starts_and_no_client_waits_for_ever(redis_client, full):
    """Whoever dies, or gives up, between two locks of a set; who lives gets all of them."""
    ran = play(redis_client, walks=FULL_WALKS if full else WALKS)
    assert min(ran) > 0


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_an_invariant(mutant, redis_client):
    """An error of a script does not count."""
    with pytest.raises(Broken):
        play(redis_client, scripts_of(mutant))
