"""Canvas, headers, priority and serializers survive parking."""

from __future__ import annotations

import time

import pytest
from celery import Celery, chain, chord, group, states

from support.waiting import eventually
from support.workers import CeleryWorker


@pytest.fixture
def held(book, worker, key):
    """A key that is held until its gate ``<key>-0`` opens."""
    book.started(book.send("act", key, 0, hold=f"{key}-0"))
    return key


def release(book, key, waiting):
    """Open the gate when so many are parked."""
    book.await_waiting(key, waiting)
    book.open(f"{key}-0")


def test_T32_a_chain_whose_first_link_is_blocked_completes(book, held):
    """Each link is parked or runs, and the last one's result is there."""
    task = book.app.tasks["act"]
    result = chain(task.si(held, 1), task.si(held, 2), book.app.tasks["plain"].si(held, 3))().id
    release(book, held, 1)
    assert book.value(result) == 3
    assert book.order(held) == [0, 1, 2, 3]


def test_T32_a_group_of_blocked_members_completes(book, held):
    """Ten members of one key run one at a time, each once."""
    task = book.app.tasks["act"]
    result = group(task.si(held, n) for n in range(1, 11)).apply_async()
    ids = [member.id for member in result.results]
    release(book, held, 10)
    assert [book.value(i) for i in ids] == list(range(1, 11))
    assert book.peak(held) == 1
    book.await_free(held)


def test_T32_a_chord_of_blocked_members_completes(book, held):
    """The body, itself locked under the same key, runs after all members, with their results."""
    tasks = book.app.tasks
    body = tasks["total_locked"].s(key=held)
    result = chord([tasks["act"].si(held, n) for n in range(1, 6)])(body).id
    release(book, held, 5)
    assert book.value(result) == [1, 2, 3, 4, 5]
    eventually(lambda: len(book.events("total", key=held)) == 1, 5)
    book.await_free(held)


def test_a_callback_and_an_errback_of_a_parked_task_are_called(book, held):
    """``link`` after success, ``link_error`` after failure."""
    plain = book.app.tasks["plain"]
    book.send("act", held, 1, link=plain.si(f"{held}-link", 1))
    bad = book.send("act", held, 2, end="raise", link_error=plain.si(f"{held}-errback", 2))
    release(book, held, 2)
    assert book.outcome(bad)[0] == states.FAILURE
    for key in (f"{held}-link", f"{held}-errback"):
        eventually(lambda key=key: book.starts(key), 10)


def test_headers_and_priority_are_kept(book, held):
    """A custom header and the priority of a parked message arrive with the task."""
    result = book.send("act", held, 1, headers={"x-tenant": "acme"}, priority=6)
    release(book, held, 1)
    assert book.value(result) == 1
    start = book.starts(held)[-1]
    assert start["headers"] == {"x-tenant": "acme"}
    assert start["priority"] == 6
    assert start["leaks"] == []


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_serializers_and_compression(book, held, serializer, compression):
    """The raw body is kept, and decoded by the worker that runs it."""
    big = "x" * 100_000  # too long to travel through the inbox
    for n, value in ((1, "é"), (2, big)):
        book.send("act", held, n, extra=value, serializer=serializer, compression=compression)
    release(book, held, 2)
    eventually(lambda: len(book.events("end", key=held)) == 3, 10)
    assert book.order(held) == [0, 1, 2]
    book.await_free(held)


def test_eta_comes_before_the_lock(book, worker, key):
    """A task with a countdown takes no lock, and no place, before its time."""
    later = book.send("act", key, 1, countdown=300)
    sooner = book.send("act", key, 2)
    assert book.value(sooner) == 2
    book.await_free(key)
    book.app.control.revoke(later, reply=True, limit=1, timeout=20)
    sent = time.monotonic()
    soon = book.send("act", key, 3, countdown=1)
    assert book.value(soon) == 3
    assert book.order(key) == [2, 3]
    assert book.starts(key)[-1]["t"] > sent + 0.9


@pytest.mark.full
def test_a_chord_ends_although_all_tasks_of_the_app_take_locks(redis_url, tmp_path):
    """Celery waits for the parts of a chord in a task of its own, whose arguments name no lock."""
    results = f"file://{tmp_path}"
    with (
        CeleryWorker("integration.task_class_app", redis_url, backend=results),
        Celery("sender", broker=redis_url, backend=results) as app,
    ):
        parts = [app.signature("integration.task_class_app.settle", (n,)) for n in (1, 2, 3)]
        ended = chord(parts, app=app)(app.signature("integration.task_class_app.add"))
        assert ended.get(timeout=60) == 6
