"""The state of a lock, as users see it: frozen values.

Durations are in seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from celery_singleton_lock.message_text import printable

HELD_AFTER: Final = "held_after"
"""State of a holder whose task has succeeded and whose lock stays held (``lock_hold_for``)."""


SETTLING: Final = "settling"
"""State of a stored message that a later call may replace until it queues (``lock_debounce``)."""


RUNS: Final = frozenset({"running", "preempted"})
"""States of a holder whose task runs."""


class WaitsFor(str, enum.Enum):
    """What a task waits for before it may start; ``waits_for`` in admission.lua decides that."""

    REDIS = "redis"
    """Redis was replaced or restarted and grants nothing yet (``singleton_lock_quarantine``)."""
    PAUSE = "pause"
    """An operator has paused the lock, or a task has closed it for a time (``RetryLater``)."""
    HOLDER = "holder"
    """All permits are held."""
    RATE = "rate"
    """A permit is free, and the rate of the lock allows no start yet."""
    GROUP = "group"
    """A permit is free, and its group holds as many as it may (``lock_fair_limit``)."""
    SETTLING = "settling"
    """A later call may replace it until its quiet period ends (``lock_debounce``)."""
    FOLLOWING = "following"
    """It waits for the result of the task that was sent first (``lock_on_duplicate``)."""
    QUEUE = "queue"
    """Other waiters are before it in the queue."""
    WORKER = "worker"
    """No live worker that declares the task consumes its queue."""


def reason_in(answer: Refusal | None) -> str:
    """Return the reason in an answer, for events, errors and metrics; empty if it is unknown."""
    return answer.waits_for.value if answer and answer.waits_for else ""


class Refusal(Protocol):
    """Has the reason why a lock is not granted: a reply, or the state of the lock."""

    @property
    def waits_for(self) -> WaitsFor | None:
        """What the next task waits for."""
        ...


class Holder(NamedTuple):
    """A holder or waiter of a lock.

    Args:
        token: owner token.
        task: name of the task, if any.
        task_id: id of the task, if any.
        worker: id of its worker, if any.
        host: machine.
        pid: process.
        expires_in: seconds left of the lease; 0 for a waiter.
        fencing_token: number of the grant; 0 for a waiter.
        state: ``running``, ``preempted`` (it must end), ``granted``, ``reserved``,
            ``held_after`` (its task has ended), ``waiting``, ``parked``, ``adrift``, ``delayed``,
            ``settling``, ``following``, ``overdue``, ``replaced``, ``revoked``, ``rejected``,
            ``too_costly`` or ``above_rate``.
        since: server seconds at which this state began.
        lease: length of its lease in seconds; 0 if unknown.
        silent: seconds since the last heartbeat or renewal of its worker; 0 if that was recent or
            was not examined, or if a client holds the lock.
        group: its group, if the lock is shared fairly (``lock_fair_by``).
        unique: the key of its unique call, if it counts as sent (``lock_unique``).
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
    group: str = ""
    unique: str = ""

    def __str__(self) -> str:
        """``settle[3f…] on worker-2``, or the client's host and pid; printable."""
        if not self.task:
            return printable(f"pid {self.pid} on {self.host}" if self.pid else self.token[:8])
        task = f"{self.task}[{self.task_id}]" if self.task_id else self.task
        return printable(f"{task} on {self.worker}" if self.worker else task)


@dataclass(frozen=True, slots=True)
class RateInForce:
    """A rate of a lock, as its callers have declared it.

    Args:
        rate: as text, ``100/m``.
        number: starts in a period.
        started: of a sliding rate, the starts in the last period and the grants that nobody has
            claimed yet. Of a smooth rate, only these grants. If the rate counts costs: their costs,
            or of a smooth rate the part of its burst that is used.
        is_smooth: whether the starts are spaced evenly.
        by_cost: whether it counts the costs of starts.
        key: its id in the data of the lock.
        most: the highest cost that it allows at all.
        by_operator: whether an operator has set it, in place of the tasks' own.
    """

    rate: str
    number: int
    started: int
    is_smooth: bool
    by_cost: bool = False
    key: str = ""
    most: int = 0
    by_operator: bool = False

    def __str__(self) -> str:
        """``100/m``; if it counts costs, with what it counts now: ``1000/m, 900 used``."""
        return f"{self.rate}, {self.started:,} used" if self.by_cost else self.rate


class WaitingGroup(NamedTuple):
    """A group of tasks that wait for a lock (``lock_fair_by``).

    Args:
        name: its name; empty for all waiters without a group.
        waiting: number of its waiters.
        held: number of permits that it holds.
        is_at_limit: whether it holds as many as it may (``lock_fair_limit``).
    """

    name: str
    waiting: int
    held: int = 0
    is_at_limit: bool = False


@dataclass(frozen=True, slots=True)
class LockView:
    """The state of a lock.

    Args:
        name: the lock's name.
        holders: holders with unexpired leases, by end of lease.
        waiters: the first of the queue, in order.
        waiting: length of the queue.
        adrift: number of parked messages that are next and that no live worker takes.
        bodies: number of stored messages.
        limit: permits in force; 0 if the lock is idle.
        fencing_token: number of the last grant.
        counters: numbers of grants, lapsed leases and so on, since the lock's keys were created.
        paused: the reason that an operator gave for a pause; empty if the lock is not paused.
        pause_left: seconds until this pause ends by itself; 0: only an operator ends it.
        limit_set: whether an operator has set the limit, in place of the tasks' own.
        limit_left: seconds until the tasks' limit is in force again; 0: until an operator acts.
        limit_computed: whether the limit was computed from the arguments of a task.
        waits_for: what the next task waits for; None if a permit is free.
        next_look: seconds until ``waits_for`` can change by time alone; 0 if only an operation on
            the lock can change it.
        rates: the rates in force.
        closed_for: seconds for which it is closed by a task or client; 0 if it is not. It may be
            paused as well.
        closed: who has closed it, and why.
        rates_set: whether an operator has set rates, in place of the tasks' own.
        rates_left: seconds until the tasks' rates are in force again; 0: until an operator acts.
        groups_waiting: number of groups that have a waiter.
        groups: at most ten of them, those with most waiters first. Only the first 500 groups below
            their limits, and the first 500 at their limits, are compared.
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
    waits_for: WaitsFor | None = None
    next_look: float = 0.0
    rates: tuple[RateInForce, ...] = ()
    closed_for: float = 0.0
    closed: str = ""
    pause_left: float = 0.0
    limit_left: float = 0.0
    limit_computed: bool = False
    rates_set: bool = False
    rates_left: float = 0.0
    groups_waiting: int = 0
    groups: tuple[WaitingGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """How a lock would have delayed tasks that ran without it.

    Args:
        name: name of the task, or of the lock (its first 200 characters).
        runs: number of observed runs; 0 for a lock.
        blocked: number of runs that would have been blocked.
        waited: sum of the waits, in seconds.
        longest: longest of these waits, in seconds.
        paused: number of blocked runs that began while an operator had paused the lock.
        replaced: number of runs that a later one would have replaced (``lock_debounce``).
    """

    name: str
    runs: int = 0
    blocked: int = 0
    waited: float = 0.0
    longest: float = 0.0
    paused: int = 0
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class Observations:
    """The report of observe mode.

    Args:
        tasks: tasks that ran without their locks, the longest waits first.
        locks: locks that would have blocked a task; if there are many, those that would have
            blocked most often.
    """

    tasks: tuple[Observed, ...] = ()
    locks: tuple[Observed, ...] = ()


class Parked(NamedTuple):
    """The parked messages of a queue.

    Args:
        waiting: their number.
        oldest: seconds since the oldest of them arrived at a worker.
        size: their size in bytes, without the memory that Redis needs for each in addition.
    """

    waiting: int
    oldest: float
    size: int = 0
