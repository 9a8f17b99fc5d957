"""The states of a record in Redis are those that the scripts write."""

from __future__ import annotations

import re

from celery_singleton_lock.core.record_state import RECORD_MOVES, RecordState
from celery_singleton_lock.store.scripts import SHARED, read


def test_the_scripts_write_no_other_state():
    text = read(SHARED)
    (waits,) = re.findall(r"^local WAITS = \{(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    written = set(re.findall(r"(\w+) = '", waits))
    for call in re.findall(r"set_state\(rec, (.*)\)", text):
        written |= set(re.findall(r"'(\w+)'", call))
    assert {"parked", "adrift", "running", "revoked"} <= written
    assert written <= {state.value for state in RecordState}


def test_every_state_has_a_way_in_and_a_way_out():
    assert set(RECORD_MOVES) == {None, *RecordState}
    assert all(RECORD_MOVES.values())
    assert {to for ways in RECORD_MOVES.values() for to in ways} == {None, *RecordState}
