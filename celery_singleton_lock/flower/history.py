"""How long the last tasks of each lock waited and held it, from the events that Flower receives.

The data is in the memory of this process, and bounded. It begins when Flower starts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, Final

from celery_singleton_lock.flower.values import id_of

TASKS: Final = 60
"""Number of the last tasks of a lock whose times stay in memory."""

LOCKS: Final = 2000
"""Largest number of locks whose times stay in memory: those with the latest events."""

_FIELDS: Final = {"lock-acquired": "waited", "lock-released": "held"}
"""Type of an event -> its field with a duration in seconds."""

_ATTRIBUTE: Final = "_celery_singleton_lock_history"


class LockHistory:
    """The last durations of each lock."""

    def __init__(self) -> None:
        """Create an empty history."""
        self._mutex = threading.Lock()
        self._locks: OrderedDict[str, dict[str, deque[float]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._locks)

    def note(self, event: Mapping[str, Any]) -> None:
        """Remember the duration in an event. Any other event is ignored.

        Args:
            event: a Celery event, of any sender.
        """
        name = _FIELDS.get(str(event.get("type")))
        lock, duration = event.get("lock"), event.get(name or "")
        if not isinstance(lock, str) or not isinstance(duration, (int, float)):
            return
        lock_id = id_of(lock)
        with self._mutex:
            of_lock = self._locks.setdefault(lock_id, {})
            of_lock.setdefault(str(name), deque(maxlen=TASKS)).append(round(float(duration), 3))
            self._locks.move_to_end(lock_id)
            while len(self._locks) > LOCKS:
                self._locks.popitem(last=False)

    def of(self, lock_id: str) -> dict[str, list[float]]:
        """Return the durations of a lock in seconds, oldest first: ``waited`` and ``held``."""
        with self._mutex:
            found = self._locks.get(lock_id, {})
            return {name: list(found.get(name, ())) for name in _FIELDS.values()}


def history_of(events: Any) -> LockHistory:
    """Return the history of Flower's event receiver. The first call creates it."""
    found: LockHistory = vars(events).setdefault(_ATTRIBUTE, LockHistory())
    return found


def listen(receiver: Any) -> None:
    """Note the events that Flower's event receiver gets.

    Flower does not pass events of locks on, since Celery's ``State`` ignores them. So this extends
    the receiver's method.

    Args:
        receiver: Flower's class ``Events``.
    """
    given = receiver.on_event

    def on_event(self: Any, event: Mapping[str, Any]) -> Any:
        history_of(self).note(event)
        return given(self, event)

    receiver.on_event = on_event
