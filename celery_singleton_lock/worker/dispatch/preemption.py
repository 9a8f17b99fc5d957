"""Ends the tasks of a worker that newer calls preempt (``lock_on_conflict="preempt"``)."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.dispatch.in_flight import InFlight
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.execution.interrupt import LostTokens
from celery_singleton_lock.worker.message_stage import IN_HAND, Stage
from celery_singleton_lock.worker.request import LockedRequest

logger: Final = logging.getLogger(__name__)

SIGNAL_AGAIN: Final = 0.25
"""Seconds after which a task is interrupted again; they double each time. An interruption has no
effect while Celery's own code runs, such as that which stores results, nor in a ``__del__``."""

KILL_AGAIN: Final = 1.0
"""Seconds after which a process that could not be stopped is tried again."""

_LOOKS: Final = 100
_PAUSE: Final = 0.001


class Preemption:
    """Interrupts a task that must end; kills its child process if it continues after the grace.

    Args:
        rules: task -> its options.
        in_flight: the messages that are in flight.
        lost_tokens: shared memory that tells the tasks of this worker which of them must end.
        notifier: reports events.
        children: whether tasks run in child processes. A thread or greenlet is not interrupted.
        post: runs a call in the main loop.
        later: runs a call in the main loop a little later.
        after: runs a call in the main loop after a number of seconds.
        terminate: kills a child process of the pool.

    Attributes:
        preempted: number of tasks that were told to end.
        killed: number of child processes that were killed, since their tasks went on.
    """

    def __init__(
        self,
        *,
        rules: Callable[[Any], LockOptions],
        in_flight: InFlight,
        lost_tokens: LostTokens,
        notifier: Notifier,
        children: bool,
        post: Callable[..., None],
        later: Callable[[Callable[[], None]], None],
        after: Callable[[float, Callable[[], None]], None],
        terminate: Callable[[int, int], None],
    ) -> None:
        self.preempted: int = 0
        self.killed: int = 0
        self._rules = rules
        self._in_flight = in_flight
        self._lost_tokens = lost_tokens
        self._notifier = notifier
        self._children = children
        self._post = post
        self._later = later
        self._after = after
        self._terminate = terminate

    def end_task(self, token: str, by: str) -> None:
        """End the task with this token. Safe from any thread; repeated calls do nothing.

        A task in a thread, a greenlet or the main process reads ``self.lock.preempted``: this is
        set here, since a solo worker makes no calls in its main loop while a task runs.

        Args:
            token: its owner token.
            by: the attempt that replaces it.
        """
        if not self._lost_tokens.preempted_by(token):
            self._lost_tokens.note(token, by)
        self._post(self._begin, token, by)

    def _begin(self, token: str, by: str) -> None:
        request = self._in_flight.of(token)
        if request is None or request.preempted_by:
            return
        request.preempted_by = by
        self.preempted += 1
        self._notifier.preempted(request)
        if self._children:
            self._interrupt(request)

    def _interrupt(self, request: LockedRequest) -> None:
        if request.stage not in IN_HAND:
            return
        if request.stage is not Stage.RUNNING or request.worker_pid is None:
            self._later(partial(self._interrupt, request))  # the pool has not reported it yet
            return
        grace = request.options(self._rules).preempt_grace
        self._after(grace, partial(self._kill, request, grace))
        self._signal(request, SIGNAL_AGAIN, grace)

    def _signal(self, request: LockedRequest, pause: float, left: float) -> None:
        """Interrupt a task, and again after a pause that doubles, until its grace has passed."""
        pid, token = request.worker_pid, request.lock_header.token
        if request.stage is not Stage.RUNNING or pid is None:
            return
        if not self._lost_tokens.preempted_by(token):  # others have replaced it
            self._lost_tokens.note(token, request.preempted_by)
        self._lost_tokens.signal(pid)
        if pause < left:
            self._after(pause, partial(self._signal, request, 2 * pause, left - pause))

    def _kill(self, request: LockedRequest, grace: float) -> None:
        """Kill the process of a task that continues after the grace.

        The process may have ended the task meanwhile, and run the next one. So it is stopped first,
        and killed only if it still shows the token of this task.
        """
        pid, token = request.worker_pid, request.lock_header.token
        if request.stage is not Stage.RUNNING or not self._lost_tokens.runs(pid, token):
            return
        stopped = _stop(pid)
        if stopped and self._lost_tokens.runs(pid, token):
            logger.warning(
                "Task %s went on for %g s (lock_preempt_grace) after it had been preempted: its "
                "process %d is killed",
                request,
                grace,
                pid,
            )
            self.killed += 1
            self._terminate(pid, signal.SIGKILL)
            return
        _signal(pid, signal.SIGCONT)
        if not stopped:
            self._after(KILL_AGAIN, partial(self._kill, request, grace))


def _stop(pid: int) -> bool:
    """Stop a process with SIGSTOP. Return whether ``/proc`` shows that it is stopped."""
    _signal(pid, signal.SIGSTOP)
    for _ in range(_LOOKS):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        if state == "T":
            return True
        threading.Event().wait(_PAUSE)
    return False


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
