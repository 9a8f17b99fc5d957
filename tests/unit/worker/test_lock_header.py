"""The stamp: what the main process tells the executing context."""

from __future__ import annotations

import pickle

import pytest

from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.worker.lock_header import (
    MOST_OF_NAME,
    MOST_OF_NOTICE,
    UNSTAMPED,
    Stamp,
    attempt_of,
    doubted,
    end_in,
    loss_in,
    notice_of_end,
    notice_of_loss,
    task_id_of,
)


def test_a_stamp_travels_to_a_pool_child_with_its_error():
    """It pickles, whatever is in it."""
    stamp = Stamp("a", "t.0", "id/0/0", "task", "w", place=7, copy=True, error=KeyError("x"))
    again = pickle.loads(pickle.dumps(stamp))
    assert (again.name, again.place, again.copy) == ("a", 7, True)
    assert isinstance(again.error, KeyError)


def test_no_stamp_names_no_lock():
    """What has not passed the desk is unlocked."""
    assert UNSTAMPED.name == ""


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
    stamp = Stamp("a", "t.0", "id/0/0", "task", "w", stamped_at=1000.0)
    assert doubted(stamp, 1000.0 + held, 60.0) == stamp._replace(copy=copy)


def test_a_copy_stays_one_however_short_it_was_held():
    """What the broker has said is not taken back."""
    stamp = Stamp("a", "t.0", "id/0/0", "task", "w", stamped_at=1000.0, copy=True)
    assert doubted(stamp, 1000.0, 60.0) is stamp


@pytest.mark.parametrize("task_id", ["x", "shop/x", ""])
def test_an_attempt_names_its_task(task_id):
    """Whatever the user has chosen for an id."""
    assert task_id_of(attempt_of({"id": task_id, "retries": 12})) == task_id


def test_a_notice_of_a_loss_says_whose_lock_was_lost():
    """In one line of text, which a pipe takes in one go."""
    stamp = Stamp("a\nb", "t.0", "id/1/0", "task", "w", place=7)
    notice = notice_of_loss(stamp)
    assert "\n" not in notice
    assert loss_in(notice) == Stamp("a\nb", "t.0", "id/1/0", "task", "")
    long = loss_in(notice_of_loss(stamp._replace(name="n" * 2000)))
    assert long.name == "n" * MOST_OF_NAME


def test_a_notice_of_an_end_says_what_is_to_be_released_and_how():
    """All that a release takes, in one line; its time too, which tells whether it is doubted."""
    stamp = Stamp("a\nb", "t.0", "id/1/0", "task", "w", 7, 1000.5, copy=True)
    notice = notice_of_end(stamp, Ending.AGAIN)
    assert "\n" not in notice
    assert (end_in(notice), loss_in(notice)) == ((stamp, Ending.AGAIN, 0.0), None)
    assert end_in(notice_of_end(stamp, Ending.HOLD, 3.5)) == (stamp, Ending.HOLD, 3.5)
    assert end_in(notice_of_loss(stamp)) is None


def test_an_end_is_not_told_in_more_than_a_pipe_takes_in_one_go():
    """The name of a lock is told whole or not at all: its lease ends by itself."""
    stamp = Stamp("n", "t.0", "id/1/0", "task", "w")
    room = MOST_OF_NOTICE - len(notice_of_end(stamp, Ending.FINAL)) + 1
    assert end_in(notice_of_end(stamp._replace(name="n" * room), Ending.FINAL))
    assert not notice_of_end(stamp._replace(name="n" * (room + 1)), Ending.FINAL)


def test_a_token_alone_tells_of_no_loss():
    """It says that its lock is held."""
    assert loss_in("0123456789abcdef.0") is None
    assert end_in("0123456789abcdef.0") is None
