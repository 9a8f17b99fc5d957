"""Events of locks, and their observers.

The code that causes an event notifies :class:`Observers`. Observers write log lines, count metrics
and send Celery events.
Durations are in seconds.

Celery's ``State``, which Flower uses, reads the name of an unknown ``task-…`` event as the task's
new state, until a final one arrives. So only events that are a state of the task are named
``task-…``. Events about its lock may occur at any time. They are named ``lock-…``, which ``State``
ignores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Protocol, TypeAlias

_log = logging.getLogger("celery_singleton_lock")


def _field(default: Any, about: str, unit: str = "") -> Any:
    """Return a field of an event; docs/events.md prints ``about`` and ``unit``."""
    return field(default=default, metadata={"about": about, "unit": unit})


_WAITS_FOR: Final = (
    "why the lock was not granted: `holder`: all permits are held; `rate`: it has reached its "
    "rate; `pause`: an operator has paused it, or a task has closed it for a time; `redis`: its "
    "Redis was replaced or restarted, and grants nothing yet; `group`: its group holds as many "
    "permits as it may; `settling`: a later call may replace it; `following`: it waits for "
    "the result of the call that was sent before it; `queue`: others are next; "
    "`worker`: no live worker takes the task; empty: not known"
)


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Fields of all events about a task; outside of tasks ``task`` and ``task_id`` are empty."""

    lock: str = field(metadata={"about": "name of the lock", "unit": ""})
    task: str = _field("", "name of the task")
    task_id: str = _field("", "id of the task; `uuid` in Celery's event")


@dataclass(frozen=True, slots=True)
class TaskBlocked(TaskEvent):
    """The lock is busy: the task waits, or returns to the broker, and runs later."""

    policy: str = _field(
        "park",
        "`park`; `requeue` (its rank is not known then); `refused`: Redis refuses this lock, whose "
        "keys hold other data",
    )
    holder: str = _field("", "one of the holders of the lock: task, id and worker, or the client")
    rank: int = _field(0, "rank in the queue: 1 is next, 0 unknown")
    waits_for: str = _field("", _WAITS_FOR)


@dataclass(frozen=True, slots=True)
class TaskDelivered(TaskEvent):
    """A parked task goes to the pool of the worker that sends this event."""

    verdict: str = _field(
        "granted",
        "`granted`; or it ends there without running: `overdue`: its wait has timed out; "
        "`too_costly`: its start costs more than the rate of its lock; `above_rate`: it does not "
        "wait for the rate; or `following`: it follows a task that has ended",
    )
    waited: float = _field(0.0, "since it arrived at a worker", "s")


@dataclass(frozen=True, slots=True)
class CallNotSent(TaskEvent):
    """A call was not sent, since one like it was sent before; see `lock_unique`.

    Its sender notifies observers in its own process, and sends no Celery event.
    """

    of: str = _field("", "id of the task that was sent before")


@dataclass(frozen=True, slots=True)
class TaskFollowed(TaskEvent):
    """A duplicate has ended with the result of the first task, and did not run.

    See `lock_on_duplicate="follow"`.
    """

    of: str = _field("", "id of the first task")


@dataclass(frozen=True, slots=True)
class TaskReplaced(TaskEvent):
    """A later task replaced a parked one, which ends as REVOKED.

    See `lock_on_full="replace"`, `lock_debounce` and `lock_on_conflict="preempt"`.
    """

    by: str = _field("", "id of the later task")
    waited: float = _field(0.0, "since it arrived at a worker", "s")


@dataclass(frozen=True, slots=True)
class TaskPreempted(TaskEvent):
    """A running task must end, since a later call of it waits for its lock. It ends as REVOKED.

    See `lock_on_conflict="preempt"`.
    """

    by: str = _field("", "id of the later task")


@dataclass(frozen=True, slots=True)
class LockAcquired(TaskEvent):
    """A task has its lock, and starts. Sent right before `task-started`."""

    waited: float = _field(0.0, "since it arrived at a worker, for the lock and for a slot", "s")


@dataclass(frozen=True, slots=True)
class LockRefused(TaskEvent):
    """A task ends without having run; `policy` says why. Most often its lock is busy."""

    policy: str = _field(
        "fail",
        "`skip` or `fail`: its policy; `full`: the queue is full; `debounce`: a later task "
        "came before it had settled; `preempt`: a later task of its name waits or runs; "
        "`follow`: the task that it follows was revoked; "
        "`timeout`: its wait has timed out; `cost`: its start costs more than the rate of the "
        "lock; `returned`: it has returned too often; `undecodable`: its message cannot be read",
    )
    waits_for: str = _field("", _WAITS_FOR)


@dataclass(frozen=True, slots=True)
class LockReleased(TaskEvent):
    """A task has ended in any way, and its lock was released."""

    held: float = _field(0.0, "since it was acquired", "s")


@dataclass(frozen=True, slots=True)
class LockClosed(TaskEvent):
    """A task has closed its lock for a time (`RetryLater`, `self.lock.pause`)."""

    seconds: float = _field(0.0, "for how long nobody gets the lock", "s")
    why: str = _field("", "the reason, as readable text")


@dataclass(frozen=True, slots=True)
class LeaseLost(TaskEvent):
    """The lock is no longer held, and its task still runs."""

    reason: str = _field("", "why, as readable text")


@dataclass(frozen=True, slots=True)
class ParkedLost(TaskEvent):
    """A parked task was lost, because the locks' Redis has lost data. It does not run."""


@dataclass(frozen=True, slots=True)
class TaskDuplicate(TaskEvent):
    """A copy of an attempt that waits, runs or has ended. The task's state is unchanged."""

    verdict: str = _field(
        "twin",
        "`twin`: the copy is stored, or waits; `done`: the copy was dropped; `ended`: the copy was "
        "dropped because this worker has run the task, although Redis has no record of that",
    )


@dataclass(frozen=True, slots=True)
class LockAdmin:
    """An operator changed something, by a command, in Flower or through a worker."""

    lock: str = field(metadata={"about": "name of the lock, or a pattern", "unit": ""})
    action: str = _field("", "`release`, `terminate`, `drop`, `purge`, `drain`, `pause` …")
    count: int = _field(1, "number of tasks, or of changes")
    who: str = _field("", "login of the operator")
    host: str = _field("", "machine or address of the operator")
    via: str = _field("", "`cli`, `flower` or `control`")
    why: str = _field("", "reason that the operator gave")
    to: str = _field("", "the new limit or the new rates; empty: as declared, or nothing was set")
    seconds: float = _field(0.0, "for how long; 0: until it is ended", "s")


@dataclass(frozen=True, slots=True)
class BackendDown:
    """The locks' Redis does not answer this worker."""

    url: str = field(metadata={"about": "without credentials", "unit": ""})
    reason: str = _field("", "why, as readable text; may be empty")


@dataclass(frozen=True, slots=True)
class BackendUp:
    """The locks' Redis answers this worker again."""

    url: str = field(metadata={"about": "without credentials", "unit": ""})
    down_for: float = _field(0.0, "for how long it did not", "s")


@dataclass(frozen=True, slots=True)
class QueueStopped:
    """A worker stopped consuming a queue: `singleton_lock_max_parked` or `…_bytes` is reached."""

    queue: str = field(metadata={"about": "name of the queue", "unit": ""})
    parked: int = _field(0, "number of its messages that are parked")
    size: int = _field(0, "their size", "bytes")


@dataclass(frozen=True, slots=True)
class QueueResumed:
    """A worker consumes a queue again."""

    queue: str = field(metadata={"about": "name of the queue", "unit": ""})
    stopped_for: float = _field(0.0, "for how long it did not", "s")
    reason: str = _field(
        "below",
        "`below`: less than 90 % of the limit is parked; `operator`: an operator has added or "
        "cancelled the queue; `redis`: the locks' Redis does not answer",
    )


Event: TypeAlias = TaskEvent | BackendDown | BackendUp | LockAdmin | QueueStopped | QueueResumed

CELERY_EVENTS: Final[dict[type[Event], str]] = {
    TaskBlocked: "task-blocked",
    TaskDelivered: "task-delivered",
    TaskReplaced: "task-replaced",
    TaskPreempted: "task-preempted",
    TaskFollowed: "lock-followed",
    LockAcquired: "lock-acquired",
    LockRefused: "lock-refused",
    LockReleased: "lock-released",
    LockClosed: "lock-closed",
    LeaseLost: "lock-lost",
    ParkedLost: "lock-parked-lost",
    TaskDuplicate: "lock-duplicate",
    LockAdmin: "lock-admin",
    QueueStopped: "lock-queue-stopped",
    QueueResumed: "lock-queue-resumed",
}
"""Events that are sent as Celery events, and their names."""


def celery_event(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Return name and fields of the Celery event for an event; None if none is sent.

    No field is called ``state``. Celery's ``State`` would copy it into the task, so a late event of
    another worker would overwrite even SUCCESS. The name of a late event overwrites no final state.

    Args:
        event: the event. The task's id becomes ``uuid``. The task's name becomes ``name``, and is
            left out of ``task-…`` events, because ``State`` has it from ``task-received``.
    """
    name = CELERY_EVENTS.get(type(event))
    if name is None:
        return None
    sent = asdict(event)
    if not isinstance(event, TaskEvent):
        return name, sent
    sent["uuid"] = sent.pop("task_id")
    task = sent.pop("task")
    if not name.startswith("task-"):
        sent["name"] = task
    return name, sent


def log_keys(event: Event) -> dict[str, Any]:
    """Return an event as the ``extra`` of a log line. Its names are stable.

    Args:
        event: the event. ``lock_event`` is the name of its Celery event, or a similar one.
    """
    renamed = {"lock": "lock_name"}
    facts = {renamed.get(name, f"lock_{name}"): value for name, value in asdict(event).items()}
    return {"lock_event": _LOGGED[type(event)], **facts}


_LOGGED: Final[dict[type[Event], str]] = {
    **CELERY_EVENTS,
    CallNotSent: "lock-not-sent",
    BackendDown: "lock-backend-down",
    BackendUp: "lock-backend-up",
}


def fields_of(kind: type[Event]) -> list[tuple[str, str, str]]:
    """Return name, unit and meaning of each field of a type of events, for the docs."""
    return [(f.name, f.metadata["unit"], f.metadata["about"]) for f in fields(kind)]


class Observer(Protocol):
    """Receives events in the thread that causes them, so ``notify`` must return quickly."""

    def notify(self, event: Event) -> None:
        """Handle an event."""
        ...


class Listener:
    """Calls a function with the events of some types.

    Args:
        call: gets the event.
        kinds: types of events; subclasses are included.
    """

    def __init__(self, call: Callable[[Any], object], kinds: tuple[type[Event], ...]) -> None:
        self._call = call
        self._kinds = kinds

    def notify(self, event: Event) -> None:
        """Call the function if the event has one of the types."""
        if isinstance(event, self._kinds):
            self._call(event)


class Observers:
    """Notifies several observers; an error of one does not affect the others.

    Args:
        observers: the observers, in the order of notification.

    Attributes:
        any: whether there is one; without one, no events need to be created.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)
        self.any: bool = bool(self._observers)

    def add(self, observer: Observer) -> None:
        """Add an observer."""
        self._observers = (*self._observers, observer)
        self.any = True

    def remove(self, observer: Observer) -> None:
        """Remove an observer; an unknown one is ignored."""
        self._observers = tuple(each for each in self._observers if each is not observer)
        self.any = bool(self._observers)

    def notify(self, event: Event) -> None:
        """Notify all observers. Their errors are logged, and do not affect locks."""
        for observer in self._observers:
            try:
                observer.notify(event)
            except Exception:  # noqa: BLE001  # each observer on its own
                _log.exception("An observer of locks raised an error for %r", event)
