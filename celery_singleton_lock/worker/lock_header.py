"""The header that a worker's main process adds to a request, for the pool.

It is stored in the request under :data:`HEADER_KEY`. It is removed before the task can see it.
Otherwise Celery would copy it into retries and child tasks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final, NamedTuple

from celery_singleton_lock.config.call_options import Call
from celery_singleton_lock.config.computed_options import Computed
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.lock_set import LockSet
from celery_singleton_lock.core.model import Ending, Reservation
from celery_singleton_lock.core.rate import overridden_by, unpacked
from celery_singleton_lock.events import LockClosed

HEADER_KEY: Final = "celery_singleton_lock"
"""Key of the header in a request."""

COPY: Final = "csl-copy"
"""Message header of a copy of a parked message: the lock's name and the token.

Older versions publish such copies; this one only reads the header."""

MOVED: Final = "csl-moved"
"""Message header of a task that was parked, and then sent to the broker: its attempt, its place
(server microseconds), and the base of its token. A retry of a task that runs without a lock copies
the header, so the attempt identifies the message to which it belongs."""

REQUEUED: Final = "csl-requeued"
"""Message header of a task that was requeued: the number of requeues, and the time of its first
arrival (server microseconds)."""

FIRST: Final = "csl-first"
"""Message header of a requeued task: its attempt, if the first arrival in ``REQUEUED`` was the
first delivery of the message. A retry may copy the header, so the attempt identifies the
message."""

AFTER: Final = "csl-after"
"""Message header of a link, of the next task of a chain, or of an error callback: the id of the
task that has sent it at its end, before its lock was released."""

UNANSWERED: Final = "csl-unanswered"
"""Message header of a parked task that a stopping worker sent to the broker, since Redis did not
answer its claim; see ``UnansweredClaim``."""

MOST_OF_NAME: Final = 500
"""Most characters of a lock's name in a notice: a write to a pipe is atomic up to 4 KB."""

MOST_OF_NOTICE: Final = 4000
"""Most bytes of a notice, for the same reason."""

_LOSS: Final = "!"
"""First character of a notice of a loss; no token begins with it."""

_NOT_ANSWERED: Final = "?"
"""First character of a notice of a release that Redis did not answer; no token begins with it."""

_NEXT: Final = "~"
"""First character of a notice of the next start that a rate allows; no token begins with it."""

_CLOSED: Final = "#"
"""First character of a notice that a task has closed a lock for a time; see above."""

MARKS: Final = _LOSS + _NOT_ANSWERED + _NEXT + _CLOSED
"""A line that begins with one of these is a notice; any other is a token."""


class LockHeader(NamedTuple):
    """One delivery of one attempt of a task. It is sent as a plain tuple, which pickles faster.

    Args:
        name: the lock's name; empty if the task runs without a lock.
        token: owner token of this delivery.
        attempt: ``id/retries/nesting``.
        task: the task's name.
        worker: id of the worker that received it.
        place: server microseconds of arrival.
        created_at: monotonic seconds of arrival on this machine, before any ETA or rate limit.
        moved: it was parked, and then sent to the broker, which may have it twice. All its
            deliveries have tokens with the same base, so ``copy`` is not needed to recognise them.
        copy: another copy of the attempt may exist. For a granted delivery: an earlier claim may
            have reached Redis.
        granted: the lock was granted to this delivery; claim it instead of acquiring it.
        acks_early: the message counts as acknowledged when the task begins (early acknowledgement).
        announce: send a notice when the lock is acquired, so that the main process acknowledges.
        error: the error with which the task fails instead of running.
        observed: in mode ``observe``, the name of the lock that the task would take; then ``name``
            is empty.
        lock_set: all locks, if the task has several; ``name`` and ``token`` are those of one.
        call: lock options of this call.
        flow: flow options of its claims, see :class:`~celery_singleton_lock.core.model.Claim`.
        later: the task acquires other locks before it starts. A rate of this lock counts the start
            when all locks are held.
        computed: options that were computed from its arguments; None if none is.
        first_place: server microseconds of its first delivery; 0 if that is not known, as the
            broker may have delivered it before.
        after: id of the task that has sent it at its end; see ``AFTER``.
    """

    name: str
    token: str
    attempt: str
    task: str
    worker: str
    place: int = 0
    created_at: float = 0.0
    moved: bool = False
    copy: bool = False
    granted: bool = False
    acks_early: bool = False
    announce: bool = False
    error: Exception | None = None
    observed: str = ""
    lock_set: LockSet | None = None
    call: Call | None = None
    flow: str = ""
    later: bool = False
    computed: Computed | None = None
    first_place: int = 0
    after: str = ""

    def concerns(self, name: str) -> bool:
        """Return whether this delivery takes the lock of this name."""
        return name == self.name or (
            self.lock_set is not None and any(part.name == name for part in self.lock_set.parts)
        )


NO_HEADER: Final = LockHeader("", "", "", "", "")
"""The header of a request that has not passed the dispatcher yet."""


def singles(header: LockHeader) -> list[LockHeader]:
    """Return a header for each lock of a delivery, in order, as if it were the only lock.

    The first lock remembers the end of a task and recognises copies. At the other locks, each
    delivery has its own attempt.
    """
    lock_set = header.lock_set
    if lock_set is None:
        return [header]
    task_id, retries, _ = header.attempt.rsplit("/", 2)
    alone, last = f"{task_id}/{retries}/{lock_set.delivery_number}", len(lock_set.parts) - 1
    return [
        header._replace(
            name=part.name,
            token=part.token,
            attempt=alone if number else header.attempt,
            copy=not number and (header.copy or header.granted),
            granted=header.granted and number == lock_set.at,
            place=lock_set.place,
            lock_set=None,
            later=number < last and bool(part.flow),
            flow=overridden_by(header.flow, part.flow),
        )
        for number, part in enumerate(lock_set.parts)
    ]


def in_order_of_release(header: LockHeader) -> list[LockHeader]:
    """Return the headers of :func:`singles` in the order in which the locks are released.

    The lock at which the message may be parked is the last one, so that its next holder finds the
    others free.
    """
    if header.lock_set is None:
        return [header]
    each = singles(header)
    here = each.pop(header.lock_set.at)
    return [*reversed(each), here]


def notice_of_loss(header: LockHeader) -> str:
    """Return the notice with which a pool child reports that a lock was lost at its task's end."""
    return _LOSS + json.dumps(
        [header.name[:MOST_OF_NAME], header.token, header.task, header.attempt]
    )


def loss_in(notice: str) -> LockHeader | None:
    """Return the header in a notice of a loss; None for any other notice."""
    if not notice.startswith(_LOSS):
        return None
    name, token, task, attempt = json.loads(notice.removeprefix(_LOSS))
    return LockHeader(name, token, attempt, task, "")


def notice_of_end(header: LockHeader, ending: Ending, kept: Reservation | None = None) -> str:
    """Return the notice with which a pool child reports that Redis did not answer its release.

    Args:
        header: the header of one lock.
        ending: how its task has ended.
        kept: the reservation, if the ending is KEEP, HOLD or LATER.

    Returns:
        The notice; empty if the lock's name is too long for one. Then the lease expires.
    """
    reserved = (kept.attempt, kept.seconds, kept.since) if kept else ("", 0.0, 0.0)
    told = [*header[: LockHeader._fields.index("copy") + 1], ending, *reserved]
    notice = _NOT_ANSWERED + json.dumps(told)
    return notice if len(notice.encode()) <= MOST_OF_NOTICE else ""


def end_in(notice: str) -> tuple[LockHeader, Ending, Reservation | None] | None:
    """Return header, ending and reservation in a notice of a release; None for any other notice."""
    if not notice.startswith(_NOT_ANSWERED):
        return None
    *header, ending, attempt, seconds, since = json.loads(notice.removeprefix(_NOT_ANSWERED))
    kept = Reservation(attempt, seconds, since) if seconds else None
    return LockHeader(*header), Ending(ending), kept


def notice_of_next_start(name: str, seconds: float) -> str:
    """Return the notice with which a pool child reports when a rate allows the next start.

    Returns:
        The notice; empty if the lock's name is too long for one. Then a sweep finds the lock.
    """
    notice = _NEXT + json.dumps([name, seconds])
    return notice if len(notice.encode()) <= MOST_OF_NOTICE else ""


def next_start_in(notice: str) -> tuple[str, float] | None:
    """Return lock name and seconds in a notice of the next start; None for any other notice."""
    if not notice.startswith(_NEXT):
        return None
    name, seconds = json.loads(notice.removeprefix(_NEXT))
    return str(name), float(seconds)


def notice_of_close(header: LockHeader, name: str, seconds: float, why: str) -> str:
    """Return the notice with which a pool child reports that its task has closed a lock.

    Args:
        header: the header of the task.
        name: the name of the lock.
        seconds: for how long.
        why: the reason, for people; it is shortened if the notice is too long.

    Returns:
        The notice; empty if the lock's name is too long for one.
    """
    told = [name, header.task, task_id_of(header.attempt), seconds]
    notices = (_CLOSED + json.dumps([*told, text]) for text in (why, why[:MOST_OF_NAME], ""))
    return next((each for each in notices if len(each.encode()) <= MOST_OF_NOTICE), "")


def close_in(notice: str) -> LockClosed | None:
    """Return the event in a notice of a closed lock; None for any other notice."""
    if not notice.startswith(_CLOSED):
        return None
    name, task, task_id, seconds, why = json.loads(notice.removeprefix(_CLOSED))
    return LockClosed(name, task, task_id, seconds=float(seconds), why=why)


def as_copy(header: LockHeader) -> LockHeader:
    """Return the header, marked as a copy, of a message that is parked again after a grant.

    Unless the broker may have delivered it before, what has ended before it arrived is another call
    with its task id.
    """
    if header.copy:
        return header
    arrived = header.place if header.lock_set is None else header.lock_set.place
    return header._replace(copy=True, first_place=header.first_place or arrived)


def doubted(header: LockHeader, now: float, again_after: float) -> LockHeader:
    """Return the header, marked as a copy if its message has waited here for long.

    Args:
        header: the header of a message that may have waited for its ETA, a rate limit, its slot, or
            Redis.
        now: monotonic seconds.
        again_after: seconds after which the broker redelivers a message. A quarter of that counts
            as long, which allows for both clocks and for a copy that is received later.
    """
    if header.copy or now - header.created_at <= again_after / 4:
        return header
    return header._replace(copy=True)


def may_be_copied(header: LockHeader, now: float, again_after: float) -> bool:
    """Return whether copies of a message may be received after its end, which is remembered then.

    Args:
        header: its header.
        now: monotonic seconds.
        again_after: as for :func:`doubted`.
    """
    return header.moved or doubted(header, now, again_after).copy


def attempt_of(request: dict[str, Any]) -> str:
    """Return the attempt of a request: ``id/retries/nesting``.

    A retry of a task, and a task that replaces another, have the same id but another attempt.
    """
    retries = request.get("retries") or 0
    nesting = request.get("replaced_task_nesting") or 0
    return f"{request['id']}/{retries}/{nesting}"


def task_id_of(attempt: str) -> str:
    """Return the task id in an attempt."""
    return attempt.rsplit("/", 2)[0]


def whose(header: LockHeader) -> str:
    """Return name and id of the task of a delivery, as text."""
    return f"{header.task}[{task_id_of(header.attempt)}]"


def options_of(header: LockHeader, number: int, options: LockOptions) -> LockOptions:
    """Return the options of a task for one of its locks, which may have its own limit and rate."""
    if header.lock_set is None:
        return options
    part = header.lock_set.parts[number]
    if part.limit in {None, options.limit} and not part.flow:
        return options
    return replace(options, limit=part.limit or options.limit, rate=unpacked(part.flow))
