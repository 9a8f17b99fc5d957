"""A granted task starts where a slot is free, not behind other tasks.

Two workers consume one queue; long tasks fill the slots of one of them.
"""

from __future__ import annotations

import time

import pytest

from celery_singleton_lock import Lock
from integration.book import LONG_LEASE, needs_pool, pools
from support.events import EventLog
from support.waiting import eventually, in_time, never

LEASE = LONG_LEASE

SOON = 4.0
"""Seconds: two of waiting for a slot, a round of the agent, and the way to the other worker."""


@pytest.fixture(params=pools("prefork", "threads", "gevent", "solo"))
def pool(request):
    """The pool of both workers."""
    needs_pool(request.param)
    return request.param


@pytest.fixture
def held(own_book):
    """The lock ``k:a``, which a client holds."""
    lock = Lock(own_book.client, "k:a", lease=60, thread_local=False)
    lock.acquire()
    yield lock
    if lock.held:
        lock.release()


def fill(book, busy):
    """Fill the slots of a worker; where its pool lets it, have as many tasks again wait in it."""
    slots = busy.concurrency
    tasks = slots if busy.pool in {"solo", "gevent"} else 2 * slots
    sent = [book.send("plain", "plug", n, hold="plug") for n in range(tasks)]
    for result in sent[:slots]:
        book.started(result)
    eventually(lambda: book.queued() == 0, 5, "all are prefetched")
    return sent


def ended_well(book, parked, plugs):
    """Each has run once, and nothing of them is left behind in either worker."""
    book.open("plug")
    for result in plugs:
        book.value(result)
    assert book.value(parked) == 1
    book.await_free("a")
    never(lambda: len(book.starts("a")) > 1, 0.5)

    def nothing_left():
        told = book.app.control.inspect(timeout=20, limit=2).stats()
        counts = [stats["singleton_lock"] for stats in told.values()]
        left = [(each["granted"], each["held"], each["in_flight"]) for each in counts]
        assert left == [(0, 0, {})] * 2
        return True

    eventually(nothing_left)


def test_a_revoked_task_that_waits_for_a_slot_frees_its_lock(own_book, held):
    """It kept the lock until the slot was free, and the next task waited for that."""
    book = own_book
    with (
        book.worker(concurrency=1) as busy,
        book.worker(queues="other", name="idle"),
    ):
        gone = book.send("act", "a", 1)
        book.await_waiting("a", 1)
        following = book.send("act", "a", 2, queue="other")
        book.await_waiting("a", 2)
        plugs = fill(book, busy)
        held.release()
        eventually(lambda: book.view("a").holders, 10, "it is granted")
        book.app.control.revoke(gone)
        assert book.value(following, 20) == 2
        result = book.app.AsyncResult(gone)
        eventually(lambda: result.state == "REVOKED", 20, lambda: result.state)
        book.open("plug")
        for plug in plugs:
            book.value(plug)
        book.await_free("a", 10)
    assert book.order("a") == [2]


def test_a_revoked_task_that_waits_for_a_slot_frees_all_of_its_locks(own_book):
    """Those that it had kept stayed held until their leases had ended."""
    book = own_book
    other = Lock(book.client, "k:b", lease=60, thread_local=False)
    other.acquire()
    with book.worker(concurrency=1, pool="threads") as busy:
        gone = book.send("pair_lost", "a", "b")
        book.await_waiting("b", 1)
        plugs = fill(book, busy)
        other.release()
        eventually(lambda: book.view("b").holders, 10, "it is granted")
        book.app.control.revoke(gone)
        revoked_at = time.monotonic()
        eventually(lambda: not book.view("a").holders, 80, lambda: str(book.view("a")))
        assert time.monotonic() - revoked_at < LEASE / 2, "and not when the lease has ended"
        book.open("plug")
        for plug in plugs:
            book.value(plug)
        result = book.app.AsyncResult(gone)
        eventually(lambda: result.state == "REVOKED", 20, lambda: result.state)
        book.await_free("a", 10)
        book.await_free("b", 10)


@pytest.mark.parametrize("kind", ["prefork", "threads"])
def test_a_task_whose_revoke_another_worker_hears_first_frees_all_of_its_locks(own_book, kind):
    """The worker with the grant kept the others until its slot was free, and ended it once more."""
    book = own_book
    needs_pool(kind)
    other = Lock(book.client, "k:b", lease=60, thread_local=False)
    other.acquire()
    with (
        book.worker(concurrency=1, pool=kind, args=("-E",)) as busy,
        book.worker(queues="other", name="idle") as idle,
        EventLog(book.app) as log,
    ):
        gone = book.send("pair_lost", "a", "b")
        book.await_waiting("b", 1)
        plugs = fill(book, busy)
        other.release()
        eventually(lambda: book.view("b").holders, 10, "it is granted")
        book.app.control.revoke(gone, destination=[idle.node_name])
        revoked_at = time.monotonic()
        result = book.app.AsyncResult(gone)
        eventually(lambda: result.state == "REVOKED", 20, lambda: result.state)
        eventually(lambda: not book.view("a").holders, 80, lambda: str(book.view("a")))
        assert time.monotonic() - revoked_at < LEASE / 2, "and not when the lease has ended"
        book.open("plug")
        for plug in plugs:
            book.value(plug)
        book.await_free("a", 10)
        book.await_free("b", 10)
        eventually(lambda: log.counts(gone).get("task-revoked"), 5)
        never(lambda: log.counts(gone)["task-revoked"] > 1, 0.5)


@pytest.mark.parametrize("kind", ["prefork", "threads"])
def test_a_task_that_runs_keeps_its_lock_when_it_is_revoked(own_book, held, kind):
    """Its lease of 2 s was not renewed any more, and the next task ran beside it."""
    book = own_book
    with book.worker(pool=kind, concurrency=2):
        revoked = book.send("act_again", "a", 1, hold="a-1")
        book.await_waiting("a", 1)
        following = book.send("act_again", "a", 2)
        book.await_waiting("a", 2)
        held.release()
        book.started(revoked)
        book.app.control.revoke(revoked, reply=True)
        never(lambda: len(book.starts("a")) > 1, 5.0)
        book.open("a-1")
        assert book.value(following) == 2
        assert book.events("end", id=revoked)  # Celery 5.6 calls it REVOKED while it runs
        book.await_free("a", 10)
    assert book.order("a") == [1, 2]


@pytest.mark.full
def test_a_granted_task_begins_in_the_idle_worker_not_behind_long_tasks(own_book, pool, held):
    book, slots = own_book, 1 if pool == "solo" else 2
    with book.worker(pool=pool, concurrency=slots) as busy:
        parked = book.send("act", "a", 1)
        book.await_waiting("a", 1)
        plugs = fill(book, busy)
        with book.worker(pool=pool, concurrency=slots) as idle:
            book.await_consumers(busy, idle)
            eventually(lambda: book.workers_with_a_free_slot() == [idle.name], 10)
            held.release()
            start = book.started(parked, SOON)
            assert start["worker"].startswith(f"{idle.name}@")
            ended_well(book, parked, plugs)


@pytest.mark.full
def test_a_grant_that_waits_for_a_slot_goes_on_to_a_worker_that_has_one(own_book, pool, held):
    """The other worker comes when the grant has been made; the first has no slot for minutes."""
    book, slots = own_book, 1 if pool == "solo" else 2
    with book.worker(pool=pool, concurrency=slots) as busy:
        parked = book.send("act", "a", 1)
        book.await_waiting("a", 1)
        plugs = fill(book, busy)
        eventually(lambda: book.workers_with_a_free_slot() == [], 5)
        held.release()
        eventually(lambda: book.view("a").holders, 5, "it is granted")
        with book.worker(pool=pool, concurrency=slots) as idle:
            (ready,) = eventually(book.workers_with_a_free_slot, 10)
            began = book.client.time()
            start = book.started(parked, 10)
            after = book.client.time()
            assert start["worker"].startswith(f"{idle.name}@"), ready
            in_time(after[0] - began[0] + (after[1] - began[1]) / 1e6, SOON)
            ended_well(book, parked, plugs)


@pytest.mark.full
def test_a_task_that_waited_in_vain_ends_once_in_a_worker_with_a_free_slot(own_book, pool, held):
    """The worker that was notified first has no slot to end it in for minutes.

    When it has one it does not end the task again: that would call the errbacks twice, and count
    twice in a chord.
    """
    book, slots = own_book, 1 if pool == "solo" else 2
    told = book.app.tasks["plain"].si("told", 1)
    with book.worker(pool=pool, concurrency=slots) as busy:
        parked = book.send("act_patient", "a", 1, link_error=told)
        busy.await_log(f"act_patient[{parked}] is parked")
        plugs = fill(book, busy)
        eventually(lambda: not book.view("a").waiters, 5, "it is overdue")
        with book.worker(pool=pool, concurrency=slots):
            assert book.outcome(parked)[0] == "FAILURE"
            eventually(lambda: not book.view("a").bodies)  # Redis has its end, too
            book.open("plug")
            for result in plugs:
                book.value(result)
            eventually(lambda: book.starts("told"), 5)
            never(lambda: len(book.starts("told")) > 1, 2)
            assert not book.starts("a")


def test_the_slots_that_pool_grow_adds_are_free(own_book):
    """Granted tasks waited in another worker until its long task had ended."""
    book = own_book
    with book.worker(concurrency=1) as grown:
        plug = book.send("plain", "plug", 0, hold="plug")
        book.started(plug)
        eventually(lambda: book.workers_with_a_free_slot() == [], 10)
        book.app.control.pool_grow(1, destination=[grown.node_name])
        eventually(lambda: book.workers_with_a_free_slot() == [grown.name], 10)
        book.open("plug")
        book.value(plug)


def test_a_pool_that_may_grow_grows_for_a_granted_task(own_book, held):
    """Celery's autoscaler looks at messages of the broker, and otherwise every so many seconds."""
    book = own_book
    with book.worker(args=("--autoscale", "2,1"), env={"AUTOSCALE_KEEPALIVE": "600"}):
        parked = book.send("act", "a", 1)
        book.await_waiting("a", 1)
        plug = book.send("plain", "plug", 0, hold="plug")
        book.started(plug)
        held.release()
        book.started(parked)
        book.open("plug")
        book.value(plug)
        book.value(parked)
