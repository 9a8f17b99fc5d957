"""Receive the events of workers, as Flower does."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from support.waiting import eventually

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Self


class EventLog:
    """Records the events that workers with ``-E`` send.

    Args:
        app: an app with the same broker.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._receiver: Any = None
        self._received = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self.seen: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(self._is_subscribed, 20, "an event arrives")
        return self

    def __exit__(self, *_: object) -> None:
        if self._receiver is not None:
            self._receiver.should_stop = True
        self._thread.join(10)

    def _is_subscribed(self) -> bool:
        """Ask workers for a heartbeat event: a subscription takes effect after some time."""
        self._app.control.broadcast("heartbeat")
        return self._received.wait(0.2)

    def of(self, task_id: str) -> list[str]:
        """Return the types of a task's events, in order."""
        return [event["type"] for event in self.seen if event.get("uuid") == task_id]

    def counts(self, task_id: str) -> dict[str, int]:
        """Return how many events of each type a task has."""
        return dict(Counter(self.of(task_id)))

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self._note})
            self._receiver = receiver
            for _ in receiver.consume(limit=None, safety_interval=0.2, wakeup=False):
                pass

    def _note(self, event: dict[str, Any]) -> None:
        self.seen.append(event)
        self._received.set()
