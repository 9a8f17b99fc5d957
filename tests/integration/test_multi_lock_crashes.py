"""Tasks with several locks whose workers die or stop, or whose message is redelivered.

The locks of a test are named such that ``a`` comes before ``b`` in the global order. Workers that
are killed have leases of :data:`KILLED_LEASE` seconds.
"""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock import Lock
from celery_singleton_lock.store.scripts import load_scripts
from integration.book import only
from support.proxy import Proxy
from support.waiting import eventually, in_time, never

KILLED_LEASE = 10.0
MORTAL = {"singleton_lock_lease": KILLED_LEASE}
"""Settings of a worker that is killed: its locks are free soon after that."""


def held_by_another(book, name):
    """Yield a lock that another client holds."""
    lock = Lock(book.client, name, lease=60, thread_local=False)
    lock.acquire()
    yield lock
    if lock.held:
        lock.release()


@pytest.fixture
def busy(own_book):
    """The lock b, which another client holds."""
    yield from held_by_another(own_book, "k:b")


@pytest.fixture
def third(own_book):
    """Likewise the lock c."""
    yield from held_by_another(own_book, "k:c")


THREE = {"task_annotations": {"pair": {"lock_keys": ["k:{key}", "k:{n}", "k:c"]}}}
"""The task pair takes the lock c, too."""


def parked_at_c(book, busy):
    """Send a task that is parked at b, and then at c, where it keeps a and b; return its id."""
    task = parked_at_b(book)
    busy.release()
    book.await_waiting("c", 1)
    eventually(lambda: not book.view("b").bodies, message="its message is kept once")
    return task


def parked_at_b(book):
    """Send a task that takes a, and is parked at b; return its id."""
    task = book.send("pair", "a", "b")
    book.await_waiting("b", 1)
    eventually(lambda: [h.task_id for h in book.view("a").holders] == [task])
    return task


def deliver_again(book, raw):
    """Put a message into the broker as kombu restores it after the visibility time-out."""
    message = json.loads(raw)
    message["headers"]["redelivered"] = True
    message["properties"]["delivery_info"]["redelivered"] = True
    book.broker.lpush("celery", json.dumps(message))


def settled(book):
    """Wait until nothing is left of a and b, in Redis and in the broker."""
    book.await_free("a", 10)
    book.await_free("b", 10)
    book.await_drained("celery")


@only("prefork")
@pytest.mark.parametrize("parked", [False, True], ids=["at once", "parked before"])
def test_T30_a_killed_child_of_a_task_with_two_locks_gives_both_back(own_book, pool, parked):
    """acks_late: it runs again, never beside another that takes one of its locks."""
    book = own_book
    with book.worker(pool=pool, concurrency=3):
        if parked:
            book.start_holder("b", 1)
        task = book.send("pair_lost", "a", "b", end="die")
        if parked:
            book.await_waiting("b", 1)
            book.open("b-1")
        book.started(task)
        others = [book.send("act", "a", 2), book.send("act", "b", 3)]
        book.value(task)
        for other in others:
            book.value(other)
        assert len(book.starts("a", id=task)) == 2
        settled(book)
    assert book.peak("a") == 1


@pytest.mark.full
@only("prefork")
def test_a_task_whose_kept_lock_was_lost_with_its_worker_begins_again(own_book, pool, busy):
    """The parking worker is killed: the kept lock goes to the next one lease later.

    The task is granted b while that one still runs: it gives b back, and waits for a.
    """
    book = own_book
    one = book.worker(pool=pool, conf=MORTAL).start()
    task = parked_at_b(book)
    with book.worker(pool=pool):
        killed = book.kill_worker(one)
        behind = book.send("act", "a", 2, hold="a-2")
        in_time(book.started(behind)["t"] - killed, KILLED_LEASE + 2)
        busy.release()
        book.await_waiting("a", 1)
        assert book.value(book.send("act", "b", 3)) == 3
        assert not book.starts("a", id=task)
        book.open("a-2")
        book.value(task)
        book.value(behind)
        settled(book)
    assert [start["id"] for start in book.starts("a")] == [behind, task]
    assert book.peak("a") == 1


@pytest.mark.full
@only("prefork")
def test_a_kept_lock_is_lost_one_lease_after_its_worker_was_killed(own_book, pool, busy):
    """Nobody waits for it: the task takes it again, at the place of its arrival, and runs."""
    book = own_book
    one = book.worker(pool=pool, conf=MORTAL).start()
    task = parked_at_b(book)
    with book.worker(pool=pool):
        book.kill_worker(one)
        eventually(lambda: not book.view("a").holders, KILLED_LEASE + 1)
        busy.release()
        book.value(task)
        settled(book)
    assert len(book.starts("a")) == 1


@pytest.mark.full
def test_a_stopping_worker_hands_over_the_locks_that_its_tasks_keep(own_book, pool, busy):
    """Warm shutdown: no lease has to expire, and the task starts again in the other worker."""
    book, long = own_book, {"singleton_lock_lease": 60.0}
    one = book.worker(pool=pool, conf=long).start()
    task = parked_at_b(book)
    with book.worker(pool=pool, conf=long) as two:
        one.stop()
        eventually(
            lambda: [h.worker.split("@")[0] for h in book.view("a").holders] == [two.name],
            message="the other worker has taken the first lock for it",
        )
        book.await_waiting("b", 1)
        busy.release()
        assert book.started(task)["worker"].split("@")[0] == two.name
        book.value(task)
        settled(book)
    assert len(book.starts("a")) == 1


def test_the_last_worker_releases_the_locks_that_its_tasks_keep_when_it_stops(own_book, pool, busy):
    """Nobody else is there: the locks are free at once, and the task waits for a worker."""
    book, long = own_book, {"singleton_lock_lease": 60.0}
    with book.worker(pool=pool, conf=long):
        task = parked_at_b(book)
    assert not book.view("a").holders
    assert (book.view("a").adrift, book.view("b").waiting) == (1, 0)
    busy.release()
    with book.worker(pool=pool):
        book.value(task)
        settled(book)
    assert len(book.starts("a")) == 1


@pytest.mark.full
def test_no_task_is_lost_that_waits_for_its_third_lock_when_its_worker_stops(
    own_book, pool, busy, third
):
    """Early acknowledgement. It had been granted the second lock, and found the third busy."""
    book, conf = own_book, {"singleton_lock_lease": 60.0, **THREE}
    one = book.worker(pool=pool, conf=conf).start()
    task = parked_at_c(book, busy)
    with book.worker(pool=pool, conf=conf):
        one.stop()
        third.release()
        book.value(task)
        settled(book)
        book.await_free("c")
    assert len(book.starts("a")) == 1


@pytest.mark.full
def test_a_task_is_delivered_to_another_worker_with_what_it_keeps(own_book, pool, busy):
    """The parking worker no longer consumes its queue: the other one uses the same grant."""
    book = own_book
    with book.worker(pool=pool) as one:
        task = parked_at_b(book)
        fence = book.view("a").fencing_token
        with book.worker(pool=pool) as two:
            book.await_consumers(one, two)
            book.app.control.cancel_consumer("celery", destination=[one.node_name])
            book.await_consumers(two)
            busy.release()
            start = book.started(task)
            assert (start["worker"].split("@")[0], start["locks"][0][1]) == (two.name, fence)
            book.value(task)
            settled(book)


@pytest.mark.full
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "lapsed"])
def test_T14_a_copy_of_a_parked_task_does_not_run_beside_it(own_book, pool, busy, kept):
    """The copy finds the task at its first lock; or takes that, and the task then finds it."""
    book = own_book
    task = book.send("pair", "a", "b", hold=0.2)
    (raw,) = book.broker.lrange("celery", 0, -1)
    one = book.worker(pool=pool, conf={} if kept else MORTAL).start()
    book.await_waiting("b", 1)
    with book.worker(pool=pool):
        if not kept:
            book.kill_worker(one)
            eventually(lambda: not book.view("a").holders, KILLED_LEASE + 1)
        deliver_again(book, raw)
        if kept:
            eventually(lambda: book.view("a").bodies == 1, message="a twin at the first lock")
        else:
            book.await_waiting("b", 2)
        busy.release()
        book.value(task)
        settled(book)
        deliver_again(book, raw)
        book.await_drained("celery")
        never(lambda: len(book.starts("a")) > 1, 0.5)
        settled(book)
    one.stop()


@pytest.mark.full
@only("prefork")
def test_T34_a_task_whose_worker_is_killed_between_two_releases_does_not_run_again(
    own_book, redis_server, pool
):
    """Its end is remembered at the first lock; its message is kept at the second a lease longer."""
    book = own_book
    with Proxy(redis_server.port) as proxy:
        one = book.worker(pool=pool, conf={"singleton_lock_backend": proxy.url}).start()
        book.start_holder("b", 1)
        task = book.send("pair_lost", "a", "b", hold="a-1")
        book.await_waiting("b", 1)
        book.open("b-1")
        book.started(task)
        proxy.stall_at = load_scripts()["release"].sha.encode()
        book.open("a-1")
        one.await_log("could not release 'k:b'")
        book.kill_worker(one)
        view = book.view("a"), book.view("b")
        assert [len(each.holders) for each in view] == [0, 1]
        assert view[1].bodies == 1
    with book.worker(pool=pool):
        settled(book)
        book.value(task)
    assert len(book.starts("a")) == 1


@pytest.mark.full
@only("prefork")
def test_T14_a_redelivered_copy_of_a_running_task_waits_at_its_first_lock(own_book, pool):
    """Its task dies with its child: then the copy runs."""
    book = own_book
    task = book.send("pair_lost", "a", "b", hold="a-1")
    (raw,) = book.broker.lrange("celery", 0, -1)
    with book.worker(pool=pool):
        child = book.started(task)["pid"]
        deliver_again(book, raw)
        eventually(lambda: book.view("a").bodies == 1, message="a twin at the first lock")
        book.kill_child(child)
        book.started(task, times=2)
        book.open("a-1")
        book.value(task)
        settled(book)
    assert book.peak("a") == 1
    assert len(book.starts("a")) == 2


@pytest.mark.full
@only("prefork")
def test_an_early_acknowledged_task_with_two_locks_does_not_begin_twice(own_book, pool, busy):
    """A copy is kept at its first lock when it begins; then its worker is killed."""
    book = own_book
    task = book.send("pair", "a", "b", hold="a-1")
    (raw,) = book.broker.lrange("celery", 0, -1)
    one = book.worker(pool=pool, conf=MORTAL).start()
    book.await_waiting("b", 1)
    deliver_again(book, raw)
    eventually(lambda: book.view("a").bodies == 1, message="a copy at the first lock")
    busy.release()
    book.started(task)
    book.kill_worker(one)
    with book.worker(pool=pool):
        settled(book)
    assert len(book.starts("a")) == 1


@pytest.mark.full
@only("prefork")
def test_a_task_that_gets_a_second_lock_while_it_is_parked_takes_both(own_book, pool, busy):
    """It was parked with one lock; the worker that gets it declares ``lock_keys``."""
    book = own_book
    newer = {"task_annotations": {"act": {"lock_key": None, "lock_keys": ["k:{key}", "k:{n}"]}}}
    one = book.worker(pool=pool, conf=MORTAL).start()
    book.started(book.send("act", "a", 1, hold="a-1"))
    task = book.send("act", "a", "b")
    book.await_waiting("a", 1)
    book.kill_worker(one)
    with book.worker(pool=pool, conf=newer):
        book.await_waiting("b", 1)
        busy.release()
        locks = book.started(task)["locks"]
        assert [(name, held) for name, _, held in locks] == [("k:a", True), ("k:b", True)]
        book.value(task)
        settled(book)
