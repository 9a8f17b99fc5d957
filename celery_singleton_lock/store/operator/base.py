"""The operations of a store for operators: they show all locks, and change them.

Every change is written into the audit log in the same step, with who made it, when and from where.
Durations are in seconds, measured by the server's clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_view import Holder, Observations
from celery_singleton_lock.core.model import DONE_FOR, Reply
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.core.unique import FirstCall, SentCall
from celery_singleton_lock.events import LockAdmin
from celery_singleton_lock.store.base import Store


@dataclass(frozen=True, slots=True)
class Operator:
    """Who changes a lock, for the audit log.

    Args:
        who: login of the person, as far as it is known.
        host: name of the machine.
        via: interface: ``cli``, ``flower``, ``control`` or ``python``.
        why: the reason; its first 500 characters are stored.
        action: name of the operation, if it consists of several (``purge``, ``drain``).
        op: id of the operation: its steps on a lock are one entry of the audit log.
        to: the value that the operation sets, as text for the event.
        seconds: for how long it is set; 0: until it is ended.
    """

    who: str
    host: str = ""
    via: str = "python"
    why: str = ""
    action: str = ""
    op: str = field(default_factory=lambda: os.urandom(8).hex())
    to: str = ""
    seconds: float = 0.0

    def sets(self, to: str, seconds: float | None) -> Operator:
        """Return this operator for an operation that sets a value.

        Args:
            to: the value, as text.
            seconds: for how long; None: until it is ended.
        """
        return replace(self, to=to, seconds=seconds or 0.0)

    def at(self, token: str) -> Operator:
        """Return this operator for one holder: each release has its own audit entry and id."""
        return replace(self, op=f"{self.op}:{token}")

    def step(self, lock: str, action: str = "", count: int = 1) -> LockAdmin:
        """Return the event for a change.

        Args:
            lock: name of the lock, or the filter that selected locks.
            action: name of the operation; by default that of this operator.
            count: of the tasks or steps.
        """
        done = action or self.action
        made_by = (self.who, self.host, self.via, self.why)
        return LockAdmin(lock, done, count, *made_by, to=self.to, seconds=self.seconds)


class Glance(NamedTuple):
    """A summary of a lock.

    Args:
        name: the lock's name.
        held: number of holders.
        waiting: length of the queue.
        adrift: number of parked messages that are next and that no live worker takes.
        bodies: number of stored messages.
        limit: permits in force; 0 if the lock is idle.
        paused: whether an operator has paused it.
        oldest: seconds for which the first in the queue has waited.
        holders: the first holders by the end of their leases.
        broken: its keys are of another type; then ``name`` is a key, and nothing else is known.
        rated: a permit is free, others wait, and a rate was declared, which may hold them back.
        grouped: a permit is free, others wait, and it has groups, whose limits may hold them back.
        closed_for: seconds for which a task or client has closed it; 0 if it is not closed.
        paused_for: seconds until the pause ends by itself; 0 if it does not.
        groups: number of groups that have a waiter (``lock_fair_by``).
        aside: how many stored messages are out of the queue; 0 if anybody waits in the queue. They
            settle, follow another task, start again later, or are to be ended.
    """

    name: str
    held: int = 0
    waiting: int = 0
    adrift: int = 0
    bodies: int = 0
    limit: int = 0
    paused: bool = False
    oldest: float = 0.0
    holders: tuple[Holder, ...] = ()
    broken: bool = False
    rated: bool = False
    grouped: bool = False
    closed_for: float = 0.0
    paused_for: float = 0.0
    groups: int = 0
    aside: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether it has no holder, no waiter and no message, and is not paused or closed."""
        used = self.held or self.waiting or self.adrift or self.bodies
        return not (used or self.paused or self.closed_for)


class Waiting(NamedTuple):
    """A waiter of a lock, or a holder.

    Args:
        lock: the lock's name.
        token: owner token.
        state: as in :class:`Holder`; ``leaving`` while it is drained.
        task: name of the task, if any.
        attempt: ``id/retries/nesting``; empty outside of tasks.
        age: seconds since its arrival.
        since: seconds since its last change of state.
        size: bytes of its message; 0 if none is stored.
        realm: hash of the broker from which its message came.
        queue: queue from which its message came.
        worker: id of its worker, if any.
        lease: seconds.
        place: its place in the queue: time of arrival in microseconds of the server, minus its head
            start.
        wait: seconds for which each of its waits may last; None: for ever.
        copied: whether copies of its message are known.
        returns: how often its message came back after it had begun.
        message: the message, if it was requested.
        arrived: time of arrival in microseconds of the server; 0: its place.
        costs: id of a rate -> what its start costs; None if it has no costs.
        group: its group, if its task has one (``lock_fair_by``).
        refused: another lock of its task, which Redis refuses, so that it is delayed.
        follows: id of the task for whose result it waits (``lock_on_duplicate``), if any.
        unique: the key of its unique call, if it counts as sent (``lock_unique``).
        settles_for: seconds after which it queues, unless a later call replaces it
            (``lock_debounce``); 0 if it does not settle.
        comes_again: whether a worker has given it back instead of ending it with a result.
        publish_pause: seconds until it is sent to the broker again, if that fails: no live worker
            takes it. It doubles each time; 0: a worker takes it.
    """

    lock: str
    token: str
    state: str
    task: str = ""
    attempt: str = ""
    age: float = 0.0
    since: float = 0.0
    size: int = 0
    realm: str = ""
    queue: str = ""
    worker: str = ""
    lease: float = 30.0
    place: int = 0
    wait: float | None = None
    copied: bool = False
    returns: int = 0
    message: bytes = b""
    arrived: int = 0
    costs: Mapping[str, int] | None = None
    group: Group | None = None
    refused: str = ""
    follows: str = ""
    unique: str = ""
    settles_for: float = 0.0
    comes_again: bool = False
    publish_pause: float = 0.0

    @property
    def arrival(self) -> int:
        """Time of arrival in microseconds of the server."""
        return self.arrived or self.place

    @property
    def head_start(self) -> float:
        """Seconds by which its place is earlier than its arrival; below 0 if it is later."""
        return (self.arrival - self.place) / 1_000_000

    @property
    def task_id(self) -> str:
        """Id of the task, or an empty text."""
        parts = self.attempt.rsplit("/", 2)
        return parts[0] if len(parts) == 3 else self.attempt  # noqa: PLR2004  # id, retries, nesting


class Standing(NamedTuple):
    """Whether a token holds a lock or waits for it.

    Args:
        waiting: its record; None if it neither holds nor waits.
        rank: number in the queue, 1 is next; 0 if it is not in the queue.
        expires_in: seconds left of its lease; 0 if it does not hold the lock.
        ended: its end is remembered.
    """

    waiting: Waiting | None
    rank: int = 0
    expires_in: float = 0.0
    ended: bool = False


class Page(NamedTuple):
    """A page of waiters.

    Args:
        waiting: the waiters, in order.
        end: argument for the next page; empty if this is the last one.
    """

    waiting: tuple[Waiting, ...]
    end: str = ""


PARTS = ("queue", "adrift", "overdue")
"""The collections of waiters: in the queue; without a live worker; to be ended with a verdict."""


class AdminStore(Store, Protocol):
    """Operations for operators.

    Raises (all operations):
        BackendError: the server is unreachable or refused. A change may have been made; a further
            call is safe.
    """

    def summarise_locks(self, pattern: str = "", *, holders: int = 1) -> Iterator[Glance]:
        """Yield all locks, in no order, in many short steps.

        A lock that exists all the time is yielded once. The keys of an idle lock expire after a
        minute.

        Args:
            pattern: part of the name; with one of ``*?[`` a pattern for the whole name; empty for
                all locks.
            holders: most holders of each lock that are returned.
        """
        ...

    def key_count(self) -> int:
        """Return the number of keys on the servers, also of other programs."""
        ...

    def count_waiters(self, order: str = "waiting") -> Sequence[tuple[str, int, float]]:
        """Return the locks that have waiters, or lately had, in no order.

        Uses no SCAN. A lock that changes meanwhile may be missing, or appear twice.

        Args:
            order: ``waiting``, ``oldest``, ``held``, ``lease`` or ``name``.

        Returns:
            Name, number of waiters (with messages that no live worker consumes), and by the order:
            seconds for which the first in the queue has waited, number of holders, seconds until
            the first lease ends, or 0.
        """
        ...

    def summarise_named(self, names: Sequence[str], *, holders: int = 1) -> Sequence[Glance]:
        """Return those of these locks that Redis knows, in this order.

        Args:
            names: names of the locks.
            holders: most holders of each lock that are returned.
        """
        ...

    def list_waiters(self, name: str, part: str, after: str = "", most: int = 100) -> Page:
        """Return a page of the waiters of a lock.

        Args:
            name: the lock's name.
            part: one of :data:`PARTS`.
            after: ``end`` of the previous page.
            most: how many, or a few more.
        """
        ...

    def locate_token(self, name: str, token: str) -> Standing:
        """Return whether a token holds the lock or waits for it, and at which rank."""
        ...

    def find_call(self, name: str, key: str) -> SentCall | None:
        """Return the unique call with a key; None if none counts as sent.

        Args:
            name: name of the lock that they take.
            key: text that they share (see ``UniqueStore.announce``).
        """
        ...

    def call_keys(self, name: str) -> Iterator[str]:
        """Yield the keys of the unique calls of a lock. Reads all keys of Redis in short steps.

        Args:
            name: name of the lock.
        """
        ...

    def list_calls(self, name: str, keys: Iterable[str] = ()) -> Sequence[FirstCall]:
        """Return the unique calls of a lock that count as sent.

        A call whose message is in the broker is found only by its key, or if a duplicate follows
        it. The first hundred each of the holders, the queue, the adrift messages and the messages
        out of the queue are read.

        Args:
            name: name of the lock.
            keys: keys of further calls.
        """
        ...

    def locate_running(self, start: str, most: int = 100) -> Sequence[tuple[str, str, str]]:
        """Return task id, lock name and token of tasks that workers have had for seconds.

        The workers list them, so they may have ended, or not have begun. Tasks of workers of an
        older version are missing.

        Args:
            start: first characters of the ids.
            most: largest number of tasks of each worker.
        """
        ...

    def task_ids(self, start: str) -> Iterator[str]:
        """Yield ids of tasks that wait, or waited and now run; some may be yielded twice.

        Reads the whole index in short steps, since it is not sorted by task id.

        Args:
            start: first characters of the ids.
        """
        ...

    def force_release(
        self,
        name: str,
        token: str,
        by: Operator,
        *,
        keep: bool = True,
        done_for: float = DONE_FOR,
        worker: str = "",
    ) -> Reply:
        """Take the lock from one holder, and grant it to the next waiter.

        This does not end the holder's task, which continues without the lock, with a fencing token
        below the next one.

        Args:
            name: the lock's name.
            token: the holder. Other holders are not changed.
            by: who does it.
            keep: its stored message goes to the end of the queue, and the task runs again; else the
                message is deleted.
            done_for: seconds for which copies of a deleted message do not run.
            worker: id of a worker that is preferred for the next grant.

        Returns:
            RELEASED, or ABSENT if the token does not hold the lock.
        """
        ...

    def drop_waiters(
        self,
        name: str,
        tokens: Sequence[str],
        by: Operator,
        *,
        done_for: float | None = DONE_FOR,
        whole: bool = False,
        seal: str = "",
    ) -> Sequence[Waiting]:
        """Remove waiters and their stored messages. Holders are not changed.

        Args:
            name: the lock's name.
            tokens: the waiters; at most some hundred, since all are removed in one step.
            by: who does it.
            done_for: seconds for which copies of them do not run; None: copies may run.
            whole: return their messages as well.
            seal: only waiters that :meth:`take_out_messages` took out with this seal. If a worker
                has acknowledged the published copy as a duplicate, the message queues again. The
                removal is recorded for :meth:`drains`.

        Returns:
            The removed waiters.
        """
        ...

    def adopt_messages(
        self, name: str, tokens: Sequence[str], realm: str, by: Operator
    ) -> Sequence[str]:
        """Assign waiting messages to another broker. Each keeps its place and its deadline.

        Messages whose queue a live worker of their broker consumes are left. Those that a worker
        has to end are delivered to one of the new broker.

        Args:
            name: the lock's name.
            tokens: the waiters; at most some hundred.
            realm: the realm of the new broker.
            by: who does it.

        Returns:
            The tokens among these that wait for the new broker now.
        """
        ...

    def forget_drops(self, name: str, owners: Sequence[tuple[str, str]]) -> int:
        """Forget that these waiters were dropped, so that their messages can be parked again.

        The end of a task that has run stays remembered.

        Args:
            name: the lock's name.
            owners: token and attempt of each waiter; at most some hundred.

        Returns:
            How many were forgotten.
        """
        ...

    def take_out_messages(
        self, name: str, tokens: Sequence[str], seconds: float, seal: str
    ) -> Sequence[Waiting]:
        """Take messages out of the queue for ``seconds``, and return them.

        Publish them, then call :meth:`drop_waiters` with the same ``seal``, which no other call
        uses. Without that call they queue again at their places.
        """
        ...

    def promote(self, name: str, token: str, by: Operator) -> Reply:
        """Put a waiter at the head of the queue.

        Returns:
            WAITING, also if that has granted the lock to it; ABSENT if it does not wait.
        """
        ...

    def forget_call(self, name: str, key: str, by: Operator) -> bool:
        """Delete the entry of a call whose message is lost, so that a call like it is sent.

        Args:
            name: name of the lock that it takes.
            key: text that calls share if they are alike.
            by: who does it.

        Returns:
            Whether there was an entry of a task that is neither parked nor holds the lock.
        """
        ...

    def pause(self, name: str, by: Operator, *, seconds: float | None = None) -> bool:
        """Stop granting the lock until :meth:`resume`; holders keep it.

        Args:
            name: the lock's name.
            by: who does it.
            seconds: time after which it is granted again; None: not before :meth:`resume`. On a
                paused lock this sets a new end.

        Returns:
            Whether that changed something.
        """
        ...

    def resume(self, name: str, by: Operator) -> bool:
        """Grant the lock again. Return whether it was paused."""
        ...

    def reopen(self, name: str, by: Operator) -> bool:
        """End a timed close, which a task or client has made. A pause stays.

        Returns:
            Whether the lock was closed.
        """
        ...

    def set_limit(
        self, name: str, limit: int | None, by: Operator, *, seconds: float | None = None
    ) -> int:
        """Override the declared limits, or (None) use them again.

        Holders above a lower limit keep their permits until they end.

        Args:
            name: the lock's name.
            limit: permits; None: those that the tasks declare.
            by: who does it.
            seconds: time after which the declared limits are in force again; None: not before a
                further call.

        Returns:
            The limit in force.
        """
        ...

    def set_rates(
        self, name: str, rates: Sequence[Rate], by: Operator, *, seconds: float | None = None
    ) -> bool:
        """Override the declared rates, or (empty) use them again.

        Rates that count starts replace declared rates that count starts, and rates with costs
        replace declared rates with costs. The others stay in force. Starts that were counted still
        count.

        Args:
            name: the lock's name.
            rates: all that an operator sets; empty: those that the tasks declare.
            by: who does it.
            seconds: time after which the declared rates are in force again; None: not before a
                further call.

        Returns:
            Whether an operator's rates were in force before.
        """
        ...

    def messages(self, name: str, tokens: Sequence[str]) -> Sequence[bytes | None]:
        """Return the stored messages of these tokens."""
        ...

    def write_audit_entry(
        self, name: str, by: Operator, *, token: str = "", steps: int = 1
    ) -> None:
        """Record a change outside of Redis in the audit log, such as a terminated holder."""
        ...

    def find_contradictions(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield contradictions in a lock's data: a token, and what is wrong with it.

        The data is read page by page. What changes between two pages is not reported.
        """
        ...

    def silences(self, workers: Iterable[str]) -> Mapping[str, float]:
        """Return the seconds since the last heartbeat of each of these workers.

        Infinity if none is stored: it was over half a minute ago, or the worker has stopped.
        """
        ...

    def lost(self, task_id: str) -> Mapping[str, Any] | None:
        """Return what :meth:`MessageStore.note_lost` recorded of a parked task, or None."""
        ...

    def losses(self, most: int) -> tuple[int, Sequence[str]]:
        """Return how many parked tasks are recorded as lost, and at most ``most`` of their ids."""
        ...

    def forget_losses(self, task_ids: Sequence[str]) -> None:
        """Forget that tasks were lost: they were parked again, or have ended."""
        ...

    def observations(self) -> Observations:
        """Return the report of what was observed. Changes nothing."""
        ...

    def clear_observations(self) -> None:
        """Delete the report."""
        ...

    def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the live workers: id -> ``realm`` and ``queues``."""
        ...

    def locked_tasks(self) -> frozenset[str]:
        """Return the names of the tasks that live workers lock."""
        ...

    def consumers(self, realm: str, queue: str, task: str) -> Mapping[str, bool]:
        """Return the live workers that consume a queue, each with whether it locks a task.

        A worker of an older version, which does not list its tasks, counts as one that locks it, as
        for grants.

        Args:
            realm: the realm of the queue's broker.
            queue: name of the queue.
            task: name of the task.
        """
        ...

    def drains(self) -> Mapping[str, float]:
        """Return when a drain last removed a message of each route: ``realm:queue`` -> time.

        A time is in seconds of the server's clock. A route that was never drained is not listed.
        """
        ...

    def audit(self, most: int = 100) -> Sequence[dict[str, Any]]:
        """Return the audit log, newest entry first; it has at most a thousand entries.

        The steps of one operation on one lock are one entry, with their ``count``. An operation on
        many locks has one entry for each of the first twenty; the last one has the number of the
        others in ``more``.
        """
        ...
