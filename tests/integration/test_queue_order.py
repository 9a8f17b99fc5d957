"""Order of arrival, and the cost of waiting for other tasks."""

from __future__ import annotations

import os
import time

import pytest
from celery import states

from integration.book import LONG_LEASE, only
from support.waiting import eventually, in_time, in_time_once

MANY = int(os.environ.get("CSL_TEST_MANY", "1000"))
"""How many blocked tasks stand before the free one (T21); the issue also says 10,000."""


@pytest.fixture(scope="module")
def lease():
    """No lease ends here, also not while a process stands still."""
    return LONG_LEASE


def test_one_worker_keeps_the_order_of_arrival(book, worker, key):
    """150 tasks over three keys, from one sender: per key they start in the order of sending."""
    keys = [f"{key}-{i}" for i in range(3)]
    sent = [book.send("act", keys[n % 3], n, hold=0.001 * (n % 3)) for n in range(150)]
    for n, result in enumerate(sent):
        assert book.value(result, 30) == n
    for i, each in enumerate(keys):
        assert book.order(each) == list(range(i, 150, 3))
        assert book.peak(each) == 1
        book.await_free(each)


@pytest.mark.full
def test_one_worker_keeps_the_order_of_what_was_queued_before_it(own_book):
    """100 tasks of one key are in the broker when the worker starts: they run in order."""
    sent = [own_book.send("act", "a", n) for n in range(100)]
    with own_book.worker(concurrency=4):
        for result in sent:
            own_book.value(result, 30)
    assert own_book.order("a") == list(range(100))


@pytest.mark.full
@pytest.mark.needs_real_redis("the speed of a server")
@only("prefork")
@pytest.mark.timeout(180 + MANY / 20)
def test_T21_blocked_tasks_do_not_stall_a_free_one(book, worker, key):
    """1,000 tasks wait for a busy key: those of a free key, sent after them, start within 1 s."""
    first = book.send("act", key, -1, hold=f"{key}-0")
    book.started(first)
    for n in range(MANY):
        book.send("act", key, n)
    behind_all = _until_it_starts(book, f"{key}-free", 0)
    book.await_waiting(key, MANY, timeout=30 + MANY / 100)
    took = [_until_it_starts(book, f"{key}-free", n) for n in range(1, 6)]
    assert book.order(key) == [-1], "all the others still wait"
    eventually(lambda: book.unacked() == 0)
    book.open(f"{key}-0")
    eventually(lambda: len(book.events("end", key=key)) == MANY + 1, 30 + MANY / 50)
    assert book.order(key) == list(range(-1, MANY))
    book.await_free(key)
    in_time_once(took, 1)
    in_time(behind_all, 1 + MANY / 5000)  # the second term: the backlog in the broker


def _until_it_starts(book, key, n) -> float:
    """Send a task, and return how many seconds later it starts."""
    sent = time.monotonic()
    return book.started(book.send("act", key, n))["t"] - sent


@pytest.mark.full
@pytest.mark.needs_real_redis("INFO commandstats")
@only("prefork")
def test_T25_a_parked_task_costs_no_command_while_it_waits(book, worker, key):
    """300 tasks wait for 3 s: the commands that Redis runs do not grow with them."""

    def commands(seconds: float) -> int:
        before = book.client.info("commandstats")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.05)
        after = book.client.info("commandstats")
        names = ("cmdstat_evalsha", "cmdstat_eval")
        return sum(
            after[n]["calls"] - before.get(n, {"calls": 0})["calls"] for n in names if n in after
        )

    first = book.start_holder(key)
    alone = commands(3)
    for n in range(300):
        book.send("act", key, n + 1)
    book.await_waiting(key, 300)
    crowded = commands(3)
    assert (
        crowded < alone + 150
    )  # what the worker asks by the clock varies; each waiter does not ask
    book.open(f"{key}-0")
    assert book.value(first) == 0
    eventually(lambda: len(book.events("end", key=key)) == 301, 20)
    assert book.order(key) == list(range(301))
    book.await_free(key)


@pytest.mark.full
@only("prefork")
def test_T41_a_backlog_of_others_delays_no_grant_and_multiplies_no_copy(book, worker, key):
    """40 parked keys and a backlog of 500 plain tasks: each runs once, and all soon."""
    holders = [book.send("act", f"{key}-{i}", 0, hold=f"{key}-0") for i in range(2)]
    for result in holders:
        book.started(result)
    parked = [book.send("act", f"{key}-{i % 2}", i + 1) for i in range(40)]
    for i in range(2):
        book.await_waiting(f"{key}-{i}", 20)
    for n in range(500):
        book.send("plain", f"{key}-plain", n, hold=0.002)
    book.open(f"{key}-0")
    for result in parked:
        assert book.outcome(result, 30)[0] == states.SUCCESS
    for i in range(2):
        assert len(book.starts(f"{key}-{i}")) == 21
        assert book.order(f"{key}-{i}") == [0, *range(i + 1, 41, 2)]
        book.await_free(f"{key}-{i}")
    eventually(lambda: len(book.events("end", key=f"{key}-plain")) == 500, 20)
