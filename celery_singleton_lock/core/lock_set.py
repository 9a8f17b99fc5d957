"""Several locks of one task: which, in what order, and how far a message has come with them.

All tasks take their locks in one order, that of the names' bytes; so a task that keeps what it has
while it waits for the next can never wait for one that waits for it.

A task has an owner token of its own for each of its locks: all that is keyed by tokens (leases that
are renewed, losses, releases) works as for a single lock. The **first** lock alone tells copies of
a message apart, by their attempt; at the others each delivery counts as one of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

KEPT: Final = "csl-kept"
"""Header of a message that is kept in Redis: the locks of its task, and which of them it has."""


class Names(str):
    """The name of a task's first lock; knows all of them.

    Whoever looks at one lock only sees a plain name.

    Args:
        keys: names with their limits, in order; a limit of None is the task's ``lock_limit``.
    """

    __slots__ = ("keys",)

    keys: tuple[tuple[str, int | None], ...]

    def __new__(cls, keys: Iterable[tuple[str, int | None]]) -> Names:  # noqa: PYI034  # Python 3.10
        """Take the first one's name."""
        found = tuple(keys)
        made = super().__new__(cls, found[0][0])
        made.keys = found
        return made


def in_order(keys: Iterable[tuple[str, int | None]], limit: int = 1) -> str:
    """Return locks in the order in which every task takes them, equal ones once.

    Args:
        keys: names with their limits; of those of equal names the lowest counts.
        limit: the task's ``lock_limit``, for which a limit of None stands.

    Returns:
        :class:`Names`; or, if there is one only and it has no limit of its own, its plain name.
    """
    limits: dict[str, int | None] = {}
    for name, own in keys:
        known = limits.setdefault(name, own)
        if own != known:
            limits[name] = min(limit if known is None else known, limit if own is None else own)
    ordered = sorted(limits.items(), key=lambda key: key[0].encode())
    if len(ordered) == 1 and ordered[0][1] is None:
        return ordered[0][0]
    return Names(ordered)


def names_in(name: str) -> frozenset[str]:
    """Return the names of all locks for which a name stands."""
    return (
        frozenset(each for each, _ in name.keys) if isinstance(name, Names) else frozenset({name})
    )


class Part(NamedTuple):
    """One of a task's locks.

    Args:
        name: of the lock.
        token: owner token for this lock.
        limit: permits; None is the task's ``lock_limit``.
        fence: fencing token, once the lock is taken.
    """

    name: str
    token: str
    limit: int | None = None
    fence: int = 0


class Bundle(NamedTuple):
    """The locks of one delivery of a task, and how far it has come.

    Args:
        parts: all locks, in order.
        at: which of them it asks for, waits for or was granted; it has those before.
        place: server microseconds of its arrival: its place in every line.
        left: where its message is kept in Redis until it is kept at ``at``; None if with the
            broker.
        frees: locks that are given back before it is parked: it begins again.
    """

    parts: tuple[Part, ...]
    at: int = 0
    place: int = 0
    left: Part | None = None
    frees: tuple[Part, ...] = ()

    @property
    def here(self) -> Part:
        """The lock that it asks for, waits for or was granted."""
        return self.parts[self.at]

    def granted(self, fence: int) -> Bundle:
        """Return it with the number of the grant of the lock for which it has waited.

        It is kept on from there: if the next one is busy, nobody asks for this one again.
        """
        here = self.here._replace(fence=fence)
        return self._replace(parts=(*self.kept, here, *self.parts[self.at + 1 :]))

    @property
    def kept(self) -> tuple[Part, ...]:
        """The locks that it has while it waits for this one."""
        return self.parts[: self.at]

    @property
    def turn(self) -> int:
        """A number that no other delivery of the same attempt has."""
        return int(self.parts[-1].token[:8], 16)

    def header(self) -> dict[str, Any]:
        """Return what is kept with the message."""
        return {KEPT: {"parts": self.parts, "at": self.at, "place": self.place}}


def read(header: Mapping[str, Any]) -> Bundle:
    """Return the bundle of which this is the header."""
    parts = tuple(Part(*part) for part in header["parts"])
    return Bundle(parts, int(header["at"]), int(header["place"]))


def bundle_in(kept: bytes | None) -> Bundle | None:
    """Return the bundle of a message that is kept in Redis; None if its task has one lock."""
    head, _, _ = (kept or b"").partition(b"\n")
    if f'"{KEPT}"'.encode() not in head:
        return None
    return read(json.loads(head)["headers"][KEPT])
