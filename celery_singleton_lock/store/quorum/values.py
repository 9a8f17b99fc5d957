"""Requests to the servers of a quorum, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from celery_singleton_lock.errors import BackendError

Answers: TypeAlias = Mapping[int, Any]
"""Server -> its answer or BackendError; servers that did not answer in time are missing."""


class Each(NamedTuple):
    """A request to several servers at once; the answer is :data:`Answers`.

    Args:
        calls: server -> what to call on it.
        enough: whether these answers suffice; else all servers are awaited until the time-out.
        about: the token. Requests about one token reach a server in the order in which they were
            made, as far as the network allows.
    """

    calls: Mapping[int, Callable[[Any], Any]]
    enough: Callable[[Answers], bool]
    about: str = ""


class Bid(NamedTuple):
    """A request for the vote of one server.

    Args:
        name: the lock's name.
        token: owner token that asks for the vote.
        round: number of the attempt; it grows with each.
        lease: seconds for which the server keeps the vote.
        fence: the least fencing token.
        until: time by the server's clock after which the request is too late.
        new_for: seconds for which a server that was restarted gives no votes.
    """

    name: str
    token: str
    round: int
    lease: float
    fence: int
    until: float
    new_for: float


class VoteReply(NamedTuple):
    """The answer of one server to a request for its vote.

    Args:
        verdict: ``yes``; ``busy``, another token has it; ``new``, the server gives none yet;
            ``late``, the request arrived too late; ``gone``, the round was withdrawn before.
        fencing_token: the number that the server has given.
        left: seconds until the server may vote (``busy``, ``new``).
        now: the server's clock, in seconds.
        run: its run id.
    """

    verdict: str
    fencing_token: int = 0
    left: float = 0.0
    now: float = 0.0
    run: str = ""


class ServerState(NamedTuple):
    """The state of one server, and of a lock there.

    Args:
        token: the token that has its vote; empty if none has.
        fencing_token: the last number that it has stored.
        left: seconds left of the vote.
        now: its clock, in seconds.
        run: its run id.
        new_for: seconds for which it votes for no new token.
    """

    token: str
    fencing_token: int
    left: float
    now: float
    run: str
    new_for: float


class Elected(NamedTuple):
    """The lock is owned.

    Args:
        fencing_token: number of the grant.
        valid_until: monotonic time up to which it is owned.
    """

    fencing_token: int
    valid_until: float


class NotElected(NamedTuple):
    """The lock is not owned; all votes were withdrawn.

    Args:
        reason: ``silent``, too few servers answered; ``refused``, too many refused; ``new``, too
            many were restarted, and may have lost votes; ``busy``, another token owns it, or
            several tokens try.
        answered: how many servers answered.
        left: seconds until a further attempt may succeed (``new``, ``busy``).
        error: the first refusal, else the first error, if any.
        lacking: the servers that did not answer, or refused.
        refusing: those of them that refused.
    """

    reason: str
    answered: int
    left: float = 0.0
    error: BackendError | None = None
    lacking: Sequence[int] = ()
    refusing: Sequence[int] = ()


def wait_for_all(_answers: Answers) -> bool:
    """Return False: no number of answers suffices, so all servers are awaited."""
    return False
