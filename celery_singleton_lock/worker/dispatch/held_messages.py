"""Holds messages for which Redis did not answer, or whose lock it refuses, until the next try."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.events import TaskBlocked
from celery_singleton_lock.worker.agent_commands import RetryRefused
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.dispatch.wait_for_redis import RefusedLocks, Retry, WaitForRedis
from celery_singleton_lock.worker.request import LockedRequest, about

logger: Final = logging.getLogger(__name__)


class HeldMessages:
    """The messages that stay unacknowledged in this process until Redis answers for their lock.

    Args:
        commands: the queue of the agent.
        notifier: sends events.
        prefetch: raises (+1) or lowers (-1) the worker's prefetch count.
        backend_failed: called when Redis has not answered a task.
        clock: source of monotonic seconds.

    Attributes:
        redis_is_refused: whether this worker must not use the Redis, so that no task may ask it.
    """

    def __init__(
        self,
        *,
        commands: AgentQueue,
        notifier: Notifier,
        prefetch: Callable[[int], None],
        backend_failed: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.redis_is_refused = False
        self._commands = commands
        self._notifier = notifier
        self._backend_failed = backend_failed
        self._unanswered = WaitForRedis(prefetch)
        self._refused = RefusedLocks(prefetch, clock)

    def __len__(self) -> int:
        """Return how many messages are held."""
        return len(self._unanswered) + len(self._refused)

    @property
    def redis_is_down(self) -> bool:
        """Whether Redis does not answer."""
        return self._unanswered.down

    # -- hold -------------------------------------------------------------------------------------

    def hold_while_down(self, request: LockedRequest) -> bool:
        """Hold a message if Redis does not answer. Return whether it is held."""
        return self._unanswered.suspend(request)

    def find(self, task_id: str) -> list[tuple[LockedRequest, bool]]:
        """Return the held messages of a task, each with whether Redis refuses its lock."""
        refused = [(request, True) for request in self._refused.find(task_id)]
        return [*((request, False) for request in self._unanswered.find(task_id)), *refused]

    def hold_while_refused(self, request: LockedRequest) -> bool:
        """Hold a message if Redis refuses its lock. Return whether it is held."""
        held = self._refused.suspend(request)
        if held:
            self._tell_refused(request)
        return held

    def hold_unanswered(self, request: LockedRequest, reason: str) -> None:
        """Hold a message for which Redis did not answer, and all further ones."""
        if not self._unanswered.down:
            logger.warning("celery-singleton-lock: %s Locked tasks wait.", reason)
        self._unanswered.begin(request)
        # last: when Redis answers, the agent dispatches all messages that are held
        self._backend_failed()

    def hold_refused(self, request: LockedRequest, reason: str, name: str) -> None:
        """Hold a message since Redis refuses its lock ``name``, and plan the next try."""
        retry = self._refused.begin(request, name)
        self._tell_refused(request)
        if retry is not None:
            self._log_refused(name, reason, retry)
            self._commands.put_off(RetryRefused(name), retry.delay)

    def refused_stored(self, request: LockedRequest, reason: str, name: str) -> float:
        """Report that Redis refuses the lock ``name`` of a message that is stored at another lock.

        Returns:
            The seconds until the next try.
        """
        retry = self._refused.plan(name)
        self._tell_refused(request)
        self._log_refused(name, reason, retry)
        return retry.delay

    @staticmethod
    def _log_refused(name: str, reason: str, retry: Retry) -> None:
        if retry.is_first:
            logger.error(
                "celery-singleton-lock: Redis refuses the lock %r. Its tasks wait; other tasks "
                "run. %s Look at the keys of this lock (redis-cli SCAN and TYPE; `locks doctor` "
                "names a wrong meta key), and delete those of other programs. The lock is tried "
                "again after %.0f s, and then at least once a minute.",
                name,
                reason,
                retry.delay,
            )

    def _tell_refused(self, request: LockedRequest) -> None:
        """Report once that a message waits since Redis refuses its lock."""
        if not request.lock_refused:
            request.lock_refused = request.was_blocked = True
            self._notifier.tell(request, TaskBlocked(*about(request), policy="refused"))

    # -- let go -----------------------------------------------------------------------------------

    def hold_all(self) -> None:
        """Hold all further messages: Redis does not answer."""
        self._unanswered.down = True

    def answered(self) -> list[LockedRequest]:
        """Return the held messages in the order of arrival: Redis answers again."""
        return self._unanswered.end()

    def tried_again(self, name: str) -> list[LockedRequest]:
        """Return the messages of a refused lock, which is tried again."""
        return self._refused.end(name)

    def free(self, keeps: Callable[[LockedRequest], bool]) -> list[LockedRequest]:
        """Stop holding the messages for which ``keeps`` returns False; return them."""
        return [*self._unanswered.free(keeps), *self._refused.free(keeps)]

    def abandon(self) -> list[LockedRequest]:
        """Stop holding all messages: the broker redelivers them. Return them."""
        return [*self._unanswered.abandon(), *self._refused.abandon()]
