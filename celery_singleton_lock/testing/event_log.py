"""A log of the runs of an app's tasks in this process, and of the events of their locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from celery import signals
from celery.result import AsyncResult

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.events import (
    CallNotSent,
    LeaseLost,
    LockRefused,
    TaskBlocked,
    TaskDelivered,
    TaskDuplicate,
    TaskEvent,
    TaskFollowed,
    TaskReplaced,
)
from celery_singleton_lock.message_text import a_kind
from celery_singleton_lock.worker.execution.task_lock import current_lock
from celery_singleton_lock.worker.extension import Extension


@dataclass(eq=False)
class Run:
    """One run of a task's body.

    Args:
        task_id: id of the task.
        task: name of the task.
        lock: name of the lock that it should hold; empty if it is not a ``LockedTask``.
        held: whether it held that lock when it started.
        limit: number of permits of the lock.
        began: monotonic time of the start, in seconds.
        ended: monotonic time of the end; None while it runs.
        lost: whether it lost the lock while it ran.
    """

    task_id: str
    task: str
    lock: str
    held: bool
    limit: int
    began: float
    ended: float | None = None
    lost: bool = False

    def overlaps(self, other: Run) -> bool:
        """Return whether both ran at the same time."""
        mine, others = self.ended or float("inf"), other.ended or float("inf")
        return self.began < others and other.began < mine

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


class EventLog:
    """Records Celery's signals and the events of locks.

    Args:
        extension: the app's locks.

    Attributes:
        runs: the runs of tasks, in the order of their start.
        events: the events about tasks and their locks.
    """

    def __init__(self, extension: Extension) -> None:
        """Connect to the signals and events."""
        self.runs: list[Run] = []
        self.events: list[TaskEvent] = []
        self._lines: list[tuple[float, str, str]] = []
        self._extension = extension
        self._clock = SystemClock()
        self._open: dict[int, Run] = {}
        self._signals: Final[dict[Any, Callable[..., None]]] = {
            signals.task_received: self._received,
            signals.task_prerun: self._begins,
            signals.task_postrun: self._ends,
        }
        for signal, receiver in self._signals.items():
            signal.connect(receiver, weak=False)
        extension.observers.add(self)
        self._noted_before = extension.eager.noted
        extension.eager.noted = self._eager

    def close(self) -> None:
        """Disconnect."""
        for signal, receiver in self._signals.items():
            signal.disconnect(receiver)
        self._extension.observers.remove(self)
        self._extension.eager.noted = self._noted_before

    def forget(self) -> None:
        """Delete all records, also those of running tasks."""
        for kept in (self.runs, self.events, self._lines):
            kept.clear()

    # -- queries ----------------------------------------------------------------------------------

    def runs_of(self, task_id: str) -> list[Run]:
        """Return the runs of a task. A retried task has several."""
        return [run for run in self.runs if run.task_id == task_id]

    def runs_for(self, lock: str) -> list[Run]:
        """Return the runs that should have held a lock."""
        return [run for run in self.runs if run.lock == lock]

    def overlapping(self, run: Run) -> list[Run]:
        """Return the largest group of other runs for the same lock that overlapped at one time."""
        others = [
            other for other in self.runs_for(run.lock) if other is not run and run.overlaps(other)
        ]
        moments = [run.began, *(other.began for other in others if other.began >= run.began)]
        groups = [
            [o for o in others if o.began <= at and (o.ended is None or o.ended > at)]
            for at in moments
        ]
        return max(groups, key=len)

    def refusals(self, task_id: str) -> list[LockRefused]:
        """Return the ``LockRefused`` events of a task."""
        return [e for e in self.events if isinstance(e, LockRefused) and e.task_id == task_id]

    def history(self, task_id: str) -> str:
        """Return what happened to a task, one line for each step."""
        entries = [(at, sentence) for at, whose, sentence in self._lines if whose == task_id]
        lines = [f"  {at - entries[0][0]:+7.3f} s: {sentence}" for at, sentence in entries]
        return "\n".join(lines or ["  No worker in this process has received it."])

    def follows(self, task_id: str) -> bool:
        """Return whether a task was last sent to the pool to end with the result of another one."""
        sent = [e for e in self.events if isinstance(e, TaskDelivered) and e.task_id == task_id]
        return bool(sent) and sent[-1].verdict == "following"

    # -- recording --------------------------------------------------------------------------------

    def notify(self, event: Any) -> None:
        """Record an event of a lock."""
        if isinstance(event, TaskEvent):
            self.events.append(event)
            sentence = _SENTENCES.get(type(event))
            if isinstance(event, TaskBlocked) and not event.holder:
                sentence = _NO_HOLDER.get(event.waits_for, _BLOCKED_BY_NOBODY)
            if sentence is not None:
                self._add_line(event.task_id, sentence.format_map(asdict(event)))

    def _received(self, request: Any = None, **_: Any) -> None:
        if request is not None and request.app is self._extension.app:
            self._add_line(request.id, "a worker received it")

    def _begins(self, sender: Any = None, **_: Any) -> None:
        if sender.app is not self._extension.app or self._is_noted(sender):
            return
        request = sender.request
        run = self._begin(sender, self._lock_of(sender, request.args, request.kwargs))
        self._open[id(request)] = run

    def _ends(self, sender: Any = None, state: Any = None, **_: Any) -> None:
        run = self._open.pop(id(sender.request), None)
        if run is not None:
            self._end(run, str(state))

    @contextmanager
    def _eager(self, task: Any, name: str) -> Iterator[None]:
        run = self._begin(task, name)
        try:
            yield
        finally:
            self._end(run, "its body")

    def _is_noted(self, task: Any) -> bool:
        """Return whether :meth:`_eager` records this run, after the lock was acquired."""
        locked = task.name in self._extension.declared()
        return bool(locked and task.request.is_eager and self._extension.locks_eager(task))

    def _begin(self, task: Any, name: str) -> Run:
        lock, limit = current_lock(), 1
        if task.name in self._extension.declared():
            limit = self._extension.options(task).limit
        held = bool(lock.name) and lock.held
        run = Run(task.request.id, task.name, name, held, limit, self._clock.monotonic())
        self.runs.append(run)
        shown = f"under the lock {name!r}" if held else "without a lock"
        self._add_line(run.task_id, f"it started {shown}")
        return run

    def _end(self, run: Run, state: str) -> None:
        run.lost = run.held and not current_lock().held
        run.ended = self._clock.monotonic()
        lost = ", without the lock, which it had lost" if run.lost else ""
        self._add_line(run.task_id, f"it ended{lost} ({state})")

    def _lock_of(self, task: Any, args: Any, kwargs: Any) -> str:
        if task.name not in self._extension.declared():
            return ""
        try:
            return self._extension.name_of(task, args or (), kwargs or {})
        except Exception:  # noqa: BLE001  # the task has no lock name, and fails with this error
            return ""

    def _add_line(self, task_id: str, sentence: str) -> None:
        self._lines.append((self._clock.monotonic(), task_id, sentence))


_BLOCKED_BY_NOBODY: Final = (
    "it was blocked ({policy}): the lock {lock!r} waits for the {waits_for}; it had rank {rank}"
)
_NO_HOLDER: Final = {
    "settling": "it settled before it queued for the lock {lock!r} (lock_debounce)",
    "following": "it waited for the result of the call that was sent before it",
    "": "it was parked for the lock {lock!r}, which had just become free",
}
"""Sentences for a blocked task that waits for something else than the lock, by ``waits_for``."""

_SENTENCES: Final[dict[type[TaskEvent], str]] = {
    TaskBlocked: "it was blocked ({policy}): {holder} held the lock {lock!r}; it had rank {rank}",
    TaskDelivered: "it was delivered to the pool ({verdict}), after {waited:.3f} s",
    TaskFollowed: "it ended with the result of {of}, and did not run",
    TaskReplaced: "{by} replaced it in the queue",
    CallNotSent: "it was not sent, since {of} was",
    LockRefused: "it was refused the lock {lock!r} and did not run ({policy})",
    LeaseLost: "it lost the lock {lock!r}: {reason}",
    TaskDuplicate: "a duplicate of it was delivered ({verdict})",
}
"""Sentences for events. Other events need none: the runs show them."""


def id_of(result: Any) -> str:
    """Return the id of a task, given its result or the id itself.

    Raises:
        TypeError: ``result`` is neither a result nor a text.
    """
    found = result if isinstance(result, str) else getattr(result, "id", None)
    if not isinstance(found, str):
        msg = f"give what delay() or apply() returned, or a task's id as text, not {a_kind(result)}"
        raise TypeError(msg)
    return found


def state_of(app: Any, result: Any) -> str:
    """Return a task's state and result in the result backend, or why they are not known."""
    found = AsyncResult(result, app=app) if isinstance(result, str) else result
    try:
        return f"{found.state}: {found.result}" if found.result is not None else str(found.state)
    except (AttributeError, NotImplementedError):  # the disabled backend has none
        return "unknown: the app has no result backend"
