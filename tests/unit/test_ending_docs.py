"""The table in docs/endings.md is complete: each ending, each pool, each within its bound."""

from __future__ import annotations

import re

import pytest

from integration.ending_matrix import BEGIN, DOC, END, reasons, states
from integration.endings import ENDINGS, POOLS


def shown():
    """The matrix as the docs show it."""
    text = DOC.read_text()
    return text[text.index(BEGIN) : text.index(END)]


def row(ending):
    """The cells of an ending."""
    (found,) = [line for line in shown().splitlines() if line.startswith(f"| {ending.name} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
def test_the_docs_state_bound_and_measured_time_of_each_ending_in_each_pool(ending):
    """A cell is a time within the bound, or the letter of a reason why there is none."""
    name, state, bound, *cells = row(ending)
    assert (name, state, bound) == (ending.name, states(ending), f"{ending.bound:g} s")
    assert len(cells) == len(POOLS)
    for pool, cell in zip(POOLS, cells, strict=True):
        if pool in ending.cannot:
            assert cell.startswith(f"[{reasons()[ending.cannot[pool]]}]")
        else:
            assert re.fullmatch(r"\d+ ms", cell), (pool, cell)
            assert int(cell.split()[0]) < 1000 * ending.bound


def test_the_docs_give_every_reason():
    """Each letter is explained, in the same words as in the tests."""
    for reason, letter in reasons().items():
        assert f"- **{letter}**: {reason}.\n" in shown()


def test_the_docs_have_no_ending_that_is_not_tested():
    """A row that was renamed or removed does not stay in the docs."""
    rows = [line for line in shown().splitlines() if line.endswith(" |") and " s | " in line]
    assert len(rows) == len(ENDINGS)
