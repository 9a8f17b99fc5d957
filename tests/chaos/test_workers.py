"""Workers are killed, paused and shut down: no task is lost, and none runs twice at once.

Leases end here, and not while a process stands still for 5 s.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from celery import states

from celery_singleton_lock.store.operator.base import Operator
from integration.book import SAFE_LEASE, Book
from support.redelivery import redelivery_after
from support.waiting import eventually, in_time

pytestmark = [pytest.mark.chaos, pytest.mark.integration]

LEASE = SAFE_LEASE
NEXT = LEASE + 2
START = 3.0
"""Seconds that a worker may need to start."""
IMPATIENT = {"broker_transport_options": redelivery_after(2)}
"""A Redis broker that soon delivers again what was not acknowledged."""


@pytest.fixture
def book(redis_url, tmp_path):
    with Book(redis_url, tmp_path, conf={"singleton_lock_lease": LEASE}) as book:
        yield book


@pytest.fixture(params=["prefork", "threads"])
def pool(request):
    return request.param


def test_T7_a_killed_workers_next_task_starts_on_another_worker(book, pool):
    """Kill -9 of a whole worker: the next of the key starts elsewhere within a lease plus 2 s."""
    one = book.worker(pool=pool).start()
    first = book.send("act", "a", 1, hold="never")
    book.started(first)
    with book.worker(pool=pool):
        parked = [book.send("act", "a", n) for n in (2, 3)]
        book.await_waiting("a", 2)
        killed = book.kill_worker(one)
        assert [book.value(r) for r in parked] == [2, 3]
        assert sorted(book.order("a")) == [1, 2, 3]  # either worker may get either task
        assert book.peak("a") == 1
        book.await_free("a")
    in_time(min(start["t"] for start in book.starts("a")[1:]) - killed, NEXT)


@pytest.mark.full
def test_T7_a_worker_restarted_at_once_keeps_the_parked_and_never_runs_two(book, pool):
    """Kill -9 of the only worker, restarted at once: its parked tasks run, one at a time."""
    one = book.worker(pool=pool, name="same").start()
    book.start_holder("a", 1, task="act_lost")
    parked = [book.send("act", "a", n) for n in (2, 3, 4)]
    book.await_waiting("a", 3)
    killed = book.kill_worker(one)
    with book.worker(pool=pool, name="same"):
        begun = book.started(parked[0])["t"]
        assert [book.value(r) for r in parked] == [2, 3, 4]
        assert book.order("a") == [1, 2, 3, 4]
        assert book.peak("a") == 1
        book.await_free("a")
    in_time(begun - killed, NEXT + START)


@pytest.mark.full
def test_T16_recovery_continues_under_the_same_host_name(book):
    """A worker that died as the only sweeper: its namesake repairs every lock that it held."""
    one = book.worker(concurrency=4, name="same").start()
    held = [book.send("act", f"k{i}", 1, hold="never") for i in range(4)]
    for result in held:
        book.started(result)
    parked = [book.send("act", f"k{i}", 2) for i in range(4)]
    for i in range(4):
        book.await_waiting(f"k{i}", 1)
    killed = book.kill_worker(one)
    with book.worker(concurrency=4, name="same"):
        starts = [book.started(result)["t"] for result in parked]
        for i in range(4):
            book.await_free(f"k{i}")
    in_time(max(starts) - killed, NEXT + START)


@pytest.mark.full
def test_T35_the_last_copy_runs_although_its_attempt_seems_to_hold(book):
    """Claimed, killed with its worker, redelivered within the dead lease: it runs."""
    one = book.worker(conf=IMPATIENT).start()
    first = book.start_holder("a", 1, task="act_late")
    book.kill_worker(one)
    with book.worker(conf=IMPATIENT):
        book.started(first, times=2)
        book.open("a-1")
        assert book.value(first) == 1
        assert book.peak("a") == 1
        book.await_free("a")


@pytest.mark.full("test_T14_a_long")
def test_T14_a_long_task_is_redelivered_and_runs_once(book):
    """A late-ack task four times as long as the visibility time-out: its copies do not run."""
    with book.worker(conf=IMPATIENT), book.worker(conf=IMPATIENT):
        first = book.send("act_late", "a", 1, hold=8)
        assert book.value(first, 20) == 1
        book.await_free("a", 10)
        assert book.value(book.send("act_late", "a", 2)) == 2
        eventually(lambda: book.unacked() == 0 and book.queued() == 0, 10, "the copies settle")
        assert book.order("a") == [1, 2]


@pytest.mark.full("test_T14_a_redelivered")
def test_T14_a_redelivered_task_whose_worker_dies_runs_again_once_at_a_time(book):
    """The copy waits beside the running original; when that dies, the copy runs."""
    one = book.worker(conf=IMPATIENT).start()
    first = book.start_holder("a", 1, task="act_late")
    with book.worker(conf=IMPATIENT):
        eventually(lambda: book.view("a").bodies == 1, 15, "a copy is parked as a twin")
        killed = book.kill_worker(one)
        again = book.started(first, times=2)
        book.open("a-1")
        assert book.value(first) == 1
        book.await_free("a", 10)
        eventually(lambda: book.unacked() == 0 and book.queued() == 0, 10, "the copies settle")
        assert book.order("a") == [1, 1]
        assert book.peak("a") == 1
    in_time(again["t"] - killed, NEXT)


@pytest.mark.full
def test_T5_a_stopped_holders_late_finish_frees_nothing(book):
    """SIGSTOP the worker past its lease, a successor starts, SIGCONT: the successor keeps it."""
    one = book.worker().start()
    first = book.send("act", "a", 1, hold="a-1")
    pids = [one.pid, *one.child_pids()]
    book.started(first)
    two = book.worker().start()
    second = book.send("act", "a", 2, hold="a-2")
    book.await_waiting("a", 1)
    third = book.send("act", "a", 3)
    book.await_waiting("a", 2)
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    book.started(second)
    fence = book.view("a").fencing_token
    book.open("a-1")
    for pid in pids:
        _signal(pid, signal.SIGCONT)
    eventually(lambda: book.events("end", key="a", n=1), 10, "the late finish")
    view = book.view("a")
    assert [holder.fencing_token for holder in view.holders] == [fence]
    assert book.order("a") == [1, 2]
    book.open("a-2")
    assert [book.value(second), book.value(third)] == [2, 3]
    assert book.order("a") == [1, 2, 3]
    book.await_free("a")
    two.stop()


@pytest.mark.full
def test_T12_a_paused_and_evicted_holder_does_not_re_insert_itself(book):
    """The worker is paused, its lock is taken away, it goes on: its renewal creates nothing."""
    with book.worker(pool="threads") as worker:
        first = book.start_holder("a", 1)
        worker.signal(signal.SIGSTOP)
        assert book.store.reset("k:a") == 1
        worker.signal(signal.SIGCONT)
        worker.await_log("was lost while its task", LEASE + START)
        assert book.view("a").holders == ()
        book.open("a-1")
        assert book.value(first) == 1
        assert book.view("a").holders == ()


@pytest.mark.full
def test_T13_a_killed_holder_of_two_gives_its_permit_back_under_load(book):
    """Limit 2, one of two workers killed under steady load: two at once again within a lease."""
    one = book.worker(concurrency=1, name="one", conf=IMPATIENT).start()
    first = book.send("act_two", "a", 0, hold="never")
    book.started(first)
    with book.worker(concurrency=4, name="two", conf=IMPATIENT):
        load = [book.send("act_two", "a", n, hold=0.5) for n in range(1, 81)]  # for 20 s at least
        eventually(lambda: len(book.starts("a")) > 5, 10, "the load runs beside it")
        killed = book.kill_worker(one)
        for result in load:
            book.value(result, 60)
        assert book.peak("a") == 2
        assert _peak([run for run in book.runs("a") if run[0] > killed + NEXT]) == 2
        book.await_free("a")


def _peak(runs) -> int:
    return max(sum(b <= begin < e for b, e, _ in runs) for begin, _, _ in runs)


@pytest.mark.full
def test_T7_many_keys_survive_the_kill_of_one_of_two_workers(book):
    """100 late-ack tasks over 5 keys: what was parked or queued runs, in no overlap.

    None is on its way from the broker when the worker is killed: see test_broker_gap.py.
    """
    one, two = book.worker().start(), book.worker().start()
    sent = {book.send("act_lost", f"k{n % 5}", n, hold=0.1): n for n in range(100)}
    eventually(lambda: sum(each.log().count("] received") for each in (one, two)) == 100, 20)
    book.kill_worker(one)
    with book.worker(conf=IMPATIENT):
        for task_id in sent:
            assert book.outcome(task_id, 30)[0] == states.SUCCESS
    for k in range(5):
        assert book.peak(f"k{k}") == 1
        assert set(book.order(f"k{k}")) == set(range(k, 100, 5))
        book.await_free(f"k{k}")
    two.stop()


@pytest.mark.full
@pytest.mark.parametrize("task", ["act", "act_late"])
def test_warm_shutdown_finishes_what_runs_and_loses_nothing(book, pool, task):
    """TERM while one runs, some are parked and others run freely: all run once."""
    one = book.worker(pool=pool).start()
    first = book.send(task, "a", 1, hold="a-1")
    other = book.send(task, "b", 1, hold="a-1")
    book.started(first)
    book.started(other)
    rest = [book.send(task, key, n) for n in (2, 3, 4) for key in "ab"]
    book.await_waiting("a", 3)
    book.await_waiting("b", 3)
    one.terminate()
    one.await_log("Warm shutdown")
    book.open("a-1")
    assert one.wait() == 0
    assert book.value(first) == 1
    with book.worker(pool=pool):
        assert [book.value(r) for r in rest] == [2, 2, 3, 3, 4, 4]
    for key in "ab":
        assert sorted(book.order(key)) == [1, 2, 3, 4]
        assert book.peak(key) == 1
        book.await_free(key)
    assert book.unacked() == 0


@pytest.mark.full
def test_warm_shutdown_under_load_loses_nothing_and_overlaps_never(book, pool):
    """TERM amid 200 short tasks over 4 keys, a successor takes over: all run, in no overlap.

    Doubles are Celery's: what it has written to a child and not heard accepted it throws away at
    the shutdown, whether it runs or not (its children then wait up to 30 s for the answer).
    """
    one = book.worker(pool=pool, concurrency=2).start()
    sent = [book.send("act", f"k{n % 4}", n, hold=0.005) for n in range(200)]
    eventually(lambda: len(book.starts()) > 30, 20, "they run")
    one.terminate()
    with book.worker(pool=pool, concurrency=2):
        for task_id in sent:
            book.value(task_id, 40)
        assert one.wait(120) == 0
    for k in range(4):
        assert set(book.order(f"k{k}")) == set(range(k, 200, 4))
        assert book.peak(f"k{k}") == 1
        book.await_free(f"k{k}")
    assert len(book.starts()) - len(sent) <= (2 if pool == "prefork" else 0)


@pytest.mark.full
def test_a_shutdown_gives_what_was_granted_and_not_started_to_another_worker(book):
    """A grant that waits for a slot of a closing worker starts elsewhere within 2 s, and once."""
    one = book.worker(concurrency=1, name="one").start()
    by = Operator("jane")
    book.store.pause("k:a", by)
    second = book.send("act", "a", 2)
    book.await_waiting("a", 1)
    book.started(book.send("plain", "p", 0, hold="p"))
    book.store.resume("k:a", by)  # the grant waits for the slot
    eventually(lambda: [h.state for h in book.view("a").holders] == ["granted"], 5)
    with book.worker(concurrency=1, name="two"):
        one.terminate()
        one.await_log("Warm shutdown")
        closed = time.monotonic()
        begun = book.started(second, 20)["t"]
        book.open("p")
        assert one.wait() == 0
        assert book.value(second) == 2
        assert book.order("a") == [2]
        book.await_free("a")
    in_time(begun - closed, 2)


@pytest.mark.full
@pytest.mark.parametrize("task", ["act", "act_late"])
def test_a_message_is_acknowledged_only_once_redis_keeps_it(make_redis, redis_url, tmp_path, task):
    """The locks' Redis stands still, so nothing can be parked: a killed worker loses no message."""
    locks = make_redis()
    conf = {
        **IMPATIENT,
        "singleton_lock_backend": locks.url,
        "singleton_lock_lease": LEASE,
    }
    with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
        holder = book.worker(queues="other", name="holder").start()
        first = book.send("act", "a", 0, hold="a-1", queue="other")
        book.started(first)
        victim = book.worker(name="victim", concurrency=2).start()
        locks.pause()
        sent = [book.send(task, "a", n) for n in range(1, 7)]
        eventually(lambda: book.unacked() == 6, 10, lambda: f"all taken; {book.unacked()}")
        book.kill_worker(victim)
        locks.resume()
        with book.worker(name="heir"):
            book.await_waiting("a", 6, timeout=20)
            eventually(lambda: book.unacked() == 0, 10, "all acknowledged")
            book.open("a-1")
            assert [book.value(task_id) for task_id in sent] == list(range(1, 7))
            assert sorted(book.order("a")) == list(range(7))
            assert book.peak("a") == 1
            book.await_free("a")
        holder.stop()


def _signal(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
