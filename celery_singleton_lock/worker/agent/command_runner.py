"""Carries out commands in batches, and repeats those that fail."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.errors import BackendError, BackendUnreachable, LockUnusable
from celery_singleton_lock.worker.agent_commands import Call, CheckBlocked, Command, Park, lock_of
from celery_singleton_lock.worker.agent_queue import REFUSED_RETRY, AgentQueue
from celery_singleton_lock.worker.redis_health import RedisHealth

logger: Final = logging.getLogger(__name__)

REPORTED_AFTER: Final = 5
"""Number of failures, caused by a defect of this package, after which the log asks for a report."""


class CommandRunner:
    """Carries out the commands that one round of the agent has taken from its queue.

    A command that fails delays no other command. If the thread dies, the commands that are not
    carried out are put into the queue again.

    Args:
        queue: receives the commands to repeat.
        carry_out: carries out a batch: commands to park, or one other command.
        health: counts the errors of Redis.
    """

    def __init__(
        self, queue: AgentQueue, carry_out: Callable[[list[Command]], None], health: RedisHealth
    ) -> None:
        self._queue = queue
        self._carry_out = carry_out
        self._health = health
        self._unfinished: deque[Command] = deque()

    def run(self, commands: list[Command]) -> None:
        """Carry out commands in order. Adjacent commands to park are one batch."""
        self._unfinished = deque(commands)
        try:
            for run in alike(commands):
                together = isinstance(run[0], Park)  # one round trip for all
                self._run_alike([run] if together else [[command] for command in run])
        except BaseException as error:
            self._return_unfinished(error)
            raise

    def _run_alike(self, batches: list[list[Command]]) -> None:
        for number, batch in enumerate(batches):
            try:
                self._carry_out(batch)
            except BackendUnreachable as error:
                rest = [command for each in batches[number:] for command in each]
                self._failed(rest, error)
                self._finished(rest)
                return
            except BackendError as error:
                if len(batch) > 1 and isinstance(error, LockUnusable):  # the lock of one of them
                    self._run_alike([[command] for command in batch])
                    continue
                self._failed(batch, error)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # logged by _broken
                if len(batch) > 1:  # one of them may be the cause
                    self._run_alike([[command] for command in batch])
                    continue
                self._broken(batch[0], error)
            self._finished(batch)

    def _finished(self, batch: list[Command]) -> None:
        for _ in batch:
            self._unfinished.popleft()

    def _return_unfinished(self, error: BaseException) -> None:
        """Put the remaining commands into the queue again: this thread dies, and is restarted.

        The first command may be the cause, so it is repeated later.
        """
        if not self._unfinished:
            return
        first = self._unfinished.popleft()
        while self._unfinished:
            self._queue.put(self._unfinished.popleft())
        if _is_repeated(first):
            self._queue.try_again(first, error)

    def _failed(self, batch: list[Command], error: BackendError) -> None:
        unreachable = isinstance(error, BackendUnreachable)
        known = self._health.down if unreachable else self._queue.tries(batch[0])
        self._health.failed(error)
        if not known and not isinstance(error, LockUnusable):
            logger.warning("celery-singleton-lock: %s Trying again.", error)
        elif not known:
            logger.error(
                "celery-singleton-lock: Redis refuses the lock %r. %s Look at the keys of this "
                "lock, and delete those of other programs. The worker tries again every %.0f s "
                "(%s).",
                getattr(error, "name", "") or lock_of(batch[0]),
                error,
                REFUSED_RETRY,
                type(batch[0]).__name__,
            )
        for command in batch:
            if not isinstance(command, Delivery):  # its lease expires, and Redis grants again
                self._queue.try_again(command, error)

    def _broken(self, command: Command, error: BaseException) -> None:
        """Repeat a command that failed because of a defect: it may have the only copy of a message.

        Each command has a token, so Redis recognises a repeated one. A message may be reported as
        parked twice.
        """
        logger.error("celery-singleton-lock: the agent failed at %r", command, exc_info=error)
        if not _is_repeated(command):
            return
        tries = self._queue.tries(command)
        if tries >= REPORTED_AFTER:
            logger.error(
                "celery-singleton-lock: %s of the lock %r has failed %d times because of a defect "
                "of celery-singleton-lock. It is tried again once a minute, and no message is "
                "lost. Please report the traceback above. If you restart this worker, the broker "
                "redelivers its unacknowledged messages, and its other leases expire.",
                type(command).__name__,
                lock_of(command),
                tries + 1,
            )
        self._queue.try_again(command, error)


def _is_repeated(command: Command) -> bool:
    """Return whether a command is repeated after a defect.

    A delivery is not: its lease expires, and Redis grants the lock again.
    """
    return not isinstance(command, Delivery | Call | CheckBlocked)


def alike(commands: list[Command]) -> Iterator[list[Command]]:
    """Divide commands into runs of the same type, in their order."""
    run: list[Command] = []
    for command in commands:
        if run and type(command) is not type(run[0]):
            yield run
            run = []
        run.append(command)
    if run:
        yield run
