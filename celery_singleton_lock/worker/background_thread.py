"""Background threads of a worker. They survive errors, and report when their last round began."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from celery_singleton_lock.core.clock import SystemClock

logger: Final = logging.getLogger(__name__)

PAUSE: Final = 0.5
"""Seconds from an error to the next round, so that a lasting error does not fill the log."""


def _nothing() -> None:
    pass


class BackgroundThread:
    """A daemon thread that calls a function in a loop.

    After an error it logs the error and continues. If the thread dies nevertheless, the next
    :meth:`start` restarts it.

    Args:
        name: name of the thread.
        one_round: called in each round; returns whether another round follows.
        at_end: called once after the last round.
    """

    def __init__(
        self,
        name: str,
        one_round: Callable[[], bool],
        at_end: Callable[[], None] = _nothing,
    ) -> None:
        self.name: Final = name
        self.restarts: int = 0
        self.errors: int = 0
        self._one_round = one_round
        self._at_end = at_end
        self._clock = SystemClock()
        self._mutex = threading.Lock()
        self._hurried = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._idle = False
        self._ended = False

    def start(self) -> None:
        """Start the thread, or restart it if it has died. Has no effect if it runs or has ended.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._mutex:
            if self._ended or self.is_alive():
                return
            if self._thread is not None:
                self.restarts += 1
                logger.error(
                    "celery-singleton-lock: the thread %s has died; a new one is started", self.name
                )
            self._began, self._idle = self._clock.monotonic(), False
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def was_started(self) -> bool:
        """Return whether :meth:`start` was called. The thread may have ended since."""
        return self._thread is not None

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def is_current(self) -> bool:
        """Return whether the caller runs in this thread."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the end of the thread. The caller requests the end."""
        self._hurried.set()
        thread = self._thread
        if (
            thread is not None and thread.is_alive()
        ):  # one that could not be started cannot be joined
            thread.join(timeout)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Mark the time in which a round only waits for work."""
        self._idle = True
        try:
            yield
        finally:
            self._began, self._idle = self._clock.monotonic(), False

    def last_round(self) -> float | None:
        """Return the seconds since the last round began; None if it waits for work, or has ended.

        If the number grows, the thread hangs, or has died.
        """
        waits = self._idle and self.is_alive()
        if self._thread is None or self._ended or waits:
            return None
        return self._clock.monotonic() - self._began

    def _run(self) -> None:
        while self._safely(self._one_round):
            self._began = self._clock.monotonic()
        self._ended = True
        self._safely(self._at_end)

    def _safely(self, call: Callable[[], Any]) -> bool:
        """Return the result of ``call`` as a bool. On an error, log it, pause, and return True."""
        try:
            return bool(call())
        except (Exception, SystemExit):
            self.errors += 1
            logger.exception("celery-singleton-lock: the thread %s continues after", self.name)
            self._hurried.wait(PAUSE)
            return True


class ThreadGroup:
    """The background threads of one worker.

    Args:
        threads: the threads, which may not be started yet.
    """

    def __init__(self, *threads: BackgroundThread) -> None:
        self._threads: Final = threads

    def look_after(self) -> None:
        """Restart each thread that was started and has died."""
        for thread in self._threads:
            if thread.was_started():
                thread.start()

    def last_rounds(self) -> dict[str, float | None]:
        """Return thread name -> seconds since its last round; see ``last_round``."""
        return {thread.name: thread.last_round() for thread in self._threads}
