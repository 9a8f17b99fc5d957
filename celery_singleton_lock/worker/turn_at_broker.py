"""Limits how many greenlets acknowledge at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

ACKS_AT_ONCE: Final = 4
"""Most messages that greenlets acknowledge at once.

Kombu has ten connections to a Redis broker. If its consumer finds none, Celery reconnects, and the
message that the consumer has just taken is lost.
"""

_SEMAPHORES: Final = {"gevent": "gevent.lock", "eventlet": "eventlet.semaphore"}
"""Pool -> module of its semaphore. That of ``threading`` breaks if greenlets are killed in it."""


class TurnAtBroker:
    """Each call returns a context in which a greenlet may acknowledge.

    Args:
        pool: ``gevent`` or ``eventlet``.
    """

    def __init__(self, pool: str) -> None:
        self._permits: Any = import_module(_SEMAPHORES[pool]).BoundedSemaphore(ACKS_AT_ONCE)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Wait for a turn.

        A greenlet that is killed, or reaches its time limit, while it waits, acknowledges first.
        Otherwise its message would count as prefetched for as long as the connection lasts.
        """
        ended = self._wait()
        try:
            yield
        finally:
            self._permits.release()
            if ended is not None:
                raise ended

    def _wait(self) -> BaseException | None:
        """Return what has ended the greenlet meanwhile."""
        ended: BaseException | None = None
        while True:
            try:
                self._permits.acquire()
            except Exception:
                raise
            except BaseException as error:  # noqa: BLE001  # those of gevent and eventlet
                ended = ended or error
            else:
                return ended
