"""A task with several locks: real workers, real Redis.

The locks of a test are named such that ``a`` comes before ``b`` before ``c`` in the global order.
"""

from __future__ import annotations

import pytest

from celery_singleton_lock import Lock
from celery_singleton_lock.admin import why
from celery_singleton_lock.store.factory import admin_of
from integration.book import needs_pool, only, pools
from support.waiting import eventually


@pytest.fixture(scope="module", params=pools("prefork", "threads", "gevent", "eventlet"))
def pool(request):
    """The pool of the module's worker; ``test_pools.py`` has a scene of these on each."""
    needs_pool(request.param)
    return request.param


@pytest.fixture
def names(key):
    """Names of a test's locks, in order."""
    return [f"{key}-{letter}" for letter in "abc"]


@pytest.fixture
def other(book):
    """A function that acquires a lock as another client; held locks are released at the end."""
    taken = []

    def take(name):
        lock = Lock(book.client, f"k:{name}", lease=60, thread_local=False)
        assert lock.acquire(blocking=False)
        taken.append(lock)
        return lock

    yield take
    for lock in taken:
        if lock.held:
            lock.release()


def holders(book, name):
    """Return the ids of the tasks that hold a lock."""
    return [holder.task_id for holder in book.view(name).holders]


def test_all_locks_are_held_while_the_task_runs_and_given_back(book, worker, names):
    """Each lock has a fencing token of its own; after the end all are free."""
    a, b, _ = names
    task = book.send("pair", b, a)
    start = book.started(task)
    assert [name for name, _, _ in start["locks"]] == [f"k:{a}", f"k:{b}"]
    assert all(fence and held for _, fence, held in start["locks"])
    book.value(task)
    book.await_free(a)
    book.await_free(b)


def test_equal_names_are_one_lock(book, worker, names):
    """A transfer from an account to itself does not wait for itself."""
    a, *_ = names
    task = book.send("pair", a, a)
    assert [name for name, _, _ in book.started(task)["locks"]] == [f"k:{a}"]
    book.value(task)
    book.await_free(a)


def test_a_task_that_finds_its_second_lock_busy_keeps_the_first(book, worker, names, other):
    """It is parked at the second lock, without a slot, and no other task gets the first."""
    a, b, _ = names
    busy = other(b)
    task = book.send("pair", a, b)
    book.await_waiting(b, 1)
    eventually(lambda: holders(book, a) == [task], 5, "it keeps the first lock")
    behind = book.send("act", a)
    book.await_waiting(a, 1)
    admin = admin_of(book.store)
    assert why(admin, task).keeps == (f"k:{a}",)
    assert f"(which waits for 'k:{b}')" in why(admin, behind).sentence
    busy.release()
    book.value(task)
    book.value(behind)
    assert book.starts(a)[0]["id"] == task
    book.await_free(a)
    book.await_free(b)


@pytest.mark.full
def test_a_kept_lock_outlives_its_lease(book, worker, names, other):
    """While its task is parked at the other lock: the lease is renewed."""
    a, b, _ = names
    busy = other(b)
    task = book.send("pair", a, b)
    book.await_waiting(b, 1)
    fence = book.view(a).fencing_token
    book.await_renewal(a)
    book.await_renewal(a)
    assert holders(book, a) == [task]
    busy.release()
    book.value(task)
    assert book.started(task)["locks"][0][1] == fence


def test_a_task_that_was_parked_at_its_first_lock_goes_on_to_the_second(book, worker, names, other):
    """Both busy, the first is free first: it moves from one line to the next, at its place."""
    a, b, _ = names
    first, second = other(a), other(b)
    task = book.send("pair", a, b)
    book.await_waiting(a, 1)
    first.release()
    book.await_waiting(b, 1)
    eventually(lambda: holders(book, a) == [task], 5, "it keeps the first lock")
    eventually(lambda: not book.view(a).bodies, 5, "its message is kept once")
    second.release()
    book.value(task)
    assert len(book.starts(a)) == 1
    book.await_free(a)
    book.await_free(b)


def test_L33_a_lock_that_was_granted_before_the_next_was_busy_has_its_fencing_token(
    book, worker, names, other
):
    """Parked at the first, granted it, parked at the second: not 0, which a resource refuses.

    Found by the storm (seed 401).
    """
    a, b, _ = names
    first, second = other(a), other(b)
    task = book.send("pair", a, b)
    book.await_waiting(a, 1)
    first.release()
    book.await_waiting(b, 1)
    granted = book.view(a).fencing_token
    assert granted > first.fencing_token
    second.release()
    fences = [fence for _, fence, _ in book.started(task)["locks"]]
    assert fences == [granted, book.view(b).fencing_token]


def test_L27_opposite_orders_do_not_deadlock(book, worker, names):
    """Forty tasks that name three locks in all orders: each runs once, no lock is held twice."""
    orders = [(x, y) for x in names for y in names if x != y]
    sent = [book.send("pair", *orders[n % len(orders)], hold=0.01) for n in range(42)]
    for task in sent:
        book.value(task, 60)
    runs = [run for name in names for run in book.runs(name)]
    assert len(runs) == len(sent)
    assert not overlaps(runs)
    for name in names:
        book.await_free(name)


def overlaps(runs):
    """Return the pairs of runs that had a lock at the same time."""
    ordered = sorted(runs, key=lambda run: run[0])
    return [
        (one, two)
        for index, one in enumerate(ordered)
        for two in ordered[index + 1 :]
        if two[0] < one[1] and {n for n, *_ in one[2]["locks"]} & {n for n, *_ in two[2]["locks"]}
    ]


@pytest.mark.parametrize(
    ("task", "state"), [("pair_skip", "REVOKED"), ("pair_fail", "FAILURE")], ids=["skip", "fail"]
)
def test_a_task_that_does_not_wait_releases_the_locks_that_it_has(
    book, worker, names, other, task, state
):
    """The second lock is busy: the task ends as its policy says, and the first is free."""
    a, b, _ = names
    other(b)
    result = book.send(task, a, b)
    ended, why = book.outcome(result)
    assert (ended, f"k:{b}" in str(why)) == (state, True)
    book.await_free(a)
    assert not book.starts(a)


@pytest.mark.full
def test_a_task_that_waits_in_its_slot_keeps_the_first_lock(book, worker, names, other):
    """lock_on_conflict="wait": the lease is renewed, and nobody passes it at the first lock."""
    a, b, _ = names
    busy = other(b)
    task = book.send("pair_wait", a, b)
    eventually(lambda: book.view(b).waiting == 1, 5, "it stands in the second line")
    book.await_renewal(a)
    assert holders(book, a) == [task]
    busy.release()
    book.value(task)
    book.await_free(a)
    book.await_free(b)


def test_a_requeued_task_releases_the_locks_that_it_has(book, worker, names, other):
    """lock_on_conflict="requeue": between two tries it holds nothing, and runs in the end."""
    a, b, _ = names
    busy = other(b)
    task = book.send("pair_requeue", a, b)
    eventually(lambda: book.view(a).counters.get("grants", 0) >= 2, 15, "two tries")
    eventually(lambda: not book.view(a).holders, 5, "the first is free between two tries")
    busy.release()
    book.value(task)
    book.await_free(a)


@pytest.mark.full
def test_a_wait_timeout_releases_the_kept_locks(book, worker, names, other):
    """lock_wait_timeout counts for all locks together; then the first is free at once."""
    a, b, _ = names
    first, _second = other(a), other(b)
    task = book.send("pair_patient", a, b, lock_wait_timeout=6)
    book.await_waiting(a, 1)
    first.release()
    ended, why = book.outcome(task)
    assert (ended, type(why).__name__) == ("FAILURE", "LockWaitTimeout")
    assert f"k:{b}" in str(why)
    book.await_free(a, 2)
    assert not book.starts(a)


def test_a_full_queue_of_the_second_lock_ends_the_task_and_releases_the_first(
    book, worker, names, other
):
    """lock_max_waiting counts at each lock."""
    a, b, _ = names
    other(b)
    ended, why = book.outcome(book.send("pair_bounded", a, b))
    assert (ended, type(why).__name__) == ("FAILURE", "LockQueueFull")
    book.await_free(a, 2)


def test_T17_a_revoked_parked_task_releases_the_locks_that_it_keeps(book, worker, names, other):
    """At once, not when its lease ends."""
    a, b, _ = names
    other(b)
    task = book.send("pair", a, b)
    book.await_waiting(b, 1)
    behind = book.send("act", a)
    book.await_waiting(a, 1)
    book.app.control.revoke(task)
    assert book.outcome(task)[0] == "REVOKED"
    book.value(behind)
    assert book.lapses(a) == 0
    assert [start["id"] for start in book.starts(a)] == [behind]


def test_T15_a_retried_task_acquires_its_locks_again(book, worker, names):
    """Between two attempts all are free, and the retry has no lock header."""
    a, b, _ = names
    task = book.send("pair", a, b, end="retry", extra=0.3)
    book.value(task)
    one, two = book.starts(a, id=task)
    assert (one["leaks"], two["leaks"]) == ([], [])
    assert [lock[0] for lock in two["locks"]] == [f"k:{a}", f"k:{b}"]
    assert two["locks"][0][1] > one["locks"][0][1]
    book.await_free(a)
    book.await_free(b)


def test_T37_nothing_leaks_from_a_delivered_task(book, worker, names, other):
    """What is kept with its message is not for its code."""
    a, b, _ = names
    busy = other(b)
    task = book.send("pair", a, b)
    book.await_waiting(b, 1)
    busy.release()
    book.value(task)
    assert book.started(task)["leaks"] == []


def test_locks_have_limits_of_their_own(book, worker, names):
    """lock_keys as a dict: two tasks share the second lock, none the first."""
    a, b, c = names
    one = book.send("pair_limited", a, c, hold=f"{a}-1")
    two = book.send("pair_limited", b, c, hold=f"{a}-1")
    three = book.send("pair_limited", a, c)
    book.started(one)
    book.started(two)
    book.await_waiting(a, 1)
    assert len(book.view(c).holders) == 2
    book.open(f"{a}-1")
    for task in (one, two, three):
        book.value(task)
    for name in names:
        book.await_free(name)


@pytest.mark.parametrize("lost", [0, 1], ids=["the first", "the second"])
def test_T10_the_task_is_notified_of_the_loss_of_any_of_its_locks(book, worker, names, lost):
    """self.lock represents all; ensure_held names the lost one."""
    a, b, _ = names
    task = book.send("pair", a, b, end="watch", extra=f"{a}-lost")
    book.started(task)
    book.store.reset(f"k:{names[lost]}")
    book.open(f"{a}-lost")
    told = book.value(task, 20)
    assert (told["lost"], told["error"]) == (True, "LockLost")
    worker.await_log(f"The lock 'k:{names[lost]}' was lost")
    book.await_free(a)
    book.await_free(b)


@only("prefork")
def test_a_task_whose_lock_is_lost_is_interrupted_if_declared_so(book, worker, names):
    """lock_on_lost="abort", for any of its locks; in a pool of processes."""
    a, b, _ = names
    task = book.send("pair_abort", a, b, hold=f"{a}-never")
    book.started(task)
    eventually(lambda: len(book.view(b).holders) == 1)
    book.store.reset(f"k:{b}")
    ended, why = book.outcome(task, 20)
    assert (ended, type(why).__name__) == ("FAILURE", "LockLost")
    book.await_free(a)
