"""Lock headers of tasks with several locks: the first one, and those after a busy lock."""

from __future__ import annotations

from collections.abc import Iterable

from celery_singleton_lock.core.lock_set import LockSet, Names, Part, lock_set_in, part_of
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import Delivery, UntakenMessage
from celery_singleton_lock.worker.lock_header import LockHeader, as_copy
from celery_singleton_lock.worker.message_stage import UnansweredClaim


def with_lock_set(
    header: LockHeader, names: Names, frees: Iterable[tuple[str, str]] = ()
) -> LockHeader:
    """Return the header of a task that takes these locks. Its token is that of the first lock.

    Args:
        header: the header of the task, as for one lock.
        names: the names of its locks.
        frees: names and tokens of locks to release before it is parked.
    """
    parts = [part_of(key, new_token()) for key in names.keys]
    parts[0] = parts[0]._replace(token=header.token)
    freed = tuple(Part(name, token) for name, token in frees)
    lock_set = LockSet(tuple(parts), place=header.place, frees=freed)
    return header._replace(name=str(names) if header.name else "", lock_set=lock_set)


def renewed(lock_set: LockSet, token: str) -> LockSet | None:
    """Return the lock set of a message whose earlier delivery may still run.

    Args:
        lock_set: the lock set in the message; its tokens belong to the earlier delivery.
        token: token under which this delivery holds the lock at which the message was parked.

    Returns:
        The lock set with new tokens; None if the earlier delivery may hold some of the locks, so
        that this one must start over.
    """
    if lock_set.at:
        return None
    first, *others = lock_set.parts
    parts = (first._replace(token=token), *(part._replace(token=new_token()) for part in others))
    return lock_set._replace(parts=parts)


def onward(header: LockHeader, lock_set: LockSet, further: LockSet | None) -> LockHeader:
    """Return the header of a delivery that did not get all of its locks.

    Args:
        header: the header of the delivery.
        lock_set: the lock set of the delivery.
        further: the lock set with the locks that it holds now; None if it must start over.
    """
    if further is not None:
        return _moved(header, further)
    if header.granted and not lock_set.at:
        return unanswered(header)  # its message may be there: the server that denied it was another
    return begun_again(header, lock_set, frees=lock_set.kept)


def _moved(header: LockHeader, lock_set: LockSet) -> LockHeader:
    here = lock_set.here
    return header._replace(
        name=here.name,
        token=here.token,
        lock_set=lock_set,
        place=lock_set.place,
        granted=False,
        announce=True,
    )


def begun_again(header: LockHeader, lock_set: LockSet, *, frees: tuple[Part, ...]) -> LockHeader:
    """Return the header of a task that acquires all of its locks again.

    It may have lost one while it was parked, or its set of locks may have changed.

    It gets new tokens, and counts as a copy: the first lock recognises duplicates. It has not
    ended, so an end before its arrival is that of another call with its task id.

    Args:
        header: the header of a delivery that was granted the lock at which its message is parked.
        lock_set: the lock set in the message.
        frees: locks of this delivery to release, since it may still hold them.
    """
    parts = tuple(_with_new_token(part) for part in lock_set.parts)
    left = Part(header.name, header.token)
    return header._replace(
        name=parts[0].name,
        token=parts[0].token,
        lock_set=LockSet(parts, place=lock_set.place, left=left, frees=frees),
        place=lock_set.place,
        copy=True,
        first_place=lock_set.place,
        granted=False,
        announce=True,
    )


def _with_new_token(part: Part) -> Part:
    return part._replace(token=new_token(), fence=0)


def unanswered(header: LockHeader) -> LockHeader:
    """Return the header of a granted delivery whose claim Redis did not answer.

    If the claim may have deleted the stored message, the message is parked again at its first lock,
    which recognises copies: it is the only lock that may count the message as acknowledged.

    Args:
        header: the header of a delivery that has not begun.
    """
    if header.lock_set is None or not header.acks_early:
        return as_copy(header)
    return at_first_lock(header)


def at_first_lock(header: LockHeader) -> LockHeader:
    """Return the header of a delivery that is parked again, at its first lock, by this process."""
    header, lock_set = as_copy(header), header.lock_set
    if lock_set is None:
        return header
    first, *others = lock_set.parts
    parts = (first, *map(_with_new_token, others))
    left = lock_set.here if lock_set.at else None
    frees = tuple(part for part in others if part != left)
    again = LockSet(parts, place=lock_set.place, left=left, frees=frees)
    return header._replace(name=first.name, token=first.token, lock_set=again)


def claim_in(header: LockHeader) -> UnansweredClaim:
    """Return the claim of a header that :func:`unanswered` has returned."""
    return UnansweredClaim(header.attempt, header.token, held_before(header))


def held_before(header: LockHeader) -> list[tuple[str, str]]:
    """Return locks and tokens, apart from the first, of the delivery before it was parked again."""
    lock_set = header.lock_set
    held = () if lock_set is None else (lock_set.left, *lock_set.frees)
    return [(part.name, part.token) for part in held if part is not None]


def time_left(header: LockHeader, timeout: float | None, now: float) -> float | None:
    """Return the seconds of ``lock_wait_timeout`` that are left after the wait for other locks.

    Args:
        header: the header of the delivery.
        timeout: ``lock_wait_timeout``.
        now: monotonic seconds.
    """
    if timeout is None or header.lock_set is None or header.lock_set.left is None:
        return timeout
    return max(0.01, timeout - (now - header.created_at))


def own_lock_set(delivery: Delivery | UntakenMessage) -> LockSet | None:
    """Return the lock set of a message, if no other delivery can hold its locks, else None.

    That is so for the first delivery after it was parked. Before any later one, an earlier
    delivery may still run.
    """
    lock_set = lock_set_in(delivery.body)
    return lock_set if lock_set is not None and lock_set.here.token == delivery.token else None
