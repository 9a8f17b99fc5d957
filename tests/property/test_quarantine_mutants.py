"""With a quarantine no lock is granted twice after a loss of data; mutants are found."""

from __future__ import annotations

import pytest

from support.quarantine_simulation import HISTORIES, MUTANTS, Broken, World, scripts_of, walk

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("run ids in scripts")]

WALKS = 12


def play(client, scripts=None):
    for history in HISTORIES:
        history(World(client, scripts))
    for seed in range(WALKS):
        walk(World(client, scripts), seed)


def test_l30_a_server_that_forgot_grants_nothing_twice(redis_client):
    """Whatever was lost; and one longest lease later it grants again."""
    play(redis_client)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_gate_is_found_by_an_invariant(mutant, redis_client):
    """An error of a script does not count."""
    with pytest.raises(Broken):
        play(redis_client, scripts_of(mutant))
