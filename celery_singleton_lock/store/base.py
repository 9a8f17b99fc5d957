"""The protocols of a store: each method is one atomic operation on Redis.

Three protocols, by caller: :class:`LockStore` for locks, :class:`MessageStore` for parked messages,
:class:`WorkerStore` for the housekeeping of workers. :class:`Store` is all three. What operators
need in addition is in :mod:`celery_singleton_lock.store.operator.base`.

All methods are idempotent per token: a call may be repeated if its answer was lost. Most methods
that change a lock also sweep it: they end lapsed leases and grant the lock to the next waiters.
``extend``, ``close_for`` and the operations of unique calls do not. A store knows tokens, leases
and queues, but neither threads nor Celery. Durations are in seconds, measured by the server's
clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_view import LockView, Parked
from celery_singleton_lock.core.model import (
    DONE_FOR,
    SCHEMA,
    Claim,
    Ending,
    Identity,
    Owner,
    Renewal,
    Reply,
    Reservation,
)
from celery_singleton_lock.core.parked_message import (
    Delivery,
    MessageToPark,
    ParkedMessage,
    SweepReply,
)
from celery_singleton_lock.core.unique import Announced
from celery_singleton_lock.errors import BackendError


class LockStore(Protocol):
    """Lock operations: what locks in code, the watchdog and the tracer of a worker need.

    Attributes:
        clock: the clock by which callers measure durations.
        has_rates: whether it counts starts, so that a :class:`Claim` may have a rate.
    """

    clock: Clock
    has_rates: bool

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Reply:
        """Acquire the lock if a permit is free and nobody waits before the caller.

        Args:
            owner: the caller. A second call with the same token changes nothing.
            claim: the lock, and the options of this acquisition.
            wait: None: do not queue. Otherwise join the queue for this many seconds; a further call
                within that time prolongs it.

        Returns:
            GRANTED; WAITING (with ``wait``), BLOCKED or FULL. TWIN if another delivery of the same
            message holds the lock, waits for it, or is stored. DONE if its attempt has ended.

        Raises:
            BackendError: the server is unreachable or refused. If it granted the lock nevertheless,
                a further call with the same token returns GRANTED.
        """
        ...

    def claim(
        self,
        owner: Owner,
        name: str,
        lease: float,
        *,
        acks_early: bool = False,
        kept_elsewhere: bool = False,
        later: bool = False,
        limit: int = 0,
    ) -> Reply:
        """Start to use a grant, with a full lease.

        The first waiter of a free lock is granted by its claim, without a delivery.

        Args:
            owner: the granted token, with the process that now uses it.
            name: the lock's name.
            lease: seconds.
            acks_early: delete the stored message (early acknowledgement).
            kept_elsewhere: delete the message that is stored at this lock, since another lock of
                the task stores it.
            later: the task acquires other locks before it starts. If a message is stored here, it
                is deleted. A later claim counts the start at the rates.
            limit: the number of permits that the task declares now. It is in force if it is lower
                than what was declared when its message was parked. 0: none.

        Returns:
            GRANTED, WAITING, or ABSENT if the grant was lost.
        """
        ...

    def release(
        self,
        name: str,
        token: str,
        ending: Ending,
        *,
        worker: str = "",
        done_for: float = DONE_FOR,
        mark: bool = False,
        reserve: Reservation | None = None,
    ) -> Reply:
        """Release the lock, or leave its queue, and grant it to the next waiter.

        Args:
            name: the lock's name.
            token: the holder or waiter. Other tokens are not changed.
            ending: see :class:`Ending`.
            worker: id of the caller's worker, which is preferred for the next grant.
            done_for: seconds for which copies of the attempt are dropped, if copies are known.
            mark: remember the end of the attempt even if no copy is known.
            reserve: with KEEP, the attempt for which the permit is reserved; if it waits already,
                it is granted. With HOLD, how long nobody gets the permit. With LATER, for how long
                the lock is closed, as by :meth:`close_for`; None: it is not.

        Returns:
            RELEASED, ABSENT, or GRANTED if a CANCEL came after the grant. ABSENT with ``repeated``
            if an earlier request, whose answer was lost, may have released it.
        """
        ...

    def extend(self, leases: Iterable[tuple[str, str, float]]) -> Sequence[Renewal]:
        """Renew many leases; never create one, never revive a lapsed one.

        Args:
            leases: (name, token, seconds).

        Returns:
            For each whether it is held; :class:`Preempted`, which is true, if it is, and must be
            released for a newer call; None if the server refused this lock (its keys are of another
            type), but answered for others.
        """
        ...

    def inspect(self, name: str, *, waiters: int = 10) -> LockView:
        """Return the current state of the lock, without lapsed leases. Changes nothing."""
        ...

    def reset(self, name: str, *, call: str = "") -> int:
        """Take the lock from all its holders, and grant it to the next waiters.

        Args:
            name: the lock's name.
            call: id of this call. After a lost reply, repeat the call with the same id: it does not
                take the lock from the next waiters. Empty: a new one.

        Returns:
            How many held it. Parked messages stay stored. A stored message of a holder goes to the
            end of the queue, since its task may still run.
        """
        ...

    def close_for(self, name: str, seconds: float, why: str) -> float:
        """Stop granting the lock for a time. Holders keep it.

        Args:
            name: the lock's name.
            seconds: for how long. Of two closes the longer one is in force.
            why: who closes it, and why, for people.

        Returns:
            Seconds for which it is closed.
        """
        ...

    def wait(self, name: str, token: str, timeout: float) -> bool:
        """Block until ``token`` is granted or ``timeout`` seconds have passed; True if granted."""
        ...

    def time(self) -> float:
        """Return the server's clock, in seconds."""
        ...


class RatedStore(Protocol):
    """Counts the starts of locks; all stores whose ``has_rates`` is true."""

    def charge(
        self, name: str, token: str, charge_id: str, amount: int, rates: Sequence[str]
    ) -> Reply:
        """Correct what a start has used of the rates that count costs.

        Args:
            name: the lock's name.
            token: the holder that has started.
            charge_id: a further call with the same id changes nothing, for at least the longest
                period of the lock's rates.
            amount: how much more it has used, which counts from now on; below 0: how much less. At
                most the cost of the start is given back, and only the part that still counts.
            rates: keys of the rates, see :attr:`Rate.key`.

        Returns:
            CHARGED, or ABSENT if the lock has none of the rates. ``next_look`` is when the next
            waiter may start.
        """
        ...


class UniqueStore(Protocol):
    """The entries of unique calls (``lock_unique``); they change no lock."""

    def announce(self, name: str, key: str, task_id: str, *, instead_of: str = "") -> Announced:
        """Announce that a unique call is about to be sent, or return the one that was sent before.

        Args:
            name: name of the lock that the call takes.
            key: text that two calls of this lock share if they are alike.
            task_id: id of the caller's task. Its own entry does not refuse it.
            instead_of: id of a task whose confirmation the caller has awaited. If the entry of that
                task is still pending, the caller's entry replaces it.

        Returns:
            ANNOUNCED: send it, then call :meth:`confirm_sent` or :meth:`withdraw`. Otherwise the
            state and id of the task that was sent before. If it is PENDING, :meth:`LockStore.wait`
            for the token ``unique:<id>``.

        Raises:
            BackendError: the server is unreachable or refused.
        """
        ...

    def confirm_sent(self, name: str, key: str, task_id: str, retries: int, seconds: float) -> bool:
        """Note that the broker has the message of a call that was announced.

        Args:
            name: as for :meth:`announce`.
            key: as for :meth:`announce`.
            task_id: as for :meth:`announce`.
            retries: number of retries of the attempt that was sent.
            seconds: for how long the entry stays, unless a worker parks or starts the task.

        Returns:
            Whether the entry is that of this task.
        """
        ...

    def withdraw(
        self, name: str, key: str, task_id: str, retries: int, *, ended: bool = False
    ) -> bool:
        """End the entry of a call that was not sent, or whose task has ended without a start.

        Args:
            name: name of the lock that the call takes.
            key: text that two calls of this lock share if they are alike.
            task_id: id of its task; empty: that of any task.
            retries: number of retries of its attempt.
            ended: whether its task has ended. Then the entry of a task that holds the lock ends
                with its lease, if the lock is not released before.

        Returns:
            Whether the entry has ended. It stays if the task is parked or holds the lock, or if its
            retry was sent.
        """
        ...


class MessageStore(Protocol):
    """Parked messages: store, deliver, publish and find them."""

    def park(self, owner: Owner, claim: Claim, message: MessageToPark) -> Reply:
        """Store a message and queue it at its place; grant it at once if it is next.

        Returns:
            WAITING, also if it was granted: each grant arrives in an inbox. FULL or DONE. TWIN if
            another delivery holds the lock or waits: the broker need not keep this one.

        Raises:
            BackendError: the message was not stored; leave it with the broker.
        """
        ...

    def park_many(
        self, messages: Iterable[tuple[Owner, Claim, MessageToPark]]
    ) -> Sequence[Reply | BackendError]:
        """Park several messages in one round trip; return an answer or error for each."""
        ...

    def body(self, name: str, token: str) -> bytes | None:
        """Return the parked message of ``token``."""
        ...

    def bodies_of(self, parked: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """Return the parked message of each lock and token, in one round trip."""
        ...

    def receive(self, worker: str, timeout: float) -> Delivery | None:
        """Wait up to ``timeout`` seconds for a grant in the inbox of ``worker``."""
        ...

    def sweep_and_grant(
        self, name: str, *, worker: str = "", realm: str = "", patience: float = 0.0
    ) -> SweepReply:
        """Sweep and grant; take messages that no live worker consumes out of the queue.

        Args:
            name: the lock's name.
            worker: id of the caller's worker, which is preferred for grants.
            realm: broker of the messages to take out; empty: take out none.
            patience: seconds for which no worker must have consumed them.

        Returns:
            At most 100 messages. Publish them, then call :meth:`record_publish_result`. Without
            that call they queue again after a minute, at their places.
        """
        ...

    def sweep_and_grant_many(
        self, names: Sequence[str], *, worker: str = "", realm: str = "", patience: float = 0.0
    ) -> SweepReply:
        """Sweep several locks in one round trip; skip a lock that the server refuses."""
        ...

    def record_publish_result(
        self, name: str, seal: str, tokens: Sequence[str], *, sent: bool, worker: str = ""
    ) -> int:
        """Record whether messages that were taken out of the queue are with the broker.

        Args:
            name: the lock's name.
            seal: see :class:`~celery_singleton_lock.core.parked_message.UntakenMessage`. Messages
                that queue again, or were taken out by another call, are not changed.
            tokens: owner tokens of the messages.
            sent: True: the broker has them; delete them here. If a worker has acknowledged the
                published copy as a duplicate, the message queues again. False: all queue again.
            worker: id of the caller's worker, which is preferred for grants.

        Returns:
            How many were deleted.
        """
        ...

    def locate_tasks(self, task_ids: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Return the lock and token of each of these tasks that waits, or waited and now runs.

        There are several for an id that several messages share.
        """
        ...

    def deliver_revoked(self, name: str, token: str, *, realm: str, worker: str = "") -> Reply:
        """Deliver the waiting message of a revoked task with the verdict "revoked".

        Args:
            name: the lock's name.
            token: owner token of the message. A holder is not changed.
            realm: broker that the message must come from.
            worker: id of the caller's worker, which is preferred for the delivery.

        Returns:
            RELEASED if it waited, else ABSENT.
        """
        ...

    def deliver_unlocked(
        self, names: Sequence[str], tasks: Sequence[str], most: int, *, worker: str, realm: str
    ) -> int:
        """Grant parked messages of tasks whose mode is not "enforce", whoever holds the locks.

        Args:
            names: names of the locks.
            tasks: names of the tasks.
            most: largest number of messages of one lock.
            worker: id of the caller's worker, which is preferred for grants.
            realm: broker that the messages must come from.

        Returns:
            How many were granted.
        """
        ...

    def parked(self, realm: str, queues: Collection[str] | None = None) -> Mapping[str, Parked]:
        """Return for each queue of a broker what is parked, at a cost that does not depend on it.

        Args:
            realm: hash of the broker's URL.
            queues: names of the queues; None for all queues with parked messages.
        """
        ...

    def has_messages(self, messages: Sequence[ParkedMessage]) -> Sequence[bool]:
        """Return for each message whether it is still stored: its task has not ended."""
        ...

    def has_traces(self, messages: Sequence[ParkedMessage]) -> Sequence[bool]:
        """Return for each message whether it is stored, has ended, was sent, or is vouched for.

        After a loss of data, a message without a trace is lost.
        """
        ...

    def vouch(self, tokens: Sequence[str]) -> None:
        """Record, after a loss of data, which messages this worker still has or has ended.

        Args:
            tokens: the bases of their owner tokens; all deliveries of a message have the same base.
        """
        ...

    def note_lost(self, notes: Mapping[str, str]) -> None:
        """Record lost parked tasks, for ``locks doctor`` and ``locks why``.

        Args:
            notes: task id -> JSON with ``lock``, ``task``, ``worker`` (which parked it) and ``at``
                (the wall time at which the loss was noticed).
        """
        ...


class WorkerStore(Protocol):
    """The housekeeping of workers: heartbeats, due locks, modes, and the state of the servers."""

    def worker_heartbeat(
        self,
        worker: str,
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int = 0,
        *,
        tasks: Collection[str] | None = None,
        stopped: Mapping[str, float] | None = None,
        light: bool = False,
    ) -> Mapping[str, str]:
        """Record that ``worker`` is alive and consumes ``queues``, for ``ttl`` seconds.

        Args:
            worker: its id.
            realm: hash of the broker.
            queues: names.
            ttl: seconds; 0 if it stops.
            free: number of free slots of its pool; -3: no slot is free, and three tasks wait for
                one. Parked messages go to workers with a free slot first.
            tasks: names of the tasks that it locks; it gets only their messages. None: all tasks.
            stopped: those of the queues that it does not consume at present, although it takes
                their parked messages -> wall time since when.
            light: only move the deadlines, since queues and tasks are those of a heartbeat less
                than ``ttl`` ago.

        Returns:
            The modes that were switched: name of a task, or ``*`` for all -> mode.
        """
        ...

    def list_running(
        self,
        worker: str,
        new: Collection[tuple[str, str, str]],
        gone: Collection[tuple[str, str, str]],
        seconds: float,
    ) -> None:
        """Change the list of tasks that a worker runs, which ``why`` reads.

        Args:
            worker: its id.
            new: task id, lock name and owner token of each task to add.
            gone: likewise, to remove.
            seconds: for how long the list is kept, and read.
        """
        ...

    def fleet_size(self, realm: str, queues: Iterable[str]) -> int:
        """Return the number of workers, also recently dead ones, on the busiest of these queues."""
        ...

    def inbox_size(self, worker: str) -> int:
        """Return the number of grants that ``worker`` has not received yet."""
        ...

    def leave(self, worker: str, realm: str, queues: Iterable[str]) -> None:
        """Record that ``worker`` accepts no more grants."""
        ...

    def take_due_locks(self, limit: int = 100) -> Sequence[str]:
        """Return names of locks that are due for a sweep; other callers get them only later."""
        ...

    def unswept_locks(self, seconds: float, limit: int = 20) -> Sequence[str]:
        """Return names of locks that have been due for ``seconds``: no worker sweeps them.

        Changes nothing.
        """
        ...

    def waited_for(self) -> Sequence[str]:
        """Return names of locks that have waiters: a random sample of a few hundred."""
        ...

    def switches(self) -> Mapping[str, str]:
        """Return the modes that were switched: name of a task, or ``*`` for all -> mode."""
        ...

    def switch(self, task: str, mode: str | None) -> None:
        """Switch the mode of a task, or of all (``*``); None removes the switch.

        Raises:
            BackendRefused: this store keeps no modes.
        """
        ...

    def record_observation(
        self, owner: Owner, claim: Claim, *, waits: bool, took: float | None = None
    ) -> Reply | None:
        """Record that a task runs without its lock, and what the lock would have done.

        Args:
            owner: the run.
            claim: the lock that it would have acquired.
            waits: whether it would wait; else it would be skipped.
            took: seconds that the run took; None if it starts now.

        Returns:
            None if the lock would have been free, or if the run has ended. Otherwise BLOCKED, with
            the reason, and with the holder if one is known. If the reason is SETTLING, the run
            would have replaced this holder.

        Raises:
            BackendRefused: this store records no observations.
        """
        ...

    def identify(self) -> Identity:
        """Return the run ids of the servers, and markers whose change shows a loss of data.

        A missing marker is written again.
        """
        ...

    def probe(self) -> None:
        """Acquire and release a lock that nobody else uses.

        Raises:
            BackendError: locks cannot be acquired now; a full Redis, for example, refuses them.
        """
        ...

    def schema(self, needed: str = SCHEMA) -> str:
        """Return the version of the data model on the server.

        Args:
            needed: is written if no version is stored, or a lower one of
                :data:`~celery_singleton_lock.core.model.SCHEMAS`.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Return the server's version, eviction policy, persistence and number of replicas."""
        ...


class ReplicaStore(Protocol):
    """Waits until replicas have the writes of a store."""

    clock: Clock

    def confirm(self, names: Sequence[str]) -> Sequence[bool]:
        """Wait for replicas; return for each lock whether enough of them have all its writes."""
        ...

    def too_few(self) -> str:
        """Return the error text for locks that too few replicas confirm."""
        ...

    def has_traces(self, messages: Sequence[ParkedMessage]) -> Sequence[bool]:
        """See :meth:`MessageStore.has_traces`."""
        ...


class Store(LockStore, RatedStore, UniqueStore, MessageStore, WorkerStore, Protocol):
    """All operations that a worker needs."""
