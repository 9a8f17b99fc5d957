"""What a worker's main process tells the executing context about a message.

A stamp travels in the request, under :data:`STAMP`, and is taken out before the task can see it:
left there, Celery would carry it into retries and children.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from celery_singleton_lock.core.lock_set import Bundle
from celery_singleton_lock.config.call_options import Call
from celery_singleton_lock.core.model import Ending

STAMP: Final = "celery_singleton_lock"
"""Key of the stamp in a request."""

COPY: Final = "csl-copy"
"""Message header of a copy that was published to wake a worker: the lock's name and the token."""

MOVED: Final = "csl-moved"
"""Message header of a task that was parked, and then sent to the broker: its attempt, and its place
in line (server microseconds). A retry of a task that runs without a lock carries the header on, so
the attempt tells whose it is."""

REQUEUED: Final = "csl-requeued"
"""Message header of a task that has been requeued: how often, and when it arrived first (server
microseconds)."""


MOST_OF_NAME: Final = 500
"""Characters of a lock's name in a notice: a pipe takes 4 KB in one go, and may cut more."""

MOST_OF_NOTICE: Final = 4000
"""Bytes of a notice: likewise."""

_LOSS: Final = "!"
"""Begins a notice of a loss; no token begins with it."""

_UNHEARD: Final = "?"
"""Begins a notice of a release that the store has not heard; likewise."""

MARKS: Final = _LOSS + _UNHEARD
"""What begins with one of these is a notice, and no token."""


class Stamp(NamedTuple):
    """One delivery of one attempt of a task; it travels as a plain tuple, which pickles faster.

    Args:
        name: the lock's name; empty if the task runs unlocked.
        token: owner token of this delivery.
        attempt: ``id/retries/nesting``.
        task: the task's name.
        worker: id of the worker that received it.
        place: server microseconds of arrival.
        stamped_at: monotonic seconds of arrival on this machine, before any ETA or rate limit.
        copy: another copy of the attempt may exist; of one that is granted: it may have been
            claimed before.
        granted: the lock was handed to this delivery; claim it instead of acquiring.
        settle: the message counts as acknowledged from its start (early acknowledgement).
        announce: tell the main process when the lock is taken, so that it acknowledges.
        error: why the task must fail instead of run.
        observed: name of the lock that the task would take, where it runs without and that is
            to be written down; then ``name`` is empty.
        bundle: all locks, if the task has several; ``name`` and ``token`` are those of one.
        call: lock options of this call.
    """

    name: str
    token: str
    attempt: str
    task: str
    worker: str
    place: int = 0
    stamped_at: float = 0.0
    copy: bool = False
    granted: bool = False
    settle: bool = False
    announce: bool = False
    error: Exception | None = None
    observed: str = ""
    bundle: Bundle | None = None
    call: Call | None = None

    def concerns(self, name: str) -> bool:
        """Return whether a lock is this delivery's."""
        return name == self.name or (
            self.bundle is not None and any(part.name == name for part in self.bundle.parts)
        )


UNSTAMPED: Final = Stamp("", "", "", "", "")
"""Stands in a request that has not passed the desk yet."""


def singles(stamp: Stamp) -> list[Stamp]:
    """Return a stamp for each of a delivery's locks, in order, as if it were the only one.

    The end of a task that was parked is remembered at its first lock, where copies are told apart.
    At the others each delivery has an attempt of its own.
    """
    bundle = stamp.bundle
    if bundle is None:
        return [stamp]
    task_id, retries, _ = stamp.attempt.rsplit("/", 2)
    alone = f"{task_id}/{retries}/{bundle.turn}"
    return [
        stamp._replace(
            name=part.name,
            token=part.token,
            attempt=alone if number else stamp.attempt,
            copy=not number and (stamp.copy or stamp.granted),
            granted=stamp.granted and number == bundle.at,
            place=bundle.place,
            bundle=None,
        )
        for number, part in enumerate(bundle.parts)
    ]


def leaving(stamp: Stamp) -> list[Stamp]:
    """Return the stamps of :func:`singles` in the order in which locks are given back.

    The lock at which the message may be kept is the last: whoever gets it then finds the others
    free.
    """
    if stamp.bundle is None:
        return [stamp]
    each = singles(stamp)
    here = each.pop(stamp.bundle.at)
    return [*reversed(each), here]


def notice_of_loss(stamp: Stamp) -> str:
    """Return the line by which a pool child tells that a lock was lost when its task ended."""
    return _LOSS + json.dumps([stamp.name[:MOST_OF_NAME], stamp.token, stamp.task, stamp.attempt])


def loss_in(notice: str) -> Stamp | None:
    """Return whose lock a notice calls lost; None if it tells that a token holds its lock."""
    if not notice.startswith(_LOSS):
        return None
    name, token, task, attempt = json.loads(notice.removeprefix(_LOSS))
    return Stamp(name, token, attempt, task, "")


def notice_of_end(stamp: Stamp, ending: Ending, hold: float = 0.0) -> str:
    """Return the line by which a pool child tells that the store did not hear its release.

    Args:
        stamp: of one lock.
        ending: of its task.
        hold: seconds for which the lock is to stay taken, if its ending is HOLD.

    Returns:
        Empty if the lock's name is too long for a notice: its lease ends by itself.
    """
    told = [*stamp[: Stamp._fields.index("copy") + 1], ending, hold]
    notice = _UNHEARD + json.dumps(told)
    return notice if len(notice.encode()) <= MOST_OF_NOTICE else ""


def end_in(notice: str) -> tuple[Stamp, Ending, float] | None:
    """Return what was to be released, how, and for how long it is held, if a notice tells that."""
    if not notice.startswith(_UNHEARD):
        return None
    *stamp, ending, hold = json.loads(notice.removeprefix(_UNHEARD))
    return Stamp(*stamp), Ending(ending), hold


def doubted(stamp: Stamp, now: float, done_for: float) -> Stamp:
    """Return a stamp that counts as one of two copies if its message was held here for long.

    Args:
        stamp: of a message that waited for its ETA, a rate limit, its slot, or Redis.
        now: monotonic seconds.
        done_for: seconds after which the broker delivers a message again. A quarter of it is long:
            the clocks of both ends, and a copy that is received later, have to fit in.
    """
    if stamp.copy or now - stamp.stamped_at <= done_for / 4:
        return stamp
    return stamp._replace(copy=True)


def attempt_of(request: dict[str, Any]) -> str:
    """Return the attempt that a request is: one try of one task.

    A retry, and a task that replaced another, keep the id and are other attempts.
    """
    retries = request.get("retries") or 0
    nesting = request.get("replaced_task_nesting") or 0
    return f"{request['id']}/{retries}/{nesting}"


def task_id_of(attempt: str) -> str:
    """Return the id of the task of which this is an attempt."""
    return attempt.rsplit("/", 2)[0]
