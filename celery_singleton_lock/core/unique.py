"""Unique calls: a call that is like one that was sent before need not be sent (``lock_unique``)."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, NamedTuple

HEADER: Final = "csl-unique"
"""Message header of a unique call; see :attr:`UniqueCall.header`."""

MOST_PENDING: Final = 30.0
"""Seconds for which an announcement is valid without a confirmation."""


MOST_KEPT: Final = 366 * 86400
"""Longest time in seconds for which the entry of a sent call stays."""


class UniqueCall(NamedTuple):
    """What makes a call unique, as its message carries it.

    Args:
        lock: name of its lock.
        key: text that two calls of one lock share if they are alike.
        until_start: whether the next one may be sent once the task has started.
        most: seconds for which the entry stays while the broker has the message.
        late: whether the broker keeps the message until the task has ended (late acknowledgement).
        follows: id of the first task, if this call is a duplicate that ends with its result.
    """

    lock: str
    key: str
    until_start: bool
    most: float
    late: bool = False
    follows: str = ""

    @property
    def packed(self) -> list[Any]:
        """The value for the scripts; seconds are milliseconds there."""
        return [self.key, int(self.until_start), round(self.most * 1000), int(self.late)]

    @property
    def header(self) -> list[Any]:
        """The value of the message header."""
        return [self.lock, *self.packed, *([self.follows] if self.follows else [])]

    @property
    def packed_follow(self) -> list[Any]:
        """What a follower waits for, and its entry if it counts later, for the scripts."""
        return [self.key, self.follows, *self.packed[1:]]


def unpacked(header: object) -> UniqueCall | None:
    """Return the value of a message header, or None if it is not valid."""
    follows = ""
    match header:
        case [str(lock), str(key), int(until_start), int(most_ms), int(late)]:
            pass
        case [str(lock), str(key), int(until_start), int(most_ms), int(late), str(follows)]:
            pass
        case _:
            return None
    most = min(max(1, most_ms), MOST_KEPT * 1000) / 1000
    return UniqueCall(lock, key, until_start == 1, most, late == 1, follows)


class EntryState(Enum):
    """What is known of the call that was sent before."""

    ANNOUNCED = "announced"
    """No call like it was sent before: the caller sends this one."""

    PENDING = "pending"
    """Its sender has announced it, and may not have sent it yet."""

    SENT = "sent"
    """The broker has its message."""

    PARKED_OR_HELD = "here"
    """It is parked, or holds the lock."""


class SentCall(NamedTuple):
    """A unique call that counts as sent.

    Args:
        state: what is known of it.
        task_id: id of its task.
        expires_in: seconds for which it counts; None: as long as it is parked or holds the lock.
    """

    state: EntryState
    task_id: str
    expires_in: float | None


class FirstCall(NamedTuple):
    """A unique call that counts as sent, and how many duplicates wait for it.

    Args:
        key: what the calls share; by default the name of their task.
        task_id: id of its task.
        state: ``pending``: it is being sent; ``sent``: the broker has it; else the state of its
            record, as of a :class:`Holder`.
        age: seconds since it arrived at a worker; 0 while it is pending or sent.
        expires_in: seconds for which it counts; None: as long as it is parked or holds the lock.
        followers: number of duplicates that wait for its result (``lock_on_duplicate``).
    """

    key: str
    task_id: str
    state: str
    age: float = 0.0
    expires_in: float | None = None
    followers: int = 0


class Announced(NamedTuple):
    """The answer to an announcement.

    Args:
        state: of the call that counts.
        task_id: its task id.
    """

    state: EntryState
    task_id: str
