"""What a store can do for those who operate it: look at all locks, and step in.

Every verb that changes something is audited in the same step: who, when, from where. Seconds
everywhere; all times are the store's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from celery_singleton_lock.events import LockAdmin
from celery_singleton_lock.core.model import Holder, Reply
from celery_singleton_lock.store.base import Store


@dataclass(frozen=True, slots=True)
class Operator:
    """Who steps in, for the audit.

    Args:
        who: name of the person, as far as it is known (a login).
        host: machine.
        via: by what: ``cli``, ``flower``, ``control``, ``python``.
        why: reason, in words; the first 500 characters are kept.
        action: name of the operation, if it is more than one verb (``purge``, ``drain``).
        op: id of the operation: its steps on a lock are one entry of the audit.
    """

    who: str
    host: str = ""
    via: str = "python"
    why: str = ""
    action: str = ""
    op: str = field(default_factory=lambda: os.urandom(8).hex())

    def step(self, lock: str, action: str = "", count: int = 1) -> LockAdmin:
        """Return the event of what they did.

        Args:
            lock: name of the lock, or what was meant.
            action: name of the operation; else theirs.
            count: to how many tasks, or how often.
        """
        return LockAdmin(
            lock, action or self.action, count, self.who, self.host, self.via, self.why
        )


class Glance(NamedTuple):
    """A lock in short.

    Args:
        name: the lock's name.
        held: how many hold it.
        waiting: how many stand in the queue.
        adrift: how many of the parked no live worker consumes.
        bodies: how many messages are kept.
        limit: permits in force; 0 if the lock is idle.
        paused: whether an operator has it granted to nobody.
        oldest: seconds for which the first of the queue has waited.
        holders: the first that hold it, by end of lease.
        broken: its keys hold something else; ``name`` is the key then, and nothing else is known.
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

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds it nor waits for it, and it is granted as usual."""
        return not (self.held or self.waiting or self.adrift or self.bodies or self.paused)


class Waiting(NamedTuple):
    """Who waits for a lock, or held it when it was looked at.

    Args:
        lock: the lock's name.
        token: owner token.
        state: as in :class:`Holder`; ``leaving`` while it is being drained.
        task: name of the task, if any.
        attempt: ``id/retries/nesting``; empty outside of tasks.
        age: seconds since it arrived.
        since: seconds for which it is in this state.
        size: bytes of its message; 0 if none is kept.
        realm: which broker its message came from.
        queue: queue from which its message came.
        worker: id of its worker, if any.
        lease: seconds.
        place: server microseconds of its arrival; its place in line.
        wait: seconds that it may wait from the start of each wait; None for ever.
        copied: whether copies of its message are known.
        returns: how often it has come back after it had begun.
        message: the message, where it was asked for.
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

    @property
    def task_id(self) -> str:
        """Id of the task, or an empty string."""
        parts = self.attempt.rsplit("/", 2)
        return parts[0] if len(parts) == 3 else self.attempt  # noqa: PLR2004  # id, retries, nesting


class Standing(NamedTuple):
    """Where one token stands.

    Args:
        waiting: its record; None if it neither holds nor waits.
        rank: place in the queue, 1 is next; 0 if it does not stand there.
        expires_in: seconds left of its lease; 0 if it does not hold the lock.
        ended: its end is remembered.
    """

    waiting: Waiting | None
    rank: int = 0
    expires_in: float = 0.0
    ended: bool = False


class Page(NamedTuple):
    """Some of who waits.

    Args:
        waiting: they, in order.
        end: give it back for the next page; empty if there is none.
    """

    waiting: tuple[Waiting, ...]
    end: str = ""


PARTS = ("queue", "adrift", "overdue")
"""Where one can wait: in line; where no live worker consumes; with a verdict, to be ended."""


class AdminStore(Store, Protocol):
    """The verbs of operators.

    Raises (all verbs):
        BackendError: unreachable, or refused. What changes something may or may not have done so;
            asking again is safe.
    """

    def glances(self, pattern: str = "", *, holders: int = 1) -> Iterator[Glance]:
        """Yield all locks that are there, in no order, in many short steps.

        A lock that is there all the while comes once. Keys of an idle lock go after a minute.

        Args:
            pattern: part of the name; a pattern for all of it if it has one of ``*?[``; empty for
                all locks.
            holders: most holders of each that are shown.
        """
        ...

    def page(self, name: str, part: str, after: str = "", most: int = 100) -> Page:
        """Return some of who waits for a lock.

        Args:
            name: the lock's name.
            part: one of :data:`PARTS`.
            after: ``end`` of the page before.
            most: how many, or a few more.
        """
        ...

    def look(self, name: str, token: str) -> Standing:
        """Return where a token stands."""
        ...

    def task_ids(self, start: str) -> Iterator[str]:
        """Yield the ids of tasks that wait, or have waited and run; some may come twice.

        Reads the whole index in short steps, as no index is sorted by task id.

        Args:
            start: how the ids begin.
        """
        ...

    def force_release(
        self,
        name: str,
        token: str,
        by: Operator,
        *,
        keep: bool = True,
        done_for: float = 3600.0,
        worker: str = "",
    ) -> Reply:
        """Take the lock from one holder, whatever it does, and grant it to who is next.

        Its task is not ended by that: it runs on without the lock, unless ended otherwise, and its
        fencing token is lower than the next one's.

        Args:
            name: the lock's name.
            token: whose; another holder is never touched.
            by: who does it.
            keep: a message that is kept of it goes to the end of the line, so that it runs again;
                else it is dropped.
            done_for: seconds for which copies of what was dropped end quietly.
            worker: id of a worker whose inbox is preferred for the next grant.

        Returns:
            RELEASED, or ABSENT if the token does not hold the lock (any more).
        """
        ...

    def drop(
        self,
        name: str,
        tokens: Sequence[str],
        by: Operator,
        *,
        done_for: float | None = 3600.0,
        whole: bool = False,
        seal: str = "",
    ) -> Sequence[Waiting]:
        """Take waiters out of the line, with all that is kept of them; holders are left alone.

        Args:
            name: the lock's name.
            tokens: whose; at most some hundred, since all are dropped in one step.
            by: who does it.
            done_for: seconds for which copies of them end quietly; None: copies may run.
            whole: return their messages.
            seal: only those that left under it; see :meth:`seal`. One of which the message has
                come to a worker meanwhile, and was acknowledged, queues again.

        Returns:
            Those that were dropped.
        """
        ...

    def seal(
        self, name: str, tokens: Sequence[str], seconds: float, seal: str
    ) -> Sequence[Waiting]:
        """Take messages out of the line for ``seconds``, and return them, with their messages.

        Who publishes them drops them then, under the same ``seal``, which no other call has; if
        nobody does, they queue again at their places.
        """
        ...

    def promote(self, name: str, token: str, by: Operator) -> Reply:
        """Put a waiter at the head of the line: WAITING (or granted already), else ABSENT."""
        ...

    def pause(self, name: str, by: Operator) -> bool:
        """Grant the lock to nobody until :meth:`resume`; holders keep it. Return if that is new."""
        ...

    def resume(self, name: str, by: Operator) -> bool:
        """Grant as usual again. Return whether it was paused."""
        ...

    def set_limit(self, name: str, limit: int | None, by: Operator) -> int:
        """Set a limit that goes before the declared ones, or (None) let those count again.

        Holders above a lower limit keep their permits until they end.

        Returns:
            The limit in force.
        """
        ...

    def messages(self, name: str, tokens: Sequence[str]) -> Sequence[bytes | None]:
        """Return the messages that are kept of these tokens."""
        ...

    def remark(self, name: str, by: Operator, *, token: str = "", steps: int = 1) -> None:
        """Put into the audit what was done to a lock elsewhere, such as to terminate its holder."""
        ...

    def drift(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield what contradicts itself in a lock's data: a token, and what is wrong with it.

        Looks at it page by page: what changes between two pages is never told of.
        """
        ...

    def silences(self, workers: Iterable[str]) -> Mapping[str, float]:
        """Return the seconds since the last heartbeat of each of these workers.

        Infinite if none is remembered: it was over half a minute ago, or the worker has left.
        """
        ...

    def lost(self, task_id: str) -> Mapping[str, Any] | None:
        """Return what is noted of a parked task that was lost with Redis' data; None if nothing.

        See :meth:`Store.note_lost`.
        """
        ...

    def losses(self, most: int) -> tuple[int, Sequence[str]]:
        """Return how many parked tasks are noted as lost, and the ids of at most so many."""
        ...

    def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the live workers: id -> ``realm`` and ``queues``."""
        ...

    def audit(self, most: int = 100) -> Sequence[dict[str, Any]]:
        """Return what operators did, newest first; the last thousand entries are kept.

        The steps of one operation on one lock are one entry, with their ``count``. An operation on
        many locks has an entry for each of the first twenty; the last tells how many ``more``.
        """
        ...
