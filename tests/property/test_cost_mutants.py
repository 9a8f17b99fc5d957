"""A rate counts what starts and charges have used, and nobody waits without need."""

from __future__ import annotations

import pytest

from support.cost_simulation import MUTANTS, play
from support.rate_simulation import Broken, scripts_of

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the clock of the scripts is set")]


def test_a_rate_counts_what_was_used(redis_client, full):
    """Whoever claims late, dies, is charged twice or sets the clock back."""
    play(redis_client, walks=20 if full else 2)


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_the_account(mutant, redis_client):
    """An error of a script does not count."""
    with pytest.raises(Broken):
        play(redis_client, scripts_of(mutant), walks=6)
