"""What happens to locks: frozen events, and who observes them.

The code that decides never logs, counts or sends: it tells an :class:`Observers`, and logs, metrics
and Celery events are made of that, each in one place. Seconds everywhere.

Celery's ``State``, of which Flower is made, takes the name of an unknown ``task-…`` event for the
task's new state, until a final one comes. So an event that is a state of the task has such a name.
One that tells of its lock beside that, and may come at any time, is a ``lock-…`` one, of which
``State`` makes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Protocol, TypeAlias

_log = logging.getLogger("celery_singleton_lock")


def _told(default: Any, about: str, unit: str = "") -> Any:
    """Return a field of an event, with what the table in docs/events.md says of it."""
    return field(default=default, metadata={"about": about, "unit": unit})


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """What all events about a task share; outside of tasks ``task`` and ``task_id`` are empty."""

    lock: str = field(metadata={"about": "name of the lock", "unit": ""})
    task: str = _told("", "name of the task")
    task_id: str = _told("", "id of the task; `uuid` in Celery's event")


@dataclass(frozen=True, slots=True)
class TaskBlocked(TaskEvent):
    """The lock is busy: the task is kept, or goes back to the broker, and runs later."""

    policy: str = _told("park", "`park`, or `requeue` (its rank is not known then)")
    holder: str = _told("", "one of those who hold the lock: task, id and worker, or the client")
    rank: int = _told(0, "place in the queue: 1 is next, 0 unknown")


@dataclass(frozen=True, slots=True)
class TaskDelivered(TaskEvent):
    """A parked task goes to the pool of the worker that tells this."""

    verdict: str = _told(
        "granted", "`granted`; or `overdue`: it goes there to fail, since its wait is over"
    )
    waited: float = _told(0.0, "since it arrived at a worker", "s")


@dataclass(frozen=True, slots=True)
class TaskReplaced(TaskEvent):
    """A parked task made room for a later one (`lock_on_full="replace"`); it ends as REVOKED."""

    by: str = _told("", "id of the later task")
    waited: float = _told(0.0, "since it arrived at a worker", "s")


@dataclass(frozen=True, slots=True)
class LockAcquired(TaskEvent):
    """A task has its lock, and starts. Sent right before `task-started`."""

    waited: float = _told(0.0, "since it arrived at a worker: for the lock, and for a slot", "s")


@dataclass(frozen=True, slots=True)
class LockRefused(TaskEvent):
    """A task did not get its lock, and ends without having run."""

    policy: str = _told(
        "fail",
        "`skip` or `fail`, as it declares; `full`: no room to wait; `timeout`: its wait is over; "
        "`returned`: it has come back too often; `undecodable`: its message cannot be read",
    )


@dataclass(frozen=True, slots=True)
class LockReleased(TaskEvent):
    """A task has ended, however, and its lock was given back."""

    held: float = _told(0.0, "since it was acquired", "s")


@dataclass(frozen=True, slots=True)
class LeaseLost(TaskEvent):
    """The lock is no longer held, though its task is not done."""

    reason: str = _told("", "why, for people")


@dataclass(frozen=True, slots=True)
class ParkedLost(TaskEvent):
    """A parked task is gone, since the locks' Redis has lost data. It does not run."""


@dataclass(frozen=True, slots=True)
class TaskDuplicate(TaskEvent):
    """Another copy of an attempt that is here, or has ended. The task's own state is unchanged."""

    verdict: str = _told(
        "twin",
        "`twin`: it is kept, or waits; `done`: it was dropped quietly; `ended`: it has run here, "
        "and Redis has lost its end, so it was dropped",
    )


@dataclass(frozen=True, slots=True)
class LockAdmin:
    """An operator stepped in. Told by what they did it with: the command, Flower, a worker."""

    lock: str = field(metadata={"about": "name of the lock, or what was meant", "unit": ""})
    action: str = _told("", "`release`, `terminate`, `drop`, `purge`, `drain`, `pause` …")
    count: int = _told(1, "how many tasks, or times")
    who: str = _told("", "login of the operator")
    host: str = _told("", "their machine, or address")
    via: str = _told("", "`cli`, `flower` or `control`")
    why: str = _told("", "reason that they gave")


@dataclass(frozen=True, slots=True)
class BackendDown:
    """The locks' Redis does not answer this worker."""

    url: str = field(metadata={"about": "without credentials", "unit": ""})
    reason: str = _told("", "why, for people; may be empty")


@dataclass(frozen=True, slots=True)
class BackendUp:
    """The locks' Redis answers this worker again."""

    url: str = field(metadata={"about": "without credentials", "unit": ""})
    down_for: float = _told(0.0, "for how long it did not", "s")


Event: TypeAlias = TaskEvent | BackendDown | BackendUp | LockAdmin

CELERY_EVENTS: Final[dict[type[Event], str]] = {
    TaskBlocked: "task-blocked",
    TaskDelivered: "task-delivered",
    TaskReplaced: "task-replaced",
    LockAcquired: "lock-acquired",
    LockRefused: "lock-refused",
    LockReleased: "lock-released",
    LeaseLost: "lock-lost",
    ParkedLost: "lock-parked-lost",
    TaskDuplicate: "lock-duplicate",
    LockAdmin: "lock-admin",
}
"""Which events are sent as Celery events, and under which name."""


def celery_event(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the fields of the Celery event to send; None if it is not one.

    None has a field ``state``: ``State`` lets that overwrite even SUCCESS, where an event of
    another worker comes late. The name alone does what is wanted (see above), and spares SUCCESS.

    Args:
        event: what happened. The task's id becomes ``uuid``. The task's name is left out where
            Celery's ``State`` knows it, from ``task-received``; else it is ``name``, as there.
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
    """Return an event as the ``extra`` of a log line: stable names, none of logging's own.

    Args:
        event: what happened. ``lock_event`` is the name of its Celery event, or one like it.
    """
    renamed = {"lock": "lock_name"}
    facts = {renamed.get(name, f"lock_{name}"): value for name, value in asdict(event).items()}
    return {"lock_event": _LOGGED[type(event)], **facts}


_LOGGED: Final[dict[type[Event], str]] = {
    **CELERY_EVENTS,
    BackendDown: "lock-backend-down",
    BackendUp: "lock-backend-up",
}


def fields_of(kind: type[Event]) -> list[tuple[str, str, str]]:
    """Return name, unit and meaning of each field of a type of events, for the docs."""
    return [(f.name, f.metadata["unit"], f.metadata["about"]) for f in fields(kind)]


class Observer(Protocol):
    """Whoever wants to know. Called in the thread in which it happens: be quick."""

    def notify(self, event: Event) -> None:
        """Take note of an event."""
        ...


class Listener:
    """Calls a function with the events of some types.

    Args:
        call: takes the event.
        kinds: types; all that are derived from one count as well.
    """

    def __init__(self, call: Callable[[Any], object], kinds: tuple[type[Event], ...]) -> None:
        """Keep both."""
        self._call = call
        self._kinds = kinds

    def notify(self, event: Event) -> None:
        """Pass the event on, if it is one of these."""
        if isinstance(event, self._kinds):
            self._call(event)


class Observers:
    """Tells many observers, whatever one of them does.

    Args:
        observers: in the order in which they are told.

    Attributes:
        any: whether anybody wants to know: an event of each task need not be made else.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        """Start with these observers."""
        self._observers = tuple(observers)
        self.any = bool(self._observers)

    def add(self, observer: Observer) -> None:
        """Tell this one too, from the next event on."""
        self._observers = (*self._observers, observer)
        self.any = True

    def remove(self, observer: Observer) -> None:
        """Tell this one no more; one that is not there is ignored."""
        self._observers = tuple(each for each in self._observers if each is not observer)
        self.any = bool(self._observers)

    def notify(self, event: Event) -> None:
        """Tell all. What an observer raises is logged: no lock is lost by a broken counter."""
        for observer in self._observers:
            try:
                observer.notify(event)
            except Exception:  # noqa: BLE001  # each observer on its own
                _log.exception("An observer of locks failed on %r", event)
