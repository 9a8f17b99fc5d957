"""Stops tracking the tasks that leave the pool, and releases the locks of dead processes."""

from __future__ import annotations

from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.worker.agent_commands import Release
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.in_flight import InFlight
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.dispatch.recently_ended import RecentEnds
from celery_singleton_lock.worker.dispatch.task_leases import TaskLeases, kept_parts
from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.message_stage import BEGUN, IN_HAND, LEFT_BEFORE, Stage
from celery_singleton_lock.worker.request import LockedRequest


class PoolExit:
    """Handles messages that leave the pool, whatever the reason.

    Args:
        in_flight: the messages that are in flight.
        leases: renews the leases of the tasks in the pool.
        commands: the queue of the agent.
        notifier: sends events.
        clock: source of monotonic seconds.
        children: whether tasks run in child processes, which may die. In other pools Celery's pid
            of a task may be the number of a greenlet.

    Attributes:
        children: as given.
        ends: the deliveries that have ended here recently.
    """

    def __init__(
        self,
        *,
        in_flight: InFlight,
        leases: TaskLeases,
        commands: AgentQueue,
        notifier: Notifier,
        clock: Clock,
        children: bool,
    ) -> None:
        self._in_flight = in_flight
        self._leases = leases
        self._commands = commands
        self._notifier = notifier
        self._clock = clock
        self.children: Final = children
        self._releasing: dict[str, LockedRequest] = {}
        self.ends: RecentEnds = RecentEnds(clock)

    def end(self, request: LockedRequest, *, gone: bool) -> None:
        """Stop tracking a task that has ended.

        Args:
            request: of the task.
            gone: whether its process has died, so that the agent must release its locks.
        """
        if not self.leave(request, IN_HAND, Stage.ENDED, gone=gone):
            request.move_from(LEFT_BEFORE, Stage.ENDED)

    def leave(
        self, request: LockedRequest, stages: frozenset[Stage], to: Stage, *, gone: bool
    ) -> bool:
        """Move a message out of the pool.

        Args:
            request: the message.
            stages: those in which it is moved.
            to: its next stage.
            gone: whether its process has died, so that the agent must release its locks.

        Returns:
            False if it was in none of the stages.
        """
        was = request.move_from(stages, to)
        if was is None:
            return False
        header = request.lock_header
        if not header.name:
            return True
        began = was in BEGUN
        if began and request.ending() is Ending.FINAL:
            # In a pool of threads the traceback of the error refers to the request and its message.
            self.ends.note(header._replace(error=None))
        self.left(request, began=began, gone=gone)
        self._in_flight.leave(header)
        return True

    def left(
        self, request: LockedRequest, *, began: bool, gone: bool, ending: Ending | None = None
    ) -> None:
        """Stop tracking a delivery, and release its lock if its process cannot.

        Args:
            request: the message.
            began: whether its process had received it.
            gone: whether its process has died.
            ending: how it has ended; None: as its acknowledgement says.
        """
        header = request.lock_header
        self._in_flight.remove(header)
        unclaimed = header.error is not None and (header.granted or bool(kept_parts(header)))
        if unclaimed or (gone and (began or header.granted)):
            dying = request.worker_pid if gone and self.children else None
            self._releasing[header.token] = request
            self.release(header, ending or _ending_of(request, began=began), dying)
        elif request.acquired_at is not None:
            self._notifier.released(request)
        self._leases.forget(header)  # after release(), which asks when the lease ends

    def release(self, header: LockHeader, ending: Ending, pid: int | None) -> None:
        """Have the agent release the locks of a task whose process cannot.

        Args:
            header: the lock header of the task.
            ending: how the task has ended.
            pid: process id. The locks stay held until the process has ended, or their leases end.
                None: release at once.
        """
        until = self._leases.valid_until(header) if pid else None
        self._commands.put(Release(header, ending, pid, self._clock.monotonic(), until))

    def released(self, token: str) -> None:
        """Report a release that the agent made because a process could not."""
        request = self._releasing.pop(token, None)
        if request is not None:
            self._notifier.released(request)


def _ending_of(request: LockedRequest, *, began: bool) -> Ending:
    """Return the ending with which the lock of a request is released.

    A child may have read the request from its pipe and not sent a notice yet, and a thread may
    begin it now. ``Ending.RETURN`` leaves it to the process that has claimed it.
    """
    ending, header = request.ending(), request.lock_header
    may_have_begun = header.granted and not began
    return Ending.RETURN if ending is Ending.AGAIN and may_have_begun else ending
