"""Traps of comparable systems: sweeping, late starts, bursts, lost wake-ups."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
from celery import states

from integration.book import SAFE_LEASE, Book, only
from support.redelivery import redelivery_after
from support.waiting import eventually, in_time

ROUNDS = int(os.environ.get("CSL_TEST_MANY", "1000"))
"""Interleavings of T6: so many tasks, on few keys, at random moments."""


LEASE = SAFE_LEASE


@pytest.fixture(scope="module")
def lease():
    """It does not end while a process stands still."""
    return LEASE


@pytest.mark.full
def test_T1_a_sweeper_that_loops_frees_no_running_task(book, worker, key):
    """A task runs during the sweeps of an impatient sweeper: it keeps its lock, and none starts."""
    book.start_holder(key)
    second = book.send("act", key, 1)
    book.await_waiting(key, 1)
    before = book.view(key).holders[0]
    until = time.monotonic() + 1.2 * LEASE
    while time.monotonic() < until:
        book.store.take_due_locks(100)
        book.store.sweep_and_grant(f"k:{key}")
        time.sleep(0.02)
    after = book.view(key).holders
    assert [(h.token, h.fencing_token) for h in after] == [(before.token, before.fencing_token)]
    assert len(book.starts(key)) == 1
    book.open(f"{key}-0")
    assert book.value(second) == 1
    assert book.peak(key) == 1


@pytest.mark.full
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_T2_workers_that_start_after_every_lease_has_lapsed_run_all(own_book, pool):
    """For longer than a lease, messages lie in the broker, others parked by a worker that died."""
    with own_book.worker(pool=pool, concurrency=2) as first:
        running = own_book.send("act_lost", "a", 0, hold="first")
        own_book.started(running)
        parked = [own_book.send("act_lost", "a", n) for n in (1, 2)]
        own_book.await_waiting("a", 2)
        own_book.kill_worker(first)
    queued = [own_book.send("act_lost", key, n) for n, key in enumerate("bbc")]
    lapsed = time.monotonic() + 1.2 * LEASE
    eventually(lambda: time.monotonic() > lapsed, message="longer than a lease")
    own_book.open("first")
    conf = {"broker_transport_options": redelivery_after(1)}
    with own_book.worker(pool=pool, concurrency=2, conf=conf):
        for result in (*parked, *queued):
            assert own_book.outcome(result, 20)[0] == states.SUCCESS
        assert own_book.outcome(running, 20)[0] == states.SUCCESS
        for key in "abc":
            assert own_book.peak(key) == 1
            own_book.await_free(key)


@pytest.mark.full
@pytest.mark.needs_real_redis("INFO commandstats")
@only("prefork")
def test_T4_blocked_tasks_are_not_published_again(book, worker, key):
    """100 tasks are blocked for longer than a lease: the broker sees each message once."""
    first = book.send("act", key, -1, hold=f"{key}-0")
    book.started(first)
    sent = [book.send("act", key, n) for n in range(100)]
    book.await_waiting(key, 100)

    def published():
        return book.broker.info("commandstats").get("cmdstat_lpush", {"calls": 0})["calls"]

    before, until = published(), time.monotonic() + 1.2 * LEASE
    while time.monotonic() < until:
        assert book.view(key).waiting == 100
        time.sleep(0.2)  # the promise is about time that passes
    assert published() - before < 50  # the worker's own heartbeats and results
    book.open(f"{key}-0")
    for result in sent:
        book.value(result, 30)
    assert len(book.starts(key)) == 101
    assert book.order(key) == [-1, *range(100)]


@pytest.mark.full
@pytest.mark.needs_real_redis("INFO commandstats")
@only("prefork")
def test_T25_a_task_costs_as_many_calls_among_a_thousand_as_among_ten(book, worker, key):
    """From its arrival to its end: parked, claimed, released. Only the locks use scripts here."""

    def scripts():
        return book.broker.info("commandstats")["cmdstat_evalsha"]["calls"]

    def per_task(count, rounds):
        before = scripts()
        for number in range(rounds):
            gate = f"{key}-{count}-{number}"
            book.started(book.send("act", gate, -1, hold=gate))
            sent = [book.send("act", gate, n) for n in range(count)]
            book.await_waiting(gate, count)
            book.open(gate)
            for result in sent:
                book.value(result, 60)
        return (scripts() - before) / rounds / (count + 1)

    few, many = per_task(10, 10), per_task(1000, 1)
    # And what the worker asks by the clock, the more the longer it takes.
    assert 2.9 < many < few + 1, (few, many)
    assert few < 6


class Idleness(threading.Thread):
    """Looks how long a key is free while somebody waits for it.

    Args:
        book: where the locks are.
        keys: to look at, again and again, until :attr:`over`.
    """

    def __init__(self, book, keys):
        super().__init__()
        self.book, self.keys, self.over = book, keys, threading.Event()
        self.worst, self._since = 0.0, {}

    def run(self):
        while not self.over.wait(0.02):
            for key in self.keys:
                self._look(key)

    def _look(self, key):
        view, now = self.book.view(key), time.monotonic()
        if view.waiting + view.adrift and not view.holders:
            self.worst = max(self.worst, now - self._since.setdefault(key, now))
        else:
            self._since.pop(key, None)


@pytest.mark.needs_real_redis("the speed of a server")
def test_T6_no_task_stays_parked_beside_a_free_key(book, worker, key):
    """1,000 tasks of three keys come at random moments: none is parked beside a key free for 1 s.

    What is looked for is the wake-up lost between "busy" and "parked", so tasks are short, and a
    new one arrives as an old one ends.
    """
    rng = random.Random(1)  # the same interleavings each time, as far as that goes
    keys, sent = [f"{key}-{i}" for i in range(3)], []
    idleness = Idleness(book, keys)
    idleness.start()
    try:
        for n in range(ROUNDS):
            sent.append(book.send("act", rng.choice(keys), n, hold=rng.choice([0, 0, 0.002])))
            if rng.random() < 0.1:
                time.sleep(rng.random() * 0.02)  # the random moments
        for result in sent:
            book.value(result, 60)
    finally:
        idleness.over.set()
        idleness.join()
    in_time(idleness.worst, 1)
    for each in keys:
        assert book.peak(each) == 1
        book.await_free(each)


@pytest.mark.full
@pytest.mark.parametrize("times", ["once", "again, on the same Redis, not flushed"])
def test_T26_a_killed_run_does_not_fail_the_next_one(times, redis_server, tmp_path):
    """A suite that died with locks held and tasks parked: its next run passes as its first did."""
    with Book(redis_server.url, tmp_path, conf={"singleton_lock_lease": LEASE}) as book:
        first = book.worker(queues="t26").start()
        running = book.send("act", "t26", 0, hold="never", queue="t26")
        book.started(running)
        left = book.send("act", "t26", 1, queue="t26")
        book.await_waiting("t26", 1)
        book.kill_worker(first)
        book.worker(queues="t26").start()  # it ends with the test, by SIGKILL
        assert book.value(left) == 1
        assert book.value(book.send("act", "t26", 2, queue="t26")) == 2
        assert book.peak("t26") == 1
        if times == "once":
            book.send("act", "t26", 3, hold="never", queue="t26")
            book.send("act", "t26", 4, queue="t26")
            book.await_waiting("t26", 1)
