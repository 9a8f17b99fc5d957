"""The lock header: what the main process tells the executing context."""

from __future__ import annotations

import pickle

import pytest

from celery_singleton_lock.core.model import Ending, Reservation
from celery_singleton_lock.worker.lock_header import (
    MOST_OF_NAME,
    MOST_OF_NOTICE,
    NO_HEADER,
    LockHeader,
    as_copy,
    attempt_of,
    doubted,
    end_in,
    loss_in,
    notice_of_end,
    notice_of_loss,
    task_id_of,
)


def test_a_header_travels_to_a_pool_child_with_its_error():
    """It pickles, whatever is in it."""
    header = LockHeader("a", "t.0", "id/0/0", "task", "w", place=7, copy=True, error=KeyError("x"))
    again = pickle.loads(pickle.dumps(header))
    assert (again.name, again.place, again.copy) == ("a", 7, True)
    assert isinstance(again.error, KeyError)


def test_no_header_names_no_lock():
    """A message that has not passed the dispatcher is unlocked."""
    assert NO_HEADER.name == ""


@pytest.mark.parametrize(
    ("request_dict", "attempt"),
    [
        ({"id": "x"}, "x/0/0"),
        ({"id": "x", "retries": None}, "x/0/0"),
        ({"id": "x", "retries": 2}, "x/2/0"),
        ({"id": "x", "retries": 2, "replaced_task_nesting": 1}, "x/2/1"),
    ],
)
def test_a_retry_and_a_replacement_are_other_attempts(request_dict, attempt):
    """The id alone is no attempt: retries and replaced tasks keep it."""
    assert attempt_of(request_dict) == attempt


@pytest.mark.parametrize(("held", "copy"), [(0.0, False), (15.0, False), (15.1, True)])
def test_a_message_that_was_held_for_long_counts_as_one_of_two_copies(held, copy):
    """The broker delivers it again after 60 s: a quarter of that is long."""
    header = LockHeader("a", "t.0", "id/0/0", "task", "w", created_at=1000.0)
    assert doubted(header, 1000.0 + held, 60.0) == header._replace(copy=copy)


def test_a_copy_stays_one_however_short_it_was_held():
    """What the broker has said is not taken back."""
    header = LockHeader("a", "t.0", "id/0/0", "task", "w", created_at=1000.0, copy=True)
    assert doubted(header, 1000.0, 60.0) is header


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, {"copy": True, "first_place": 7}),
        ({"first_place": 3}, {"copy": True, "first_place": 3}),
        ({"copy": True}, {"copy": True, "first_place": 0}),
    ],
    ids=["arrived at its place", "requeued", "redelivered"],
)
def test_a_message_that_is_parked_again_is_no_copy_of_what_ended_before_it_arrived(known, expected):
    """Unless the broker may have delivered it before."""
    header = LockHeader("a", "t.0", "id/0/0", "task", "w", place=7, **known)
    assert as_copy(header) == header._replace(**expected)


@pytest.mark.parametrize("task_id", ["x", "shop/x", ""])
def test_an_attempt_names_its_task(task_id):
    """Whatever the user has chosen for an id."""
    assert task_id_of(attempt_of({"id": task_id, "retries": 12})) == task_id


def test_a_notice_of_a_loss_has_the_owner_token():
    """In one line of text, which a pipe takes in one go."""
    header = LockHeader("a\nb", "t.0", "id/1/0", "task", "w", place=7)
    notice = notice_of_loss(header)
    assert "\n" not in notice
    assert loss_in(notice) == LockHeader("a\nb", "t.0", "id/1/0", "task", "")
    long = loss_in(notice_of_loss(header._replace(name="n" * 2000)))
    assert long.name == "n" * MOST_OF_NAME


def test_a_notice_of_an_end_has_the_locks_to_release_and_the_ending():
    """All that a release takes, in one line; its time too, which tells whether it is doubted."""
    header = LockHeader("a\nb", "t.0", "id/1/0", "task", "w", 7, 1000.5, moved=True, copy=True)
    notice = notice_of_end(header, Ending.AGAIN)
    assert "\n" not in notice
    assert (end_in(notice), loss_in(notice)) == ((header, Ending.AGAIN, None), None)
    for kept in (Reservation("", 3.5), Reservation("id/1/0", 3.5)):
        assert end_in(notice_of_end(header, Ending.HOLD, kept)) == (header, Ending.HOLD, kept)
    _, _, kept = end_in(notice_of_end(header, Ending.HOLD, Reservation("", 3.5, since=90.0)))
    assert kept.since == 90.0
    assert end_in(notice_of_loss(header)) is None


def test_a_notice_of_an_end_fits_into_one_write_to_a_pipe():
    """The name of a lock is sent whole or not at all: its lease ends by itself."""
    header = LockHeader("n", "t.0", "id/1/0", "task", "w")
    room = MOST_OF_NOTICE - len(notice_of_end(header, Ending.FINAL)) + 1
    assert end_in(notice_of_end(header._replace(name="n" * room), Ending.FINAL))
    assert not notice_of_end(header._replace(name="n" * (room + 1)), Ending.FINAL)


def test_a_bare_token_is_not_a_notice_of_a_loss():
    """It says that its lock is held."""
    assert loss_in("0123456789abcdef.0") is None
    assert end_in("0123456789abcdef.0") is None
