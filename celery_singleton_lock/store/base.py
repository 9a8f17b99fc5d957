"""What a store must do: the verbs of a lock, each atomic and idempotent per token.

A store knows tokens, leases and queues; it knows neither threads nor Celery. All times are the
store's own; a caller gets durations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.core.model import (
    Claim,
    Delivery,
    Ending,
    Holder,
    Identity,
    LockView,
    Observations,
    Owner,
    Parcel,
    Parked,
    ParkedMessage,
    Reply,
    Reservation,
    Stray,
)


class Store(Protocol):
    """The verbs of a lock.

    All but ``extend`` and ``inspect`` sweep: lapsed leases end, and their successors are granted.

    Attributes:
        clock: what those who use the store measure seconds by.
    """

    clock: Clock

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Reply:
        """Take the lock if a permit is free and nobody who came earlier waits for it.

        Args:
            owner: who asks. Asking again with the same token changes nothing (idempotent).
            claim: what is asked.
            wait: None: do not queue. Otherwise stand in the queue, alive for this many seconds
                (ask again within them to stay).

        Returns:
            GRANTED; WAITING (``wait`` given), BLOCKED or FULL. TWIN if the same attempt is here
            already and DONE if it has ended for good: for ``claim.copy``, and for a message that
            was parked and is kept here under a later number of its token, or was settled.

        Raises:
            BackendError: unreachable, or refused; nothing is held by this call that asking again
                with the same token would not find.
        """
        ...

    def park(self, owner: Owner, claim: Claim, parcel: Parcel) -> Reply:
        """Put a message into the queue, at its place; grant it at once if its turn has come.

        Returns:
            WAITING (or granted already: it arrives in an inbox like every grant), FULL, DONE, TWIN
            (kept, or already safe here).

        Raises:
            BackendError: the message was not kept; leave it with the broker.
        """
        ...

    def park_many(
        self, parcels: Iterable[tuple[Owner, Claim, Parcel]]
    ) -> Sequence[Reply | BackendError]:
        """Park several messages in one round trip; each gets its own answer or error."""
        ...

    def claim(
        self,
        owner: Owner,
        name: str,
        lease: float,
        *,
        settle: bool = False,
        kept_elsewhere: bool = False,
    ) -> Reply:
        """Begin to use a grant: GRANTED with a full lease, WAITING, or ABSENT if it was lost.

        A waiter that is next at a free lock is granted by its claim, without a delivery.

        Args:
            owner: the granted token, with the process that now uses it.
            name: the lock's name.
            lease: seconds.
            settle: drop the body now, and keep no copy of it (the message counts as acknowledged
                from its start).
            kept_elsewhere: drop the body now: the message is kept at another lock of its task.
        """
        ...

    def release(
        self,
        name: str,
        token: str,
        ending: Ending,
        *,
        worker: str = "",
        done_for: float = 3600.0,
        mark: bool = False,
        reserve: Reservation | None = None,
    ) -> Reply:
        """Give the lock back, or leave its queue, and hand it to who is next.

        Args:
            name: the lock's name.
            token: whose. Another's lock is never touched (compare and delete).
            ending: see :class:`Ending`.
            worker: id of the releaser's worker, whose inbox is preferred for the next grant.
            done_for: seconds for which later copies of the attempt end quietly, where copies are
                known to exist (it was parked, or has a twin).
            mark: remember the end also where no copy is known.
            reserve: for a KEEP: for whom the permit is kept. If that attempt waits already, it is
                granted; if its permit would be one too many, nothing is kept. For a HOLD: for how
                long nobody gets the permit.

        Returns:
            RELEASED, ABSENT, or GRANTED when a CANCEL came after the grant. ABSENT and ``repeated``
            if it may have been released by a request of which the answer was lost.
        """
        ...

    def extend(self, leases: Iterable[tuple[str, str, float]]) -> Sequence[bool | None]:
        """Renew many leases; never creates one, never revives a lapsed one.

        Args:
            leases: (name, token, seconds).

        Returns:
            For each whether it is held; None if the store refused to say (the keys of that lock
            hold something else), while it answered for others.
        """
        ...

    def kick(
        self, name: str, *, worker: str = "", realm: str = "", patience: float = 0.0
    ) -> Sequence[Stray]:
        """Sweep and grant; take messages that no live worker takes out of the line.

        Args:
            name: the lock's name.
            worker: id of the caller's worker, whose inbox is preferred.
            realm: broker of the messages that are taken out; empty: none is.
            patience: seconds for which no worker must have taken them.

        Returns:
            At most 100 of them, to be published; then :meth:`left` is told. If that is not done
            within a minute, they queue again at their places.
        """
        ...

    def kick_many(
        self, names: Sequence[str], *, worker: str = "", realm: str = "", patience: float = 0.0
    ) -> Sequence[Stray]:
        """Sweep several locks in one round trip; a lock whose keys are refused is passed by."""
        ...

    def left(
        self, name: str, seal: str, tokens: Sequence[str], *, sent: bool, worker: str = ""
    ) -> int:
        """End the leaving of messages that were taken out of the line.

        Args:
            name: the lock's name.
            seal: of :class:`~celery_singleton_lock.core.model.Stray`; a message that queues again
                meanwhile, or was taken by another call, is left alone.
            tokens: of the messages.
            sent: they are with the broker, and are forgotten here. One of which the broker's
                message has come to a worker that locks, and was acknowledged, queues again. If
                False, they all do.
            worker: id of the caller's worker, whose inbox is preferred.

        Returns:
            How many were forgotten.
        """
        ...

    def take_due(self, limit: int = 100) -> Sequence[str]:
        """Return names of locks that want a look; another caller gets them only in a while."""
        ...

    def neglected(self, seconds: float, limit: int = 20) -> Sequence[str]:
        """Return names of locks that have wanted a look for so long: no worker sweeps them.

        Changes nothing.
        """
        ...

    def inspect(self, name: str, *, waiters: int = 10) -> LockView:
        """Return the lock as it stands. Changes nothing, and shows lapsed leases as gone."""
        ...

    def reset(self, name: str) -> int:
        """Take the lock from all its holders, whoever they are, and grant it to who is next.

        Returns:
            How many held it. The parked are kept. A message that is kept of a holder goes to the
            end of the line, since its run may go on.
        """
        ...

    def find(self, task_ids: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Return the lock and token of those of these tasks that wait, or waited before they ran.

        Several for an id that several messages share.
        """
        ...

    def revoke(self, name: str, token: str, *, realm: str, worker: str = "") -> Reply:
        """Have a message that waits, and whose task was revoked, delivered with that verdict.

        Args:
            name: the lock's name.
            token: whose; one that holds the lock, or does not wait, is left alone.
            realm: only if it came from this broker.
            worker: id of the caller's worker, whose inbox is preferred.

        Returns:
            RELEASED if it waited, else ABSENT.
        """
        ...

    def body(self, name: str, token: str) -> bytes | None:
        """Return the parked message of ``token``."""
        ...

    def beat(
        self,
        worker: str,
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int = 0,
        *,
        tasks: Collection[str] | None = None,
    ) -> Mapping[str, str]:
        """Tell that ``worker`` lives and consumes ``queues``, for ``ttl`` seconds.

        Args:
            worker: its id.
            realm: hash of the broker.
            queues: names.
            ttl: seconds; 0 if it leaves.
            free: slots of its pool that are free; below 0, so many tasks wait for one. Parked
                messages go to workers with a free slot before others.
            tasks: names of the tasks that it locks: it is given messages of no others. None: of
                all.

        Returns:
            The switches, as :meth:`switches` does.
        """
        ...

    def parked(self, realm: str) -> Mapping[str, Parked]:
        """Return how many messages of a broker are parked, and for how long: by queue."""
        ...

    def switches(self) -> Mapping[str, str]:
        """Return which tasks' modes are switched: task, or ``*``, -> mode."""
        ...

    def switch(self, task: str, mode: str | None) -> None:
        """Switch the mode of a task, or of all (``*``); None takes the switch away."""
        ...

    def waited_for(self) -> Sequence[str]:
        """Return names of locks that somebody waits for: a few hundred, other ones each time."""
        ...

    def let_run(
        self, names: Sequence[str], tasks: Sequence[str], most: int, *, worker: str, realm: str
    ) -> int:
        """Give parked messages of these tasks their turn, whoever holds the locks.

        Args:
            names: of locks.
            tasks: whose locks are not kept.
            most: most messages of one lock.
            worker: id of the caller's worker, whose inbox is preferred.
            realm: only messages of this broker.

        Returns:
            How many.
        """
        ...

    def observe(
        self, owner: Owner, claim: Claim, *, waits: bool, took: float | None = None
    ) -> Holder | None:
        """Write down that a task runs without its lock, and what the lock would have done.

        Args:
            owner: the run.
            claim: what it would have asked.
            waits: whether it would wait; else it would be left out.
            took: None: it begins. Otherwise it has ended, after so many seconds.

        Returns:
            None if the lock would have been free (or the run has ended); else who, as far as that
            is known, would have held it.
        """
        ...

    def observed(self) -> Observations:
        """Return the report of what was observed. Changes nothing."""
        ...

    def forget_observed(self) -> None:
        """Begin the report anew."""
        ...

    def leave(self, worker: str, realm: str, queues: Iterable[str]) -> None:
        """Tell that ``worker`` takes no more grants."""
        ...

    def confirm(self, names: Sequence[str]) -> Sequence[bool]:
        """Wait for replicas; return for which of these locks enough have all that was written."""
        ...

    def too_few(self) -> str:
        """Return what is said when too few replicas confirm."""
        ...

    def identify(self) -> Identity:
        """Return which servers hold the locks, and the markers by which a loss of data is noticed.

        A marker that is missing is written anew.
        """
        ...

    def kept(self, messages: Sequence[ParkedMessage]) -> Sequence[bool]:
        """Return for each message whether it is still kept: its task is not settled."""
        ...

    def traced(self, messages: Sequence[ParkedMessage]) -> Sequence[bool]:
        """Return for each message whether it is kept, its end is remembered, or it is vouched for.

        What is asked after a loss of data: what has left no trace is lost.
        """
        ...

    def vouch(self, tokens: Sequence[str]) -> None:
        """Tell, after a loss of data, which messages are in hand, or have ended.

        Args:
            tokens: their bases, which stay the same over deliveries.
        """
        ...

    def note_lost(self, notes: Mapping[str, str]) -> None:
        """Note parked tasks that were lost, for ``locks doctor`` and ``locks why``.

        Args:
            notes: task id -> JSON: ``lock``, ``task``, ``worker`` that parked it, and ``at``, the
                wall time at which the loss was noticed.
        """
        ...

    def receive(self, worker: str, timeout: float) -> Delivery | None:
        """Wait up to ``timeout`` seconds for a grant in the inbox of ``worker``."""
        ...

    def wait(self, name: str, token: str, timeout: float) -> bool:
        """Block until the wake list of ``token`` has an element, or ``timeout`` seconds passed."""
        ...

    def time(self) -> float:
        """Return the store's clock, in seconds."""
        ...

    def probe(self) -> None:
        """Take and give back a lock that nobody else wants.

        Raises:
            BackendError: locks cannot be taken now: a Redis that is full refuses them.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Return what this store guarantees: version, eviction, persistence, replicas."""
        ...
