"""Notices of pool children that a task has closed a lock."""

from __future__ import annotations

from celery_singleton_lock.events import LockClosed
from celery_singleton_lock.worker.lock_header import (
    MARKS,
    MOST_OF_NOTICE,
    LockHeader,
    close_in,
    notice_of_close,
)

HEADER = LockHeader("a", "t.0", "id-1/0/0", "shop.settle", "w")


def test_a_notice_becomes_the_event():
    notice = notice_of_close(HEADER, "a:ü", 2.5, "429")
    assert notice[0] in MARKS
    assert close_in(notice) == LockClosed("a:ü", "shop.settle", "id-1", seconds=2.5, why="429")
    assert close_in("t.0") is None


def test_a_long_reason_is_shortened_and_a_long_name_has_no_notice():
    notice = notice_of_close(HEADER, "a", 1.0, "x" * MOST_OF_NOTICE)
    assert len(notice) <= MOST_OF_NOTICE
    closed = close_in(notice)
    assert closed is not None
    assert closed.why == "x" * 500
    assert notice_of_close(HEADER, "n" * MOST_OF_NOTICE, 1.0, "") == ""
