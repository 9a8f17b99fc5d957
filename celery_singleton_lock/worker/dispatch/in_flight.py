"""Tracks the messages of each lock that are in flight, and those that wait behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Final

from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.message_stage import BEGUN, Stage
from celery_singleton_lock.worker.request import LockedRequest

MOST_SHOWN: Final = 100
"""Most locks that a report names."""


class LockInFlight:
    """The messages of one lock that are in flight, and those that wait behind them.

    Attributes:
        requests: token -> request that was dispatched to the pool.
        parking: requests that are being parked. Messages that arrive now are parked after them.
        followers: requests that arrived before it was known whether an earlier one gets the lock.
    """

    __slots__ = ("followers", "parking", "requests")

    def __init__(self) -> None:
        self.requests: dict[str, LockedRequest] = {}
        self.parking: set[LockedRequest] = set()
        self.followers: list[LockedRequest] = []

    def undecided(self, waiting_in_redis: Collection[str]) -> bool:
        """Return whether it is not known yet for at least one request whether it gets the lock.

        Args:
            waiting_in_redis: tokens of requests that do not count.
        """
        return any(
            not request.holds_lock and token not in waiting_in_redis
            for token, request in self.requests.items()
        )


class InFlight:
    """Keeps the messages of each lock in order until it is known which of them gets the lock.

    The agent's thread and the threads of a pool call it too.

    Args:
        wait: called with a message that must wait, when it is known of the messages before it
            whether they get the lock. The mutex is held, so that no other message of the lock
            overtakes it.

    Attributes:
        by_token: token -> request that the pool has, or is about to get.
    """

    def __init__(self, wait: Callable[[LockedRequest], None]) -> None:
        self.by_token: dict[str, LockedRequest] = {}
        self._wait = wait
        self._locks: dict[str, LockInFlight] = {}
        self._token_of_part: dict[str, str] = {}
        self._asking: set[str] = set()
        self._waiting_in_redis: set[str] = set()
        self._mutex = threading.RLock()

    # -- to the pool and back ---------------------------------------------------------------------

    def admit(self, request: LockedRequest, limit: int, *, parks: bool) -> bool:
        """Admit a message to the pool; let it wait if the pool has ``limit`` of its lock.

        Args:
            request: the message.
            limit: number of permits of its lock.
            parks: whether the message can be parked. If not, it is always admitted.

        Returns:
            Whether it is admitted.
        """
        header = request.lock_header
        with self._mutex:
            lock = self._locks.get(header.name)
            if lock is None:
                lock = self._locks[header.name] = LockInFlight()
            if parks and (lock.parking or len(lock.requests) >= limit):
                self._follow(lock, request)
                return False
            lock.requests[header.token] = request
            self.by_token[header.token] = request
        return True

    def _follow(self, lock: LockInFlight, request: LockedRequest) -> None:
        """Let a message wait here until it is known whether earlier ones get the lock.

        If it were parked before them, a release could grant it first.
        """
        if lock.undecided(self._waiting_in_redis):
            request.move(Stage.FOLLOWING)
            lock.followers.append(request)
        else:
            self._wait(request)

    def add(self, request: LockedRequest) -> None:
        """Track a message by its token: it has its lock, or is delivered so that its task ends."""
        self.by_token[request.lock_header.token] = request

    def add_part(self, token: str, part: str) -> None:
        """Note the token under which a message holds one more of its locks."""
        self._token_of_part[part] = token

    def decided(self, name: str) -> None:
        """Dispatch the followers if it is known whether the messages before them get the lock."""
        with self._mutex:
            lock = self._locks.get(name)
            if lock is not None:
                self._decided(name, lock)

    def look(self) -> None:
        """Dispatch the followers of messages that have asked for their lock since the last call.

        With ``lock_on_conflict="wait"`` a task may wait in its slot for long. Redis has its place
        in the queue, so later messages may be parked behind it. If they stayed here, they would
        count as prefetched, and the worker might receive no other tasks.
        """
        asking = {
            token
            for token, request in list(self.by_token.items())
            if request.stage is Stage.ACCEPTED and not request.holds_lock
        }
        with self._mutex:
            self._waiting_in_redis, self._asking = asking & self._asking, asking
            if self._waiting_in_redis:
                for name, lock in list(self._locks.items()):
                    self._decided(name, lock)

    def _decided(self, name: str, lock: LockInFlight) -> None:
        if lock.followers and not lock.undecided(self._waiting_in_redis):
            followers, lock.followers = lock.followers, []
            for request in followers:
                self._wait(request)
        if not (lock.requests or lock.parking or lock.followers):
            del self._locks[name]

    def remove(self, header: LockHeader) -> None:
        """Stop tracking a token. Followers stay blocked until :meth:`leave`."""
        self.by_token.pop(header.token, None)
        for part in header.lock_set.parts if header.lock_set else ():
            self._token_of_part.pop(part.token, None)

    def leave(self, header: LockHeader) -> None:
        """Remove a message that has left the pool; dispatch its followers."""
        with self._mutex:
            lock = self._locks.get(header.name)
            if lock is not None:
                lock.requests.pop(header.token, None)
                self._decided(header.name, lock)

    # -- into Redis -------------------------------------------------------------------------------

    def park(self, request: LockedRequest) -> None:
        """Note that a message is being parked. Messages that arrive now wait behind it."""
        with self._mutex:
            request.move(Stage.PARKING)
            self._locks.setdefault(request.lock_header.name, LockInFlight()).parking.add(request)

    def parked(self, request: LockedRequest) -> None:
        """Note that a message is parked, or cannot be parked; dispatch its followers."""
        with self._mutex:
            lock = self._locks.get(request.lock_header.name)
            if lock is not None:
                lock.parking.discard(request)
                self._decided(request.lock_header.name, lock)

    def drop_followers(self) -> None:
        """Forget the followers; the broker delivers them again."""
        with self._mutex:
            for lock in self._locks.values():
                for request in lock.followers:
                    request.move(Stage.ENDED)
                lock.followers.clear()

    # -- queries ----------------------------------------------------------------------------------

    def parking(self) -> set[LockedRequest]:
        """Return the messages that are being parked."""
        with self._mutex:
            return {request for lock in self._locks.values() for request in lock.parking}

    def of(self, token: str) -> LockedRequest | None:
        """Return the delivery with this token, which may be that of any of its locks."""
        return self.by_token.get(self._token_of_part.get(token, token))

    def has(self, token: str) -> bool:
        """Return whether a token belongs to a message that is in flight."""
        return self.of(token) is not None

    def has_begun(self, token: str) -> bool:
        """Return whether a message that is in flight runs, or may run."""
        request = self.of(token)
        return request is not None and (request.stage in BEGUN or not request.lock_header.granted)

    def who(self, token: str) -> tuple[str, str]:
        """Return name and id of the task of a token; empty if it is not in flight."""
        request = self.of(token)
        return ("", "") if request is None else (request.task.name, request.id)

    def note_lost(self, token: str) -> None:
        """Note that the lock of a token was lost while its task runs."""
        request = self.of(token)
        if request is not None:
            request.lock_lost = True

    def in_hand(self) -> list[LockedRequest]:
        """Return the requests that are in the pool, or on their way there or back."""
        return list(self.by_token.values())

    def granted(self, task_ids: Collection[str]) -> list[tuple[str, str]]:
        """Return lock name and token of each granted message of these tasks."""
        return [
            (request.lock_header.name, request.lock_header.token)
            for request in self.in_hand()
            if request.id in task_ids and request.lock_header.granted
        ]

    def requests(self) -> list[LockedRequest]:
        """Return the requests that hold their locks, or are on their way to them."""
        return [request for request in self.in_hand() if request.lock_header.name]

    def unfinished(self) -> list[LockedRequest]:
        """Return the requests that the pool has accepted and whose end it has not reported."""
        return [request for request in self.in_hand() if request.stage in BEGUN]

    def busy(self) -> bool:
        """Return whether anything is in the pool, or on its way there."""
        return bool(self.by_token)

    def backlog(self) -> int:
        """Return how many granted messages wait for a slot."""
        return sum(
            request.lock_header.granted and request.stage not in BEGUN for request in self.in_hand()
        )

    def waiting_since(self, until: float) -> list[LockedRequest]:
        """Return granted messages that have waited for a slot since ``until`` (monotonic seconds).

        In the order of arrival. Messages that hold other locks, and messages that may have begun,
        are left out.
        """
        waiting = [
            request
            for request in self.in_hand()
            if request.lock_header.granted
            and request.stage not in BEGUN
            and not request.lock_header.copy
            and request.lock_header.error is None
            and request.lock_header.lock_set is None
            and request.received_at <= until
        ]
        return sorted(waiting, key=lambda request: request.received_at)

    def counts(self) -> dict[str, Any]:
        """Return the numbers of messages by state, for JSON.

        ``in_flight`` has the number for each lock, of the first :data:`MOST_SHOWN` locks.
        """
        in_hand = self.in_hand()
        with self._mutex:
            locks = list(self._locks.items())
        return {
            "in_flight": {name: len(lock.requests) for name, lock in locks[:MOST_SHOWN]},
            "held": sum(request.holds_lock and not request.lock_lost for request in in_hand),
            "granted": self.backlog(),
            "waiting": sum(r.stage in BEGUN and not r.holds_lock for r in in_hand),
            "parking": sum(len(lock.parking) + len(lock.followers) for _, lock in locks),
        }
