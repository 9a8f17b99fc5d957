"""Which messages of each lock are on their way, and who comes behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from celery_singleton_lock.worker.request import LockedRequest
from celery_singleton_lock.worker.lock_header import Stamp

MOST_SHOWN: Final = 100
"""Most locks that a report names."""


class Flight:
    """The messages of one lock that are on their way here: to the pool and back, or into Redis.

    Attributes:
        requests: on their way to the pool or back, by token.
        parking: so many are being parked; who arrives now comes behind them.
        followers: arrived behind one of which it is not known yet whether it takes the lock.
    """

    __slots__ = ("followers", "parking", "requests")

    def __init__(self) -> None:
        """Begin with nothing on its way."""
        self.requests: dict[str, LockedRequest] = {}
        self.parking = 0
        self.followers: list[LockedRequest] = []

    def undecided(self) -> bool:
        """Return whether one of the requests has neither taken its lock nor been turned away."""
        return any(not request.took for request in self.requests.values())


class Flights:
    """Keeps the messages of each lock in order as long as nobody knows which of them takes it.

    The agent's thread asks it, too, and where a pool has threads, these end flights.

    Args:
        wait: takes a message that must wait, once it is known what becomes of those before it;
            nobody passes it meanwhile.

    Attributes:
        by_token: what is in the pool, or on its way there or back; for others to read.
    """

    def __init__(self, wait: Callable[[LockedRequest], None]) -> None:
        """Begin with nothing in flight."""
        self.by_token: dict[str, LockedRequest] = {}
        self._wait = wait
        self._flights: dict[str, Flight] = {}
        self._kin: dict[str, str] = {}
        self._mutex = threading.RLock()

    # -- there and back ---------------------------------------------------------------------------

    def board(self, request: LockedRequest, limit: int, *, parks: bool) -> bool:
        """Begin a flight, or have the message wait: as many as may hold the lock are on their way.

        Args:
            request: the message.
            limit: of its lock.
            parks: whether it may wait; else it flies.

        Returns:
            Whether it flies.
        """
        stamp = request.stamp
        with self._mutex:
            flight = self._flights.get(stamp.name)
            if flight is None:
                flight = self._flights[stamp.name] = Flight()
            if parks and (flight.parking > 0 or len(flight.requests) >= limit):
                self._follow(flight, request)
                return False
            flight.requests[stamp.token] = request
            self.by_token[stamp.token] = request
        return True

    def _follow(self, flight: Flight, request: LockedRequest) -> None:
        """Have it wait, but not before those that arrived earlier: a release could grant it."""
        if flight.undecided():
            flight.followers.append(request)
        else:
            self._wait(request)

    def expect(self, request: LockedRequest) -> None:
        """Note a message that has its lock, and is about to be sent to the pool."""
        self.by_token[request.stamp.token] = request

    def alias(self, token: str, other: str) -> None:
        """Note that a flight has taken one of its locks by another token."""
        self._kin[other] = token

    def go_on(self, name: str) -> None:
        """Let followers go on, once it is known who comes before them."""
        with self._mutex:
            flight = self._flights.get(name)
            if flight is not None:
                self._go_on(name, flight)

    def _go_on(self, name: str, flight: Flight) -> None:
        if flight.followers and not flight.undecided():
            followers, flight.followers = flight.followers, []
            for request in followers:
                self._wait(request)
        if not (flight.requests or flight.parking or flight.followers):
            del self._flights[name]

    def land(self, stamp: Stamp) -> None:
        """Know a token no more. Who comes behind it waits until it leaves."""
        self.by_token.pop(stamp.token, None)
        for part in stamp.bundle.parts if stamp.bundle else ():
            self._kin.pop(part.token, None)

    def leave(self, stamp: Stamp) -> None:
        """End a flight: those behind it go on."""
        with self._mutex:
            flight = self._flights.get(stamp.name)
            if flight is not None:
                flight.requests.pop(stamp.token, None)
                self._go_on(stamp.name, flight)

    # -- into Redis -------------------------------------------------------------------------------

    def park(self, request: LockedRequest) -> None:
        """Have those who arrive from now on come behind a message that is being parked."""
        request.at_clerk = True
        with self._mutex:
            self._flights.setdefault(request.stamp.name, Flight()).parking += 1

    def parked(self, request: LockedRequest) -> None:
        """Let those behind a message go on: it is known what became of it, if it was parked."""
        with self._mutex:
            flight = self._flights.get(request.stamp.name)
            if request.at_clerk and flight is not None:
                flight.parking -= 1
            request.at_clerk = False
        self.go_on(request.stamp.name)

    def drop_followers(self) -> None:
        """Forget who waits for others; the broker delivers them again."""
        with self._mutex:
            for flight in self._flights.values():
                flight.followers.clear()

    # -- what is known ----------------------------------------------------------------------------

    def of(self, token: str) -> LockedRequest | None:
        """Return the delivery that has this token, or has taken one of its locks by it."""
        return self.by_token.get(self._kin.get(token, token))

    def has(self, token: str) -> bool:
        """Return whether a delivery is in this worker's hands."""
        return self.of(token) is not None

    def has_begun(self, token: str) -> bool:
        """Return whether a delivery in this worker's hands runs, or may do so."""
        request = self.of(token)
        return request is not None and (request.accepted or not request.delivered)

    def who(self, token: str) -> tuple[str, str]:
        """Return name and id of the task that a delivery in this worker's hands is of."""
        request = self.of(token)
        return ("", "") if request is None else (request.task.name, request.id)

    def in_hand(self) -> list[LockedRequest]:
        """Return what is in the pool, or on its way there or back."""
        return list(self.by_token.values())

    def requests(self) -> list[LockedRequest]:
        """Return the requests that hold their locks, or are on their way to them."""
        return [request for request in self.in_hand() if request.stamp.name]

    def unfinished(self) -> list[LockedRequest]:
        """Return what the pool has accepted and not told the end of."""
        return [request for request in self.in_hand() if request.accepted]

    def busy(self) -> bool:
        """Return whether anything is in the pool, or on its way there."""
        return bool(self.by_token)

    def backlog(self) -> int:
        """Return how many granted messages wait for a slot."""
        return sum(request.delivered and not request.accepted for request in self.in_hand())

    def waiting_since(self, until: float) -> list[LockedRequest]:
        """Return granted messages that have waited for a slot since ``until`` (monotonic seconds).

        Those that came first are first. Left out are a message that keeps other locks, and one of
        which nobody knows whether it has begun.
        """
        waiting = [
            request
            for request in self.in_hand()
            if request.delivered
            and not request.accepted
            and request.stamp.granted
            and not request.stamp.copy
            and request.stamp.error is None
            and request.stamp.bundle is None
            and request.received_at <= until
        ]
        return sorted(waiting, key=lambda request: request.received_at)

    def counts(self) -> dict[str, Any]:
        """Return how many messages are on their way, and where; for JSON.

        ``in_flight`` tells it by lock, of the first :data:`MOST_SHOWN`.
        """
        in_hand = self.in_hand()
        with self._mutex:
            flights = list(self._flights.items())
        return {
            "in_flight": {name: len(flight.requests) for name, flight in flights[:MOST_SHOWN]},
            "held": sum(request.took for request in in_hand),
            "granted": self.backlog(),
            "waiting": sum(request.accepted and not request.took for request in in_hand),
            "parking": sum(flight.parking + len(flight.followers) for _, flight in flights),
        }
