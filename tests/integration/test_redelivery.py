"""The broker redelivers a message whose task runs, waits, or has ended.

Redis does it after the visibility time-out, RabbitMQ when a connection is lost. The visibility
time-out is 3 s here, and the task is four times as long.
"""

from __future__ import annotations

import time

import pytest

from celery_singleton_lock import Lock
from integration.book import SAFE_LEASE, needs_pool, only_kind
from support.redelivery import redelivery_after
from support.waiting import eventually, in_time, never

VISIBILITY = 3
LONG = 4 * VISIBILITY
LEASE = SAFE_LEASE
NEXT = LEASE + 2
IMPATIENT = {"broker_transport_options": redelivery_after(VISIBILITY)}


@pytest.fixture(scope="module")
def lease():
    """It does not end while a process stands still."""
    return LEASE


@pytest.fixture
def book(kind, make_book):
    """The task book on the broker of this test."""
    return make_book(conf=IMPATIENT if kind == "redis" else {})


def redeliver(book):
    """Have the broker deliver again what was not acknowledged, and wait until a copy is kept."""
    if book.kind != "redis":
        book.cut()
    eventually(lambda: book.view("a").bodies == 1, 25, lambda: f"a twin: {book.view('a')}")


@pytest.mark.full
@only_kind("redis")
def test_T14_a_task_of_four_visibility_timeouts_runs_once(book, pool):
    """A late-ack task of 12 s on two workers: no copy of it runs, and all copies settle."""
    with book.worker(pool=pool), book.worker(pool=pool):
        first = book.send("act_late", "a", 1, hold=LONG)
        assert book.value(first, LONG + 10) == 1
        book.await_settled("a", timeout=15)
        assert book.value(book.send("act_late", "a", 2)) == 2
        never(lambda: len(book.starts("a")) > 2, VISIBILITY)
        book.await_settled("a")
    assert book.order("a") == [1, 2]


def test_T14_a_redelivered_task_runs_once(book, pool):
    """Redelivered in mid-run to two workers: its copy waits beside it, and ends with it."""
    with book.worker(pool=pool), book.worker(pool=pool):
        first = book.start_holder("a", 1, task="act_late")
        redeliver(book)
        never(lambda: len(book.starts("a")) > 1, 1)
        book.open("a-1")
        assert book.value(first) == 1
        book.await_settled("a", timeout=15)
        assert book.value(book.send("act_late", "a", 2)) == 2
        book.await_settled("a")
    assert book.order("a") == [1, 2]


@pytest.mark.full
def test_T35_a_redelivered_task_whose_worker_dies_runs_again_once_at_a_time(book, pool):
    """Its copy waits beside it, and runs after the worker was killed and the lease has ended."""
    one = book.worker(pool=pool).start()
    first = book.start_holder("a", 1, task="act_late")
    with book.worker(pool=pool):
        redeliver(book)
        killed = book.kill_worker(one)
        again = book.started(first, times=2)
        book.open("a-1")
        assert book.value(first) == 1
        book.await_settled("a", timeout=15)
    assert book.order("a") == [1, 1]
    assert book.peak("a") == 1
    in_time(again["t"] - killed, NEXT)


@pytest.mark.full
def test_T30_a_killed_workers_task_is_redelivered_and_runs_again(book, pool):
    """Killed before any copy was there: what the broker delivers then is no duplicate."""
    one = book.worker(pool=pool).start()
    first = book.start_holder("a", 1, task="act_late")
    with book.worker(pool=pool):
        second = book.send("act_late", "a", 2)
        book.await_arrived(second, "a")
        book.kill_worker(one)
        book.started(first, 25, times=2)
        book.open("a-1")
        assert [book.value(first), book.value(second, 25)] == [1, 2]
        book.await_settled("a", timeout=15)
    assert sorted(book.order("a")) == [1, 1, 2]
    assert book.peak("a") == 1


@only_kind("classic", "quorum")
def test_T14_a_task_that_waited_in_its_slot_when_the_broker_was_lost_runs_once(book, pool):
    """Its copy waits for that slot, the only one, so it asks for the lock only after the end."""
    lock = Lock(book.client, "k:a", lease=60)
    lock.acquire()
    with book.worker(pool=pool, concurrency=1) as worker:
        first = book.send("act_wait", "a", 1)
        eventually(lambda: book.view("a").waiting == 1)
        book.cut()
        eventually(lambda: worker.log().count(f"{first}] received") == 2, 25)
        lock.release()
        assert book.value(first) == 1
        assert book.value(book.send("act_wait", "a", 2)) == 2
        book.await_settled("a")
    assert book.order("a") == [1, 2]


@pytest.mark.full
@only_kind("classic", "quorum")
def test_T14_many_cuts_lose_nothing_and_overlap_never(book, pool):
    """The connections are cut four times under 200 tasks of four keys, early and late ack."""
    with book.worker(pool=pool), book.worker(pool=pool):
        tasks = ("act", "act_late")
        sent = [book.send(tasks[n % 2], f"k{n % 4}", n, hold=0.02) for n in range(200)]
        for share in (20, 60, 100, 140):
            eventually(lambda s=share: len(book.events("end")) >= s, 30)
            book.cut()
        for n, result in enumerate(sent):
            assert book.value(result, 40) == n
        keys = [f"k{n}" for n in range(4)]
        book.await_settled(*keys, timeout=20)
    for n, key in enumerate(keys):
        assert set(book.order(key)) == set(range(n, 200, 4))
        assert book.peak(key) == 1


@pytest.mark.full
@only_kind("classic", "quorum")
def test_T36_a_task_that_a_lost_connection_cancels_runs_again(book):
    """worker_cancel_long_running_tasks_on_connection_loss: cancelled, freed, redelivered, run."""
    conf = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    with book.worker(conf=conf):
        first = book.send("act_late", "a", 1, hold="a-1")
        child = book.started(first)["pid"]
        second = book.send("act_late", "a", 2)
        book.await_waiting("a", 1)
        book.cut()
        book.journal.note("killed", victim=child)  # by the worker, soon
        eventually(lambda: book.order("a").count(1) > 1 or 2 in book.order("a"), 15)
        book.open("a-1")
        assert [book.value(first), book.value(second)] == [1, 2]
        book.await_settled("a", timeout=15)
    assert sorted(book.order("a")) == [1, 1, 2]


@pytest.mark.full
@only_kind("redis")
@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet"])
def test_a_parked_task_that_a_lost_connection_cancels_is_not_lost(book, pool):
    """The broker has no message for it, so its message in Redis must queue again."""
    needs_pool(pool)
    conf = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    with book.worker(pool=pool, conf=conf):
        book.start_holder("a", 0)
        parked = book.send("act_late", "a", 1, hold="a-1")
        book.await_waiting("a", 1)
        book.open("a-0")
        child = book.started(parked)["pid"]
        book.cut()
        book.journal.note("killed", victim=child)  # by the worker, soon
        book.started(parked, 20, times=2)
        book.open("a-1")
        assert book.value(parked) == 1
        book.await_settled("a", timeout=15)
    assert book.order("a") == [0, 1, 1]


@only_kind("classic", "quorum")
def test_a_cut_while_tasks_are_parked_and_granted_changes_nothing(book, pool):
    """What is kept in Redis does not hang on the broker's connection: each runs once, in order."""
    with book.worker(pool=pool, concurrency=1):
        book.start_holder("a")
        parked = [book.send("act", "a", n, hold=0.3) for n in range(1, 6)]
        book.await_waiting("a", 5)
        book.open("a-0")
        for result in parked[:3]:
            book.started(result)
            book.cut()
        assert [book.value(result) for result in parked] == list(range(1, 6))
        book.await_settled("a", timeout=15)
    assert book.order("a") == list(range(6))
    assert book.peak("a") == 1


@pytest.mark.full
@only_kind("redis")
def test_T14_an_eta_message_that_two_workers_have_runs_once(book, pool):
    """An ETA past the visibility time-out: both workers hold a copy until then; one runs."""
    with book.worker(pool=pool) as one, book.worker(pool=pool) as two:
        sent = [book.send(t, "a", n, countdown=15) for n, t in enumerate(["act_late", "act"])]
        for result in sent:
            eventually(
                lambda r=result: (one.log() + two.log()).count(f"[{r}] received") > 1,
                20,
                "a second copy has been received",
            )
        assert [book.value(result, 25) for result in sent] == [0, 1]
        book.await_settled("a", timeout=20)
        never(lambda: len(book.starts("a")) > 2, VISIBILITY)
        book.await_settled("a")
    assert sorted(book.order("a")) == [0, 1]
    assert book.peak("a") == 1


@pytest.mark.full
@only_kind("redis")
def test_T14_an_eta_message_whose_copy_has_run_elsewhere_does_not_run(kind, make_book):
    """A solo worker that is busy at the ETA dispatches its message after the copy has ended."""
    patient = {"broker_transport_options": redelivery_after(8)}
    book = make_book("celery", "one", "two", conf=patient)
    with book.worker(pool="solo", queues=["celery", "one"]) as one:
        sent, due = book.send("act_late", "a", 1, countdown=25), time.monotonic() + 25
        received = f"[{sent}] received"
        eventually(lambda: received in one.log(), 10, "the first one has it")
        with book.worker(pool="solo", queues=["celery", "two"]) as two:
            book.app.control.cancel_consumer("celery", destination=[one.node_name], reply=True)
            eventually(lambda: received in two.log(), 20, "the second one has a copy")
            busy = book.send("plain", "b", 2, hold=due + 5 - time.monotonic(), queue="one")
            assert book.value(sent, 40) == 1
            assert book.value(busy, 20) == 2
            never(lambda: len(book.starts("a")) > 1, 3)


@pytest.mark.full
@only_kind("classic")
def test_T14_an_eta_message_that_a_cut_delivers_again_runs_once(book, pool):
    """Its timer dies with the connection; the copy that comes again runs at its time, once."""
    with book.worker(pool=pool), book.worker(pool=pool):
        began = time.monotonic()
        later = book.send("act_late", "a", 1, countdown=4)
        eventually(lambda: book.unacked() == 1, 10)
        book.cut()
        assert book.value(later, 20) == 1
        assert book.starts("a")[0]["t"] - began > 3.5
        book.await_settled("a", timeout=15)
        never(lambda: len(book.starts("a")) > 1, 1)
    assert book.order("a") == [1]
