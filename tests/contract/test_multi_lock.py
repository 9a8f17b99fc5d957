"""Several locks as one: whatever interrupts the caller, it holds none afterwards."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.lock.multi_lock import MultiLock
from celery_singleton_lock.lock.sync import Lock

pytestmark = pytest.mark.contract

NAMES = ("a", "b", "c")


class Interrupted(BaseException):
    """Raised in a task from outside, like the error of a soft time limit."""


@pytest.fixture
def locks(lock_client):
    return [Lock(lock_client, name, lease=30) for name in NAMES]


def interrupt(patch, lock, method, *, before):
    """Interrupt one call of a method of a lock, before or after its work."""
    call = getattr(lock, method)

    def interrupted(*args, **options):
        patch.setattr(lock, method, call)
        if not before:
            call(*args, **options)
        raise Interrupted

    patch.setattr(lock, method, interrupted)


def busy(client):
    return [name for name in NAMES if Lock(client, name).locked()]


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("before", [True, False])
def test_a_task_that_is_interrupted_while_it_releases_its_locks_holds_none(
    locks, lock_client, monkeypatch, at, before
):
    lock = MultiLock(locks, SystemClock())
    assert lock.acquire()
    interrupt(monkeypatch, locks[at], "release", before=before)
    with pytest.raises(Interrupted):
        lock.release()
    assert busy(lock_client) == []


@pytest.mark.parametrize("at", range(3))
def test_a_task_that_is_interrupted_between_its_locks_holds_none(
    locks, lock_client, monkeypatch, at
):
    interrupt(monkeypatch, locks[at], "acquire", before=True)
    with pytest.raises(Interrupted):
        MultiLock(locks, SystemClock()).acquire()
    assert busy(lock_client) == []
