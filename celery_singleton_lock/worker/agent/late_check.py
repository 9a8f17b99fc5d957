"""Repeats the check of the locks' Redis that a worker could not do at its start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from celery_singleton_lock.errors import (
    BackendRefused,
    BackendUnreachable,
    ConfigurationError,
    SchemaMismatch,
)

logger: Final = logging.getLogger(__name__)


SILENT: Final = "Redis, which did not answer when this worker started,"


class LateCheck:
    """The check of a worker's start, made again later.

    Redis did not answer at the start, or its schema has become newer since then. The check is the
    first step of each tick. Until it has passed, the tick does not go on, so Redis counts as down:
    locked tasks are held, and the worker writes no heartbeat.

    Args:
        on_verdict: called with True if the worker must not use this Redis, with False if it may.
    """

    def __init__(self, on_verdict: Callable[[bool], None]) -> None:
        self._on_verdict = on_verdict
        self._check: Callable[[], None] | None = None
        self._refused = ""
        self._which = SILENT

    @property
    def is_due(self) -> bool:
        """Whether the check has not passed yet."""
        return self._check is not None

    def plan(self, check: Callable[[], None], which: str = SILENT) -> None:
        """Set the check. Call it before the agent starts, or in the agent's thread.

        Args:
            check: raises BackendUnreachable if Redis does not answer, another error if the worker
                must not use it.
            which: names Redis in the log line for such an error.
        """
        self._check, self._which = check, which

    def __call__(self) -> None:
        """Check, if that is due.

        Raises:
            BackendError: Redis does not answer, or the worker must not use it.
        """
        if self._check is None:
            return
        try:
            self._check()
        except BackendUnreachable:
            raise
        except (BackendRefused, ConfigurationError, SchemaMismatch) as error:
            self._refuse(str(error))
            raise BackendRefused(str(error)) from error
        self._check = None
        self._on_verdict(False)  # noqa: FBT003  # the callback's only argument

    def _refuse(self, reason: str) -> None:
        """Log the reason once."""
        self._on_verdict(True)  # noqa: FBT003  # likewise
        if reason != self._refused:
            self._refused = reason
            logger.critical(
                "celery-singleton-lock: %s cannot be used for its locks. %s All locked tasks wait "
                "until that is corrected, whatever their lock_on_backend_error says. Other tasks "
                "run.",
                self._which,
                reason,
            )
