"""Releases locks in the main process.

The process of a task cannot release its locks if it has died or is being killed. If a delivery does
not run, no process releases its locks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.model import Ending, Reply, Verdict
from celery_singleton_lock.errors import LockUnusable
from celery_singleton_lock.store.base import LockStore
from celery_singleton_lock.worker.agent_commands import Release
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.lock_header import LockHeader, in_order_of_release, may_be_copied
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets
from celery_singleton_lock.worker.redis_health import for_each

logger: Final = logging.getLogger(__name__)

GONE: Final = 5.0
"""Seconds after which the log says that a killed process still exists."""

LOOK: Final = 0.02
"""Seconds between two checks whether a process still exists."""

RARE_LOOK: Final = 0.5
"""Seconds between two checks after :data:`GONE`."""


class ReleaseAfterProcessDeath:
    """Releases the locks of tasks, after the end of a process that is being killed.

    Args:
        store: the agent's store.
        partial_lock_sets: renews the locks that parked messages hold.
        commands: the queue of the agent.
        taker: returns the id of the worker to which a release may grant; empty if there is none.
        done_for: seconds for which an ended attempt is remembered, so that its copies are dropped.
        again_after: seconds after which the broker delivers a message again.
        released: called with the token of each task whose locks were released.

    Attributes:
        done: number of tasks whose locks were released because their process could not.
    """

    def __init__(
        self,
        store: LockStore,
        *,
        partial_lock_sets: PartialLockSets,
        commands: AgentQueue,
        taker: Callable[[], str],
        done_for: float,
        again_after: float,
        released: Callable[[str], None],
    ) -> None:
        self.done: int = 0
        self._store = store
        self._partial_lock_sets = partial_lock_sets
        self._commands = commands
        self._taker = taker
        self._done_for = done_for
        self._again_after = again_after
        self._released = released
        self._clock: Clock = store.clock

    def carry_out(self, command: Release) -> None:
        """Release the locks of a task, or check its process again later.

        Raises:
            BackendError: Redis did not answer.
        """
        now = self._clock.monotonic()
        until = command.since + GONE if command.until is None else command.until
        if command.pid and now < until and not gone(command.pid):
            self._wait_for_process(command, until, now)
            return
        self._release_all(_with_what_is_left(command, now))
        self._partial_lock_sets.drop(command.lock_header.token)
        self.done += command.pid is not None
        self._released(command.lock_header.token)

    def _release_all(self, command: Release) -> None:
        """Release the locks of a task.

        With RETURN, release none if the task has started but no report of that has arrived. The
        lock at which its message is parked shows this, since the task claims that lock last.
        """
        each, lock_set = in_order_of_release(command.lock_header), command.lock_header.lock_set
        if command.ending is Ending.REFUSED and command.kept and lock_set is not None:
            # It is not held, unless the message is stored there.
            unheld = {command.kept.attempt} - {lock_set.here.name}
            each = [one for one in each if one.name not in unheld]
        if command.ending is Ending.RETURN:
            if self._release(command, each.pop()).verdict is Verdict.GRANTED:
                return
            command = replace(command, ending=Ending.AGAIN)
        for_each(each, partial(self._release, command))

    def _release(self, command: Release, header: LockHeader) -> Reply:
        try:
            return self._store.release(
                header.name,
                header.token,
                command.ending,
                worker=self._taker(),
                done_for=self._done_for,
                mark=may_be_copied(header, self._clock.monotonic(), self._again_after),
                reserve=command.kept,
            )
        except LockUnusable as error:
            error.name = header.name
            raise

    def _wait_for_process(self, command: Release, until: float, now: float) -> None:
        """Check again later: a killed process may hang in the kernel and still exist.

        Its lease is no longer renewed. The lock is free when the lease ends, at the latest.
        """
        if now - command.since < GONE:
            self._commands.put_off(command, LOOK)
            return
        if not command.logged:
            logger.warning(
                "celery-singleton-lock: the process %d of task %s was killed %.0f s ago and still "
                "exists: its lock %r is free when it ends, or in %.0f s, when its lease ends",
                command.pid,
                command.lock_header.task,
                now - command.since,
                command.lock_header.name,
                until - now,
            )
        self._commands.put_off(replace(command, logged=True), min(RARE_LOOK, until - now))


def _with_what_is_left(command: Release, now: float) -> Release:
    """Return the command with what is left of its reservation, since Redis may have been down."""
    if command.kept is None:
        return command
    left = command.kept.left(now)
    over = left is None and command.ending in {Ending.KEEP, Ending.HOLD}
    return replace(command, kept=left, ending=Ending.FINAL if over else command.ending)


def gone(pid: int) -> bool:
    """Return whether a process has ended. A zombie has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False
