"""Each script mutant still applies to the scripts as they are."""

import pytest
from property import test_close_mutants, test_preempt_mutants, test_unique_mutants

from support import (
    cost_simulation,
    debounce_simulation,
    fair_simulation,
    priority_simulation,
    quarantine_simulation,
    quorum_comparison,
    rate_set_simulation,
    rate_simulation,
    ruling_simulation,
)
from support.script_model import mutants

SUITES = {
    "model": (mutants.MUTANTS, mutants.Mutant.scripts),
    "close": (test_close_mutants.MUTANTS, mutants.Mutant.patched),
    "preempt": (test_preempt_mutants.MUTANTS, mutants.Mutant.patched),
    "unique": (test_unique_mutants.MUTANTS, mutants.Mutant.patched),
    "cost": (cost_simulation.MUTANTS, mutants.Mutant.patched),
    "debounce": (debounce_simulation.MUTANTS, mutants.Mutant.patched),
    "fair": (fair_simulation.MUTANTS, mutants.Mutant.patched),
    "priority": (priority_simulation.MUTANTS, mutants.Mutant.patched),
    "quarantine": (quarantine_simulation.MUTANTS, quarantine_simulation.scripts_of),
    "quorum": (quorum_comparison.MUTANTS, quorum_comparison.scripts_of),
    "rate": (rate_simulation.MUTANTS, mutants.Mutant.patched),
    "rate set": (rate_set_simulation.MUTANTS, mutants.Mutant.patched),
    "ruling": (ruling_simulation.MUTANTS, mutants.Mutant.patched),
}
"""Of each suite, the mutants, and what raises an error if the text of one is not there."""
LISTS = [
    pytest.param(mutant, apply, id=f"{suite}: {mutant.name}")
    for suite, (found, apply) in SUITES.items()
    for mutant in found
]


@pytest.mark.parametrize(("mutant", "apply"), LISTS)
def test_a_script_mutant_applies(mutant, apply):
    """The text that it replaces is in the script once: a change of a script changes it, too."""
    assert apply(mutant)
