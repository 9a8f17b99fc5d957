"""The moves that a message may make in the worker's main process."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock.worker.message_stage import (
    ACK_MOVES,
    STAGE_MOVES,
    STRICT,
    AckState,
    IllegalMove,
    IllegalMoves,
    Stage,
    illegal_moves,
)
from celery_singleton_lock.worker.request import LockedRequest
from support.diagrams import PAGE, written

TABLES = {"ack": ACK_MOVES, "stage": STAGE_MOVES}
ENDS = {
    "ack": {AckState.ACKNOWLEDGED, AckState.REJECTED, AckState.REQUEUED},
    "stage": {Stage.PARKED, Stage.ENDED},
}


def reached(moves, start):
    """Return the states that can be reached from one."""
    found, new = set(), {start}
    while new:
        found |= new
        new = {to for state in new for to in moves[state]} - found
    return found


@pytest.mark.parametrize("table", TABLES)
def test_every_state_has_a_way_to_an_end_and_only_ends_have_no_way_out(table):
    moves, ends = TABLES[table], ENDS[table]
    (states,) = {type(state) for state in moves}
    assert set(moves) == set(states)
    assert {state for state in moves if not moves[state]} == ends
    for state in moves:
        assert reached(moves, state) & ends


@pytest.mark.parametrize("table", TABLES)
def test_every_state_is_reached_from_the_first(table):
    moves = TABLES[table]
    assert reached(moves, next(iter(moves))) == set(moves)


def test_an_illegal_move_raises_in_tests_and_is_logged_once_in_production(monkeypatch, caplog):
    """The task goes on: nothing is raised there."""
    moves, kind = IllegalMoves(), (AckState.REJECTED, AckState.DUE)
    with pytest.raises(IllegalMove, match="settle moved from REJECTED to DUE"):
        moves.report("settle", *kind)
    monkeypatch.delenv(STRICT)
    for _ in range(2):
        moves.report("settle", *kind)
    moves.report("settle", AckState.REJECTED, AckState.LEFT_TO_CELERY)
    assert moves.count == 4
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2


class Message(LockedRequest):
    """Made of nothing."""

    def __init__(self):
        pass

    def __str__(self):
        return "settle"


@given(st.lists(st.sampled_from(Stage), max_size=20))
def test_a_message_goes_where_it_is_sent_and_only_illegal_moves_are_counted(stages):
    """No task is lost by a defect here: a production worker makes the move all the same."""
    request = Message()
    for stage in stages:
        was, before = request.stage, illegal_moves.count
        with nullcontext() if stage in STAGE_MOVES[was] else pytest.raises(IllegalMove):
            assert request.move(stage) is was
        assert request.stage is stage
        assert illegal_moves.count - before == (stage not in STAGE_MOVES[was])


@given(st.data())
def test_a_message_that_goes_on_reaches_an_end(data):
    """It can be parked or ended from wherever legal moves have taken it."""
    request = Message()
    for _ in range(data.draw(st.integers(0, 20))):
        if STAGE_MOVES[request.stage]:
            request.move(data.draw(st.sampled_from([*STAGE_MOVES[request.stage]])))
    assert reached(STAGE_MOVES, request.stage) & ENDS["stage"]


def test_the_documentation_shows_the_moves():
    """Write its diagrams anew with ``python -m tests.support.diagrams``."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page)
