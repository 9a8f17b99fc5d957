"""Defects that were found stay fixed: each has its shortest program."""

from __future__ import annotations

import pytest

from support.script_model.kept_examples import FOLDER, HOLES, breaks, shrunk
from support.script_model.mutants import mutant

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the invariants are the scripts'")]


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.file)
def test_a_hole_that_was_found_stays_closed(hole, redis_client):
    """No invariant breaks any more where one did."""
    assert breaks(redis_client, hole.load()["moves"]) is None


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.file)
def test_its_program_would_show_it_again(hole, redis_client):
    """On scripts with that defect. If the moves have changed: tests.property.record_examples."""
    kept = hole.load()
    assert breaks(redis_client, kept["moves"], mutant(hole.mutant).scripts()) == kept["breaks"]


def test_each_program_belongs_to_a_hole():
    """One that is not in the list would not be played."""
    assert {path.stem for path in FOLDER.glob("*.json")} == {hole.file for hole in HOLES}


def test_a_program_is_cut_down_to_the_moves_that_it_needs(redis_client):
    """What a search finds is kept as short as it gets."""
    hole = HOLES[0]
    kept, scripts = hole.load(), mutant(hole.mutant).scripts()
    idle = ["time_passes", {"seconds": 0.001}]
    longer = [idle, *(move for each in kept["moves"] for move in (each, idle, idle))]
    assert len(shrunk(redis_client, longer, kept["breaks"], scripts)) <= len(kept["moves"])
