"""A thread whose error is raised by ``join()``."""

from __future__ import annotations

import threading
from collections.abc import Callable


class CheckedThread(threading.Thread):
    """Runs a function. ``join()`` raises if the function has failed: its results are incomplete.

    Args:
        job: the function.
    """

    def __init__(self, job: Callable[[], None]) -> None:
        super().__init__(name=job.__name__, daemon=True)
        self._job = job
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._job()
        except BaseException as error:  # noqa: BLE001  # raised by join()
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: the function has raised an error.
        """
        super().join(timeout)
        if self._error is not None:
            text = f"{self.name} ended with an error"
            raise RuntimeError(text) from self._error
