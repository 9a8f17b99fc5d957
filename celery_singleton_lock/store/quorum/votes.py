"""The owner of a lock on several servers: the token with the votes of a majority (no I/O).

Each server gives its vote for a lock to one token at a time, for a lease by the server's clock. The
token with a majority of votes owns the lock, for one lease by the owner's monotonic clock, counted
from before the votes were requested. Two majorities have a server in common. So two tokens never
own the lock at once, as long as:

* no clock runs faster or slower than another by more than :data:`DRIFT`: each server keeps a vote
  longer than its owner relies on it, by this fraction;
* a server keeps its votes. A server that was restarted, or lost its data, gives no new votes until
  the longest lease that it may have forgotten has ended (``quorum/vote.lua``).

The fencing token of a grant is one that a majority has stored before the owner learns it. The next
majority has a server in common with this one, which gives a higher number.

A request may reach a server long after its sender has given up. So each request says until when, by
the server's clock, the vote may be given. A server from which a vote was withdrawn refuses earlier
requests for a while. Each attempt of a token has its own number (the round), so that a late
withdrawal of one attempt does not take the votes of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.errors import BackendError, BackendRefused, ConfigurationError
from celery_singleton_lock.store.quorum.values import (
    Answers,
    Bid,
    Each,
    Elected,
    NotElected,
    ServerState,
    VoteReply,
    wait_for_all,
)
from celery_singleton_lock.store.script_arguments import lease_of, milliseconds_of

T = TypeVar("T")

DRIFT: Final = 0.01
"""How far clocks may diverge during a lease, as a fraction of the lease."""

JITTER: Final = 0.002
"""Seconds added to that, since clocks are read in milliseconds."""

LAST_ROUND: Final = 2**53 - 1
"""A round that is higher than any other: scripts count in doubles."""

ASK_AGAIN: Final = 1.0
"""Seconds after which a server whose clock is unknown is asked again."""


class Votes:
    """The votes of several servers.

    Args:
        count: how many servers there are.
        clock: source of monotonic seconds.
        timeout: seconds within which a server must answer.
        longest_lease: seconds; the longest lease of any lock of all clients of these servers.
        drift: how far clocks may diverge during a lease, as a fraction of the lease.

    Raises:
        ConfigurationError: the number of servers is even, or under three; or a duration is invalid.
    """

    def __init__(
        self,
        count: int,
        clock: Clock,
        *,
        timeout: float,
        longest_lease: float,
        drift: float = DRIFT,
    ) -> None:
        if count < 3 or count % 2 == 0:  # noqa: PLR2004  # the fewest of which one may fail
            given = {0: "none is", 1: "1 is"}.get(count, f"{count} are")
            msg = (
                f"A quorum needs an odd number of servers, 3 or more, and {given} given (of 5 "
                "servers 2 may fail; of 4 servers only 1 may fail, as of 3)."
            )
            if count == 1:
                msg += (
                    " For one server give its client, redis.Redis.from_url(URL) or that of "
                    "redis.asyncio, not a list."
                )
            raise ConfigurationError(msg)
        for what, seconds in (("timeout", timeout), ("longest_lease", longest_lease)):
            milliseconds_of(what, seconds, least=0.001)
        self.count: Final = count
        self.majority: Final = count // 2 + 1
        self.timeout: Final = timeout
        self.longest_lease: Final = longest_lease
        self._clock = clock
        self._drift = drift
        self._round = 0
        self._ahead: dict[int, tuple[float, float]] = {}
        self._runs: dict[int, str] = {}
        self._ask_again_at: dict[int, float] = {}

    def kept(self, lease: float) -> float:
        """Return the seconds for which servers keep a vote whose owner relies on ``lease``."""
        return lease + lease * self._drift + JITTER

    # -- election ---------------------------------------------------------------------------------

    def elect(
        self, name: str, token: str, lease: float, fence: int = 0
    ) -> Plan[Each, Elected | NotElected]:
        """Collect a majority of votes, or withdraw those that were given.

        Args:
            name: the lock's name.
            token: owner token. A further call with the same one is safe.
            lease: seconds.
            fence: the least fencing token.

        Raises:
            ConfigurationError: the lease is invalid or too long, or two servers are the same.
        """
        self._check_lease(name, lease)
        began = self._clock.monotonic()
        failed = yield from self._learn_clocks(name)
        votes_given = yield from self._ask_all(name, token, lease, fence)
        highest = max((vote.fencing_token for vote in _yes(votes_given)), default=0)
        if self._won(votes_given) and not self._agreed(votes_given, highest):
            votes_given = yield from self._ask_all(name, token, lease, highest)
        elected = Elected(highest, began + lease)
        if self._agreed(votes_given, highest) and self._clock.monotonic() < elected.valid_until:
            return elected
        yield from self.withdraw(name, token)
        return self._refused({**failed, **votes_given})

    def _won(self, votes_given: Answers) -> bool:
        return len(_yes(votes_given)) >= self.majority

    def _agreed(self, votes_given: Answers, number: int) -> bool:
        """Return whether a majority has given its vote and stored this number."""
        stored = [vote for vote in _yes(votes_given) if vote.fencing_token == number]
        return len(stored) >= self.majority

    def _check_lease(self, name: str, lease: float) -> None:
        lease_of(lease)
        if lease > self.longest_lease:
            msg = (
                f"Lock {name!r} has a lease of {lease:g} s, and these servers wait for "
                f"{self.longest_lease:g} s after a restart. Give a longest_lease of at least "
                f"{lease:g} s wherever these servers are used, or a shorter lease: it is renewed."
            )
            raise ConfigurationError(msg)

    def _ask_all(self, name: str, token: str, lease: float, fence: int) -> Plan[Each, Answers]:
        """Request the vote of every server whose clock is known."""
        asked, round_ = self._clock.monotonic(), self._next_round()
        calls = {
            server: partial(_vote, self._bid(server, round_, name, token, lease, fence))
            for server in list(self._ahead)
        }
        answers: Answers = yield Each(calls, self._won, token)
        for server, vote in _arrived(answers):
            self._set_clock(server, asked, vote.now)
        return answers

    def _bid(  # noqa: PLR0917  # the fields of a bid
        self, server: int, round_: int, name: str, token: str, lease: float, fence: int
    ) -> Bid:
        """Return the request to a server, with times by its clock."""
        kept, until = self.kept(lease), self._until(server)
        return Bid(name, token, round_, kept, fence, until, self._new_for)

    @property
    def _new_for(self) -> float:
        return self.kept(self.longest_lease)

    def _next_round(self) -> int:
        """Return a number that is higher than all before, in all processes of this machine."""
        self._round = max(self._round + 1, int(self._clock.monotonic() * 1e6))
        return self._round

    def _refused(self, votes_given: Answers) -> NotElected:
        """Return why there was no majority."""
        arrived = [vote for _, vote in _arrived(votes_given)]
        fresh = sorted(vote.left for vote in arrived if vote.verdict == "new")
        busy = [vote.left for vote in arrived if vote.verdict == "busy"]
        if len(arrived) < self.majority:
            return self.too_few(votes_given)
        lacking = self.majority - (len(arrived) - len(fresh))
        if lacking > 0:
            return NotElected("new", len(arrived), fresh[lacking - 1])
        return NotElected("busy", len(arrived), min(busy, default=0.0))

    def too_few(self, answers: Answers) -> NotElected:
        """Return why fewer than a majority voted: too many servers are silent, or refuse."""
        errors = {n: each for n, each in answers.items() if isinstance(each, BackendError)}
        refusals = {n: each for n, each in errors.items() if isinstance(each, BackendRefused)}
        arrived = {server for server, _ in _arrived(answers)}
        lacking = [server for server in range(self.count) if server not in arrived]
        reason = "refused" if len(refusals) > self.count - self.majority else "silent"
        first = next(iter((refusals or errors).values()), None)
        return NotElected(
            reason, len(arrived), error=first, lacking=lacking, refusing=sorted(refusals)
        )

    # -- withdrawal and renewal -------------------------------------------------------------------

    def withdraw(self, name: str, token: str, *, forced: bool = False) -> Plan[Each, Answers]:
        """Withdraw all votes of a token; wait for every server or the time-out.

        Args:
            name: the lock's name.
            token: owner token.
            forced: ignore the rounds: those of an owner on another machine, from which a lock is
                taken, are not comparable.

        Returns:
            Server -> whether the token had its vote.
        """
        round_ = LAST_ROUND if forced else self._next_round()
        calls = {
            server: partial(_withdraw, name, token, round_, 4 * self.timeout + self._doubt(server))
            for server in range(self.count)
        }
        answers: Answers = yield Each(calls, wait_for_all, token)
        return answers

    def renew(
        self, leases: Sequence[tuple[str, str, float]]
    ) -> Plan[Each, tuple[list[bool | None], Answers]]:
        """Renew leases that a majority of servers still keeps, then request the other votes.

        This never creates a majority: the others are asked after the result is known.

        Args:
            leases: (name, token, seconds).

        Returns:
            For each lease whether it is held, None if too few servers answered; and the answers of
            the servers.

        Raises:
            ConfigurationError: a lease is invalid or too long.
        """
        for name, _, seconds in leases:
            self._check_lease(name, seconds)
        asked = [(name, token, self.kept(seconds)) for name, token, seconds in leases]
        calls = dict.fromkeys(range(self.count), lambda node: node.renew_votes(asked))
        answers: Answers = yield Each(calls, wait_for_all)
        arrived = dict(_arrived(answers))
        held: list[bool | None] = []
        absent: dict[int, list[tuple[str, str, float, int]]] = {}
        for index, lease in enumerate(leases):
            says = {server: votes[index] for server, votes in arrived.items()}
            held.append(self._still(says))
            if held[-1]:
                number = max(number for kept, number in says.values() if kept)
                for server in [n for n, (kept, _) in says.items() if not kept]:
                    absent.setdefault(server, []).append((*lease, number))
        yield from self._fill_in(absent)
        return held, answers

    def _still(self, says: Mapping[int, tuple[bool, int]]) -> bool | None:
        """Return whether a majority keeps a lease; None if silent servers could decide that."""
        kept = sum(held for held, _ in says.values())
        if kept >= self.majority:
            return True
        return False if kept + self.count - len(says) < self.majority else None

    def _fill_in(
        self, absent: Mapping[int, Sequence[tuple[str, str, float, int]]]
    ) -> Plan[Each, None]:
        """Request the votes of servers for leases that a majority keeps without them.

        All in one round trip, whatever their number: a slow server must not end the others' leases.
        """
        if not set(absent) <= set(self._ahead):
            yield from self._learn_clocks("")
        calls = {}
        for server, lacking in absent.items():
            if server in self._ahead:
                bids = [self._bid(server, self._next_round(), *lease) for lease in lacking]
                calls[server] = partial(_vote_many, bids)
        if calls:
            yield Each(calls, wait_for_all)

    # -- the servers ------------------------------------------------------------------------------

    def server_states(self, name: str) -> Plan[Each, Answers]:
        """Return the :class:`ServerState` of each server.

        Raises:
            ConfigurationError: two servers are the same.
        """
        asked, new_for = self._clock.monotonic(), self._new_for
        calls = dict.fromkeys(range(self.count), lambda node: node.server_state(name, new_for))
        answers: Answers = yield Each(calls, wait_for_all)
        self._states(asked, answers)
        return answers

    def _learn_clocks(self, name: str) -> Plan[Each, Answers]:
        """Ask servers whose clock is not known for their time.

        A server without an answer is asked again after :data:`ASK_AGAIN` seconds. While fewer than
        a majority of clocks are known, each call asks: another thread may not have its answers yet.

        Returns:
            The errors of the servers that did not answer.
        """
        now, new_for = self._clock.monotonic(), self._new_for
        too_few = len(self._ahead) < self.majority
        unknown = [
            n
            for n in range(self.count)
            if n not in self._ahead and (too_few or now >= self._ask_again_at.get(n, now))
        ]
        if not unknown:
            return {}
        self._ask_again_at.update(dict.fromkeys(unknown, now + ASK_AGAIN))
        calls = dict.fromkeys(unknown, lambda node: node.server_state(name, new_for))
        answers: Answers = yield Each(calls, wait_for_all)
        known = self._states(now, answers)
        return {server: error for server, error in answers.items() if server not in known}

    def _states(self, asked: float, answers: Answers) -> dict[int, ServerState]:
        found: dict[int, ServerState] = dict(_arrived(answers))
        for server, state in found.items():
            self._set_clock(server, asked, state.now)
            self._runs[server] = state.run
        self._refuse_duplicates(found)
        return found

    def _refuse_duplicates(self, found: Iterable[int]) -> None:
        """Refuse a server that is given twice: it would vote twice."""
        for server in found:
            for other, run in self._runs.items():
                if other != server and run == self._runs[server]:
                    first, second = sorted((server + 1, other + 1))
                    msg = (
                        f"Servers {first} and {second} of the quorum are one server (run id "
                        f"{run[:8]}…), which would vote twice. Give the address of another one."
                    )
                    raise ConfigurationError(msg)

    def _set_clock(self, server: int, asked: float, now: float) -> None:
        self._ahead[server] = (now - asked, asked)

    def _doubt(self, server: int) -> float:
        """Return by how many seconds a server's clock may have diverged since it was read."""
        now = self._clock.monotonic()
        _, measured = self._ahead.get(server, (0.0, now))
        return (now - measured) * self._drift

    def _until(self, server: int) -> float:
        """Return until when, by a server's clock, a vote that is requested now may be given.

        The server read its clock after it was asked, so its clock is not ahead of this estimate.
        """
        ahead, _ = self._ahead[server]
        return self._clock.monotonic() + ahead + self._doubt(server) + self.timeout


def _arrived(answers: Mapping[int, Any]) -> Iterable[tuple[int, Any]]:
    """Return the servers that answered, with their answers."""
    return [(n, answer) for n, answer in answers.items() if not isinstance(answer, BackendError)]


def _yes(votes_given: Answers) -> list[VoteReply]:
    return [vote for _, vote in _arrived(votes_given) if vote.verdict == "yes"]


def _vote(bid: Bid, node: Any) -> Any:
    return node.vote(bid)


def _withdraw(name: str, token: str, round_: int, keep: float, node: Any) -> Any:
    return node.withdraw_vote(name, token, round_, keep)


def _vote_many(bids: Sequence[Bid], node: Any) -> Any:
    return node.vote_many(bids)
