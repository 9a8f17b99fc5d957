"""A process that ends, or is interrupted, while it asks for a lock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock.config.limits import NO_LIMIT
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Ending, Reply, Verdict
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.worker.execution.celery_outcome import Run
from celery_singleton_lock.worker.execution.interrupt import Interrupts
from celery_singleton_lock.worker.execution.multi_lock_tracer import MultiLockTracer
from celery_singleton_lock.worker.execution.tracer import LockTracer
from celery_singleton_lock.worker.lock_header import LockHeader, singles


class InterruptedStore:
    """Raises when it is asked for a lock, and notes how locks are released."""

    clock = SystemClock()

    def __init__(self, error):
        self.error, self.endings = error, set()

    def acquire(self, owner, claim, **_):
        if claim.name == "a":
            raise self.error
        return Reply(Verdict.GRANTED, 1, 30.0)

    def claim(self, *_, **__):
        raise self.error

    def release(self, _name, _token, ending, **_):
        self.endings.add(ending)
        return Reply(Verdict.RELEASED)


ONE = LockHeader("a", "ta.0", "id/0/0", "task", "w", granted=True)
TWO = ONE._replace(lock_set=LockSet((Part("a", "ta.0"), Part("b", "0b0b0b0b.0"))))


@pytest.fixture(params=[ONE, TWO], ids=["one lock", "two locks"])
def enter(request):
    """A function that has an interrupted process enter the locks of a task."""

    def call(store, *, parked=True):
        tracer = LockTracer(lambda: store, print, 3600.0, lambda *_: "a", Interrupts)
        tracer.multi_lock_tracer = MultiLockTracer(tracer, lambda: store, print, 3600.0)
        run = Run(None, None, "id", (), {}, {})
        return tracer.trace(run, request.param._replace(granted=parked), LockOptions())

    return call


def test_a_parked_task_is_not_lost_with_a_process_that_is_ended_while_it_claims(enter):
    """SIGTERM in a child: the main process releases, since it knows whether the task runs again."""
    store = InterruptedStore(SystemExit(1))
    with pytest.raises(SystemExit):
        enter(store)
    assert store.endings == set()


def test_a_message_of_the_broker_may_run_again_if_its_process_is_ended_while_it_asks(enter):
    """SIGTERM in a child: its end is not remembered, and nobody waits for its lock."""
    store = InterruptedStore(SystemExit(1))
    with pytest.raises(SystemExit):
        enter(store, parked=False)
    assert store.endings == {Ending.AGAIN}


def test_a_task_that_is_interrupted_while_it_claims_gives_its_lock_back(enter, monkeypatch):
    """Its soft time limit: it fails."""
    failed = []
    monkeypatch.setattr(
        "celery_singleton_lock.worker.execution.tracer.fail", lambda _, error: failed.append(error)
    )
    store = InterruptedStore(SoftTimeLimitExceeded())
    enter(store)
    assert (failed, store.endings) == ([store.error], {Ending.FINAL})


def held(header):
    """Return the locks of a task that runs."""
    locks = [SimpleNamespace(name=one.name, expires_in=9.0, rates=()) for one in singles(header)]
    return SimpleNamespace(locks=locks, expires_in=9.0, rates=())


@pytest.mark.parametrize("header", [ONE, TWO], ids=["one lock", "two locks"])
def test_a_lock_counts_as_left_from_the_start_of_its_release(header):
    """The watchdog may find it free before the answer comes."""
    left = []

    class Store(InterruptedStore):
        def release(self, _name, token, *_, **__):
            left.append((token, tracer.has_left(token)))
            return Reply(Verdict.RELEASED)

    tracer = LockTracer(lambda: Store(None), print, 3600.0, lambda *_: "a", Interrupts)
    tracer.multi_lock_tracer = MultiLockTracer(tracer, lambda: Store(None), print, 3600.0)
    tokens = [each.token for each in singles(header)]
    tracer.leave(header, Ending.AGAIN)
    assert not any(map(tracer.has_left, tokens)), "it has not run, and may ask for them again"
    left.clear()
    tracer.leave(header, Ending.FINAL, held(header))
    assert sorted(left) == sorted((token, True) for token in tokens)


class LimitStore(InterruptedStore):
    """Grants with a limit of 3, and lowers it if a claim declares less."""

    def __init__(self):
        super().__init__(None)
        self.limit = 3

    def claim(self, *_, limit=0, **__):
        self.limit = min(self.limit, limit or self.limit)
        return Reply(Verdict.GRANTED, 1, 30.0, limit=self.limit)


@pytest.mark.parametrize(
    ("name", "declared", "limit"),
    [("a", 1, 1), ("a", 3, 3), ("a", NO_LIMIT, 3), ("renamed", 1, 3)],
    ids=["lower", "the same", "higher", "of another lock"],
)
def test_a_declaration_that_was_lowered_since_holds_for_a_parked_task(name, declared, limit):
    """Not if the lock of its message has a name that the task does not use any more."""
    store = LimitStore()
    tracer = LockTracer(lambda: store, print, 3600.0, lambda *_: name, Interrupts)
    run = Run(None, lambda *_: "ran", "id", (), {}, {})
    tracer._take(run, ONE, LockOptions(limit=declared))
    assert store.limit == limit


def test_two_threads_that_start_such_tasks_at_once_warn_of_nothing(caplog):
    """The second one was granted before the first one had lowered the limit."""

    class Late(LimitStore):
        def claim(self, *args, limit=0, **how):
            reply = super().claim(*args, limit=limit, **how)
            return reply if limit else reply._replace(limit=3)

    store = Late()
    tracer = LockTracer(lambda: store, print, 3600.0, lambda *_: "a", Interrupts)
    for _ in range(2):
        tracer._take(Run(None, None, "id", (), {}, {}), ONE, LockOptions(limit=1))
    assert caplog.text == ""


def test_a_limit_that_an_operator_has_set_is_asked_for_once(caplog):
    asked = []

    class Ruled(LimitStore):
        def claim(self, *_, limit=0, **__):
            asked.append(limit)
            return Reply(Verdict.GRANTED, 1, 30.0, limit=3)

    tracer = LockTracer(Ruled, print, 3600.0, lambda *_: "a", Interrupts)
    for _ in range(3):
        tracer._take(Run(None, None, "id", (), {}, {}), ONE, LockOptions(limit=1))
    assert asked == [0, 1, 0, 0]
    assert caplog.text.count("an operator has set it") == 1


def test_a_task_that_was_granted_runs_under_its_lock_although_its_limit_was_not_heard():
    """Redis answered its claim, and was away a moment later."""

    class Silent(LimitStore):
        def claim(self, *args, limit=0, **how):
            if limit:
                raise BackendUnreachable
            return super().claim(*args, **how)

    tracer = LockTracer(Silent, print, 3600.0, lambda *_: "a", Interrupts)
    taken = tracer._take(Run(None, None, "id", (), {}, {}), ONE, LockOptions(limit=1))
    assert taken.token == ONE.token


def test_a_name_that_cannot_be_computed_lowers_no_limit():
    def name_of(*_):
        raise KeyError("tenant")

    store = LimitStore()
    tracer = LockTracer(lambda: store, print, 3600.0, name_of, Interrupts)
    tracer._take(Run(None, None, "id", (), {}, {}), ONE, LockOptions(limit=1))
    assert store.limit == 3


@pytest.mark.parametrize(
    ("declared", "in_force", "told"),
    [
        (NO_LIMIT, 1, "declares lock_limit=None, but 1 is in force for lock 'a': an operator has"),
        (3, 1, "an operator has set it, or a task has declared less"),
        (1, 3, "an operator has set it, or the task was parked before its declaration was changed"),
        (1, NO_LIMIT, "but no limit is in force for lock 'a'"),
    ],
    ids=["unlimited", "lower", "higher", "none"],
)
def test_the_warning_of_another_limit_says_why_it_is_in_force(caplog, declared, in_force, told):
    tracer = LockTracer(lambda: None, print, 3600.0, lambda *_: "a", Interrupts)
    reply = Reply(Verdict.GRANTED, 1, 30.0, limit=in_force)
    tracer.warn_of_limit(ONE, LockOptions(limit=declared), reply)
    assert told in caplog.text
