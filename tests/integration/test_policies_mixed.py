"""Tasks with ``wait`` and with ``park`` for the same lock in one worker."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from celery import states

from celery_singleton_lock import Lock
from celery_singleton_lock.admin import doctor
from celery_singleton_lock.errors import LockWaitTimeout
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from integration.book import LONG_LEASE
from support.waiting import eventually, in_time, never


@pytest.fixture(scope="module")
def lease():
    """No lease ends here, also not while a process stands still."""
    return LONG_LEASE


@pytest.mark.full
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_slots_full_of_waiting_tasks_keep_a_parked_one_for_lock_wait_timeout_at_most(
    own_book, pool, key
):
    """It is given the lock, and no slot, until the first that waits fails; then all go on.

    The bound that the docs name, and not a promise that it takes so long.
    """
    holder = own_book.worker(concurrency=1, queues="other").start()
    first = own_book.start_holder(key, queue="other")
    with own_book.worker(pool=pool, concurrency=2):
        parked = own_book.send("act", key, 1)
        own_book.await_waiting(key, 1)
        began = time.monotonic()
        brief = own_book.send("act_wait_12", key, 2)
        patient = own_book.send("act_wait", key, 3)
        eventually(lambda: own_book.view(key).waiting == 3)
        own_book.open(f"{key}-0")
        assert own_book.value(first) == 0
        never(lambda: len(own_book.view(key).holders) > 1, 0.5)
        state, error = own_book.outcome(brief)
        assert state == states.FAILURE
        assert isinstance(error, LockWaitTimeout)
        assert [own_book.value(parked), own_book.value(patient)] == [1, 3]
        took = time.monotonic() - began
        own_book.await_free(key)
    assert own_book.order(key) == [0, 1, 3]
    assert own_book.peak(key) == 1
    holder.stop()
    in_time(took, 12 + 2)


@pytest.mark.full
def test_plain_tasks_that_wait_with_lock_may_keep_a_parked_one_from_its_slot(own_book, key):
    """It is not promised that it starts. ``doctor`` tells, and one more slot ends it."""
    holder = own_book.worker(concurrency=1, queues="other").start()
    first = own_book.start_holder(key, queue="other")
    with own_book.worker(concurrency=2), closing(RedisAdminStore(own_book.client)) as store:
        parked = own_book.send("act", key, 1)
        own_book.await_waiting(key, 1)
        behind = [own_book.send("lock_in_body", key, n) for n in (2, 3)]
        eventually(lambda: own_book.view(key).waiting == 3)
        own_book.open(f"{key}-0")
        assert own_book.value(first) == 0
        eventually(lambda: doctor._grants(store).health is doctor.Health.WARN, 15)
        own_book.app.control.pool_grow(1)
        assert [own_book.value(each) for each in (parked, *behind)] == [1, 2, 3]
    holder.stop()


@pytest.mark.full
def test_tasks_behind_one_that_waits_in_its_slot_keep_no_other_from_the_worker(own_book, key):
    """More than the prefetch count are parked behind it, and a free slot runs plain tasks."""
    lock = Lock(own_book.client, f"k:{key}", lease=60, thread_local=False)
    lock.acquire()
    with own_book.worker(concurrency=2, conf={"worker_prefetch_multiplier": 1}):
        waiting = own_book.send("act", key, 0, lock_on_conflict="wait", lock_wait_timeout=60)
        eventually(lambda: own_book.view(key).waiting == 1)
        behind = [own_book.send("act", key, n) for n in range(1, 5)]
        assert own_book.value(own_book.send("plain", "p", 1)) == 1
        eventually(lambda: own_book.view(key).bodies == 4)
        lock.release()
        assert [own_book.value(each) for each in (waiting, *behind)] == list(range(5))
    assert own_book.order(key) == list(range(5))
    assert own_book.peak(key) == 1


def test_a_worker_warns_of_tasks_that_share_a_lock_and_differ_so(own_book):
    """It names both tasks and their lock_key, once; tasks with other keys are not named."""
    with own_book.worker(concurrency=1) as worker:
        told = "share the lock_key 'k:{key}'"
        (line,) = [line for line in worker.log().splitlines() if told in line]
        assert "act_wait (" in line
        assert "act (" in line
        assert "'k:{key}'" in line
