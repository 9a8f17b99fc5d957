"""Requests to a store and its replies: frozen values.

Durations are in seconds, unless a name ends in ``_ms`` or ``_us``. Values that are made for each
task are tuples, which cost a third of a frozen dataclass.
"""

from __future__ import annotations

import enum
import shlex
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, TypeAlias

from celery_singleton_lock.core.lock_view import HELD_AFTER, Holder, LockView, WaitsFor
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.message_text import printable

SCHEMA: Final = "1"
"""Version of the data model in Redis, of locks without flow control."""

FLOW_SCHEMA: Final = "2"
"""Version of the data model once a worker whose tasks declare flow options has started."""

SCHEMAS: Final = (SCHEMA, FLOW_SCHEMA)
"""The versions of the data that this version of the package can use; a worker refuses others."""

ALIVE: Final = 3.0
"""Seconds for which a worker counts as alive after a heartbeat; it sends one about every second."""

REMEMBERED: Final = 10
"""The server remembers a worker's last heartbeat for this multiple of :data:`ALIVE`; must be the
number in fleet/worker_heartbeat.lua."""

CLAIM_LEASE: Final = 5.0
"""Seconds within which a waiter must claim its grant, or its worker must renew it."""

DONE_FOR: Final = 7200.0
"""Seconds for which the end of a task is remembered at kombu's default visibility time-out."""


class CurrentLock(Protocol):
    """The lock of a running task, as ``current_lock()`` and ``self.lock`` return it.

    In an unlocked run it is inert: its name is empty, and it is neither held nor lost.
    """

    @property
    def name(self) -> str:
        """The lock's name; empty in an unlocked run."""
        ...

    @property
    def held(self) -> bool:
        """Whether the lock is certainly held.

        Redis is asked if its last reply is older than a third of the lease.
        """
        ...

    @property
    def lost(self) -> bool:
        """Whether the lock was held and then lost."""
        ...

    @property
    def preempted(self) -> bool:
        """Whether a newer call replaces this run (``lock_on_conflict="preempt"``).

        The run still holds the lock, and should end.
        """
        ...

    @property
    def fencing_token(self) -> int:
        """Number of the grant; it grows with each grant. 0 without a lock."""
        ...

    @property
    def expires_in(self) -> float:
        """Seconds for which the lock is certainly held without a renewal; 0 if not held."""
        ...

    def pause(self, seconds: float, why: str = "", *, name: str = "") -> float:
        """Close the lock for everybody for a time. The task goes on, and keeps the lock.

        Args:
            seconds: for how long, up to 366 days.
            why: the reason, for people.
            name: name of the lock. A task with several locks must give it.

        Returns:
            Seconds for which the lock is closed; 0 without a lock.

        Raises:
            ConfigurationError: an argument is invalid, or the locks are on a quorum.
            BackendError: Redis did not answer, or refused.
        """
        ...

    def ensure_held(self) -> None:
        """Ask Redis whether the lock is still held.

        Raises:
            LockLost: the lock was lost; stop writing.
            LockPreempted: a newer call replaces this run; clean up and end.
            BackendError: Redis did not answer, or refused.
        """
        ...

    def charge(
        self,
        amount: int,
        *,
        id: str | None = None,  # noqa: A002  # the word for it
        rate: str | Rate | None = None,
        name: str = "",
    ) -> None:
        """Correct what the start has cost, by what was used.

        Args:
            amount: how much more was used; it counts from now on, also above the rate. Below 0: how
                much less. At most the cost of the start is given back, as far as it still counts.
            id: a second charge with the same id changes nothing. None: every charge counts.
            rate: the rate to correct, as ``"1000/m"``; None: all rates that have a cost.
            name: the lock, if the task has several.

        Raises:
            ConfigurationError: no such rate has a cost, or an argument is invalid.
            BackendError: Redis did not answer, or refused.
        """
        ...


class Verdict(str, enum.Enum):
    """What a script answers."""

    GRANTED = "granted"
    """The token holds the lock."""
    WAITING = "waiting"
    """The token is in the queue."""
    BLOCKED = "blocked"
    """The lock is busy, and the token was not queued."""
    FULL = "full"
    """The lock is busy, and its queue is full."""
    TWIN = "twin"
    """The same attempt holds or waits already, under another token."""
    DONE = "done"
    """The same attempt has ended for good."""
    RELEASED = "released"
    """The token held the lock or waited for it, and no longer does."""
    TOO_COSTLY = "too_costly"
    """The start costs more than a rate of the lock ever allows, so it would wait for ever."""
    CHARGED = "charged"
    """The usage of the lock's rates was corrected, now or by an earlier call with the same id."""
    ABSENT = "absent"
    """The token neither holds the lock nor waits for it."""


class Ending(str, enum.Enum):
    """How a token releases the lock."""

    FINAL = "final"
    """The task has ended. Its stored message and its twin are deleted."""
    REPEAT = "repeat"
    """The end of a task is reported once more, since Redis may have lost it. If the task runs again
    in another worker, it keeps the lock, and the reply says so."""
    AGAIN = "again"
    """The task runs again: its stored message, or its twin, returns to the queue.

    It keeps its place. If it returns for a second time after it had begun, it waits for a growing
    delay instead, and others pass.
    """
    UNREAD = "unread"
    """No worker could read the message. It returns to the queue after a delay, and the return is
    counted."""
    REFUSED = "refused"
    """Redis refuses another lock of the task. Its message returns after a delay, and
    the return is not counted."""
    REJECT = "reject"
    """The task has rejected its message. A stored message is delivered to be dead-lettered."""
    KEEP = "keep"
    """The task is retried, and its permit is reserved for the next attempt."""
    LATER = "later"
    """The task has raised ``RetryLater``: its stored message returns to the queue at its place.

    Its wait continues, and the return is not counted. The lock is closed for a time, if one is
    given."""
    HOLD = "hold"
    """The task has succeeded, and its permit stays taken for a while (``lock_hold_for``)."""
    CANCEL = "cancel"
    """A waiter leaves the queue. If it was granted meanwhile, it keeps the grant, and the reply
    says so."""
    RETURN = "return"
    """A granted message returns to its place. If its task has begun, it keeps the lock, and the
    reply says so."""
    OFFER = "offer"
    """A granted message goes to another worker. If its task has begun, or no other worker has a
    free slot, it keeps the grant, and the reply says so."""


class Preempted(NamedTuple):
    """The answer to a renewal of a holder that must end; it still holds the lock.

    Args:
        by: the attempt for which it must end (``lock_on_conflict="preempt"``).
    """

    by: str


Renewal: TypeAlias = bool | Preempted | None
"""The answer to a renewal: whether the lock is held; None if the server refused this lock."""


class Owner(NamedTuple):
    """Who asks for a lock.

    Args:
        token: owner token.
        attempt: one try of one task (``id/retries/nesting``); an empty string outside of tasks.
        task: name of the task, for people.
        worker: id of the worker whose inbox receives grants first; may be empty.
        host: machine, for people.
        pid: process, for people.
    """

    token: str
    attempt: str = ""
    task: str = ""
    worker: str = ""
    host: str = ""
    pid: int = 0


class Claim(NamedTuple):
    """A request for a lock.

    Args:
        name: the lock's name.
        lease: seconds for which a grant is valid.
        limit: permits of the lock.
        place: server microseconds of the arrival, which sort the queue; 0 for "now".
        max_waiting: longest queue that may be joined; None for no limit.
        copy: 1 if this may be a second delivery of a message that waits, runs or has ended: the
            broker marks it as redelivered, or a worker published it; else 0. A larger number is the
            time (server microseconds) at which such a message first arrived: if an attempt with the
            same name ended before that, it was another call with the same task id.
        replace: if the queue is full, the message replaces the oldest one of its task.
        flow: flow options, see :func:`celery_singleton_lock.core.rate.packed`; empty for none.
        later: the task acquires other locks before it starts. A later
            :meth:`~celery_singleton_lock.store.base.LockStore.claim` counts the start at the rates.
            It has no effect without ``flow``.
        unanswered: of a granted message that is parked again, since Redis did not answer its claim,
            or its task runs later: its delivery ends, and it queues at its old place.
    """

    name: str
    lease: float = 30.0
    limit: int = 1
    place: int = 0
    max_waiting: int | None = None
    copy: int = 0
    replace: bool = False
    flow: str = ""
    later: bool = False
    unanswered: bool = False


SHORTEST: Final = 0.001
"""Shortest reservation, in seconds: the scripts count in milliseconds."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A permit that stays taken after a task, or the time that LATER and REFUSED need.

    Args:
        attempt: the attempt that may use it, if the task is retried; empty if none may. With LATER:
            who closes the lock, and why, for people. With REFUSED: the name of the refused lock.
        seconds: longest time for which it stays taken; with LATER, for which the lock is closed;
            with REFUSED, for which the message is delayed.
        since: monotonic time from which the seconds count; 0: from the release.
    """

    attempt: str
    seconds: float
    since: float = field(default=0.0, compare=False)

    def left(self, now: float) -> Reservation | None:
        """Return what is left of it, if it is released as late as ``now``; None if it is over."""
        left = self.seconds - (now - self.since) if self.since else self.seconds
        return replace(self, seconds=left, since=now) if left >= SHORTEST else None

    @property
    def token(self) -> str:
        """Owner token of the reservation; a final release of the token ends it."""
        return f"keep:{self.attempt}"


class Identity(NamedTuple):
    """Identifies the servers of the locks, and whether they still have their data.

    Args:
        markers: random values that were written once: one, or one for each bucket of a Cluster;
            empty if that was not possible; None while the slot of a bucket moves.
        runs: run ids of the servers that report one.
    """

    markers: tuple[str | None, ...] = ()
    runs: frozenset[str] = frozenset()

    def differs(self, before: Identity) -> str:
        """Return why data may have been lost since ``before``, as a clause; empty if it was not."""
        if self.has_lost(before):
            return "its marker is gone, so it was emptied, or restarted without its data"
        if before.runs and self.runs - before.runs:
            return "its run id is another one, so it was restarted, or a replica was promoted"
        return ""

    def has_lost(self, before: Identity) -> bool:
        """Return whether data has certainly been lost since ``before``."""
        pairs = zip(before.markers, self.markers, strict=True)
        return any(old and new is not None and old != new for old, new in pairs)

    def completed(self, before: Identity) -> Identity:
        """Return this identity with the markers of ``before`` for the buckets that move."""
        pairs = zip(before.markers, self.markers, strict=True)
        return self._replace(markers=tuple(old if new is None else new for old, new in pairs))


class Reply(NamedTuple):
    """The answer of acquire, claim, park and release.

    Args:
        verdict: what happened.
        fencing_token: number of the grant, if granted.
        lease: seconds for which the grant is valid, counted from the time of the request.
        rank: position in the queue, 1 is next; 0 if not in the queue.
        next_look: seconds until the answer can change without a call to the lock, because a lease
            or a quarantine ends; 0 if only a call can change it.
        holder: one of the holders, if the lock is busy.
        limit: permits in force (the lowest limit of all holders and waiters).
        paused: the reason that an operator gave for a pause, if that is why nothing was granted.
        closed: who has closed the lock for a time, and why, if that is why nothing was granted;
            ``next_look`` is the time that is left.
        repeated: an earlier request for this release got no answer and may have released the
            lock, so ABSENT does not mean that the lock was lost.
        waits_for: why the verdict is BLOCKED, FULL or WAITING; None for other verdicts, and if the
            reason is not known.
        excess: why the verdict is TOO_COSTLY, see
            :func:`celery_singleton_lock.core.rate.why_never`.
        lost: the verdict is ABSENT, and Redis has no trace of the message: it has lost its data.
    """

    verdict: Verdict
    fencing_token: int = 0
    lease: float = 0.0
    rank: int = 0
    next_look: float = 0.0
    holder: Holder | None = None
    limit: int = 1
    paused: str = ""
    repeated: bool = False
    waits_for: WaitsFor | None = None
    excess: str = ""
    closed: str = ""
    lost: bool = False

    @property
    def next_start(self) -> float:
        """Seconds until the next waiter may start without a call, if it waits for that; else 0."""
        return self.next_look if self.waits_for in _ENDS_BY_TIME else 0.0


_ENDS_BY_TIME: Final = frozenset({WaitsFor.RATE, WaitsFor.PAUSE, WaitsFor.SETTLING})
"""What a waiter waits for that ends by itself, at a time that the reply gives."""


def why_busy(name: str, refused: Reply | LockView | None = None) -> str:
    """Return why a lock is busy, as a clause for an error or a log line.

    Args:
        name: the lock's name.
        refused: the reply that refused it, or the state of the lock; None if neither is known.
    """
    refused = refused or Reply(Verdict.BLOCKED)
    holders = refused.holders[:1] if isinstance(refused, LockView) else (refused.holder,)
    holder = next(iter(holders), None)
    if refused.waits_for is WaitsFor.REDIS:
        return (
            f"lock {name!r} is in quarantine for another {refused.next_look:.1f} s, because its "
            "Redis was replaced or restarted (singleton_lock_quarantine)"
        )
    if refused.paused or refused.closed:
        return _held_back(name, refused)
    if refused.waits_for in {WaitsFor.RATE, WaitsFor.GROUP}:
        return _with_a_free_permit(name, refused)
    if holder is not None and holder.state == HELD_AFTER:
        return (
            f"lock {name!r} stays held for another {holder.expires_in:.1f} s after {holder} has "
            "succeeded (lock_hold_for)"
        )
    if holder is None and refused.waits_for is WaitsFor.QUEUE:
        return f"lock {name!r} is free, and other tasks are before this one"
    return f"lock {name!r} is held by {holder or 'another client'}"


def _with_a_free_permit(name: str, refused: Reply | LockView) -> str:
    if refused.waits_for is WaitsFor.GROUP:
        return f"lock {name!r} has a free permit, and its group holds as many permits as it may"
    later = f" for another {refused.next_look:.1f} s" if refused.next_look else ""
    return f"lock {name!r} has reached its rate{later}, so nobody may start"


def _held_back(name: str, refused: Reply | LockView) -> str:
    if not refused.paused:
        left = refused.closed_for if isinstance(refused, LockView) else refused.next_look
        return f"lock {name!r} is closed for another {left:.1f} s, {printable(refused.closed)}"
    left = refused.pause_left if isinstance(refused, LockView) else 0.0
    ends = f" for another {left:.1f} s, or" if left else ""
    return (
        f"lock {name!r} is paused ({printable(refused.paused)}){ends} until an operator resumes it "
        f"(celery -A YOUR_APP locks resume {printable(shlex.quote(name))})"
    )
