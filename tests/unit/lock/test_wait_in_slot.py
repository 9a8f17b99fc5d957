"""A task that waits for its lock in its pool slot."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.model import Claim, Owner, Reply, Verdict
from celery_singleton_lock.lock.wait_for_turn import wait_in_slot


class Busy:
    """A store in which the lock is busy at the first request, and free at the second."""

    def __init__(self):
        self.copies = []

    def acquire(self, _owner, claim, *, wait):
        self.copies.append(claim.copy)
        return Reply(Verdict.WAITING if len(self.copies) == 1 else Verdict.DONE)

    def wait(self, _name, _token, _seconds):
        return False


@pytest.mark.parametrize(("attempt", "copies"), [("id/0/0", [0, 7]), ("", [0, 0])])
def test_who_has_waited_asks_again_as_what_may_be_a_copy(attempt, copies):
    """If its worker stood still, the broker may have delivered it again, and the copy has ended."""
    store, clock = Busy(), SystemClock()
    claim = Claim("k", lease=5.0, limit=1, place=7)
    reply, _ = wait_in_slot(store, clock, Owner("token", attempt), claim, 60.0)
    assert reply.verdict is Verdict.DONE
    assert store.copies == copies
