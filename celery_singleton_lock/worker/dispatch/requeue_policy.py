"""The messages that go back to the broker after a while, since they found their locks busy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from celery.worker.state import task_ready

from celery_singleton_lock.clerk import Clerk
from celery_singleton_lock.errors import LockWaitTimeout
from celery_singleton_lock.events import TaskBlocked, TaskDuplicate
from celery_singleton_lock.worker.dispatch.notifier import Herald
from celery_singleton_lock.worker.request import LockedRequest, about
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.dispatch.header_factory import Stamper, waited_in_vain


class Requeues:
    """Holds messages back, unacknowledged, until the broker has them again.

    Who dies with them loses nothing.

    Args:
        stamper: knows how old a message is.
        rules: task -> its options.
        clerk: sends them.
        herald: tells what happens.
        prefetch: tells the broker that more (+1) or fewer (-1) messages may be unacknowledged.
    """

    def __init__(
        self,
        *,
        stamper: Stamper,
        rules: Callable[[Any], LockOptions],
        clerk: Clerk,
        herald: Herald,
        prefetch: Callable[[int], None],
    ) -> None:
        """Hold nothing back yet."""
        self._stamper = stamper
        self._rules = rules
        self._clerk = clerk
        self._herald = herald
        self._prefetch = prefetch
        self._held_back: set[LockedRequest] = set()

    def __len__(self) -> int:
        """Return how many messages are held back."""
        return len(self._held_back)

    def in_vain(self, request: LockedRequest) -> LockWaitTimeout | None:
        """Return with what a task ends that may wait no longer; None while it may."""
        timeout, waited = request.options(self._rules).wait_timeout, self._stamper.age(request)
        if timeout is None or waited < timeout:
            return None
        return waited_in_vain(request.stamp.name, waited)

    def begin(self, request: LockedRequest) -> None:
        """Hold a message back, and have it sent to the broker after a while."""
        task_ready(request)
        self._held_back.add(request)
        self._prefetch(1)
        self._tell(request)
        self._clerk.requeue(request, held_for(request.options(self._rules), request.requeues))

    def _tell(self, request: LockedRequest) -> None:
        """Tell it before the message is sent: it may be back, and run, before we hear of that."""
        request.was_blocked = True
        if request.is_twin:  # its like runs, or waits: that it is blocked would not be true of it
            self._herald.tell(request, TaskDuplicate(*about(request), verdict="twin"))
        else:
            self._herald.tell(request, TaskBlocked(*about(request), policy="requeue"))

    def holds(self, request: LockedRequest) -> bool:
        """Return whether a message is still to be requeued, and not redelivered instead."""
        return request in self._held_back

    def end(self, request: LockedRequest) -> None:
        """Hold a message no more: the broker has it again."""
        if request in self._held_back:
            self._held_back.remove(request)
            self._prefetch(-1)

    def abandon(self) -> None:
        """Hold nothing any more: the broker delivers it again."""
        self._held_back.clear()


def held_for(options: LockOptions, requeues: int) -> float:
    """Return for how many seconds a requeued task is held back: doubling, with jitter."""
    most = min(options.requeue_delay * 2.0 ** min(requeues, 30), options.requeue_max)
    return most * random.uniform(0.75, 1.0)  # noqa: S311  # spreads those who were blocked together
