"""Who owns a lock that lives on several servers: who has the votes of most of them (no I/O).

Each server gives its vote for a lock to one token at a time, for a lease by its own clock. A lock
is owned by who has a majority of votes, from before the votes were asked for, for one lease by the
owner's monotonic clock. Two majorities have a server in common, so two tokens never own it at once,
as long as:

* no clock runs faster or slower than another by more than :data:`DRIFT`: each server keeps a vote
  for so much longer than its owner believes in it;
* what a server has promised it keeps. One that has started anew, or lost its data, gives no new
  votes until the longest lease that it may have forgotten is over (``vote.lua``).

The number of a grant (fencing token) is one that a majority has stored before the owner hears of
it. The next majority has a server in common with this one, which gives a higher number.

A request may reach a server long after its sender has given it up. So each vote says until when, by
the server's clock, it may be given; and who takes a vote back has the server refuse, for a while,
what was asked for before. Each try of a token has a number of its own (its round), so that the end
of one try, arriving late, takes nothing away from the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendError, BackendRefused, ConfigurationError
from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.store.message_operations import lease_of, milliseconds_of

T = TypeVar("T")

DRIFT: Final = 0.01
"""By how much of a lease clocks may come apart while it lasts."""

JITTER: Final = 0.002
"""Seconds that are added to that, for clocks that are read in milliseconds."""

LAST_ROUND: Final = 2**53 - 1
"""A round that is higher than any other; scripts count in doubles."""

GREET_AGAIN: Final = 1.0
"""Seconds after which a server that did not tell its clock is asked again."""

Answers: TypeAlias = Mapping[int, Any]
"""Server -> what it answered, or its BackendError; nothing of those that did not answer in time."""


class Each(NamedTuple):
    """Ask several servers at once, and answer with :data:`Answers`.

    Args:
        calls: server -> what to ask it.
        enough: whether these answers will do; else all are waited for, or the time-out.
        about: the token; what concerns one token reaches a server in the order in which it was
            asked, where the network allows that.
    """

    calls: Mapping[int, Callable[[Any], Any]]
    enough: Callable[[Answers], bool]
    about: str = ""


class Bid(NamedTuple):
    """What one server is asked for.

    Args:
        name: the lock's name.
        token: who asks for the vote.
        round: number of the try; grows with each.
        lease: seconds for which the vote is to be kept.
        fence: a number that the grant should have at least.
        until: when the request comes too late, by the server's clock.
        new_for: seconds for which a server that has started anew gives no votes.
    """

    name: str
    token: str
    round: int
    lease: float
    fence: int
    until: float
    new_for: float


class Voice(NamedTuple):
    """What one server says when asked for its vote.

    Args:
        verdict: ``yes``; ``busy``, another has it; ``new``, it gives none yet; ``late``, the
            request arrived too late; ``gone``, it was taken back before.
        fencing_token: the number that the server has given.
        left: seconds until what is in the way is over.
        now: the server's clock, in seconds.
        run: its run id.
    """

    verdict: str
    fencing_token: int = 0
    left: float = 0.0
    now: float = 0.0
    run: str = ""


class Greeting(NamedTuple):
    """What one server says of a lock, and of itself.

    Args:
        token: who has its vote, or nothing.
        fencing_token: the last number that it knows.
        left: seconds for which the vote is given.
        now: its clock, in seconds.
        run: its run id.
        new_for: seconds for which it gives no vote to anybody new.
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


class Refused(NamedTuple):
    """The lock is not owned; all votes were taken back.

    Args:
        reason: ``silent``, too few servers answered; ``refused``, too many refused; ``new``, too
            many have lost their memory, or may have; ``busy``, another owns it, or several are
            trying.
        answered: how many servers answered.
        left: seconds until what is in the way is over.
        error: the first refusal, else the first error, if there was one.
        lacking: the servers that did not answer, or refused.
        refusing: those of them that refused.
    """

    reason: str
    answered: int
    left: float = 0.0
    error: BackendError | None = None
    lacking: Sequence[int] = ()
    refusing: Sequence[int] = ()


class Ballot:
    """The votes of several servers.

    Args:
        count: how many servers there are.
        clock: source of monotonic seconds.
        timeout: seconds within which a server must answer.
        longest_lease: seconds; the longest lease of any lock, of all who use these servers.
        drift: by how much of a lease clocks may come apart while it lasts.

    Raises:
        ConfigurationError: the number of servers is even, or under three; or a duration is none.
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
        """Know no server yet."""
        if count < 3 or count % 2 == 0:  # noqa: PLR2004  # the fewest that bear a loss
            given = {0: "none is", 1: "1 is"}.get(count, f"{count} are")
            msg = (
                f"A quorum needs an odd number of servers, 3 or more, and {given} given (5 go on "
                "without 2; 4 would bear no more losses than 3)."
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
        self._greeted: dict[int, float] = {}

    def kept(self, lease: float) -> float:
        """Return for how long servers keep a vote, so that its owner may believe in ``lease``."""
        return lease + lease * self._drift + JITTER

    # -- election ---------------------------------------------------------------------------------

    def elect(
        self, name: str, token: str, lease: float, fence: int = 0
    ) -> Plan[Each, Elected | Refused]:
        """Collect a majority of votes; else take back those that were given.

        Args:
            name: the lock's name.
            token: owner token. Asking again with the same one is safe.
            lease: seconds.
            fence: a number that the grant should have at least.

        Raises:
            ConfigurationError: the lease is none, or too long; or two of the servers are one.
        """
        self._check_lease(name, lease)
        began = self._clock.monotonic()
        strangers = yield from self._meet(name)
        voices = yield from self._ask_all(name, token, lease, fence)
        highest = max((voice.fencing_token for voice in _yes(voices)), default=0)
        if self._won(voices) and not self._agreed(voices, highest):
            voices = yield from self._ask_all(name, token, lease, highest)
        elected = Elected(highest, began + lease)
        if self._agreed(voices, highest) and self._clock.monotonic() < elected.valid_until:
            return elected
        yield from self.withdraw(name, token)
        return self._refused({**strangers, **voices})

    def _won(self, voices: Answers) -> bool:
        return len(_yes(voices)) >= self.majority

    def _agreed(self, voices: Answers, number: int) -> bool:
        """Whether a majority has given its vote, and stored this number."""
        stored = [voice for voice in _yes(voices) if voice.fencing_token == number]
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
        """Ask every server for its vote whose clock is known."""
        asked, round_ = self._clock.monotonic(), self._next_round()
        calls = {
            server: partial(_vote, self._bid(server, round_, name, token, lease, fence))
            for server in list(self._ahead)
        }
        answers: Answers = yield Each(calls, self._won, token)
        for server, voice in _heard(answers):
            self._set_clock(server, asked, voice.now)
        return answers

    def _bid(  # noqa: PLR0917  # what is asked, as elsewhere
        self, server: int, round_: int, name: str, token: str, lease: float, fence: int
    ) -> Bid:
        """Return what to ask a server, by its own clock."""
        kept, until = self.kept(lease), self._until(server)
        return Bid(name, token, round_, kept, fence, until, self._new_for)

    @property
    def _new_for(self) -> float:
        return self.kept(self.longest_lease)

    def _next_round(self) -> int:
        """Return a number that is higher than any before: of this token, in any process here."""
        self._round = max(self._round + 1, int(self._clock.monotonic() * 1e6))
        return self._round

    def _refused(self, voices: Answers) -> Refused:
        """Say what was in the way."""
        heard = [voice for _, voice in _heard(voices)]
        fresh = sorted(voice.left for voice in heard if voice.verdict == "new")
        busy = [voice.left for voice in heard if voice.verdict == "busy"]
        if len(heard) < self.majority:
            return self.too_few(voices)
        lacking = self.majority - (len(heard) - len(fresh))
        if lacking > 0:
            return Refused("new", len(heard), fresh[lacking - 1])
        return Refused("busy", len(heard), min(busy, default=0.0))

    def too_few(self, answers: Answers) -> Refused:
        """Say why fewer than a majority answered: they are silent, or refuse, which stays so."""
        errors = {n: each for n, each in answers.items() if isinstance(each, BackendError)}
        refusals = {n: each for n, each in errors.items() if isinstance(each, BackendRefused)}
        heard = {server for server, _ in _heard(answers)}
        lacking = [server for server in range(self.count) if server not in heard]
        reason = "refused" if len(refusals) > self.count - self.majority else "silent"
        first = next(iter((refusals or errors).values()), None)
        return Refused(reason, len(heard), error=first, lacking=lacking, refusing=sorted(refusals))

    # -- the way back, and renewal ----------------------------------------------------------------

    def withdraw(self, name: str, token: str, *, forced: bool = False) -> Plan[Each, Answers]:
        """Take all votes of a token back; wait for every server, or its time-out.

        Args:
            name: the lock's name.
            token: owner token.
            forced: whatever their rounds: for who takes a lock from an owner on another machine,
                where they are counted otherwise.

        Returns:
            Server -> whether the token had its vote.
        """
        round_ = LAST_ROUND if forced else self._next_round()
        calls = {
            server: partial(_withdraw, name, token, round_, 4 * self.timeout + self._doubt(server))
            for server in range(self.count)
        }
        answers: Answers = yield Each(calls, _never, token)
        return answers

    def renew(
        self, leases: Sequence[tuple[str, str, float]]
    ) -> Plan[Each, tuple[list[bool | None], Answers]]:
        """Keep leases for longer where a majority still keeps them, and then have the others vote.

        Never makes a majority that was not there: what the others are asked for comes after it.

        Args:
            leases: (name, token, seconds).

        Returns:
            For each whether it is held, None where too few servers answered to tell; and what the
            servers answered.

        Raises:
            ConfigurationError: a lease is none, or too long.
        """
        for name, _, seconds in leases:
            self._check_lease(name, seconds)
        asked = [(name, token, self.kept(seconds)) for name, token, seconds in leases]
        calls = dict.fromkeys(range(self.count), lambda node: node.prolong(asked))
        answers: Answers = yield Each(calls, _never)
        heard = dict(_heard(answers))
        held: list[bool | None] = []
        absent: dict[int, list[tuple[str, str, float, int]]] = {}
        for place, lease in enumerate(leases):
            says = {server: votes[place] for server, votes in heard.items()}
            held.append(self._still(says))
            if held[-1]:
                number = max(number for kept, number in says.values() if kept)
                for server in [n for n, (kept, _) in says.items() if not kept]:
                    absent.setdefault(server, []).append((*lease, number))
        yield from self._fill_in(absent)
        return held, answers

    def _still(self, says: Mapping[int, tuple[bool, int]]) -> bool | None:
        """Whether a majority keeps a lease; None if the silent could decide that."""
        kept = sum(held for held, _ in says.values())
        if kept >= self.majority:
            return True
        return False if kept + self.count - len(says) < self.majority else None

    def _fill_in(
        self, absent: Mapping[int, Sequence[tuple[str, str, float, int]]]
    ) -> Plan[Each, None]:
        """Have servers vote for leases that a majority keeps without them.

        All in one round, whatever their number: a server that is slow must not end the others.
        """
        if not set(absent) <= set(self._ahead):
            yield from self._meet("")
        calls = {}
        for server, lacking in absent.items():
            if server in self._ahead:
                bids = [self._bid(server, self._next_round(), *lease) for lease in lacking]
                calls[server] = partial(_vote_many, bids)
        if calls:
            yield Each(calls, _never)

    # -- the servers ------------------------------------------------------------------------------

    def greet(self, name: str) -> Plan[Each, Answers]:
        """Return what the servers say of a lock, and of themselves: each a :class:`Greeting`.

        Raises:
            ConfigurationError: two of them are one.
        """
        asked, new_for = self._clock.monotonic(), self._new_for
        calls = dict.fromkeys(range(self.count), lambda node: node.greet(name, new_for))
        answers: Answers = yield Each(calls, _never)
        self._greetings(asked, answers)
        return answers

    def _meet(self, name: str) -> Plan[Each, Answers]:
        """Ask those for the time whose clock is not known; a dead one not each time.

        While there is no majority of others, each time: another thread may be asking just now.

        Returns:
            The errors of those that do not tell.
        """
        now, new_for = self._clock.monotonic(), self._new_for
        too_few = len(self._ahead) < self.majority
        strange = [
            n
            for n in range(self.count)
            if n not in self._ahead and (too_few or now >= self._greeted.get(n, now))
        ]
        if not strange:
            return {}
        self._greeted.update(dict.fromkeys(strange, now + GREET_AGAIN))
        calls = dict.fromkeys(strange, lambda node: node.greet(name, new_for))
        answers: Answers = yield Each(calls, _never)
        met = self._greetings(now, answers)
        return {server: error for server, error in answers.items() if server not in met}

    def _greetings(self, asked: float, answers: Answers) -> dict[int, Greeting]:
        found: dict[int, Greeting] = dict(_heard(answers))
        for server, greeting in found.items():
            self._set_clock(server, asked, greeting.now)
            self._runs[server] = greeting.run
        self._refuse_twins(found)
        return found

    def _refuse_twins(self, found: Iterable[int]) -> None:
        """Refuse one server that is given twice: it would vote twice."""
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
        """Return by how many seconds a server's clock may be elsewhere than when it was heard."""
        now = self._clock.monotonic()
        _, measured = self._ahead.get(server, (0.0, now))
        return (now - measured) * self._drift

    def _until(self, server: int) -> float:
        """Return until when, by a server's clock, a vote that is asked for now may be given.

        Its clock is certainly not further than that: what it told was read after it was asked.
        """
        ahead, _ = self._ahead[server]
        return self._clock.monotonic() + ahead + self._doubt(server) + self.timeout


def _heard(answers: Mapping[int, Any]) -> Iterable[tuple[int, Any]]:
    """Return who has answered, and what."""
    return [(n, answer) for n, answer in answers.items() if not isinstance(answer, BackendError)]


def _yes(voices: Answers) -> list[Voice]:
    return [voice for _, voice in _heard(voices) if voice.verdict == "yes"]


def _never(_answers: Answers) -> bool:
    return False


def _vote(bid: Bid, node: Any) -> Any:
    return node.vote(bid)


def _withdraw(name: str, token: str, round_: int, keep: float, node: Any) -> Any:
    return node.withdraw(name, token, round_, keep)


def _vote_many(bids: Sequence[Bid], node: Any) -> Any:
    return node.vote_many(bids)
