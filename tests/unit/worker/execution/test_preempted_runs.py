"""A run that a newer call preempts, in the process that runs it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from celery import Celery, states
from celery.app.trace import build_tracer, trace_ok_t
from celery.exceptions import Reject
from celery.signals import task_prerun

from celery_singleton_lock import LockPreempted
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.model import Ending, Preempted, Reply, Verdict
from celery_singleton_lock.errors import LockLost
from celery_singleton_lock.worker.execution import interrupt, tracer
from celery_singleton_lock.worker.execution.celery_outcome import Run
from celery_singleton_lock.worker.execution.interrupt import Interrupts, LostTokens
from celery_singleton_lock.worker.execution.task_lock import TaskLock, current_lock, entered
from celery_singleton_lock.worker.execution.tracer import LockTracer
from celery_singleton_lock.worker.lock_header import LockHeader

HEADER = LockHeader("k", "t.0", "id/0/0", "task", "w")
OPTIONS = LockOptions(on_conflict="preempt")


class Store:
    """Grants, and answers renewals as told."""

    clock = SystemClock()

    def __init__(self, renewal=True):
        self.renewal, self.endings = renewal, []

    def acquire(self, *_, **__):
        return Reply(Verdict.GRANTED, 1, 30.0)

    def extend(self, leases):
        return [self.renewal for _ in leases]

    def release(self, _name, _token, ending, **_):
        self.endings.append(ending)
        return Reply(Verdict.RELEASED)


@pytest.fixture
def play(monkeypatch):
    """Run a body under its lock; return what is stored as REVOKED, and how the lock is released."""

    def play(body, tokens, store=None):
        store, revoked = store or Store(), []
        monkeypatch.setattr(tracer, "mark_skipped", lambda _run, reason: revoked.append(reason))
        interrupts = Interrupts(tokens)
        lock_tracer = LockTracer(
            lambda: store, lambda _: None, 3600.0, lambda *_: "k", lambda: interrupts
        )

        def trace(*_):
            return trace_ok_t(body(), None, 0.1, None)

        outcome = lock_tracer.trace(Run(None, trace, "id", (), {}, {}), HEADER, OPTIONS)
        return outcome, revoked, store.endings

    return play


def test_a_call_that_is_preempted_before_its_body_does_not_run(play):
    """The signal may come before the lock is the current one."""
    tokens, ran = LostTokens(), []
    tokens.note("t.0", "newer/0/0")
    outcome, revoked, endings = play(lambda: ran.append(1), tokens)
    assert (outcome.info.state, ran, endings) == (states.IGNORED, [], [Ending.FINAL])
    assert "Task newer is newer" in revoked[0]


def test_a_body_that_raises_it_ends_as_revoked_and_releases_its_lock(play):
    tokens = LostTokens()

    def body():
        assert not current_lock().preempted
        tokens.note("t.0", "newer/0/0")
        assert current_lock().preempted
        current_lock().ensure_held()

    outcome, revoked, endings = play(body, tokens)
    assert isinstance(outcome.info.retval, LockPreempted)
    assert (len(revoked), endings) == (1, [Ending.FINAL])


def test_a_run_that_is_interrupted_in_celerys_tracer_ends_as_revoked(play, monkeypatch):
    """Celery then reports an internal error, and has stored no result."""
    error = LockPreempted("gone", "k", "newer")

    def traced(*_):
        return trace_ok_t(SimpleNamespace(exception=error), None, 0.1, None)

    outcome, revoked, _ = play(lambda: traced().retval, LostTokens())
    assert (outcome.info.retval, revoked) == (error, ["gone"])


def test_a_run_that_is_interrupted_while_it_sends_its_retry_ends_as_revoked(play):
    """Celery's retry() turns each error of its publish into a Reject: it ended as FAILURE."""
    error = LockPreempted("gone", "k", "newer")
    rejected = SimpleNamespace(exception=Reject(error, requeue=False))
    outcome, revoked, _ = play(lambda: rejected, LostTokens())
    assert (outcome.info.retval, revoked) == (error, ["gone"])


def test_a_body_that_returns_although_it_was_preempted_has_its_result(play):
    tokens = LostTokens()
    outcome, revoked, endings = play(lambda: tokens.note("t.0", "newer/0/0") or 42, tokens)
    assert (outcome.retval, outcome.info, revoked, endings) == (42, None, [], [Ending.FINAL])


def test_a_renewal_tells_a_run_whose_notice_was_lost(play):
    def body():
        current_lock().ensure_held()

    outcome, revoked, _ = play(body, LostTokens(), Store(Preempted("newer/0/0")))
    assert isinstance(outcome.info.retval, LockPreempted)
    assert len(revoked) == 1


def lock(store=None, **options):
    reply = Reply(Verdict.GRANTED, 1, 30.0)
    until = SystemClock().monotonic() + 30.0
    return TaskLock(store or Store(), HEADER, reply, 30.0, until, **options)


def test_the_signal_interrupts_once_and_only_the_run_with_the_token(monkeypatch):
    monkeypatch.setattr(interrupt, "_runs_body", lambda frame: frame is None)
    tokens = LostTokens()
    interrupts = Interrupts(tokens, signals=True)
    tokens.note("other.0", "newer/0/0")
    own = lock()
    with entered(own):
        interrupts._on_signal(12, None)
        tokens.note("t.0", "newer/0/0")
        with pytest.raises(LockPreempted) as caught:
            interrupts._on_signal(12, None)
        interrupts._on_signal(12, None)
        interrupts._on_signal(12, "elsewhere")
        assert (caught.value.by, own.preempted) == ("newer", True)
        tokens.note("t.0")
        with pytest.raises(LockLost):
            interrupts._on_signal(12, None)


@pytest.mark.parametrize("where", ["body", "retried", "signal", "hook", "deletion"])
def test_only_the_body_of_a_task_is_interrupted(where):
    """Celery's code around it would store a second end, and send the next task of a chain.

    While an object is deleted, Python ignores exceptions: the task would run on until it is killed.
    """
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    seen = {}

    def look():
        seen[where] = interrupt._runs_body(sys._getframe())

    class Deleted:
        def __del__(self):
            look()

    class Hooked(app.Task):
        def before_start(self, *_):
            look()

    @app.task(
        shared=False,
        base=Hooked if where == "hook" else app.Task,
        autoretry_for=(KeyError,) if where == "retried" else (),
    )
    def run():
        if where in ("body", "retried"):
            look()
        elif where == "deletion":
            Deleted()

    app.finalize()
    if where == "signal":
        task_prerun.connect(lambda **_: look(), sender=run, weak=False)
    trace = build_tracer(run.name, run, app=app)
    trace("id", (), {}, {"id": "id"})
    assert seen == {where: where in ("body", "retried")}


def test_memory_holds_the_last_tokens_and_the_task_of_each_child(monkeypatch):
    tokens = LostTokens()
    for number in range(65):
        tokens.note(f"t{number}.0", f"newer{number}/0/0")
    assert (tokens.preempted_by("t0.0"), tokens.preempted_by("t64.0")) == ("", "newer64/0/0")
    assert tokens.preempted_by("t6.0") == "newer6/0/0"
    monkeypatch.setattr(interrupt.os, "getpid", lambda: 7)
    tokens.show_task(3, "t.0")
    tokens.show_task(512, "none.0")
    assert tokens.runs(7, "t.0")
    assert not any(tokens.runs(*each) for each in ((7, "t.1"), (8, "t.0"), (7, "none.0")))
    tokens.show_task(3, "")
    assert not tokens.runs(7, "t.0")


def test_a_child_shows_its_task_only_while_the_body_may_run(monkeypatch):
    tokens = LostTokens()
    interrupts = Interrupts(tokens, signals=True)
    monkeypatch.setattr(interrupt, "current_process", lambda: SimpleNamespace(index=1))
    pid = interrupt.os.getpid()
    with interrupts.showing("t.0"):
        assert tokens.runs(pid, "t.0")
    assert not tokens.runs(pid, "t.0")
    with Interrupts(tokens).showing("t.0"):
        assert not tokens.runs(pid, "t.0")
