"""The scripts of a quorum's server give the replies of the simulated servers; mutants do not.

The results of the state machine hold for real servers as far as the two agree.
"""

from __future__ import annotations

from contextlib import closing

import pytest

from support.quorum_comparison import MUTANTS, Differs, Twin, scripts_of, walk

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("run ids in scripts")]

WALKS = 20


@pytest.mark.full
def test_the_scripts_do_what_the_simulated_servers_do(redis_client):
    """In every answer, whatever is asked; and all that is kept ends."""
    twin = Twin(redis_client)
    with closing(twin.node):
        walks(twin)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_script_of_a_quorum_is_found(mutant, redis_client):
    """An error of a script does not count."""
    twin = Twin(redis_client, scripts_of(mutant))
    with closing(twin.node), pytest.raises(Differs):
        walks(twin)


def walks(twin):
    for seed in range(WALKS):
        walk(twin, seed)
