"""What happens to locks: frozen events, and who observes them.

The code that decides never logs, counts or sends: it tells an :class:`Observers`, and logs, metrics
and Celery events are made of that, each in one place. Seconds everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, TypeAlias

_log = logging.getLogger("celery_singleton_lock")


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """What all events about a task share; outside of tasks ``task`` and ``task_id`` are empty."""

    lock: str
    task: str = ""
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class TaskBlocked(TaskEvent):
    """The lock is busy. ``policy``: ``park`` or ``requeue``; ``rank``: 1 is next, 0 none."""

    policy: str = "park"
    holder: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class LeaseLost(TaskEvent):
    """The lock is no longer held, though its holder is not done. ``held``: for how long, s."""

    reason: str = ""
    held: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskDelivered(TaskEvent):
    """A parked task goes to a pool. ``verdict``: as in ``model.Delivery``; ``waited``: seconds."""

    verdict: str = "granted"
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskReplaced(TaskEvent):
    """A parked task made room for a later one. ``by``: id of that task; ``waited``: seconds."""

    by: str = ""
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskDuplicate(TaskEvent):
    """Another copy of an attempt. ``verdict``: ``twin`` is kept, ``done`` has ended quietly."""

    verdict: str = "twin"


@dataclass(frozen=True, slots=True)
class BackendDown:
    """The locks' Redis does not answer. ``url``: without credentials."""

    url: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BackendUp:
    """The locks' Redis answers again. ``down_for``: seconds for which it did not."""

    url: str
    down_for: float = 0.0


Event: TypeAlias = TaskEvent | BackendDown | BackendUp

CELERY_EVENTS: Final[dict[type[Event], str]] = {
    TaskBlocked: "task-blocked",
    LeaseLost: "task-lock-lost",
    TaskDelivered: "task-delivered",
    TaskReplaced: "task-replaced",
    TaskDuplicate: "task-duplicate",
}
"""Which events are sent as Celery events, and under which name."""

_STATES: Final[dict[type[Event], str]] = {TaskBlocked: "BLOCKED"}
"""Which of them carry ``state``. Only what comes before the body: Celery's ``State`` lets the field
overwrite SUCCESS, and without it leaves a finished task alone (5.7)."""


def celery_event(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the fields of the Celery event to send; None if it is not one.

    Args:
        event: what happened. The task's id becomes ``uuid``; its name is left out, since Celery
            knows it from ``task-received``.
    """
    name = CELERY_EVENTS.get(type(event))
    if name is None:
        return None
    fields = asdict(event)
    del fields["task"]
    fields["uuid"] = fields.pop("task_id")
    if type(event) in _STATES:
        fields["state"] = _STATES[type(event)]
    return name, fields


class Observer(Protocol):
    """Whoever wants to know. Called in the thread in which it happens: be quick."""

    def notify(self, event: Event) -> None:
        """Take note of an event."""
        ...


class Observers:
    """Tells many observers, whatever one of them does.

    Args:
        observers: in the order in which they are told.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        """Start with these observers."""
        self._observers = tuple(observers)

    def add(self, observer: Observer) -> None:
        """Tell this one too, from the next event on."""
        self._observers = (*self._observers, observer)

    def notify(self, event: Event) -> None:
        """Tell all. What an observer raises is logged: no lock is lost by a broken counter."""
        for observer in self._observers:
            try:
                observer.notify(event)
            except Exception:  # noqa: BLE001  # each observer on its own
                _log.exception("An observer of locks failed on %r", event)
