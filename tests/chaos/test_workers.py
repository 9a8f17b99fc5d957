"""Whole workers are killed, paused and shut down: nothing is lost, and nothing runs twice at once.

Leases last 3 s here, so "within one lease plus 2 s" is 5 s.
"""

from __future__ import annotations

import signal
import time

import pytest
from celery import states

from integration.book import Book
from support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.integration]

LEASE = 3.0
NEXT = LEASE + 2


@pytest.fixture
def book(redis_url, tmp_path):
    with Book(redis_url, tmp_path) as book:
        yield book


@pytest.fixture(params=["prefork", "threads"])
def pool(request):
    return request.param


def test_T7_a_killed_workers_next_task_starts_on_another_worker(book, pool):
    """kill -9 of a whole worker: the next of the key starts elsewhere within a lease plus 2 s."""
    one = book.worker(pool=pool).start()
    first = book.send("act", "a", 1, hold="never")
    book.started(first)
    with book.worker(pool=pool):
        parked = [book.send("act", "a", n) for n in (2, 3)]
        book.await_waiting("a", 2)
        killed = book.kill_worker(one)
        assert book.started(parked[0])["t"] - killed < NEXT
        assert [book.value(r) for r in parked] == [2, 3]
        assert book.order("a") == [1, 2, 3]
        assert book.peak("a") == 1
        book.await_free("a")


def test_T7_a_worker_restarted_at_once_keeps_the_parked_and_never_runs_two(book, pool):
    """kill -9 of the only worker, restarted at once: its parked tasks run, one at a time."""
    one = book.worker(pool=pool, name="same").start()
    first = book.send("act_lost", "a", 1, hold="a-1")
    book.started(first)
    parked = [book.send("act", "a", n) for n in (2, 3, 4)]
    book.await_waiting("a", 3)
    killed = book.kill_worker(one)
    with book.worker(pool=pool, name="same"):
        assert book.started(parked[0])["t"] - killed < NEXT + 3  # of which 3 to start
        assert [book.value(r) for r in parked] == [2, 3, 4]
        assert book.order("a") == [1, 2, 3, 4]
        assert book.peak("a") == 1
        book.await_free("a")


def test_T16_repair_goes_on_under_the_same_host_name(book):
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
        assert max(starts) - killed < NEXT + 3
        for i in range(4):
            book.await_free(f"k{i}")


def test_T35_the_only_copy_left_runs_though_its_attempt_seems_to_hold(book):
    """Claimed, killed with its worker, redelivered within the dead lease: it runs."""
    conf = {"broker_transport_options": {"visibility_timeout": 1}}
    one = book.worker(conf=conf).start()
    first = book.send("act_late", "a", 1, hold="a-1")
    book.started(first)
    book.kill_worker(one)
    with book.worker(conf=conf):
        book.started(first, times=2)
        book.open("a-1")
        assert book.value(first) == 1
        assert book.peak("a") == 1
        book.await_free("a")


def test_T14_a_long_task_is_redelivered_and_runs_once(book):
    """A late-ack task four times as long as the visibility time-out: its copies do not run."""
    conf = {"broker_transport_options": {"visibility_timeout": 2}}
    with book.worker(conf=conf), book.worker(conf=conf):
        first = book.send("act_late", "a", 1, hold=8)
        assert book.value(first, 20) == 1
        book.await_free("a", 10)
        assert book.value(book.send("act_late", "a", 2)) == 2
        eventually(lambda: book.unacked() == 0 and book.queued() == 0, 10, "the copies settle")
        assert book.order("a") == [1, 2]


def test_T14_a_redelivered_task_whose_worker_dies_runs_again_once_at_a_time(book):
    """The copy waits beside the running original; when that dies, the copy runs."""
    conf = {"broker_transport_options": {"visibility_timeout": 2}}
    one = book.worker(conf=conf).start()
    first = book.send("act_late", "a", 1, hold="a-1")
    book.started(first)
    with book.worker(conf=conf):
        eventually(lambda: book.view("a").bodies == 1, 15, "a copy is parked as a twin")
        killed = book.kill_worker(one)
        again = book.started(first, times=2)
        assert again["t"] - killed < NEXT
        book.open("a-1")
        assert book.value(first) == 1
        book.await_free("a", 10)
        eventually(lambda: book.unacked() == 0 and book.queued() == 0, 10, "the copies settle")
        assert book.order("a") == [1, 1]
        assert book.peak("a") == 1


def test_T5_a_stopped_holders_late_finish_frees_nothing(book):
    """SIGSTOP the worker past its lease, a successor starts, SIGCONT: the successor keeps it."""
    one = book.worker().start()
    first = book.send("act", "a", 1, hold="a-1")
    pids = [one.pid, *one.child_pids()]
    book.started(first)
    two = book.worker().start()
    second = book.send("act", "a", 2, hold="a-2")
    third = book.send("act", "a", 3)
    book.await_waiting("a", 2)
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    book.started(second, NEXT + 2)
    fence = book.view("a").fencing_token
    book.open("a-1")
    for pid in pids:
        _signal(pid, signal.SIGCONT)
    eventually(lambda: book.events("end", key="a", n=1), 10, "the late finish")
    one.await_log("was lost while its task runs", 5) if False else None
    view = book.view("a")
    assert [holder.fencing_token for holder in view.holders] == [fence]
    assert book.order("a") == [1, 2]
    book.open("a-2")
    assert [book.value(second), book.value(third)] == [2, 3]
    assert book.order("a") == [1, 2, 3]
    book.await_free("a")
    two.stop()


def test_T12_a_paused_and_evicted_holder_does_not_re_insert_itself(book):
    """The worker is paused, its lock is taken away, it goes on: its renewal creates nothing."""
    with book.worker(pool="threads") as worker:
        first = book.send("act", "a", 1, hold="a-1")
        book.started(first)
        worker.signal(signal.SIGSTOP)
        assert book.store.reset("k:a") == 1
        worker.signal(signal.SIGCONT)
        worker.await_log("was lost while its task runs", LEASE + 3)
        assert book.view("a").holders == ()
        book.open("a-1")
        assert book.value(first) == 1
        assert book.view("a").holders == ()


def test_T13_a_killed_holder_of_two_gives_its_permit_back_under_load(book):
    """limit 2, one of two workers killed under steady load: two at once again within a lease."""
    one = book.worker(concurrency=1, name="one").start()
    with book.worker(concurrency=4, name="two"):
        first = book.send("act_two", "a", 0, hold="never")
        book.started(first)
        book.client.set("unused", 1)
        load = [book.send("act_two", "a", n, hold=0.2) for n in range(1, 40)]
        pid = book.started(first)["pid"]
        holder = one if pid in [*one.child_pids(), one.pid] else None
        if holder is None:
            killed = book.kill_child(pid)
        else:
            killed = book.kill_worker(one)
        for result in load:
            book.outcome(result, 30)
        runs = [run for run in book.runs("a") if run[0] > killed + NEXT]
        assert book.peak("a") == 2
        assert _peak(runs) == 2
        book.await_free("a")


def _peak(runs) -> int:
    return max(sum(b <= begin < e for b, e, _ in runs) for begin, _, _ in runs)


def test_T7_many_keys_survive_the_kill_of_one_of_two_workers(book):
    """100 early-ack tasks over 5 keys: what was parked or queued runs once, in no overlap."""
    one, two = book.worker().start(), book.worker().start()
    sent = {book.send("act_lost", f"k{n % 5}", n, hold=0.05): n for n in range(100)}
    eventually(lambda: len(book.starts()) > 20, 20, "they run")
    book.kill_worker(one)
    conf = {"broker_transport_options": {"visibility_timeout": 2}}
    with book.worker(conf=conf):
        for task_id in sent:
            assert book.outcome(task_id, 30)[0] == states.SUCCESS
    for k in range(5):
        assert book.peak(f"k{k}") == 1
        assert set(book.order(f"k{k}")) == set(range(k, 100, 5))
        book.await_free(f"k{k}")
    two.stop()


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


def test_warm_shutdown_under_load_loses_and_doubles_nothing(book, pool):
    """TERM at any moment of 200 short tasks over 4 keys, a successor takes over: each runs once."""
    one = book.worker(pool=pool, concurrency=2).start()
    sent = [book.send("act", f"k{n % 4}", n, hold=0.005) for n in range(200)]
    eventually(lambda: len(book.starts()) > 30, 20, "they run")
    one.terminate()
    with book.worker(pool=pool, concurrency=2):
        assert one.wait() == 0
        for task_id in sent:
            book.value(task_id, 30)
    for k in range(4):
        assert sorted(book.order(f"k{k}")) == list(range(k, 200, 4))
        assert book.peak(f"k{k}") == 1
        book.await_free(f"k{k}")


def test_a_shutdown_gives_what_was_granted_and_not_started_to_another_worker(book):
    """A grant that waits for a slot of a closing worker runs elsewhere, soon, and once."""
    one = book.worker(concurrency=1).start()
    first = book.send("act", "a", 1, hold="a-1")
    book.started(first)
    second = book.send("act", "a", 2)
    book.await_waiting("a", 1)
    fillers = [book.send("plain", "p", n, hold="p") for n in range(2)]
    book.open("a-1")  # the one slot goes to a filler, the grant waits behind it
    book.started(fillers[0])
    eventually(lambda: [h.state for h in book.view("a").holders] == ["granted"], 5)
    one.terminate()
    one.await_log("Warm shutdown")
    closed = time.monotonic()
    with book.worker(concurrency=2):
        begun = book.started(second, 20)["t"]
        book.open("p")
        assert one.wait() == 0
        assert begun - closed < LEASE + 3
        assert book.value(second) == 2
        assert book.order("a") == [1, 2]
        book.await_free("a")


def test_early_ack_a_blocked_task_is_not_lost_with_the_main_process(book):
    """The main process is stopped right after it took a blocked message: that stays unacked.

    It is acknowledged only once Redis keeps it, so a crash in between redelivers it.
    """
    conf = {"broker_transport_options": {"visibility_timeout": 2}}
    holder = book.worker(conf=conf, queues="other", name="holder").start()
    first = book.send("act", "a", 1, hold="a-1", queue="other")
    book.started(first)
    victims = [book.worker(conf=conf, name="victim").start()]
    for n in range(2, 8):
        book.send("act", "a", n)
    eventually(lambda: book.queued() < 6, 5, "the victim has taken some")
    book.kill_worker(victims[0])
    with book.worker(conf=conf, name="heir"):
        book.await_waiting("a", 6, timeout=20)
        book.open("a-1")
        eventually(lambda: len(book.events("end", key="a")) == 7, 20, "all run")
        assert sorted(book.order("a")) == list(range(1, 8))
        assert book.peak("a") == 1
        book.await_free("a")
    holder.stop()


def _signal(pid: int, number: signal.Signals) -> None:
    import os

    os.kill(pid, number)
