"""The requests of an operation to its driver, and the Redis commands for scripts (no I/O).

An operation is a generator that yields requests and gets their answers; see
:mod:`celery_singleton_lock.core.lock_steps`. So threads and asyncio share one implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.scripts import Argument, Call, Script

T = TypeVar("T")

LONGEST_BLOCK: Final = 30.0
"""Longest time in seconds for which a call blocks; callers that wait longer call again."""

SHORTEST_BLOCK: Final = 0.01
"""Shortest time in seconds for which a call blocks: to Redis, 0 means no time-out."""

SLACK: Final = 2.0
"""Seconds by which the socket time-out of a blocking call exceeds its block."""


class Command(NamedTuple):
    """Send a command; the answer is the server's.

    Args:
        words: the command.
        options: how redis-py parses the answer.
    """

    words: tuple[Any, ...]
    options: Mapping[str, Any] = {}


class Attempts:
    """Whether a request was sent more than once.

    Attributes:
        repeated: an earlier attempt got no answer; the server may have carried it out.
    """

    __slots__ = ("repeated",)

    def __init__(self) -> None:
        self.repeated: bool = False


class Counted(NamedTuple):
    """Send a command as often as the client's retry policy says, and note whether it was repeated.

    Args:
        command: what to send.
        attempts: where to note it.
    """

    command: Command
    attempts: Attempts


class Batch(NamedTuple):
    """Send commands in one round trip; the answer is a list of answers and errors.

    Args:
        commands: what to send.
        patience: seconds after which a master of a Cluster counts as silent, so that the answers of
            the others are not late. None: after its socket time-out. No effect with one server.
    """

    commands: Sequence[Command]
    patience: float | None = None


class SplitCall(NamedTuple):
    """The script call of acquire, claim or release, in parts that a store encodes separately.

    See :func:`celery_singleton_lock.store.redis.fast_path.packed`.

    Args:
        script: what to run.
        name: the lock's name.
        own: the first arguments, which differ from call to call.
        usual: the other arguments, which are the same for all calls of a task in a process.
    """

    script: Script
    name: str
    own: tuple[Argument, ...]
    usual: tuple[Argument, ...]

    def call(self, keyspace: Keyspace) -> Call:
        """Return this as an ordinary call."""
        return Call(self.script, keyspace.sent(self.name), [*self.own, *self.usual])


class Pop(NamedTuple):
    """Block until a list has an element; the answer is the element, or None.

    Args:
        key: of the list.
        seconds: for which to block at most.
        often: whether the caller pops again at once, so that the connection is never idle and needs
            no check.
    """

    key: str
    seconds: float
    often: bool = False


class Receive(NamedTuple):
    """On a Cluster: wait until an inbox of a worker has an element; the answer is that of Pop.

    Args:
        worker: id of the worker.
        seconds: for which to wait at most.
    """

    worker: str
    seconds: float


class Replicas(NamedTuple):
    """How many replicas must have a parked message.

    Args:
        number: how many; 0: none.
        seconds: for which to wait for them.
    """

    number: int = 0
    seconds: float = 0.0

    def confirming(self, key: str) -> list[Command]:
        """Return the commands for one server.

        WAIT waits for the last write of its own connection (before Redis 7.2: its last command).
        The messages may have been written by another connection, so a write precedes WAIT.

        Args:
            key: a key on that server, which is written.
        """
        mark = Command(("SET", key, 1, "PX", 1000))
        return [mark, Command(("WAIT", self.number, round(self.seconds * 1000)))]


NO_REPLICAS: Final = Replicas()


class Confirm(NamedTuple):
    """Wait for the replicas of the servers that have these keys; the answer is a bool per key.

    Args:
        keys: for each lock that was written to, a key on the same server that may be written.
        replicas: how many, and for how long.
    """

    keys: Sequence[str]
    replicas: Replicas


Request: TypeAlias = Command | Counted | Batch | Pop | Receive | Confirm
"""A failed request raises a BackendError in the operation, or NoScriptError."""

Steps: TypeAlias = Plan[Request, T]
"""An operation: yields requests, returns a ``T``."""


def by_digest(call: Call) -> Command:
    """Return the command for a script that the server knows."""
    return Command(("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments))


def by_text(call: Call) -> Command:
    """Return the command for a script that the server does not know; it stores the script."""
    return Command(("EVAL", call.script.text, len(call.keys), *call.keys, *call.arguments))
