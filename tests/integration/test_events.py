"""Events of workers: the right state at each moment, without cost for the locks' Redis."""

from __future__ import annotations

from itertools import groupby

import pytest
from celery.events.state import State

from integration.book import Book
from support.events import EventLog
from support.redis_monitor import RedisMonitor
from support.waiting import eventually


class States:
    """What Celery's own State makes of a worker's events, as Flower and others use it."""

    def __init__(self, log):
        self.log = log

    def of(self, task_id):
        """Return the states of a task, in order, each as often as it changed."""
        state, shown = State(), []
        for event in list(self.log.seen):
            state.event(event)
            task = state.tasks.get(task_id)
            if task is not None and shown[-1:] != [task.state]:
                shown.append(task.state)
        return shown

    def await_(self, task_id, *states):
        """Wait until a task has shown exactly these, and all of its events have come."""
        eventually(
            lambda: self.of(task_id) == list(states), 10, lambda: f"{states}: {self.of(task_id)}"
        )

    def one(self, kind, task_id):
        """Wait for a task's event of a type, and return it."""
        return eventually(
            lambda: next(
                (e for e in self.log.seen if (e["type"], e.get("uuid")) == (kind, task_id)), None
            ),
            10,
            lambda: f"{kind} of {task_id}: {self.log.of(task_id)}",
        )


@pytest.fixture(scope="module")
def worker_options():
    """Its worker sends events."""
    return {"args": ["-E"]}


@pytest.fixture(scope="module")
def states(book, worker):
    """What monitors show."""
    with EventLog(book.app) as log:
        yield States(log)


@pytest.fixture
def holder(book, worker, key):
    """A task that holds the test's key until its gate opens; the test leaves nothing behind."""
    first = book.start_holder(key)
    yield first
    book.open(f"{key}-0")
    book.await_free(key)


def test_a_blocked_task_is_shown_as_such_until_it_is_delivered_and_started(
    book, states, holder, key
):
    """Each state in time, with the holder of the lock; an unblocked task has no lock state."""
    second = book.send("act", key, 1, hold=f"{key}-1")
    states.await_(second, "RECEIVED", "BLOCKED")
    blocked = states.one("task-blocked", second)
    assert holder in blocked["holder"]
    assert (blocked["lock"], blocked["rank"], blocked["policy"]) == (f"k:{key}", 1, "park")
    book.open(f"{key}-0")
    states.await_(second, "RECEIVED", "BLOCKED", "DELIVERED", "STARTED")
    book.open(f"{key}-1")
    states.await_(second, "RECEIVED", "BLOCKED", "DELIVERED", "STARTED", "SUCCESS")
    states.await_(holder, "RECEIVED", "STARTED", "SUCCESS")


def test_each_run_has_an_event_with_its_lock_that_changes_no_state(book, states, holder, key):
    """Acquired before it starts, released after its end; the start names the lock, too."""
    book.open(f"{key}-0")
    released = states.one("lock-released", holder)
    states.await_(holder, "RECEIVED", "STARTED", "SUCCESS")
    assert states.log.counts(holder) == {
        "task-received": 1,
        "lock-acquired": 1,
        "task-started": 1,
        "task-succeeded": 1,
        "lock-released": 1,
    }
    acquired = states.one("lock-acquired", holder)
    assert (acquired["lock"], acquired["name"]) == (f"k:{key}", "act")
    assert acquired["waited"] >= 0
    assert released["held"] > 0
    assert states.one("task-started", holder)["lock"] == f"k:{key}"


ENDS = {
    "raise": ("act", "plain"),
    "ignore": ("act", "plain"),
    "reject": ("act", "plain"),
    "retry": ("act", "plain"),
    "return": ("act_requeue", "plain"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_blocked_task_ends_in_the_same_state_as_a_plain_one(book, states, holder, key, end):
    """After BLOCKED (and DELIVERED, if it was parked) it has Celery's states only."""
    options = {"extra": 3} if end == "retry" else {}  # seconds; its first attempt is over by then
    task, plain = (book.send(name, key, 1, end=end, **options) for name in ENDS[end])
    ends = {"retry": 2}.get(end, 1)
    states.await_(task, "RECEIVED", "BLOCKED")
    eventually(lambda: len(book.events("end", id=plain)) == ends, 10)
    book.open(f"{key}-0")
    eventually(lambda: states.log.counts(task).get("lock-released") == ends, 10)

    def shown(each):
        """Without what the lock adds; nor RECEIVED, which Celery does not show before RETRY."""
        own = [s for s in states.of(each) if s not in {"BLOCKED", "DELIVERED", "RECEIVED"}]
        return [state for state, _ in groupby(own)]

    eventually(
        lambda: shown(task) == shown(plain), 5, lambda: f"{states.of(task)}; {states.of(plain)}"
    )


def test_a_task_that_waited_too_long_is_shown_as_failed(book, states, holder, key):
    """It is delivered in order to fail."""
    second = book.send("act_patient", key, 1)
    states.await_(second, "RECEIVED", "BLOCKED", "DELIVERED", "STARTED", "FAILURE")
    assert states.one("task-delivered", second)["verdict"] == "overdue"


def test_a_task_that_made_room_is_shown_as_replaced_and_then_revoked(book, states, holder, key):
    """And the event names the task that took its place."""
    second = book.send("act_latest", key, 1)
    states.await_(second, "RECEIVED", "BLOCKED")
    third = book.send("act_latest", key, 2)
    states.await_(second, "RECEIVED", "BLOCKED", "REPLACED", "REVOKED")
    assert states.one("task-replaced", second)["by"] == third
    states.await_(third, "RECEIVED", "BLOCKED")


def test_a_task_that_is_revoked_or_skipped_is_shown_so(book, states, holder, key):
    """While it is parked, while it runs, and where its policy is to skip."""
    parked = book.send("act", key, 1)
    skipped = book.send("act_skip", key, 2)
    states.await_(parked, "RECEIVED", "BLOCKED")
    book.app.control.revoke(parked)
    states.await_(parked, "RECEIVED", "BLOCKED", "REVOKED")
    states.await_(skipped, "RECEIVED", "REVOKED")


def test_a_task_that_is_terminated_after_it_was_blocked_stays_revoked(book, states, pool, key):
    """Its lock is released after that, which changes no state."""
    if pool != "prefork":
        pytest.skip("only processes can be terminated")
    book.start_holder(key)
    second = book.send("act", key, 1, hold=f"{key}-never")
    states.await_(second, "RECEIVED", "BLOCKED")
    book.open(f"{key}-0")
    states.await_(second, "RECEIVED", "BLOCKED", "DELIVERED", "STARTED")
    book.app.control.revoke(second, terminate=True, signal="SIGKILL")
    states.one("lock-released", second)
    states.await_(second, "RECEIVED", "BLOCKED", "DELIVERED", "STARTED", "REVOKED")


def test_a_task_that_loses_its_lock_is_shown_as_running(book, states, holder, key):
    """It runs. The loss is an event of the lock."""
    assert book.store.reset(f"k:{key}") == 1
    assert states.one("lock-lost", holder)["lock"] == f"k:{key}"
    book.open(f"{key}-0")
    states.await_(holder, "RECEIVED", "STARTED", "SUCCESS")


@pytest.mark.full
@pytest.mark.needs_real_redis("fakeredis has no MONITOR")
def test_events_cost_the_locks_redis_no_command(redis_url, make_redis, tmp_path, key):
    """Sent or not: acquire and release per task, and besides that what an idle worker does."""
    lock = make_redis()
    conf = {"singleton_lock_backend": lock.url, "singleton_lock_lease": 60.0}  # none is renewed
    with Book(redis_url, tmp_path, lock_url=lock.url, conf=conf) as book:
        book.worker(concurrency=2).start()
        with RedisMonitor(lock.url) as monitor, EventLog(book.app) as log:
            eventually(lambda: len(monitor.scripts("worker_heartbeat")) >= 3, 10, "it beats")
            idle = monitor.kinds() | {
                "CLIENT",
                "HELLO",
                "TIME",
                "GET",  # every few seconds: whether Redis still has its schema
                "EVALSHA inspect",
                "EVALSHA identify",
            }
            off = run_ten(book, f"{key}-off")
            eventually(lambda: len(of_worker(monitor, f"k:{key}-off")) >= 20)
            book.app.control.enable_events(reply=True, limit=1, timeout=20)
            on = run_ten(book, f"{key}-on")
            eventually(lambda: all("lock-released" in log.of(task) for task in on), 10)
            eventually(lambda: len(of_worker(monitor, f"k:{key}-on")) >= 20)
            assert not any(log.of(task) for task in off)
            assert [len(of_worker(monitor, f"k:{key}-{run}")) for run in ("off", "on")] == [20, 20]
            others = monitor.kinds(without=f"k:{key}-")
            assert others <= idle, others - idle


def of_worker(monitor, name):
    """Return the commands about a lock, without those with which the test looks at it."""
    looks = monitor.scripts("inspect")
    return [c for c in monitor.about(name) if c not in looks and not c.startswith("EVAL ")]


def run_ten(book, key):
    """Run ten tasks, each with a lock of its own; return their ids."""
    ids = [book.send("act", f"{key}-{n}", n) for n in range(10)]
    assert [book.value(task) for task in ids] == list(range(10))
    for n in range(10):
        book.await_free(f"{key}-{n}")
    return ids
