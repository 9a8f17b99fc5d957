"""A thread that does not die in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable


class CandidThread(threading.Thread):
    """Runs a job; who joins it hears of its error: what a dead thread did not see proves nothing.

    Args:
        job: what to run.
    """

    def __init__(self, job: Callable[[], None]) -> None:
        super().__init__(name=job.__name__, daemon=True)
        self._job = job
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._job()
        except BaseException as error:  # noqa: BLE001  # raised by who joins
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: its job has failed.
        """
        super().join(timeout)
        if self._error is not None:
            text = f"{self.name} ended by itself"
            raise RuntimeError(text) from self._error
