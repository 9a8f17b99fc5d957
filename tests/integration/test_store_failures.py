"""Any one call to the locks' Redis fails: no task is lost, doubled or stuck.

A worker in a thread of this process runs some tasks with locks in memory, through the real
dispatcher, agent and tracer. One call of the store fails, before or after it took effect.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from zlib import crc32

import pytest
from celery import Celery, states

from celery_singleton_lock import LockedTask, observe
from celery_singleton_lock.events import BackendDown, BackendUp, LeaseLost, ParkedLost
from celery_singleton_lock.testing import SingletonLocks
from support.failing_store import KINDS, FailingStores, Failure, Moment
from support.waiting import eventually

pytestmark = pytest.mark.integration

KEY = "k"
PATIENCE = 0.7
"""Seconds after which the scene's time goes faster: what was refused is tried again after 5 s."""

CALLS = {
    "acquire": 2,
    "release": 5,
    "park_many": 3,
    "claim": 3,
    "receive": 6,
    "leave": 1,
    "worker_heartbeat": 1,
    "take_due_locks": 1,
    "sweep_and_grant_many": 1,
    "has_messages": 1,
    "identify": 2,
    "locate_tasks": 1,
}
"""About how often each verb is asked for: on a busy machine some of the last ones are not."""


class Scene:
    """Tasks of one lock: one runs, three are parked. Of these, one retries and one is revoked.

    A last one is parked while its worker ends; another worker runs it.

    Args:
        failure: which call fails.
        pool: of the workers.
        acks_late: of the tasks.
    """

    def __init__(self, failure: Failure, pool: str = "threads", *, acks_late: bool = False) -> None:
        self.failure = failure
        self.runs: list[str] = []
        self.beside: list[str] = []
        self.told: list[object] = []
        self._gate = threading.Event()
        self._alone = threading.Lock()
        self.stores = FailingStores(failure)
        self._pool = pool
        name = f"scene-{uuid.uuid4().hex}"
        self._app = Celery(
            name, broker="memory://", backend="cache+memory://", set_as_current=False
        )
        self._app.conf.update(
            singleton_lock_backend=f"memory://{name}",
            task_default_queue=name,
            task_acks_late=acks_late,
            worker_hijack_root_logger=False,
        )
        observe(self._app, BackendDown, BackendUp, LeaseLost, ParkedLost)(self.told.append)
        self._work = self._new_task()

    def _new_task(self):
        @self._app.task(base=LockedTask, lock_key=KEY, shared=False, bind=True, name="work")
        def work(task, what: str) -> None:
            if not self._alone.acquire(blocking=False):
                self.beside.append(what)
                return
            try:
                self.runs.append(what)
                if what == "first":
                    self._gate.wait(120)
                if what == "retried" and not task.request.retries:
                    raise task.retry(countdown=0)
                if what == "retried":  # Celery stores RETRY after it has sent this attempt
                    eventually(lambda: task.AsyncResult(task.request.id).state == states.RETRY)
            finally:
                self._alone.release()

        return work

    def play(self) -> None:
        """Play it, and say what is wrong."""
        with SingletonLocks(self._app) as self._locks:
            self.stores.spare(self._locks.store.client)
            with self.stores.installed(), self._worker():
                hold = self._first_worker()
            hold.release()
            with self._worker():
                self._await(lambda: self._last.state == states.SUCCESS, "the last one ends")
                self._await(self._is_idle, "nothing is left")
        self._app.close()
        self._judge()

    def _first_worker(self):
        ids = ("first", "second", "retried", "revoked")
        send = self._work.delay
        first = send("first")
        self._await(lambda: self.runs, "the first one begins")
        rest = [send(each) for each in ids[1:]]
        self._await(lambda: len(self._locks.parked(KEY)) == len(rest), "three are parked")
        rest[-1].revoke()
        self._await(lambda: rest[-1].state == states.REVOKED, "one is revoked")
        self._gate.set()
        for what, result in zip(ids, (first, *rest[:-1]), strict=False):
            self._await(lambda result=result: result.state == states.SUCCESS, f"{what} ends")
        self._await(self._is_free, "the lock is free")
        hold = self._locks.hold(KEY)
        self._last = send("last")
        self._await(lambda: self._locks.parked(KEY), "the last one is parked")
        return hold

    def _judge(self) -> None:
        assert sorted(self.runs) == ["first", "last", "retried", "retried", "second"], self.failure
        assert not self.beside, f"{self.failure}: two ran at once"
        kinds = [type(each) for each in self.told]
        # A worker that ends in an outage does not hear of its end.
        assert kinds == [BackendDown, BackendUp][: len(kinds)], f"{self.failure}: {self.told}"

    def _is_idle(self) -> bool:
        view = self._locks.store.inspect(KEY)
        return not (view.holders or view.bodies or view.waiting or view.adrift)

    def _is_free(self) -> bool:
        return not self._locks.holders(KEY)

    def _await(self, fact, what: str) -> None:
        waited = threading.Event()
        quick = threading.Timer(PATIENCE, waited.set)
        quick.start()

        def look():
            if waited.is_set():
                self._locks.time._server.advance(0.2)
            return fact()

        try:
            eventually(look, message=lambda: f"{self.failure}: {what}; {self._locks._facts(KEY)}")
        finally:
            quick.cancel()

    @contextmanager
    def _worker(self) -> Iterator[None]:
        """Run a worker that ends at once: its threads block for messages, and for grants."""
        ended = threading.Event()

        def rouse() -> None:
            while not ended.wait(0.03):
                with suppress(Exception):
                    self._app.control.broadcast("ping")
                self._locks.time._server.advance(0.1)

        rouser = threading.Thread(target=rouse)
        try:
            with self._locks.worker(pool=self._pool, concurrency=3):
                yield
                rouser.start()
        finally:
            ended.set()
            if rouser.ident is not None:
                rouser.join()


@pytest.fixture(autouse=True)
def no_log():
    """Leave out what a worker logs of each failure."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("verb", "number", "moment"),
    [
        ("acquire", 1, Moment.AFTER),
        ("park_many", 1, Moment.AFTER),
        ("claim", 1, Moment.AFTER),
        ("claim", 2, Moment.BEFORE),
        ("release", 1, Moment.AFTER),
        ("release", 2, Moment.BEFORE),
        ("receive", 2, Moment.AFTER),
        ("leave", 1, Moment.BEFORE),
    ],
)
def test_no_task_is_lost_doubled_or_stuck_when_one_call_fails(verb, number, moment):
    scene = Scene(Failure(verb, number, moment, "connection"))
    scene.play()
    assert scene.stores.failed


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", CALLS)
def test_each_call_may_fail_in_each_way(verb, kind):
    """The names choose the moment and the acknowledgement: all four variants take too long."""
    variant = crc32(f"{verb} {kind}".encode())
    moment, acks_late = list(Moment)[variant % 2], variant // 2 % 2 == 1
    _play_each(verb, kind, moment, acks_late=acks_late)


@pytest.mark.long
@pytest.mark.parametrize("acks_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("moment", list(Moment), ids=[each.name.lower() for each in Moment])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", CALLS)
def test_each_call_may_fail_in_each_way_at_each_moment(verb, kind, moment, acks_late):
    _play_each(verb, kind, moment, acks_late=acks_late)


def _play_each(verb, kind, moment, *, acks_late):
    for number in range(1, CALLS[verb] + 1):
        Scene(Failure(verb, number, moment, kind), acks_late=acks_late).play()
