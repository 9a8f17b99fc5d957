"""Redis does not answer the claim of an early-acknowledged task: its message is nowhere else."""

from __future__ import annotations

import logging
import uuid

import pytest
from celery import Celery, states

from celery_singleton_lock import LockedTask
from celery_singleton_lock.testing import SingletonLocks
from support.failing_store import FailingStores, Failure, Moment
from support.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def no_log():
    """Leave out what a worker logs of each failure."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def app():
    name = f"unanswered-{uuid.uuid4().hex}"
    app = Celery(name, broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        singleton_lock_backend=f"memory://{name}",
        task_default_queue=name,
        worker_hijack_root_logger=False,
    )
    yield app
    app.close()


CLAIMS = {
    "one lock": ({"lock_key": "a"}, "a", 1),
    "may run without Redis": ({"lock_key": "a", "lock_on_backend_error": "run"}, "a", 1),
    "may fail without Redis": ({"lock_key": "a", "lock_on_backend_error": "fail"}, "a", 1),
    "may run without Redis, with two locks": (
        {"lock_keys": ["a", "b"], "lock_on_backend_error": "run"},
        "a",
        1,
    ),
    "may fail without Redis, at the second of two locks": (
        {"lock_keys": ["a", "b"], "lock_on_backend_error": "fail"},
        "b",
        1,
    ),
    "may run without Redis, at its first lock": (
        {"lock_keys": ["a", "b"], "lock_on_backend_error": "run"},
        "b",
        2,
    ),
    "parked at the first of two locks": ({"lock_keys": ["a", "b"]}, "a", 1),
    "parked at the second of two locks": ({"lock_keys": ["a", "b"]}, "b", 1),
    "its first lock, which settles it": ({"lock_keys": ["a", "b"]}, "b", 2),
}
"""Options of the task, at which lock it is parked, and which of its claims is not answered."""


def marked(claim):
    return () if claim == "one lock" else pytest.mark.full


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param(True, id="its worker stops"),
        pytest.param(False, id="Redis answers again", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("options", "busy", "number"),
    [pytest.param(*CLAIMS[claim], id=claim, marks=marked(claim)) for claim in CLAIMS],
)
def test_a_task_whose_claim_was_not_answered_runs_once(app, options, busy, number, stops):
    """At once, not after the lease of its claim, which nobody renews. Redis has executed it."""
    failure = Failure("claim", number, Moment.AFTER, "connection")
    play(app, options, busy, FailingStores(failure, then_silent=stops), stops=stops)


@pytest.mark.full("its first one")
@pytest.mark.parametrize("number", [1, 2], ids=["the one it waited for", "its first one"])
@pytest.mark.parametrize("stops", [False, True], ids=["its worker goes on", "its worker stops"])
def test_a_task_with_a_lock_that_is_refused_as_it_begins_runs_later(app, number, stops):
    """The claim of the other lock has deleted its message, so its worker has the only one."""
    options = {"lock_keys": ["a", "b"]}
    failure = Failure("claim", number, Moment.BEFORE, "WRONGTYPE")
    play(app, options, "b", FailingStores(failure), stops=stops)


def play(app, options, busy, stores, *, stops):
    """Run a task that waits for a lock, and whose claim fails; then a second worker."""
    runs: list[str] = []

    @app.task(base=LockedTask, shared=False, name="work", **options)
    def work() -> None:
        runs.append("run")

    with SingletonLocks(app) as locks:
        stores.spare(locks.store.client)
        hold = locks.hold(busy)

        def is_idle():
            views = [locks.store.inspect(name) for name in "ab"]
            return not any((v.holders or v.bodies or v.waiting or v.adrift) for v in views)

        def facts():
            return f"{stores.counts}; {locks._facts('a')}; {locks._facts('b')}"

        with stores.installed(), locks.worker(pool="threads"):
            task = work.delay()
            locks.assert_parked(task, lock=busy)
            hold.release()
            eventually(lambda: stores.failed, message="its claim is not answered")
            if not stops:
                eventually(lambda: task.state == states.SUCCESS, message=facts)
        with locks.worker(pool="threads"):
            eventually(lambda: task.state == states.SUCCESS, message=facts)
            eventually(is_idle, message=facts)
    assert runs == ["run"]
