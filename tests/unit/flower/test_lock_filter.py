"""What Flower's list says of a lock: what it waits for, whether it is stuck, who finds it."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.lock_view import HELD_AFTER, Holder
from celery_singleton_lock.flower.lock_filter import (
    PAGE_ORDERS,
    STATES,
    ListQuery,
    sentence_of,
    states_of,
    trouble_of,
)
from celery_singleton_lock.store.operator.base import Glance

ALIVE = Holder("t1", "app.settle", "3f2a91c0-1", "w-1#a", "h", 7, 20.0, 5, "running", 1e9)
DEAD = ALIVE._replace(silent=45.0, expires_in=12.0)

FREE = Glance("free", limit=1, waiting=2, oldest=9.0)
HELD = Glance("held", held=1, limit=1, holders=(ALIVE,))
BLOCKED = HELD._replace(name="blocked", waiting=3, oldest=70.0)
SILENT = HELD._replace(name="silent", holders=(DEAD,))
STUCK = SILENT._replace(name="stuck", waiting=1, oldest=50.0)
PAUSED = Glance("paused", paused=True, limit=1)
PAUSED_QUEUE = PAUSED._replace(name="paused-queue", waiting=1, oldest=3.0)
UNSERVED = Glance("unserved", adrift=2, bodies=2, limit=1)
SETTLING = Glance("settling", bodies=2, aside=2)
ALL = [FREE, HELD, BLOCKED, SILENT, STUCK, PAUSED, PAUSED_QUEUE, UNSERVED, SETTLING]


@pytest.mark.parametrize(
    ("lock", "level", "kind", "told"),
    [
        (HELD, 0, "held", ""),
        (BLOCKED, 1, "waiting", "Behind settle[3f2a91c0] on w-1."),
        (SILENT, 2, "dead", "no sign of life for 45 s. If it is dead, its permit is free in 12 s"),
        (STUCK, 3, "dead", "no sign of life for 45 s"),
        (PAUSED, 2, "paused", "An operator has paused it. Nobody waits for it."),
        (PAUSED_QUEUE, 3, "paused", "1 task waits until it is resumed."),
        (UNSERVED, 3, "unserved", "consumes the queue of 2 tasks. Start such a worker."),
        (FREE, 3, "idle", "A permit is free, and the first task has waited 9.0 s"),
        (FREE._replace(rated=True), 1, "waiting", "The rate of the lock says when the next task"),
        (FREE._replace(grouped=True), 1, "waiting", "The groups that wait may be at their"),
        (SETTLING, 1, "waiting", "2 tasks out of the queue: settling (lock_debounce)"),
        (SETTLING._replace(paused=True), 3, "paused", "2 tasks wait until it is resumed."),
        (HELD._replace(bodies=1), 0, "held", ""),
        (HELD._replace(bodies=2, aside=1), 1, "waiting", "1 task out of the queue"),
        (PAUSED_QUEUE._replace(paused_for=90.0), 3, "paused", "has paused it for another 90 s"),
        (FREE._replace(oldest=1.0), 1, "waiting", "The next task starts at once."),
    ],
)
def test_a_row_says_what_its_lock_waits_for_and_whether_that_ends_by_itself(
    lock, level, kind, told
):
    assert trouble_of(lock) == (level, kind)
    assert told in sentence_of(lock)
    assert ("stuck" in states_of(lock)) is (level == 3)


def test_further_holders_and_a_hold_after_success_are_told():
    several = BLOCKED._replace(held=3, limit=3)
    assert sentence_of(several).endswith("on w-1 and 2 others.")
    kept = BLOCKED._replace(holders=(ALIVE._replace(state=HELD_AFTER),))
    assert sentence_of(kept) == "Stays held for another 20 s (lock_hold_for)."


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ("stuck", {"free", "stuck", "paused-queue", "unserved"}),
        ("dead", {"silent", "stuck"}),
        ("unserved", {"unserved"}),
        ("paused", {"paused", "paused-queue"}),
        ("waiting", {"free", "blocked", "stuck", "paused-queue", "unserved", "settling"}),
        ("held", {"held", "blocked", "silent", "stuck"}),
    ],
)
def test_a_filter_by_state_selects_the_locks_that_are_counted(state, names):
    assert state in STATES
    query = ListQuery(state=state)
    query.check()
    assert {lock.name for lock in ALL if query.selects(lock)} == names
    assert {lock.name for lock in ALL if state in states_of(lock)} == names


def test_a_dead_holder_of_a_paused_lock_is_counted_too():
    assert "dead" in states_of(STUCK._replace(paused=True))


def test_locks_are_selected_whose_first_waiter_has_waited_long_enough():
    """The age of tasks that no worker takes is not known: they are not hidden."""
    query = ListQuery(longer=50.0)
    assert {lock.name for lock in ALL if query.selects(lock)} == {"blocked", "stuck", "unserved"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", True),
        ("block", True),
        ("bl*d", True),
        ("bl?", False),
        ("app.settle", True),
        ("settle", True),
        ("app.*", True),
        ("3f2a91", True),
        ("a91c0", False),
        ("refund", False),
    ],
)
def test_a_search_finds_a_name_a_task_and_the_beginning_of_an_id(text, found):
    assert ListQuery(text).finds(BLOCKED) is found
    assert ListQuery("waits-here").finds(BLOCKED, {"blocked"})


def test_stuck_locks_come_first_and_of_these_those_with_most_waiters():
    names = [lock.name for lock in sorted(ALL, key=PAGE_ORDERS["trouble"])]
    assert names[:4] == ["free", "unserved", "stuck", "paused-queue"]
    assert names[-1] == "held"


def test_an_unknown_state_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="state is 'odd': use one of stuck, dead"):
        ListQuery(state="odd").check()
