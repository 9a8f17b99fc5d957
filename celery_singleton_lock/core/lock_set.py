"""Lock sets: the several locks of one task (pure).

All tasks acquire their locks in the order of the names' bytes. A task holds its first locks while
it waits for the next, and the common order excludes a deadlock.

A task has a separate owner token for each of its locks, so leases, losses and releases work as for
a single lock. Only the **first** lock recognises copies of a message, by their attempt; the others
treat each delivery as a new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from celery_singleton_lock.core.rate import Rate, lowest, packed

KEPT: Final = "csl-kept"
"""Header of a message that is stored in Redis: its lock set."""


class Key(NamedTuple):
    """One of the locks that a task names.

    Args:
        name: the lock's name.
        limit: permits; None is the task's ``lock_limit``.
        rate: how many may start in a period; empty for no rate.
    """

    name: str
    limit: int | None = None
    rate: tuple[Rate, ...] = ()


class Names(str):
    """The name of a task's first lock, with those of all its locks.

    Code that handles one lock uses it as a plain name.

    Args:
        keys: the locks, in order.
    """

    __slots__ = ("keys",)

    keys: tuple[Key, ...]

    def __new__(cls, keys: Iterable[Key]) -> Names:  # noqa: PYI034  # Python 3.10
        """Return a str with the first name."""
        found = tuple(keys)
        made = super().__new__(cls, found[0].name)
        made.keys = found
        return made


def in_order(keys: Iterable[Key], limit: int = 1) -> str:
    """Return locks in the order in which every task acquires them, without repetitions.

    Args:
        keys: the locks; of equal names the lowest limit is used, and the lowest rates.
        limit: the task's ``lock_limit``; a limit of None means this one.

    Returns:
        :class:`Names`; or the plain name of a single lock without a limit or rate of its own.
    """
    found: dict[str, Key] = {}
    for key in keys:
        known = found.setdefault(key.name, key)
        if key != known:
            found[key.name] = _both(known, key, limit)
    ordered = sorted(found.values(), key=lambda key: key.name.encode())
    if len(ordered) == 1 and ordered[0].limit is None and not ordered[0].rate:
        return ordered[0].name
    return Names(ordered)


def _both(one: Key, other: Key, limit: int) -> Key:
    limits = {one.limit, other.limit}
    own = one.limit
    if len(limits) > 1:
        own = min(limit if each is None else each for each in limits)
    return Key(one.name, own, lowest((*one.rate, *other.rate)))


def names_in(name: str) -> frozenset[str]:
    """Return all names in :class:`Names`, or the plain name."""
    return (
        frozenset(key.name for key in name.keys) if isinstance(name, Names) else frozenset({name})
    )


class Part(NamedTuple):
    """One lock of a lock set.

    Args:
        name: the lock's name.
        token: owner token for this lock.
        limit: permits; None is the task's ``lock_limit``.
        fence: fencing token; 0 until the lock is acquired.
        flow: flow options of the claim on this lock, see
            :func:`celery_singleton_lock.core.rate.packed`; empty for none.
    """

    name: str
    token: str
    limit: int | None = None
    fence: int = 0
    flow: str = ""

    def written(self) -> tuple[Any, ...]:
        """Return this for a header: older workers read it, unless it has flow options."""
        return tuple(self) if self.flow else tuple(self)[:-1]


def part_of(key: Key, token: str) -> Part:
    """Return one lock of a new lock set."""
    return Part(key.name, token, key.limit, flow=packed(key.rate))


class LockSet(NamedTuple):
    """The locks of one delivery of a task, and how many of them it holds.

    Args:
        parts: all locks, in order.
        at: index of the lock that it asks for, waits for or was granted. It holds all locks before.
        place: server microseconds of its arrival: its place in the queue of each lock.
        left: the previous lock, which stores the message until the lock at ``at`` stores it; None
            if the broker has the message.
        frees: locks that are released before the message is parked, because the task starts over at
            the first lock.
    """

    parts: tuple[Part, ...]
    at: int = 0
    place: int = 0
    left: Part | None = None
    frees: tuple[Part, ...] = ()

    @property
    def here(self) -> Part:
        """The lock that the task asks for, waits for or was granted."""
        return self.parts[self.at]

    def granted(self, fence: int) -> LockSet:
        """Return the set with the fencing token of the lock that the task waited for.

        If the next lock is busy, the task still holds this one, and does not ask for it again.
        """
        here = self.here._replace(fence=fence)
        return self._replace(parts=(*self.kept, here, *self.parts[self.at + 1 :]))

    @property
    def kept(self) -> tuple[Part, ...]:
        """The locks that the task holds while it waits for this one."""
        return self.parts[: self.at]

    @property
    def delivery_number(self) -> int:
        """A number that is different for each delivery of an attempt."""
        return int(self.parts[-1].token[:8], 16)

    def header(self) -> dict[str, Any]:
        """Return the header that is stored with the message."""
        parts = [part.written() for part in self.parts]
        return {KEPT: {"parts": parts, "at": self.at, "place": self.place}}


def read(header: Mapping[str, Any]) -> LockSet:
    """Return the lock set of a header."""
    parts = tuple(Part(*part) for part in header["parts"])
    return LockSet(parts, int(header["at"]), int(header["place"]))


def lock_set_in(kept: bytes | None) -> LockSet | None:
    """Return the lock set of a message that is stored in Redis; None if its task has one lock."""
    head, _, _ = (kept or b"").partition(b"\n")
    if f'"{KEPT}"'.encode() not in head:
        return None
    return read(json.loads(head)["headers"][KEPT])
