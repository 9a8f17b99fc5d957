"""Of a burst the newest message runs, in time, and each other one is told who replaced it."""

from __future__ import annotations

import pytest

from support.debounce_simulation import MUTANTS, play
from support.rate_simulation import Broken, scripts_of

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the clock of the scripts is set")]


def test_of_a_burst_the_newest_message_runs(redis_client, full):
    """Whoever is delivered twice, stored late, revoked or dropped, and if the clock goes back."""
    play(redis_client, walks=15 if full else 3)


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_line_is_found_by_the_account(mutant, redis_client):
    """An error of a script does not count."""
    with pytest.raises(Broken):
        play(redis_client, scripts_of(mutant), walks=12)
