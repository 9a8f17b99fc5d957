"""Each script mutant still applies to the scripts as they are."""

import pytest

from support import quarantine_simulation, quorum_comparison
from support.script_model import mutants

LISTS = [
    *((mutant, lambda mutant: mutant.scripts()) for mutant in mutants.MUTANTS),
    *((mutant, quarantine_simulation.scripts_of) for mutant in quarantine_simulation.MUTANTS),
    *((mutant, quorum_comparison.scripts_of) for mutant in quorum_comparison.MUTANTS),
]


@pytest.mark.parametrize(("mutant", "scripts_of"), LISTS, ids=[each.name for each, _ in LISTS])
def test_a_script_mutant_applies(mutant, scripts_of):
    """The text that it replaces is in the script once: a change of a script changes it, too."""
    assert scripts_of(mutant)
