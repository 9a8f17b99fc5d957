"""Every way to call a task: it takes its lock, waits, and completes."""

from __future__ import annotations

from collections import Counter

import celery
import pytest
from celery import Celery, chain, chord, group, states
from kombu import Connection

from celery_singleton_lock import Lock, LockReentered
from support.events import EventLog
from support.waiting import eventually

RUN_ONCE = {"task_received": 1, "task_prerun": 1, "task_postrun": 1, "task_success": 1}
SEEN_ONCE = {
    "task-received": 1,
    "task-blocked": 1,
    "task-delivered": 1,
    "lock-acquired": 1,
    "task-started": 1,
    "task-succeeded": 1,
    "lock-released": 1,
}


@pytest.fixture(scope="module")
def worker_options():
    """Its worker sends events, notes its signals, and knows pydantic and shared tasks."""
    return {"app": "integration.call_paths_app:app", "args": ["-E"]}


@pytest.fixture(scope="module")
def log(book, worker):
    """The worker's signals about its tasks."""
    with EventLog(book.app) as log:
        yield log


@pytest.fixture
def busy(book, worker, key):
    """A key that a task of the same worker holds, so that tasks are parked without a slot."""
    book.started(book.send("act", key, 0, hold=f"{key}-0"))
    return key


def signals_of(book, task_id):
    """Return how often the worker got each signal about a task."""
    return dict(Counter(note["signal"] for note in book.events("signal", id=task_id)))


DOORS = {
    "delay": lambda app, key: app.tasks["act"].delay(key, 1),
    "apply_async": lambda app, key: app.tasks["act"].apply_async((key,), {"n": 1}, priority=3),
    "send_task": lambda app, key: app.send_task("act", (key, 1)),
    "signature": lambda app, key: app.signature("act", (key,), {"n": 1}).delay(),
    "immutable": lambda app, key: app.tasks["act"].si(key, 1).clone().apply_async(),
    "countdown": lambda app, key: app.tasks["act"].apply_async((key, 1), countdown=0.2),
    "task_id": lambda app, key: app.tasks["act"].apply_async((key, 1), task_id=f"mine-{key}"),
    "shadow": lambda app, key: app.tasks["act"].apply_async((key, 1), shadow="other-name"),
    "chain": lambda app, key: chain(
        app.tasks["plain"].si(f"{key}-x"), app.tasks["act"].si(key, 1)
    )(),
    "group": lambda app, key: group(app.tasks["act"].si(key, 1)).apply_async().results[0],
    "chord body": lambda app, key: chord(
        [app.tasks["plain"].si(f"{key}-x", n) for n in (1, 2)], app.tasks["act"].si(key, 1)
    )(),
    "chord header": lambda app, key: chord(
        [app.tasks["act"].si(key, 1), app.tasks["plain"].si(f"{key}-x")]
    )(app.tasks["total"].s()).parent.results[0],
}


@pytest.mark.parametrize("door", DOORS)
def test_t19_a_task_waits_and_runs_under_its_lock_for_each_way_to_call_it(
    book, log, locked, key, door
):
    """Blocked in the pool, parked, delivered, completed; received, started and ended once."""
    result = DOORS[door](book.app, key).id
    book.await_waiting(key, 1)
    assert book.starts(key) == []
    locked.release()
    assert book.value(result) == 1
    eventually(lambda: log.counts(result) == SEEN_ONCE, 10, lambda: str(log.of(result)))
    assert [(s["id"], s["held"], s["leaks"]) for s in book.starts(key)] == [(result, True, [])]
    assert log.counts(result) == SEEN_ONCE
    assert signals_of(book, result) == RUN_ONCE
    book.await_free(key)


def test_t19_parked_without_a_slot_it_is_received_and_run_once(book, log, busy):
    """The other way to be blocked: the lock's holder is in the same worker's pool."""
    results = [book.send("act", busy, n) for n in (1, 2, 3)]
    book.await_waiting(busy, 3)
    book.open(f"{busy}-0")
    assert [book.value(result) for result in results] == [1, 2, 3]
    for result in results:
        eventually(lambda r=result: log.counts(r) == SEEN_ONCE, 5)
    assert [log.counts(result) for result in results] == [SEEN_ONCE] * 3
    assert [signals_of(book, result) for result in results] == [RUN_ONCE] * 3


def test_t19_links_and_errbacks_that_are_locked_take_their_locks(book, locked, key):
    """A callback and an error callback with a busy key are parked, and run."""
    plain, act = book.app.tasks["plain"], book.app.tasks["act"]
    plain.apply_async((f"{key}-x",), link=act.si(key, 1))
    plain.apply_async((f"{key}-y",), {"end": "raise"}, link_error=act.si(key, 2))
    book.await_waiting(key, 2)
    locked.release()
    eventually(lambda: len(book.events("end", key=key)) == 2, 10)
    assert all(start["held"] for start in book.starts(key))
    assert sorted(book.order(key)) == [1, 2]
    book.await_free(key)


@pytest.mark.parametrize("end", ["retry", "replace", "replace-other", "chain"])
def test_t37_a_retry_or_replacement_of_a_blocked_task_is_a_new_attempt(book, log, locked, key, end):
    """retry, and replace by the same key, by another and by a chain: received once per attempt."""
    expected = {"retry": 2, "replace": 2, "replace-other": 1, "chain": 3}[end]
    result = book.send("act", key, 1, end=end, headers={"x-mine": "kept"})
    book.await_waiting(key, 1)
    locked.release()
    assert book.outcome(result)[0] == states.SUCCESS
    eventually(lambda: log.counts(result).get("task-succeeded") == 1, 5)
    starts = book.starts(key)
    assert len(starts) == expected
    assert all(start["held"] and not start["leaks"] for start in starts)
    assert len({start["fence"] for start in starts}) == expected
    if end == "replace-other":
        other = book.starts(f"{key}-other")
        assert [(start["id"], start["held"]) for start in other] == [(result, True)]
    assert starts[0]["headers"] == {"x-mine": "kept"}
    if end == "retry":
        assert starts[1]["headers"] == {"x-mine": "kept"}
    assert log.counts(result)["task-received"] == 2
    assert signals_of(book, result)["task_received"] == 2
    book.await_free(key)


@pytest.mark.full
def test_t19_beat_takes_the_lock(book, busy, tmp_path):
    """What a real beat process sends, every half second, waits and runs one at a time."""
    schedule = {"often": {"task": "act", "schedule": 0.5, "args": [busy, 1]}}
    with book.beat(schedule, tmp_path):
        eventually(lambda: book.view(busy).waiting >= 2, 20, "two are parked")
    waiting = book.view(busy).waiting
    book.open(f"{busy}-0")
    eventually(lambda: len(book.events("end", key=busy)) >= 1 + waiting, 10)
    book.await_drained("celery")
    book.await_free(busy)
    assert book.peak(busy) == 1
    assert all(start["held"] for start in book.starts(busy))


def test_t19_a_sender_that_does_not_know_the_task_needs_no_lock(book, locked, key):
    """``send_task`` from an app without tasks, and without this package's settings."""
    with Celery("stranger", broker=book.url, backend=book.backend, set_as_current=False) as app:
        result = app.send_task("act", kwargs={"key": key, "n": 1}).id
    book.await_waiting(key, 1)
    locked.release()
    assert book.value(result) == 1
    assert [start["held"] for start in book.starts(key)] == [True]


def test_t33_map_and_chunks_call_the_function_and_take_no_lock(book, locked, key):
    """Celery's map, starmap and chunks call the task directly, inside a task of their own."""
    task = book.app.tasks["act"]
    result = task.starmap([(key, 1), (key, 2)]).apply_async().id
    assert book.value(result) == [1, 2]
    chunks = task.chunks([(key, 3), (key, 4)], 2).apply_async()
    assert book.value(chunks.results[0].id) == [3, 4]
    assert [(start["held"], start["lock"]) for start in book.starts(key)] == [(False, "")] * 4
    assert len(book.view(key).holders) == 1


def test_t19_a_shared_task_excludes_itself_across_two_apps(book, worker, pool, key):
    """One function, two apps with a queue each, two workers: one lock, and each app its own."""
    other = book.worker(app="integration.call_paths_app:other", pool=pool, concurrency=2)
    with other:
        apps = {"celery": "app", "other": "other"}
        first = book.app.send_task("shared", (key, 0, f"{key}-0"))
        book.started(first.id)
        results = [
            (book.app.send_task("shared", (key, n), queue=queue), name)
            for n, (queue, name) in enumerate([*apps.items(), *apps.items()], 1)
        ]
        book.await_waiting(key, 4)
        book.open(f"{key}-0")
        assert book.value(first.id) == "app"
        assert [book.value(result.id) for result, _ in results] == [name for _, name in results]
    assert sorted(book.order(key)) == [0, 1, 2, 3, 4]
    assert book.peak(key) == 1
    book.await_free(key)


def test_a_pydantic_task_is_named_by_what_was_sent(book, worker, key):
    """``pydantic=True``: the key looks into the dict of the wire; the body gets a model."""
    pytest.importorskip("pydantic")
    if celery.VERSION < (5, 5):
        pytest.skip("this Celery knows no pydantic=True")
    first = book.app.send_task("pydantic", ({"account": key, "hold": f"{key}-0"},))
    book.started(first.id)
    result = book.app.send_task("pydantic", (), {"order": {"account": key, "n": 1}})
    book.await_waiting(key, 1)
    book.open(f"{key}-0")
    assert book.value(result.id) == {"account": key, "n": 1, "hold": None}
    assert [start["lock"] for start in book.starts(key)] == [f"k:{key}"] * 2
    assert book.peak(key) == 1
    book.await_free(key)


def test_t33_apply_inside_of_a_locked_task_raises_instead_of_waiting_for_it(own_book, pool, key):
    """In a worker, with ``singleton_lock_eager``: LockReentered, and the lock is free after it."""
    with own_book.worker(pool=pool, conf={"singleton_lock_eager": True}):
        state, error = own_book.outcome(own_book.send("act", key, 1, end="nest"))
        assert (state, type(error)) == (states.FAILURE, LockReentered)
        assert own_book.value(own_book.send("act", key, 2)) == 2
    assert own_book.order(key) == [1, 2]


def test_t33_apply_inside_of_a_locked_task_runs_unlocked_without_the_setting(book, worker, key):
    """It shows no lock, and leaves that of the task around it alone."""
    assert book.value(book.send("act", key, 1, end="nest")) == "1-nested"
    assert [start["held"] for start in book.starts(key)] == [True, False]
    book.await_free(key)


BROKEN = {
    "not JSON": {"body": b"{no json", "content_type": "application/json"},
    "an import error": {
        "body": b"cno_such_module\nThing\n.",
        "content_type": "application/x-python-serialize",
    },
    "an unknown serializer": {"body": b"x", "content_type": "application/x-nobody-knows"},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_t18_a_message_that_cannot_be_read_holds_nothing(book, worker, key, broken):
    """It is settled as Celery does, the worker serves on, and no lock was touched."""
    before = set(book.client.keys("csl:{*"))
    headers = {"lang": "py", "task": "act", "id": f"broken-{key}", "root_id": None}
    with Connection(book.url) as connection, connection.SimpleQueue("celery") as queue:
        queue.producer.publish(
            broken["body"],
            serializer=None,
            content_type=broken["content_type"],
            content_encoding="utf-8" if "json" in broken["content_type"] else "binary",
            headers=headers,
        )
    assert book.value(book.send("plain", f"{key}-x", 1)) == 1
    assert set(book.client.keys("csl:{*")) <= before
    assert book.value(book.send("act", key, 2)) == 2
    assert worker.is_running
    eventually(lambda: book.queued() == 0 and book.unacked() == 0, 10)


def test_t18_an_unknown_task_and_wrong_arguments_hold_nothing(book, worker, key):
    """They fail with Celery's and Python's own errors; the key is free."""
    unknown = book.app.send_task("nobody_knows", (key,)).id
    wrong = book.app.send_task("default", (key,), {"wrong": 1}).id
    state, error = book.outcome(unknown)
    assert (state, type(error).__name__) == (states.FAILURE, "NotRegistered")
    state, error = book.outcome(wrong)
    assert (state, type(error)) == (states.FAILURE, TypeError)
    assert not book.view(f"{key}:7").holders
    assert book.value(book.app.send_task("default", (key,)).id) == f"k:{key}:7"


@pytest.mark.full
def test_t18_a_parked_task_that_its_next_worker_does_not_know_waits_for_one_that_does(
    own_book, pool, key
):
    """Parked by a worker of newer code. One of older code runs the others of its lock."""
    lock = Lock(own_book.client, f"k:{key}", lease=60, thread_local=False)
    lock.acquire()
    with own_book.worker(app="integration.call_paths_app:app", pool=pool):
        result = own_book.app.send_task("shared", (key,)).id
        own_book.await_waiting(key, 1)
    with own_book.worker(pool=pool) as older:
        behind = own_book.send("act", key, 1)
        own_book.await_waiting(key, 2)
        lock.release()
        assert own_book.value(behind) == 1
        assert older.is_running
        assert own_book.state(result) == states.PENDING
    with own_book.worker(app="integration.call_paths_app:app", pool=pool):
        own_book.value(result)
    own_book.await_free(key)
