"""The modes observe and off: declared, and switched while workers run."""

from __future__ import annotations

import pytest
from celery import states

from celery_singleton_lock import Lock
from integration.book import Book
from support.waiting import eventually

CONF = {"singleton_lock_mode": "enforce"}


@pytest.fixture(autouse=True)
def _as_declared(request):
    """Take all switches away again."""
    yield
    if "worker" in request.fixturenames:
        book = request.getfixturevalue("book")
        for task in book.store.switches():
            book.store.switch(task, None)
        await_mode(book, "enforce")


def await_mode(book, mode, task="act"):
    """Wait until the worker has applied the mode."""

    def told():
        stats = book.app.control.inspect(timeout=20, limit=1).stats() or {}
        modes = [each["singleton_lock"]["modes"] for each in stats.values()]
        return bool(modes) and all(each.get(task, "enforce") == mode for each in modes)

    eventually(told, 10, f"{task} is {mode}")


def both_run(book, task, key, gate):
    """Send two of a key, and wait until they run at once."""
    results = [book.send(task, key, n, hold=gate) for n in (1, 2)]
    for result in results:
        book.started(result)
    return results


def ended(book, results, gate):
    book.open(gate)
    return [book.outcome(result) for result in results]


# -- switched while a worker runs ------------------------------------------------------------------


def test_mode_off_runs_parked_and_new_tasks(book, worker, key):
    """The kill switch: the holder runs on, the parked run beside it, nothing is lost or left."""
    holder = book.start_holder(key)
    parked = [book.send("act", key, n) for n in (1, 2, 3)]
    book.await_waiting(key, 3)
    book.store.switch("*", "off")
    assert [book.value(result) for result in parked] == [1, 2, 3]
    await_mode(book, "off")
    later = both_run(book, "act", key, f"{key}-later")
    unlocked = book.started(later[0])
    assert (unlocked["held"], unlocked["lock"], unlocked["fence"]) == (False, "", 0)
    assert ended(book, later, f"{key}-later") == [(states.SUCCESS, 1), (states.SUCCESS, 2)]
    book.open(f"{key}-0")
    assert book.value(holder) == 0
    assert all(start["leaks"] == [] for start in book.starts(key))
    assert len(book.starts(key)) == 6, "each ran once"
    book.await_free(key)


def test_switched_back_tasks_exclude_each_other_again(book, worker, key):
    """Tasks that started unlocked end unlocked; tasks after the switch hold the lock."""
    book.store.switch("*", "off")
    await_mode(book, "off")
    unlocked = both_run(book, "act", key, f"{key}-u")
    book.store.switch("*", None)
    await_mode(book, "enforce")
    first = book.start_holder(key, 3)
    second = book.send("act", key, 4)
    book.await_waiting(key, 1)
    assert ended(book, unlocked, f"{key}-u") == [(states.SUCCESS, 1), (states.SUCCESS, 2)]
    assert book.view(key).waiting == 1, "their end is nobody's turn"
    book.open(f"{key}-3")
    assert [book.value(result) for result in (first, second)] == [3, 4]
    book.await_free(key)


def test_one_task_can_be_switched_and_others_keep_their_locks(book, worker, key):
    """Of tasks that share a lock, the switched one passes, and the other does not pass it."""
    book.store.switch("act", "off")
    await_mode(book, "off")
    book.start_holder(key, task="act_late")
    assert book.value(book.send("act", key, 1)) == 1
    behind = book.send("act_late", key, 2)
    book.await_waiting(key, 1)
    book.open(f"{key}-0")
    assert book.value(behind) == 2
    book.await_free(key)


def test_observe_runs_tasks_and_reports_what_would_have_blocked(book, worker, key):
    """Both run at once; the report names the task, the lock, and for how long."""
    book.store.clear_observations()
    book.store.switch("act", "observe")
    await_mode(book, "observe")
    results = both_run(book, "act", key, f"{key}-o")
    start = book.started(results[0])
    assert (start["held"], start["leaks"]) == (False, [])
    assert ended(book, results, f"{key}-o") == [(states.SUCCESS, 1), (states.SUCCESS, 2)]

    def observed():
        (task,) = book.store.observations().tasks or [None]
        return task if task and (task.name, task.runs, task.blocked) == ("act", 2, 1) else None

    assert eventually(observed, message=lambda: str(book.store.observations())).waited > 0
    (lock,) = book.store.observations().locks
    assert (lock.name, lock.blocked) == (f"k:{key}", 1)
    worker.await_log("would have been blocked")
    book.await_free(key)


# -- as declared -----------------------------------------------------------------------------------


@pytest.mark.full
def test_off_by_the_settings_needs_no_redis_for_the_locks(redis_url, tmp_path, key):
    """No connection is opened: nothing listens at the URL."""
    conf = {
        "singleton_lock_mode": "off",
        "singleton_lock_backend": "redis://nobody.invalid:1/0",
    }
    with Book(redis_url, tmp_path, conf=conf) as book, book.worker() as worker:
        results = both_run(book, "act", key, "gate")
        assert ended(book, results, "gate") == [(states.SUCCESS, 1), (states.SUCCESS, 2)]
        assert book.outcome(book.send("act", key, 3, end="raise"))[0] == states.FAILURE
        assert book.value(book.send("act", key, 4, end="retry")) == 4
        assert "run without their locks" in worker.log()
        assert "did not answer" not in worker.log()
    keys = list(book.broker.scan_iter("csl:*"))
    assert keys == []


@pytest.mark.full
def test_tasks_parked_before_off_stay_parked_and_run_in_a_worker_that_locks(own_book, key):
    """A worker without Redis cannot run it: it says so at its start, and loses nothing."""
    with own_book.worker(pool="threads") as first:
        holder = own_book.send("act_lost", key, 0, hold="gate")
        own_book.started(holder)
        parked = own_book.send("act", key, 1)
        own_book.await_waiting(key, 1)
        own_book.kill_worker(first)
    with own_book.worker(pool="threads", conf={"singleton_lock_mode": "off"}) as second:
        assert own_book.value(own_book.send("act", key, 2)) == 2
        assert "does not use the locks' Redis" in second.log()
        assert own_book.view(key).bodies == 1
    with own_book.worker(pool="threads", conf={"singleton_lock_mode": "observe"}):
        assert own_book.value(parked) == 1
    assert len(own_book.starts(id=parked)) == 1


def test_observing_does_no_harm_when_redis_is_away(redis_url, tmp_path, key):
    """A task runs, at once but for one time-out, whatever becomes of the report."""
    conf = {
        "singleton_lock_mode": "observe",
        "singleton_lock_backend": "redis://127.0.0.1:1/0",
    }
    with Book(redis_url, tmp_path, conf=conf) as book, book.worker(pool="threads") as worker:
        results = both_run(book, "act", key, "gate")
        assert ended(book, results, "gate") == [(states.SUCCESS, 1), (states.SUCCESS, 2)]
        assert "are not observed" in worker.log()


def test_a_key_that_raises_is_reported_and_the_task_runs(redis_url, tmp_path, key):
    """With its lock it would fail; observed it does not."""
    conf = {"singleton_lock_mode": "observe"}
    with Book(redis_url, tmp_path, conf=conf) as book, book.worker(pool="threads") as worker:
        assert book.value(book.send("act_raising", f"bad-{key}", 1)) == 1
        assert "is not observed" in worker.log()


@pytest.mark.full
def test_tasks_wait_for_redis_no_longer_once_they_are_switched_off(
    make_redis, redis_url, tmp_path, key
):
    """The kill switch works while the locks' Redis is away: what was held for it runs."""
    locks = make_redis()
    conf = {"singleton_lock_backend": locks.url}
    with (
        Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book,
        book.worker(pool="threads") as worker,
    ):
        locks.stop()
        held = [book.send("act", key, n) for n in (1, 2)]
        worker.await_log("Locked tasks wait")
        assert not book.starts(key)
        (answer,) = book.app.control.broadcast(
            "lock_mode", {"mode": "off"}, reply=True, timeout=20, limit=1
        )
        assert "ok" in next(iter(answer.values()))
        assert sorted(book.value(result) for result in held) == [1, 2]
        locks.start()
        eventually(lambda: locks.client().hgetall("csl:fleet:mode"), 15, "the switch is in Redis")
        assert book.value(book.send("act", key, 3)) == 3
    assert [start["held"] for start in book.starts(key)] == [False] * 3


def test_a_task_may_declare_its_mode(own_book, key):
    """``lock_mode``: it passes a lock that is held; another task of the same worker does not."""
    with (
        Lock(own_book.client, f"k:{key}", lease=60),
        own_book.worker(app="integration.modes_app", pool="threads"),
    ):
        for task in ("act_observe", "act_off"):
            assert own_book.value(own_book.app.send_task(task, (key, 1)).id) is False
        blocked = own_book.send("act", key, 2)
        own_book.await_waiting(key, 1)
        assert own_book.state(blocked) == states.PENDING
