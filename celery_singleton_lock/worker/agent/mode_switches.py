"""Switches modes of tasks while the worker runs: at once here, then in all workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from celery_singleton_lock.core.lock_mode import MODES, Modes
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent_commands import SwitchMode
from celery_singleton_lock.worker.agent_queue import AgentQueue

logger: Final = logging.getLogger(__name__)


class ModeSwitches:
    """Changes the modes of tasks, and logs each change.

    Args:
        store: the agent's store.
        modes: which tasks take their locks now.
        queue: the queue of the agent.
        on_change: called after a change.
    """

    def __init__(
        self, store: Store, modes: Modes, *, queue: AgentQueue, on_change: Callable[[], None]
    ) -> None:
        self._store = store
        self._modes = modes
        self._queue = queue
        self._on_change = on_change

    def order(self, task: str, mode: str | None) -> None:
        """Switch a mode here, and order the switch for all other workers. Does not wait.

        Args:
            task: name of the task; ``*`` for all.
            mode: the new mode; None: as declared.
        """
        self._changed(self._modes.order(task, mode))
        self._queue.put(SwitchMode(task, mode))

    def apply(self, switches: Mapping[str, str]) -> None:
        """Apply the modes that other workers have switched, given as task -> mode."""
        self._changed(self._modes.apply(switches))

    def carry_out(self, command: SwitchMode) -> None:
        """Switch a mode in all workers, unless a later switch of the same task was ordered here.

        Raises:
            BackendError: Redis did not answer.
        """
        if self._modes.is_ordered(command.task, command.mode):
            self._store.switch(command.task, command.mode)
            self._modes.end_order(command.task, command.mode)

    def _changed(self, tasks: list[str]) -> None:
        for mode in MODES:
            now = [task for task in tasks if self._modes.of(task) == mode]
            if now:
                logger.warning(
                    "celery-singleton-lock: the mode is now %s for %s",
                    mode,
                    ", ".join(map(printable, now)),
                    extra={"lock_event": "mode", "lock_mode": mode},
                )
        if tasks:
            self._on_change()
