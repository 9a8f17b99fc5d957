"""docs/traps.md covers every trap, and is up to date."""

from __future__ import annotations

import pytest

from support.traps import PAGE, TRAPS, carriers, rendered


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.number)
def test_a_trap_has_a_test_or_a_reason_why_there_is_none(trap):
    """Not both: a reason that outlives the first test is wrong."""
    assert bool(carriers().get(trap.number)) != bool(trap.untested)


def test_no_test_names_a_trap_that_is_not_in_the_table():
    """A mistyped number would be a promise without a check."""
    assert set(carriers()) <= {trap.number for trap in TRAPS}


def test_the_page_is_up_to_date():
    """Write it again with ``PYTHONPATH=tests python -m support.traps``."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == rendered(text)
