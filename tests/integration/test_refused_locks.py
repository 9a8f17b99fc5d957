"""A lock whose keys hold other data: Redis refuses this lock and no other."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from celery_singleton_lock.cli import locks
from integration.book import only
from support.waiting import eventually

OTHERS = 8


@pytest.fixture(scope="module")
def book_conf():
    return {
        "worker_prefetch_multiplier": 1,
        "singleton_lock_lease": 3.0,
        "singleton_lock_max_returns": 0,
    }


@contextmanager
def foreign(book, key, part):
    """Have another program use a key of a lock."""
    name = getattr(book.store.keyspace.lock(f"k:{key}"), part)
    book.client.delete(name)
    if part == "meta":
        book.client.set(name, "of another program")
    else:
        book.client.hset(name, "of", "another program")
    try:
        yield
    finally:
        book.client.delete(name)


def refusals(worker, key):
    """Return the lines of the worker's log that name the lock as refused."""
    sign = f"Redis refuses the lock 'k:{key}'"
    return [line for line in worker.log().splitlines() if sign in line]


def lines(worker, key):
    """Return what the worker's log says of the lock that is refused."""
    found = (line for line in worker.log().splitlines() if f"'k:{key}'" in line)
    return [line for line in found if "INFO" not in line]


@pytest.mark.full
@pytest.mark.parametrize("part", ["meta", "holders"])
def test_a_lock_that_redis_refuses_stops_no_other(book, worker, key, part):
    """Its tasks wait, with one log line; they run in order when the wrong key is deleted."""
    answers_again = worker.log().count("answers again")
    with foreign(book, key, part):
        first = book.send("act", key, 1)
        eventually(lambda: lines(worker, key))
        refused = [first, *(book.send("act", key, n) for n in range(2, OTHERS + 1))]
        others = [book.send("act", f"{key}-{n}", n) for n in range(OTHERS)]
        assert [book.value(each) for each in others] == list(range(OTHERS))
        assert not book.starts(key)
    assert [book.value(each) for each in refused] == list(range(1, OTHERS + 1))
    assert book.order(key) == list(range(1, OTHERS + 1))
    (told,) = lines(worker, key)
    assert "ERROR" in told
    assert "WRONGTYPE" in told
    assert worker.log().count("answers again") == answers_again
    assert "Traceback" not in worker.log()


def run(book, *arguments):
    """Return the output of ``celery locks …``."""
    return CliRunner().invoke(locks, arguments, obj=SimpleNamespace(app=book.app)).output


@pytest.mark.full
def test_commands_show_which_worker_waits_with_a_task_whose_lock_redis_refuses(book, worker, key):
    """The task is in no lock and in no queue: it is neither lost nor in the broker."""
    with foreign(book, key, "meta"):
        task = book.send("act", key, 1)
        eventually(lambda: lines(worker, key))
        told = eventually(lambda: (out := run(book, "why", task)).startswith("received") and out)
        assert f"was received by {worker.name}@" in told
        assert f"since Redis refuses 'k:{key}'" in told
        assert "another program's keys" in run(book, "list")
        assert "delete that key" in run(book, "doctor")
    assert book.value(task) == 1


@only("prefork", "threads", "gevent", "solo")
def test_a_task_with_several_locks_holds_none_while_redis_refuses_one(book, worker, key):
    told = worker.log().count("WRONGTYPE")
    with foreign(book, f"{key}-2", "meta"):
        pair = book.send("pair", key, f"{key}-2")
        (line,) = eventually(lambda: refusals(worker, f"{key}-2"))
        assert "ERROR" in line
        assert "WRONGTYPE" in line
        others = [book.send("act", key, n) for n in range(3)]
        assert [book.value(each) for each in others] == [0, 1, 2]
        assert not book.starts(task="pair", id=pair)
    assert book.value(pair) == f"{key}-2"
    book.await_free(key)
    assert worker.log().count("WRONGTYPE") == told + 1


@only("prefork", "threads", "gevent", "solo")
def test_a_parked_task_one_of_whose_locks_redis_refuses_waits_and_does_not_fail(
    book, worker, key, locked
):
    """Its first lock was busy, so Redis has its message, which comes back again and again."""
    pair = book.send("pair", key, f"{key}-2")
    book.await_waiting(key, 1)
    with foreign(book, f"{key}-2", "meta"):
        locked.release()
        (line,) = eventually(lambda: refusals(worker, f"{key}-2"))
        assert "ERROR" in line
        assert "WRONGTYPE" in line
        assert not refusals(worker, key)
        told = eventually(lambda: "refuses" in (out := run(book, "why", pair)) and out)
        assert f"Redis refuses 'k:{key}-2'" in told
        assert book.value(book.send("act", key, 7)) == 7  # the other lock is free meanwhile
        grants = book.view(key).counters["grants"]
        eventually(lambda: book.view(key).counters["grants"] > grants, 20)  # it is tried again
        eventually(lambda: "Redis refuses" in run(book, "why", pair))
        assert not book.has_ended(pair)
    assert book.value(pair, 60) == f"{key}-2"
    book.await_free(key)
    assert len(refusals(worker, f"{key}-2")) == 1
