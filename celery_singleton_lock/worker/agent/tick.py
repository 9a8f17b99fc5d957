"""Runs the agent's periodic steps, about once a second, and records whether Redis answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from celery_singleton_lock.errors import BackendError, LockUnusable
from celery_singleton_lock.worker.redis_health import RedisHealth

logger: Final = logging.getLogger(__name__)


class Tick:
    """Runs steps in order. An error of Redis ends the tick.

    Args:
        steps: functions, each of which may raise BackendError.
        health: records whether Redis has answered.
    """

    def __init__(self, steps: Sequence[Callable[[], None]], health: RedisHealth) -> None:
        self._steps = steps
        self._health = health
        self._refused: dict[str, str] = {}
        self._told = ""

    def __call__(self) -> None:
        """Run all steps."""
        try:
            for step in self._steps:
                self._take(step)
        except BackendError as error:
            self._tell(str(error))
            self._health.failed(error)
        else:
            self._accepted()
            self._health.answered()

    def _accepted(self) -> None:
        if self._told and not self._health.down:  # else the health logs that it answers again
            logger.warning(
                "celery-singleton-lock: Redis at %s accepts calls again.", self._health.address
            )
        self._told = ""

    def _tell(self, error: str) -> None:
        """Log an error once until a tick succeeds: a Redis that refuses does not count as down."""
        if not self._health.down and error != self._told:
            logger.warning(
                "celery-singleton-lock: Redis at %s: %s Locked tasks wait.",
                self._health.address,
                error,
            )
        self._told = error

    def _take(self, step: Callable[[], None]) -> None:
        """Run a step. A lock that Redis refuses, or a defect, does not prevent the next steps."""
        name = getattr(step, "__qualname__", "")
        try:
            step()
        except LockUnusable as error:
            self._health.failed(error)
            if self._refused.get(name) != str(error):
                self._refused[name] = str(error)
                logger.error("celery-singleton-lock: %s (%s)", error, name)  # noqa: TRY400  # no defect
        except BackendError:
            raise
        except Exception:
            logger.exception("celery-singleton-lock: a step of the agent failed")
        else:
            self._refused.pop(name, None)
