"""Frozen values: who asks, what was answered, what is kept.

Seconds everywhere, unless a name ends in ``_ms`` or ``_us``. Those that are made for each task, or
for each of a hundred thousand locks, are tuples, which cost a third of a frozen dataclass.
"""

from __future__ import annotations

import enum
import hashlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from celery_singleton_lock.message_text import printable

SCHEMA: Final = "1"
"""Version of the data model in Redis; a worker refuses another one."""

ALIVE: Final = 3.0
"""Seconds for which a worker counts as alive after a heartbeat; it sends one about every second."""

REMEMBERED: Final = 10
"""How many times as long the server remembers when a worker's last heartbeat was; as beat.lua."""

CLAIM_LEASE: Final = 5.0
"""Seconds within which a waiter must claim its grant (or its worker renew it) before the sweep."""


HELD_AFTER: Final = "held_after"
"""State of a holder whose task has ended, while nobody gets its permit."""


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
        """Whether it is certainly held, as far as is known without asking."""
        ...

    @property
    def lost(self) -> bool:
        """Whether it was held, and was lost."""
        ...

    @property
    def fencing_token(self) -> int:
        """Number of the grant, growing with each; 0 without a lock."""
        ...

    @property
    def expires_in(self) -> float:
        """Seconds for which it is certainly held, if it is not renewed; 0 if it is not held."""
        ...

    def ensure_held(self) -> None:
        """Ask the store whether the lock is still held.

        Raises:
            LockLost: it was lost; stop writing.
            BackendError: no answer, or refused.
        """
        ...


def new_token() -> str:
    """Return a new owner token: random, never derived from a task id.

    The number behind the dot counts deliveries: a parked message that goes back to the queue gets
    the next number, so that a late holder of the former delivery owns nothing.
    """
    return f"{os.urandom(16).hex()}.0"


def token_for(identity: str) -> str:
    """Return a new owner token whose base is the same for each delivery of one message.

    Args:
        identity: what tells the message from all others; empty if nothing does.
    """
    if not identity:
        return new_token()
    base = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return f"{base}.{int.from_bytes(os.urandom(5), 'big')}"


def base_of(token: str) -> str:
    """Return the part of a token that stays the same over deliveries."""
    base, dot, number = token.rpartition(".")
    return base if dot and number.isdecimal() else token


class Verdict(str, enum.Enum):
    """What a script answers: closed, so that a new answer breaks the type check."""

    GRANTED = "granted"
    """The token holds the lock."""
    WAITING = "waiting"
    """The token stands in the queue."""
    BLOCKED = "blocked"
    """The lock is busy, and the token was not queued."""
    FULL = "full"
    """The lock is busy, and its queue is full."""
    TWIN = "twin"
    """The same attempt holds or waits already, under another token."""
    DONE = "done"
    """The same attempt has ended for good."""
    RELEASED = "released"
    """The token held the lock or waited for it, and does not any more."""
    ABSENT = "absent"
    """The token neither holds the lock nor waits for it."""


class Ending(str, enum.Enum):
    """How a token gives the lock back."""

    FINAL = "final"
    """The task is acknowledged and does not come back: its body and its twin go too."""
    AGAIN = "again"
    """The task comes back: its body, or its twin, returns to the queue.

    It keeps its place, unless it has come back before after it had begun: then others pass for a
    growing delay.
    """
    UNREAD = "unread"
    """No worker could make a task of the message: it comes back after a delay, and is counted."""
    REJECT = "reject"
    """The task has rejected its message: one that is kept is delivered to be rejected."""
    KEEP = "keep"
    """The task is settled, and its permit is reserved for the attempt that follows."""
    HOLD = "hold"
    """The task has succeeded, and nobody gets its permit for a while (``lock_hold_for``)."""
    CANCEL = "cancel"
    """A waiter gives up; if it was granted meanwhile it keeps the grant and is told so."""
    RETURN = "return"
    """A granted message goes back to its place; if it has begun, it keeps the lock and its worker
    is told so."""
    OFFER = "offer"
    """A granted message goes to another worker; if it has begun, or no other has a free slot, it
    keeps the grant and its worker is told so."""


class Owner(NamedTuple):
    """Who asks for a lock.

    Args:
        token: owner token, see :func:`new_token`.
        attempt: one try of one task (``id/retries/nesting``); an empty string outside of tasks.
        task: name of the task, for people.
        worker: id of the worker, of which the inbox receives grants first; may be empty.
        host: machine, for people.
        pid: process, for people.
    """

    token: str
    attempt: str = ""
    task: str = ""
    worker: str = ""
    host: str = ""
    pid: int = 0


ANOTHER_RUN: Final = 2
"""Marks a message of which a first run does not count; see :class:`Claim`."""


class Claim(NamedTuple):
    """What is asked of a lock.

    Args:
        name: the lock's name.
        lease: seconds for which an answer "granted" is valid.
        limit: permits of the lock.
        place: server microseconds at which the asker arrived, 0 for "now".
        max_waiting: most that may stand in the queue, None for no bound.
        copy: whether the asker may be a second delivery of a message that is here already, or has
            ended: the broker has marked it as redelivered, or it was published by us.
            :data:`ANOTHER_RUN` for a message that is to run although its task has ended.
        replace: a message that finds the queue full takes the room of the oldest of its task.
    """

    name: str
    lease: float = 30.0
    limit: int = 1
    place: int = 0
    max_waiting: int | None = None
    copy: int = 0
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a task leaves behind: its permit.

    Args:
        attempt: for whom it is kept, if the task is retried; empty if for nobody.
        seconds: how long it is kept at most.
    """

    attempt: str
    seconds: float

    @property
    def token(self) -> str:
        """Owner token of the reservation; a final release of it ends it."""
        return f"keep:{self.attempt}"


class Holder(NamedTuple):
    """A holder or waiter, as shown to people.

    Args:
        token: owner token.
        task: name of the task, if any.
        task_id: id of the task, if any.
        worker: id of its worker, if any.
        host: machine.
        pid: process.
        expires_in: seconds left of the lease; 0 for a waiter.
        fencing_token: number of the grant; 0 for a waiter.
        state: ``running``, ``granted``, ``reserved``, ``held_after`` (its task has ended),
            ``waiting``, ``parked``, ``adrift``, ``delayed``, ``overdue``, ``replaced``,
            ``revoked`` or ``rejected``.
        since: server seconds at which it came into this state.
        lease: seconds that a renewal gives it; 0 if unknown.
        silent: seconds for which its worker has shown no sign of life; 0 if it has lately, if that
            was not looked at, and for clients.
    """

    token: str
    task: str = ""
    task_id: str = ""
    worker: str = ""
    host: str = ""
    pid: int = 0
    expires_in: float = 0.0
    fencing_token: int = 0
    state: str = ""
    since: float = 0.0
    lease: float = 0.0
    silent: float = 0.0

    def __str__(self) -> str:
        """``settle[3f…] on worker-2``, or the client's host and pid; printable."""
        if not self.task:
            return printable(f"pid {self.pid} on {self.host}" if self.pid else self.token[:8])
        task = f"{self.task}[{self.task_id}]" if self.task_id else self.task
        return printable(f"{task} on {self.worker}" if self.worker else task)


class ParkedMessage(NamedTuple):
    """A message that a worker has parked.

    Args:
        lock: name of the lock at which it waits.
        token: owner token under which it was parked.
        task: name of the task.
        task_id: id of the task.
    """

    lock: str
    token: str
    task: str
    task_id: str


class Identity(NamedTuple):
    """Which servers hold the locks, and whether they still have their data.

    Args:
        markers: random values that were written once: one, or one for each bucket of a Cluster;
            empty where that was not possible.
        runs: run ids of the servers; without those that do not tell theirs.
    """

    markers: tuple[str, ...] = ()
    runs: frozenset[str] = frozenset()

    def differs(self, before: Identity) -> str:
        """Return why data may be lost since ``before``, as a clause; empty if nothing says so."""
        pairs = zip(before.markers, self.markers, strict=True)
        if any(old not in {"", new} for old, new in pairs):
            return "its marker is gone, so it was emptied, or restarted without its data"
        if before.runs and self.runs - before.runs:
            return "its run id is another one, so it was restarted, or a replica was promoted"
        return ""


class Reply(NamedTuple):
    """The answer of acquire, claim, park and release.

    Args:
        verdict: what happened.
        fencing_token: number of the grant, if granted.
        lease: seconds for which the grant is valid, counted from when it was asked for.
        rank: place in the queue, 1 is next; 0 if it does not stand there.
        next_look: seconds until the first lease of a holder ends; when a waiter looks again.
        holder: one of those who hold the lock, if it is busy.
        limit: permits in force (the lowest of those declared by who holds or waits).
        paused: why an operator has the lock granted to nobody, if it was asked for in vain.
        repeated: an earlier request for this release got no answer, so that may have released the
            lock: ABSENT then does not tell that it was lost.
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


def why_busy(name: str, holder: Holder | None, paused: str) -> str:
    """Return why a lock is not to be had, for the reason of a task's end.

    Args:
        name: the lock's name.
        holder: one of those who hold it, if known.
        paused: why an operator has it granted to nobody; empty if it is granted as usual.
    """
    if paused:
        return (
            f"lock {name!r} is paused ({printable(paused)}): nobody gets it until an operator "
            f"resumes it (celery -A YOUR_APP locks resume {printable(shlex.quote(name))})"
        )
    if holder is not None and holder.state == HELD_AFTER:
        return (
            f"lock {name!r} is kept for another {holder.expires_in:.1f} s after {holder} has "
            "succeeded (lock_hold_for)"
        )
    return f"lock {name!r} is held by {holder or 'another client'}"


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message to park.

    Args:
        body: the message, packed by :mod:`celery_singleton_lock.worker.publisher`.
        realm: hash of the broker URL without credentials.
        queue: queue from which the message came.
        deadline: seconds that it may wait; None for ever.
        returns: how often it has come back before.
    """

    body: bytes
    realm: str
    queue: str
    deadline: float | None = None
    returns: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """What arrives in a worker's inbox.

    Args:
        name: the lock's name.
        token: the token under which the message now holds the lock.
        fencing_token: number of the grant; 0 if ``verdict`` is not granted.
        body: the parked message; None if it was too long for the inbox (fetch it).
        verdict: ``granted``, or how it must end without running: ``overdue``, it waited for too
            long; ``replaced``, a later message took its room; ``revoked``, whether the worker that
            gets it knows that already or not; ``rejected``, its task has rejected it.
        waited: seconds since it arrived.
        by: the attempt that replaced it.
        returns: how often it has come back, after it had begun or since it could not be received.
        queue: from which it came.
    """

    name: str
    token: str
    fencing_token: int
    body: bytes | None
    verdict: str = "granted"
    waited: float = 0.0
    by: str = ""
    returns: int = 0
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Stray:
    """A parked message that no live worker takes, on its way to the broker.

    Args:
        name: of its lock.
        token: its token there.
        queue: where it was consumed.
        body: the message, packed.
        seal: names the call that took it out of the line.
        attempt: ``id/retries/nesting``.
        place: server microseconds of its arrival.
    """

    name: str
    token: str
    queue: str
    body: bytes
    seal: str = ""
    attempt: str = ""
    place: int = 0


@dataclass(frozen=True, slots=True)
class LockView:
    """A lock as it stands, for people and for tests.

    Args:
        name: the lock's name.
        holders: unexpired holders, by end of lease.
        waiters: the first of the queue, in order.
        waiting: how many stand in the queue.
        adrift: how many of the parked no live worker consumes.
        bodies: how many bodies are kept.
        limit: permits in force; 0 if the lock is idle.
        fencing_token: number of the last grant.
        counters: grants, lapses … since the lock was last idle for long.
        paused: why an operator has it granted to nobody; empty if it is granted as usual.
        limit_set: whether an operator has set the limit, whatever the tasks declare.
    """

    name: str
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Holder, ...] = ()
    waiting: int = 0
    adrift: int = 0
    bodies: int = 0
    limit: int = 0
    fencing_token: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    paused: str = ""
    limit_set: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """What a lock would have done to tasks that ran without it.

    Args:
        name: of the task, or of the lock (its first 200 characters).
        runs: how many were observed; not counted by lock.
        blocked: how many would have been blocked.
        waited: seconds that they would have waited, in sum.
        longest: seconds that one of them would have waited at most.
    """

    name: str
    runs: int = 0
    blocked: int = 0
    waited: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True, slots=True)
class Observations:
    """The report of what was observed.

    Args:
        tasks: those that ran without their locks, the longest waits first.
        locks: those that would have blocked a task; where there are many, those that would have
            done it most often.
    """

    tasks: tuple[Observed, ...] = ()
    locks: tuple[Observed, ...] = ()


class Parked(NamedTuple):
    """The parked messages of a queue.

    Args:
        waiting: how many.
        oldest: seconds since the first of them arrived at a worker.
    """

    waiting: int
    oldest: float
