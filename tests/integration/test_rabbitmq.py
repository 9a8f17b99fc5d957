"""Only for RabbitMQ: priorities, native delayed delivery, bindings, redelivery."""

from __future__ import annotations

import time

import pytest
from kombu import Connection

from celery_singleton_lock import Lock
from integration.book import SAFE_LEASE, only_kind
from integration.brokers import queues
from support.waiting import eventually, in_time, never

TENANT = {"x-tenant": "acme"}

LEASE = SAFE_LEASE


@pytest.fixture(scope="module")
def lease():
    """It does not end while a process stands still."""
    return LEASE


@pytest.fixture(params=["classic", "quorum"])
def kind(request):
    """The type of the queues."""
    return request.param


def test_the_queues_have_the_type_of_the_test(make_book, kind):
    """What the other tests of this file, and of test_brokers.py, rely on."""
    book = make_book("one")
    with book.worker():
        assert book.vhost.queue_type("one") == kind
        assert book.value(book.send("act", "a", 1)) == 1
        book.await_settled("a")


@pytest.mark.full
@only_kind("classic")
def test_a_backlog_of_one_key_runs_by_priority(make_book, pool):
    """RabbitMQ hands out the urgent first; among those that wait, arrival counts."""
    names = queues("classic", ["celery"], max_priority=9)
    book = make_book(conf={"task_queues": names, "worker_prefetch_multiplier": 1})
    with book.worker(pool=pool):
        pass  # it declares the queue
    sent = [book.send("act", "a", n, priority=n) for n in range(1, 10)]
    eventually(lambda: book.queued() == 9)
    with book.worker(pool=pool, concurrency=1):
        assert [book.value(result) for result in sent] == list(range(1, 10))
        book.await_settled("a")
    assert book.order("a") == list(range(9, 0, -1))
    assert [start["priority"] for start in book.starts("a")] == list(range(9, 0, -1))
    assert book.peak("a") == 1


def delayed(make_book, *names, queue_type="classic"):
    """Return a book whose countdowns go through RabbitMQ's delay queues."""
    conf = {"broker_native_delayed_delivery_queue_type": queue_type}
    return make_book(*names, conf=conf)


@pytest.mark.full
@only_kind("quorum")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_natively_delayed_tasks_take_the_lock_when_they_arrive(make_book, pool, queue_type):
    """The broker keeps them until their time; blocked then, they park like any other."""
    book = delayed(make_book, "celery", queue_type=queue_type)
    with book.worker(pool=pool):
        holder = book.start_holder("a")
        later = [
            book.send(task, "a", n, countdown=8, headers=TENANT)
            for n, task in enumerate(["act", "act_late"], 1)
        ]
        delayed_8_s = "celery_delayed_3"
        eventually(
            lambda: not book.view("a").waiting and book.vhost.depths()[delayed_8_s].ready == 2
        )
        book.await_waiting("a", 2)
        book.open("a-0")
        assert [book.value(result) for result in (holder, *later)] == [0, 1, 2]
        book.await_settled("a")
    assert sorted(book.order("a")) == [0, 1, 2]
    assert book.peak("a") == 1
    assert all(start["headers"]["x-tenant"] == "acme" for start in book.starts("a")[1:])


@pytest.mark.full
@only_kind("quorum")
def test_a_natively_delayed_task_stays_with_the_workers_of_its_queue(make_book):
    """Its routing key has the delay before it: a parked one still goes to its own queue's worker.

    The worker that parked it consumes two queues, and is gone when the turn comes.
    """
    book = delayed(make_book, "held", "one", "two")
    holder = book.worker(queues=["held"]).start()
    with book.worker(queues=["one", "two"]):
        first = book.start_holder("a", queue="held")
        later = book.send("act", "a", 1, countdown=1, queue="two")
        book.await_waiting("a", 1)
    with book.worker(queues=["two"], name="w-two"):
        book.open("a-0")
        assert [book.value(first), book.value(later)] == [0, 1]
        book.await_settled("a")
    assert book.starts("a")[1]["worker"].startswith("w-two")
    holder.stop()


@pytest.mark.full
@only_kind("quorum")
def test_a_retry_after_native_delay_takes_the_lock_again(make_book, pool):
    """Parked, delivered, retried with a delay of the broker's: its route is not lost on the way."""
    book = delayed(make_book)
    with book.worker(pool=pool):
        holder = book.start_holder("a")
        later = book.send("act", "a", 1, countdown=1, end="retry", extra=1)
        book.await_waiting("a", 1)
        book.open("a-0")
        assert [book.value(holder), book.value(later)] == [0, 1]
        book.await_settled("a")
    assert [(s["n"], s["retries"]) for s in book.starts("a")] == [(0, 0), (1, 0), (1, 1)]


def crosswise(kind):
    """Return two queues, each bound by the routing key that is the other's name."""
    both = queues(kind, ["one", "two"])
    both["one"]["routing_key"], both["two"]["routing_key"] = "two", "one"
    return both


@pytest.mark.full
def test_a_parked_task_returns_to_its_queue_whatever_its_routing_key(make_book, kind):
    """Each of two workers runs what came through its own queue, parked or not."""
    book = make_book(conf={"task_queues": crosswise(kind), "task_default_queue": "one"})
    with book.worker(queues="one", name="w-one"), book.worker(queues="two", name="w-two"):
        book.start_holder("a", queue="one")
        sent = [book.send("act", "a", n, queue=("one", "two")[n % 2]) for n in range(1, 7)]
        book.await_waiting("a", 6)
        book.open("a-0")
        assert [book.value(result) for result in sent] == list(range(1, 7))
        book.await_settled("a")
    ran = {s["n"]: s["worker"].partition("@")[0] for s in book.starts("a")}
    assert ran == {n: ("w-one", "w-two")[n % 2] for n in range(7)}


@pytest.mark.full
def test_a_moved_message_reaches_its_queue_past_exchange_and_binding(make_book, kind):
    """It lands in its own queue alone, though another queue has its routing key."""
    book = make_book(conf={"task_queues": crosswise(kind), "task_default_queue": "one"})
    holder = book.worker(queues="one").start()
    with book.worker(queues="two"):
        first = book.start_holder("a", queue="one")
        parked = book.send("act", "a", 1, queue="two", expires=300, headers=TENANT)
        book.await_waiting("a", 1)
    book.open("a-0")
    book.value(first)
    eventually(lambda: book.queued("two") == 1, 15, "the message is with the broker")
    never(lambda: book.queued("one") or len(book.starts("a")) > 1, 0.5)
    moved = take(book, "two")
    assert moved.properties["expiration"] == "300000"
    assert moved.properties["delivery_mode"] == 2
    assert moved.headers["x-tenant"] == "acme"
    with book.worker(queues="two"):
        assert book.value(parked) == 1
        book.await_settled("a")
    assert book.order("a") == [0, 1]
    holder.stop()


def take(book, queue):
    """Look at a message of a queue; it goes back."""
    with Connection(book.url) as connection:
        return eventually(lambda: connection.default_channel.basic_get(queue))


@pytest.mark.full
def test_T34_copies_of_a_finished_task_end_quietly(make_book, kind):
    """Copies of its message that the test makes, before and after its end: none runs again."""
    book = make_book("held", "far")
    holder = book.worker(queues="held").start()
    with book.worker(queues="far"):
        first = book.start_holder("a", queue="held")
        parked = book.send("act", "a", 1, queue="far")
        book.await_waiting("a", 1)
    book.open("a-0")
    book.value(first)
    eventually(lambda: book.queued("far") == 1, 15, "the message is with the broker")
    copy = take(book, "far")

    def again(times):
        with Connection(book.url) as connection:
            for _ in range(times):
                connection.Producer().publish(
                    copy.body, routing_key="far", headers=copy.headers,
                    content_type=copy.content_type, content_encoding=copy.content_encoding,
                )  # fmt: skip

    again(3)
    with book.worker(queues="far"):
        assert book.value(parked) == 1
        again(3)
        book.await_settled("a")
        assert book.value(book.send("act", "a", 2, queue="far")) == 2
        book.await_settled("a")
    assert book.order("a") == [0, 1, 2]
    holder.stop()


def test_parked_tasks_are_not_counted_by_the_prefetch_limit(make_book, kind, pool):
    """With prefetch 1 and one slot, 20 blocked tasks leave room for a free one."""
    book = make_book(conf={"worker_prefetch_multiplier": 1})
    with book.worker(pool=pool, concurrency=2):
        book.start_holder("a", task="act_late")
        parked = [book.send("act_late", "a", n) for n in range(1, 21)]
        free = book.send("act_late", "b", 0)
        assert book.value(free) == 0
        book.await_waiting("a", 20)
        eventually(lambda: book.unacked() == 1, 5, lambda: f"only the first: {book.unacked()}")
        book.open("a-0")
        assert [book.value(result) for result in parked] == list(range(1, 21))
        book.await_settled("a", "b")
    assert book.order("a") == list(range(21))


@pytest.mark.full
def test_threads_and_acknowledgements_do_not_mix_up_the_connection(make_book, kind):
    """500 short tasks over 20 keys on 8 threads: AMQP frames of acknowledgements never mingle."""
    book = make_book()
    sent = [book.send(("act", "act_late")[n % 2], f"k{n % 20}", n) for n in range(500)]
    with book.worker(pool="threads", concurrency=8) as worker:
        for n, result in enumerate(sent):
            assert book.value(result, 60) == n
        book.await_settled(*(f"k{n}" for n in range(20)))
        assert "Connection to broker lost" not in worker.log()
        assert "Couldn't ack" not in worker.log()
    for n in range(20):
        assert book.order(f"k{n}") == list(range(n, 500, 20))
        assert book.peak(f"k{n}") == 1


@pytest.mark.full
def test_a_deleted_queue_is_no_lost_lock_of_granted_tasks(make_book, kind):
    """One task runs, others wait for a slot: each runs once after the queue is declared again."""
    book = make_book()
    keys = "abcdef"
    locks = [Lock(book.client, f"k:{key}", lease=60, thread_local=False) for key in keys]
    for lock in locks:
        lock.acquire()
    with book.worker(concurrency=1) as worker:
        tasks = ("act", "act_late")
        sent = [book.send(tasks[n % 2], key, 1, hold="all") for n, key in enumerate(keys)]
        for key in keys:  # all of them, before the first one takes the slot
            book.await_waiting(key, 1)
        for lock in locks:
            lock.release()
        book.started(sent[0])
        for key in keys[1:]:
            eventually(lambda key=key: [h.state for h in book.view(key).holders] == ["granted"])
        book.vhost.delete("celery")
        worker.await_log("Connection to broker lost", 10)
        never(lambda: "was lost" in worker.log(), 1.3 * LEASE)
        book.open("all")
        assert [book.value(result) for result in sent] == [1] * len(keys)
        book.await_settled(*keys)
        assert "was lost" not in worker.log()
    assert [len(book.starts(key)) for key in keys] == [1] * len(keys)


@pytest.mark.full
def test_a_worker_starts_within_seconds_beside_a_backlog_of_parked(make_book, kind):
    """Parked tasks of a worker that is gone run on its successor, in order, without copies left."""
    book = make_book()
    with book.worker():
        book.start_holder("a", task="act_late")
        parked = [book.send("act_late", "a", n, hold=0.2) for n in range(1, 11)]
        book.await_waiting("a", 10)
        book.open("a-0")
        book.started(parked[0])
    began = time.monotonic()
    with book.worker():
        assert [book.value(result) for result in parked] == list(range(1, 11))
        book.await_settled("a", timeout=15)
    took = time.monotonic() - began
    assert book.order("a") == list(range(11))
    assert book.peak("a") == 1
    in_time(took, 30)
