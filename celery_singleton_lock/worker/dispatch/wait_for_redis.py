"""Holds messages in the main process while Redis does not answer, or refuses their lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from celery.worker.state import task_ready, task_reserved

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.worker.agent_queue import REFUSED_RETRY
from celery_singleton_lock.worker.message_stage import Stage
from celery_singleton_lock.worker.request import LockedRequest

MOST_SUSPENDED: Final = 1000
"""Number of held messages up to which the worker raises its prefetch count."""

LONGEST_RETRY: Final = 60.0
"""Most seconds between two tries of a lock that Redis refuses. The delay doubles up to this."""

FORGOTTEN: Final = 30.0
"""Seconds after a try from which a refusal of the lock counts as the first one in a row."""


class Retry(NamedTuple):
    """When a lock that Redis has refused is tried again.

    Args:
        delay: seconds until then.
        is_first: whether this is the first refusal in a row.
    """

    delay: float
    is_first: bool


class Suspended:
    """Holds unacknowledged messages. The broker sends further messages meanwhile.

    The main loop and the threads of a pool use it.

    Args:
        prefetch: raises (+1) or lowers (-1) the worker's prefetch count.
    """

    def __init__(self, prefetch: Callable[[int], None]) -> None:
        self._prefetch = prefetch
        self._suspended: list[LockedRequest] = []
        self._mutex = threading.RLock()  # reentrant for a cold shutdown; see RecentEnds

    def __len__(self) -> int:
        """Return how many messages are held."""
        return len(self._suspended)

    def find(self, task_id: str) -> list[LockedRequest]:
        """Return the held messages with this task id."""
        with self._mutex:
            return [request for request in self._suspended if request.id == task_id]

    def _hold(self, request: LockedRequest) -> None:
        request.move(Stage.SUSPENDED)
        task_ready(request)
        self._suspended.append(request)
        if len(self._suspended) <= MOST_SUSPENDED:
            self._prefetch(1)

    def _take_all(self) -> list[LockedRequest]:
        held, self._suspended = self._suspended, []
        return held

    def free(self, keeps: Callable[[LockedRequest], bool]) -> list[LockedRequest]:
        """Stop holding some messages.

        Args:
            keeps: returns whether a message is still held.

        Returns:
            The other messages in the order of arrival. They may have been held in another order: a
            message that was in the pool is held later than messages that arrived after it.
        """
        freed: list[LockedRequest] = []
        with self._mutex:
            held = self._take_all()
            for request in held:
                (self._suspended if keeps(request) else freed).append(request)
        freed.sort(key=lambda request: request.lock_header.created_at)
        self._go_on(freed, before=len(held))
        return freed

    def _go_on(self, freed: list[LockedRequest], before: int) -> None:
        """Lower the prefetch count by as much as it was raised for these messages."""
        asked_for = min(before, MOST_SUSPENDED) - min(before - len(freed), MOST_SUSPENDED)
        for _ in range(asked_for):
            self._prefetch(-1)
        for request in freed:
            request.move(Stage.RECEIVED)
            task_reserved(request)

    def abandon(self) -> list[LockedRequest]:
        """Stop holding all messages: the broker redelivers them. Return them."""
        with self._mutex:
            return self._take_all()


class WaitForRedis(Suspended):
    """Holds messages while Redis does not answer.

    Args:
        prefetch: raises (+1) or lowers (-1) the worker's prefetch count.

    Attributes:
        down: whether Redis does not answer.
    """

    def __init__(self, prefetch: Callable[[int], None]) -> None:
        super().__init__(prefetch)
        self.down: bool = False

    def suspend(self, request: LockedRequest) -> bool:
        """Hold a message, unless Redis answers again: then nothing would dispatch it.

        Returns:
            Whether it is held.
        """
        with self._mutex:
            if self.down:
                self._hold(request)
            return self.down

    def begin(self, request: LockedRequest) -> None:
        """Hold a message for which Redis did not answer, and all further ones."""
        with self._mutex:
            self.down = True
            self._hold(request)

    def end(self) -> list[LockedRequest]:
        """Note that Redis answers again; return the held messages in the order of arrival."""
        self.down = False
        return self.free(lambda _request: False)


class Refusal:
    """A lock that Redis has refused.

    Attributes:
        tries: how often it was refused in a row.
        asked_at: monotonic time of the next try, or of the last one.
        waits: whether messages are held for it.
    """

    __slots__ = ("asked_at", "tries", "waits")

    def __init__(self) -> None:
        self.tries: int = 0
        self.asked_at: float = 0.0
        self.waits: bool = False


class RefusedLocks(Suspended):
    """Holds the messages of locks that Redis refuses, until each lock is tried again.

    Args:
        prefetch: raises (+1) or lowers (-1) the worker's prefetch count.
        clock: source of monotonic seconds.
    """

    def __init__(self, prefetch: Callable[[int], None], clock: Clock) -> None:
        super().__init__(prefetch)
        self._clock = clock
        self._refusals: dict[str, Refusal] = {}

    def suspend(self, request: LockedRequest) -> bool:
        """Hold a message if other messages are held for one of its locks.

        Returns:
            Whether it is held.
        """
        with self._mutex:
            if not self._refusals:
                return False
            names = (name for name in _names(request) if self._waits(name))
            request.refused_lock = next(names, "")
            if request.refused_lock:
                self._hold(request)
            return bool(request.refused_lock)

    def _waits(self, name: str) -> bool:
        refusal = self._refusals.get(name)
        return refusal is not None and refusal.waits

    def begin(self, request: LockedRequest, name: str) -> Retry | None:
        """Hold a message since Redis has refused its lock ``name``.

        Returns:
            When to try again; None if :meth:`end` will be called anyway.
        """
        with self._mutex:
            request.refused_lock = name
            self._hold(request)
            if self._waits(name):
                return None
            retry = self.plan(name)
            self._refusals[name].waits = True
            return retry

    def plan(self, name: str) -> Retry:
        """Return when to try a lock again that Redis has refused."""
        now = self._clock.monotonic()
        with self._mutex:
            refusal = self._known(name, now)
            if now < refusal.asked_at:
                return Retry(refusal.asked_at - now, is_first=False)
            delay = min(REFUSED_RETRY * 2.0 ** min(refusal.tries, 10), LONGEST_RETRY)
            refusal.tries += 1
            refusal.asked_at = now + delay
            return Retry(delay, is_first=refusal.tries == 1)

    def _known(self, name: str, now: float) -> Refusal:
        """Return the refusal of a lock, and delete those that ended long ago."""
        for known, each in list(self._refusals.items()):
            if not each.waits and now - each.asked_at > FORGOTTEN:
                del self._refusals[known]
        return self._refusals.setdefault(name, Refusal())

    def end(self, name: str) -> list[LockedRequest]:
        """Stop holding the messages of a lock, which is tried again; return them in order."""
        with self._mutex:
            refusal = self._refusals.get(name)
            if refusal is not None:
                refusal.waits = False
        return self.free(lambda request: request.refused_lock != name)


def _names(request: LockedRequest) -> list[str]:
    """Return the names of the locks of a message."""
    lock_set = request.lock_header.lock_set
    return [request.lock_header.name] if lock_set is None else [p.name for p in lock_set.parts]
