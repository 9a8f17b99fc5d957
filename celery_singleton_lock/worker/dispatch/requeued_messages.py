"""Requeues messages of blocked tasks after a delay (``lock_on_conflict="requeue"``)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from celery.worker.state import task_ready

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.errors import LockWaitTimeout
from celery_singleton_lock.events import TaskBlocked, TaskDuplicate
from celery_singleton_lock.worker.agent_commands import Requeue
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.header_factory import HeaderFactory
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.message_stage import Stage
from celery_singleton_lock.worker.not_started import waited_in_vain
from celery_singleton_lock.worker.request import LockedRequest, about


class RequeuedMessages:
    """Holds messages back until the broker has a copy of each.

    They stay unacknowledged until then, so a worker that dies loses none.

    Args:
        header_factory: returns the age of a message.
        rules: task -> its options.
        commands: the queue of the agent, which publishes the copies.
        notifier: sends events.
        prefetch: raises (+1) or lowers (-1) the worker's prefetch count.
    """

    def __init__(
        self,
        *,
        header_factory: HeaderFactory,
        rules: Callable[[Any], LockOptions],
        commands: AgentQueue,
        notifier: Notifier,
        prefetch: Callable[[int], None],
    ) -> None:
        self._header_factory = header_factory
        self._rules = rules
        self._commands = commands
        self._notifier = notifier
        self._prefetch = prefetch
        self._held_back: set[LockedRequest] = set()
        self._copies: dict[tuple[str, int], set[LockedRequest]] = {}

    def __len__(self) -> int:
        """Return how many messages are held back."""
        return len(self._held_back)

    def find(self, task_id: str) -> list[LockedRequest]:
        """Return the messages with this task id that are held back."""
        return [request for request in list(self._held_back) if request.id == task_id]

    def in_vain(self, request: LockedRequest) -> LockWaitTimeout | None:
        """Return the error of a task whose wait timeout is over; None if it may still wait."""
        timeout, waited = (
            request.options(self._rules).wait_timeout,
            self._header_factory.age(request),
        )
        if timeout is None or waited < timeout:
            return None
        return waited_in_vain(request.lock_header.name, f"{waited:.1f}")

    def begin(self, request: LockedRequest, waits_for: str, *, is_twin: bool) -> None:
        """Hold a message back, and requeue it after a delay.

        Args:
            request: the message.
            waits_for: why the lock was not granted; see ``TaskBlocked``.
            is_twin: whether another copy of its attempt runs or waits.
        """
        request.move(Stage.REQUEUING)
        task_ready(request)
        self._held_back.add(request)
        self._copies.setdefault(_message_of(request), set()).add(request)
        self._prefetch(1)
        self._tell(request, waits_for, is_twin=is_twin)
        delay = held_for(request.options(self._rules), request.arrival.requeues)
        self._commands.put_off(Requeue(request), delay)

    def _tell(self, request: LockedRequest, waits_for: str, *, is_twin: bool) -> None:
        """Report the requeue before the message is sent.

        Another worker may receive and run it before the broker's confirmation arrives here.
        """
        request.was_blocked = True
        if is_twin:  # the other copy is not blocked
            self._notifier.tell(request, TaskDuplicate(*about(request), verdict="twin"))
        else:
            event = TaskBlocked(*about(request), policy="requeue", waits_for=waits_for)
            self._notifier.tell(request, event)

    def copies_of(self, request: LockedRequest) -> list[LockedRequest]:
        """Return the messages that are held back and are copies of one message, with this one.

        Returns:
            An empty list if the message is not held back any more, as after a lost connection.
        """
        if request not in self._held_back:
            return []
        return list({request, *self._copies.get(_message_of(request), ())})

    def end(self, request: LockedRequest) -> bool:
        """Stop holding a message: the broker has a copy. Return whether it was held back."""
        if request not in self._held_back:
            return False
        self._held_back.remove(request)
        self._forget_copy(request)
        request.move(Stage.ENDED)
        self._prefetch(-1)
        return True

    def _forget_copy(self, request: LockedRequest) -> None:
        copies = self._copies.get(_message_of(request), set())
        copies.discard(request)
        if not copies:
            self._copies.pop(_message_of(request), None)

    def abandon(self) -> None:
        """Stop holding all messages: the broker redelivers them."""
        for request in list(self._held_back):  # threads of a pool add to it meanwhile
            request.move(Stage.ENDED)
        self._held_back.clear()
        self._copies.clear()


def _message_of(request: LockedRequest) -> tuple[str, int]:
    """Return what is the same for all copies of a message, and no other call of its task id.

    If Redis has not answered since this worker started, it is not known when the message arrived.
    Then the message has no known copies.
    """
    return request.lock_header.attempt, request.first_place or -id(request)


def held_for(options: LockOptions, requeues: int) -> float:
    """Return the seconds for which a message is held back: exponential back-off with jitter."""
    most = min(options.requeue_delay * 2.0 ** min(requeues, 30), options.requeue_max)
    return most * random.uniform(0.75, 1.0)  # noqa: S311  # so that blocked tasks do not return at once
