"""An agent whose rounds the test plays, with a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.worker.state import revoked

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.core.lock_mode import Modes
from celery_singleton_lock.events import Observers
from celery_singleton_lock.worker.agent.loop import (
    Agent,
)
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets
from celery_singleton_lock.worker.queue_stops import QueueStops
from support.agent_fakes import (
    CAPACITY,
    MAX_BODY,
    FakeDispatcher,
    FakeStore,
    Leases,
    ManualClock,
)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(clock):
    return FakeStore(clock)


@pytest.fixture
def dispatcher(clock):
    return FakeDispatcher(clock)


@pytest.fixture
def seen():
    """What observers, Celery's side and the publisher were given; whether the main loop turns."""
    return SimpleNamespace(
        events=[],
        received=[],
        published=[],
        refuse=None,
        still=False,
        later=[],
        forgotten=[],
        preempted=[],
    )


@pytest.fixture(autouse=True)
def none_revoked():
    """A worker in a thread of this process, in an earlier test, may have heard of some."""
    revoked.clear()


@pytest.fixture
def agent(clock, store, dispatcher, seen):
    """An agent without its threads: the tests call its rounds."""

    def send_back(body, queue, attempt, place, token):
        if seen.refuse:
            raise seen.refuse
        seen.published.append((attempt, queue))

    def post(call, *args):
        if seen.still:
            seen.later.append((call, args))
        else:
            call(*args)

    watchdog = Leases(clock, seen.forgotten)
    return Agent(
        store,
        worker="w#1",
        realm="r",
        place=ServerClock(clock),
        queues=SimpleNamespace(consumed=lambda: ["q"], queue_of=lambda request: "q"),
        declared=lambda: {"task"},
        rules=lambda task: LockOptions(),
        receive=seen.received.append,
        post=post,
        reap=lambda: None,
        abort=lambda _token: None,
        preempt=lambda token, by: seen.preempted.append((token, by)),
        end_unique=lambda task_ids: None,
        publisher=SimpleNamespace(send_back=send_back, close=lambda: None),
        watchdog=watchdog,
        partial_lock_sets=PartialLockSets(store, watchdog, "w#1", lambda name, token: None),
        modes=Modes({"task": "enforce"}),
        notifier=Notifier(Observers([SimpleNamespace(notify=seen.events.append)])),
        address="redis://localhost",
        done_for=60.0,
        again_after=60.0,
        max_body=MAX_BODY,
        capacity=CAPACITY,
        free=lambda: 2,
        stands_still=lambda: seen.still,
        commands=AgentQueue(clock),
        dispatcher=dispatcher,
        queue_stops=QueueStops(SimpleNamespace(hub=None), post),
        registered={"task", "plain"},
    )
