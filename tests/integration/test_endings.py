"""After each kind of ending the lock is free at once and the next task of the key starts."""

from __future__ import annotations

import signal
from uuid import uuid4

import pytest
from celery import states

from celery_singleton_lock.errors import LockConflict
from integration.book import only
from support.versions import ACKS_ON_TIMEOUT, TELLS_EXIT, TELLS_REJECTED
from support.waiting import eventually, in_time, never


def first_and_next(book, key, task="act", end="return", **options):
    """Send a task with an ending, and another one of the key.

    Return both when both have arrived.
    """
    first = book.send(task, key, 1, hold=f"{key}-1", end=end, **options)
    book.started(first)
    following = book.send(task, key, 2)
    book.await_waiting(key, 1)
    book.open(f"{key}-1")
    return first, following


def test_success_frees_the_lock(book, worker, key):
    """The next task starts when the first has returned; Redis keeps nothing of either."""
    first, following = first_and_next(book, key)
    assert book.value(first) == 1
    assert book.value(following) == 2
    assert book.peak(key) == 1
    book.await_free(key)


def test_failure_frees_the_lock(book, worker, key):
    """The next task starts when the first has failed, and the failure is the task's own."""
    first, following = first_and_next(book, key, end="raise")
    state, error = book.outcome(first)
    assert (state, type(error), str(error)) == (states.FAILURE, ValueError, "told to")
    assert book.value(following) == 2
    book.await_free(key)


def test_T15_retry_lets_others_run_between_the_attempts(book, worker, key):
    """A retried task releases its lock, and acquires it again for the next attempt."""
    first, following = first_and_next(book, key, end="retry", extra=0.5)
    assert book.value(first) == 1
    assert book.value(following) == 2
    assert [(s["n"], s["retries"]) for s in book.starts(key)] == [(1, 0), (2, 0), (1, 1)]
    assert book.peak(key) == 1
    book.await_free(key)


def test_T15_a_failing_task_its_retry_and_an_equal_call_all_run_once(book, worker, key):
    """The retry neither waits for its own former lock, nor releases that of the other call."""
    first, twin = first_and_next(book, key, end="retry", extra=0.1)
    book.started(twin)
    third = book.send("act", key, 3)
    assert [book.value(r) for r in (first, twin, third)] == [1, 2, 3]
    assert book.peak(key) == 1
    assert sorted(book.order(key)) == [1, 1, 2, 3]
    book.await_free(key)


def test_T17_max_retries_exceeded_frees_the_lock(book, worker, key):
    """The last attempt fails, and the next task starts."""
    first, following = first_and_next(book, key, end="retry-always", extra=1)
    assert book.outcome(first)[0] == states.FAILURE
    assert book.value(following) == 2
    assert [s["retries"] for s in book.starts(key, n=1)] == [0, 1]
    book.await_free(key)


def test_T17_ignore_frees_the_lock(book, worker, key):
    """A task that raises Ignore leaves no state, and the next one starts."""
    first, following = first_and_next(book, key, end="ignore")
    assert book.value(following) == 2
    assert book.state(first) == states.PENDING
    book.await_free(key)


@pytest.mark.parametrize("task", ["act", "act_late"])
def test_T17_reject_frees_the_lock(book, worker, key, task):
    """A task that rejects its message has failed, and the next one starts."""
    first, following = first_and_next(book, key, task, end="reject")
    assert book.value(following) == 2
    if TELLS_REJECTED:
        assert book.outcome(first)[0] == states.FAILURE
    assert len(book.starts(key)) == 2
    book.await_free(key)


def test_T36_reject_with_requeue_runs_again(book, worker, key):
    """A late-ack task that requeues itself is redelivered, and acquires its lock again."""
    first, following = first_and_next(book, key, "act_late", end="requeue")
    assert book.value(following) == 2
    assert book.value(first) == 1
    assert sorted(book.order(key)) == [1, 1, 2]
    assert book.peak(key) == 1
    book.await_free(key)


def test_T36_a_delivered_task_that_requeues_itself_runs_again(book, worker, key):
    """Also if it was parked: its message is no longer in the broker, but in Redis."""
    first = book.start_holder(key, 1, task="act_late")
    second = book.send("act_late", key, 2, end="requeue")
    book.await_waiting(key, 1)
    book.open(f"{key}-1")
    assert [book.value(first), book.value(second)] == [1, 2]
    assert book.order(key) == [1, 2, 2]
    book.await_free(key)


def test_an_early_ack_task_that_requeues_itself_is_as_lost_as_with_celery(book, worker, key):
    """Reject(requeue=True) after the acknowledgement does nothing in Celery; the lock is free."""
    book.send("act", key, 1, end="requeue")
    assert book.value(book.send("act", key, 2)) == 2
    book.await_free(key)


@only("prefork")
@pytest.mark.parametrize("extra", ["raise", "tidy"])
def test_soft_time_limit_frees_the_lock(book, worker, key, extra):
    """If the task fails at its soft limit or cleans up and returns, the next task starts."""
    first = book.send("act", key, 1, end="soft", extra=extra, soft_time_limit=1)
    book.started(first)
    following = book.send("act", key, 2)
    assert book.outcome(first)[0] == (states.FAILURE if extra == "raise" else states.SUCCESS)
    assert book.value(following) == 2
    assert book.peak(key) == 1
    book.await_free(key)


@only("prefork")
@pytest.mark.parametrize("task", ["act", "act_late"])
def test_hard_time_limit_frees_the_lock_once_the_process_is_gone(book, worker, key, task):
    """The next task starts soon after the limit, but not before the first process has ended."""
    first = book.send(task, key, 1, hold="never", time_limit=1)
    begun = book.started(first)
    following = book.send(task, key, 2)
    assert book.outcome(first)[0] == states.FAILURE
    start = book.started(following)
    assert book.value(following) == 2
    assert len(book.starts(key)) == 2
    book.await_free(key)
    assert book.lapses(key) == 0
    in_time(start["t"] - begun["t"], 1 + 2)


@pytest.mark.skipif(not ACKS_ON_TIMEOUT, reason="acks_on_timeout came with Celery 5.7")
@only("prefork")
def test_T36_hard_time_limit_with_requeue_runs_again(book, worker, key):
    """acks_on_timeout=False: the message is requeued, and the task runs again."""
    first = book.start_holder(key, 1, task="act_hard_late")
    following = book.send("act", key, 2)
    book.started(first, times=2)
    book.open(f"{key}-1")
    assert book.value(following) == 2
    eventually(lambda: book.state(first) == states.SUCCESS, 10)
    book.await_free(key)


@only("prefork")
@pytest.mark.parametrize("end", ["die", "os-exit", "exit"])
def test_a_child_that_ends_in_mid_task_frees_its_lock(book, worker, key, end):
    """SIGKILL, os._exit and sys.exit: the task fails, and the next one starts within 2 s."""
    first, following = first_and_next(book, key, end=end)
    start = book.started(following)
    if end != "exit" or TELLS_EXIT:
        assert book.outcome(first)[0] == states.FAILURE
    assert book.value(following) == 2
    assert len(book.starts(key)) == 2
    book.await_free(key)
    assert book.lapses(key) == 0
    in_time(start["t"] - book.runs(key)[0][1], 2)


@pytest.mark.skipif(not TELLS_EXIT, reason="in older versions such an error ends the process")
@only("prefork")
@pytest.mark.parametrize("end", ["cancel", "cancel-unpicklable"])
@pytest.mark.parametrize("task", ["act", "act_late", "pair_lost"])
def test_a_parked_task_whose_coroutine_is_cancelled_runs_once(book, worker, key, task, end):
    """It fails with CancelledError, which is no Exception, and its lock is free at once."""
    book.start_holder(key, 1)
    parked = book.send(task, key, f"{key}-2", end=end)
    book.await_waiting(key, 1)
    following = book.send("act", key, 3)
    book.await_waiting(key, 2)
    book.open(f"{key}-1")
    assert book.outcome(parked)[0] == states.FAILURE
    assert book.value(following) == 3
    book.await_free(key)
    assert book.lapses(key) == 0
    assert len(book.starts(id=parked)) == 1


@only("threads")
def test_sys_exit_in_a_thread_frees_the_lock(book, worker, key):
    """The next task starts. Celery stores no state for a thread that exits."""
    _, following = first_and_next(book, key, end="exit")
    assert book.value(following) == 2
    book.await_free(key)


def test_revoked_before_it_arrives_takes_no_lock(book, worker, key):
    """A task that was revoked before it arrived is ended, and its lock is free."""
    task_id = str(uuid4())
    book.app.control.revoke(task_id, reply=True, limit=1, timeout=20)
    first = book.send("act", key, 1, task_id=task_id)
    assert book.outcome(first)[0] == states.REVOKED
    assert book.value(book.send("act", key, 2)) == 2
    assert book.order(key) == [2]
    book.await_free(key)


def test_T17_revoked_while_it_is_parked_never_runs(book, worker, key):
    """A revoked parked task ends as REVOKED while the holder runs; the next waiter runs."""
    book.start_holder(key, 1)
    second, third = book.send("act", key, 2), book.send("act", key, 3)
    book.await_waiting(key, 2)
    book.app.control.revoke(second, reply=True, limit=1, timeout=20)
    book.await_waiting(key, 1)
    assert book.outcome(second)[0] == states.REVOKED
    book.open(f"{key}-1")
    assert book.value(third) == 3
    assert book.order(key) == [1, 3]
    book.await_free(key)


@only("prefork")
@pytest.mark.parametrize("task", ["act", "act_late"])
def test_T17_terminated_while_it_runs_frees_the_lock(book, worker, key, task):
    """revoke(terminate=True): the running task is killed, the next one starts within 2 s."""
    first = book.send(task, key, 1, hold="never")
    begun = book.started(first)
    following = book.send(task, key, 2)
    book.await_waiting(key, 1)
    book.journal.note("killed", victim=begun["pid"])
    book.app.control.revoke(first, terminate=True, signal="SIGKILL")
    start = book.started(following)
    assert book.outcome(first)[0] == states.REVOKED
    assert book.value(following) == 2
    assert len(book.starts(key)) == 2
    book.await_free(key)
    assert book.lapses(key) == 0
    in_time(start["t"] - book.runs(key)[0][1], 2)


def test_T17_expired_before_it_arrives_takes_no_lock(book, worker, key):
    """A task whose ``expires`` has passed ends REVOKED, and its key is free."""
    first = book.send("act", key, 1, expires=-1)
    assert book.outcome(first)[0] == states.REVOKED
    assert book.value(book.send("act", key, 2)) == 2
    assert book.order(key) == [2]
    book.await_free(key)


@pytest.mark.full
@pytest.mark.parametrize("why", ["revoked", "expired"])
@pytest.mark.parametrize("task", ["act", "act_late"])
def test_T17_a_task_that_ends_on_its_way_to_the_pool_is_acknowledged(book, worker, key, task, why):
    """Revoked or expired before its ETA: the message is acknowledged, and the lock is free."""
    options = {"countdown": 1, "expires": 0.5} if why == "expired" else {"countdown": 6}
    first = book.send(task, key, 1, **options)
    if why == "revoked":
        book.app.control.revoke(first, reply=True, limit=1, timeout=20)
    assert book.outcome(first)[0] == states.REVOKED
    eventually(
        lambda: first.encode() not in b"".join(book.broker.hvals("unacked")), message="settled"
    )
    assert book.value(book.send(task, key, 2)) == 2
    assert book.order(key) == [2]
    book.await_free(key)


def test_T17_expired_while_it_is_parked_never_runs(book, worker, key):
    """A parked task whose ``expires`` passes ends as REVOKED when it is granted the lock."""
    book.start_holder(key, 1)
    second, third = book.send("act", key, 2, expires=0.5), book.send("act", key, 3)
    for result in (second, third):
        book.await_arrived(result, key)
    never(lambda: book.state(second) == states.SUCCESS, during=0.6)
    book.open(f"{key}-1")
    assert book.outcome(second)[0] == states.REVOKED
    assert book.value(third) == 3
    assert book.order(key) == [1, 3]
    book.await_free(key)


@pytest.mark.parametrize("end", ["retry", "replace", "chain", "children"])
def test_T37_no_lock_header_leaks_into_retries_and_children(book, worker, key, end):
    """A retry, a replacement, a chain and children are new attempts, each with its own lock."""
    first = book.send("act", key, 1, end=end, headers={"x-mine": "kept"})
    expected = {"retry": 2, "replace": 2, "chain": 3, "children": 3}[end]
    eventually(lambda: len(book.events("end", key=key)) == expected, 15)
    starts = book.starts(key)
    assert [start["leaks"] for start in starts] == [[]] * expected
    assert len({start["fence"] for start in starts}) == expected
    assert all(start["held"] for start in starts)
    assert book.peak(key) == 1
    assert book.outcome(first)[0] == states.SUCCESS
    book.await_free(key)


def test_T3_the_loser_does_not_free_the_winners_lock(book, worker, key):
    """A third task, sent while the first runs and the second was refused, is still refused."""
    first = book.start_holder(key, 1, task="act_fail")
    for n in (2, 3, 4):
        state, error = book.outcome(book.send("act_fail", key, n))
        assert (state, type(error)) == (states.FAILURE, LockConflict)
    book.open(f"{key}-1")
    assert book.value(first) == 1
    assert book.order(key) == [1]
    book.await_free(key)


@only("prefork")
def test_T30_a_killed_child_of_a_late_ack_task_runs_again_one_at_a_time(book, worker, key):
    """acks_late and reject_on_worker_lost: the task is redelivered, and nothing overlaps."""
    first, following = first_and_next(book, key, "act_lost", end="die")
    assert book.value(first) == 1
    assert book.value(following) == 2
    assert sorted(book.order(key)) == [1, 1, 2]
    assert book.peak(key) == 1
    book.await_free(key)


@only("prefork")
def test_T30_a_parked_and_delivered_task_survives_its_child_too(book, worker, key):
    """Also if it was parked: it returns to its old place in the queue, and runs next."""
    first = book.start_holder(key, 1, task="act_lost")
    second = book.send("act_lost", key, 2, end="die")
    third = book.send("act_lost", key, 3)
    book.await_waiting(key, 2)
    book.open(f"{key}-1")
    assert [book.value(r) for r in (first, second, third)] == [1, 2, 3]
    assert book.order(key) == [1, 2, 2, 3]
    assert book.peak(key) == 1
    book.await_free(key)


@only("prefork")
def test_a_child_killed_from_outside_frees_its_lock(book, worker, key):
    """Kill -9 of the pool child that runs a task: the next of its key starts within 2 s."""
    first = book.send("act", key, 1, hold="never")
    child = book.started(first)["pid"]
    following = book.send("act", key, 2)
    book.await_waiting(key, 1)
    killed = book.kill_child(child, signal.SIGKILL)
    begun = book.started(following)["t"]
    assert book.outcome(first)[0] == states.FAILURE
    book.await_free(key)
    assert book.lapses(key) == 0
    in_time(begun - killed, 2)
