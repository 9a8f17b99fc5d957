"""The verbs of a store on several servers, as plans (no I/O).

A lock's **turn** is an ordinary lock of the same name on one of the servers, its coordinator: who
queues, queues there, and is woken there. Which server that is follows from the name, the same for
all clients; if it does not answer, it is the next. A turn is not the lock: whose turn it is asks
for the votes (:mod:`celery_singleton_lock.store.quorum.votes`), and owns the lock with a majority. So two
turns at once, on two coordinators, cost time and order, but never the lock.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, TypeVar

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import (
    BackendError,
    BackendRefused,
    BackendUnreachable,
    ConfigurationError,
)
from celery_singleton_lock.core.model import (
    Claim,
    Ending,
    Holder,
    LockView,
    Owner,
    Reply,
    Reservation,
    Verdict,
)
from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.store.quorum.votes import Answers, Ballot, Each, Elected, Greeting, Refused

T = TypeVar("T")

logger = logging.getLogger(__name__)

DOWN: Final = 1.0
"""Seconds for which a server that did not answer is asked last for a turn."""

TRY_AGAIN: Final = (0.02, 0.08)
"""Between how many seconds whose turn it is tries again, if others have votes: at random, so that
two who try at once do not do so for ever."""


MOST_TURNS: Final = 10_000
"""Most tokens of which is noted where they ask for a turn; of others, it may be anywhere."""


class At(NamedTuple):
    """Ask one server, and answer with its answer. An error is one of ours.

    Args:
        server: its number.
        call: asks it.
    """

    server: int
    call: Callable[[Any], Any]


Wish: TypeAlias = At | Each
Verb: TypeAlias = Plan[Wish, T]


def ranked(addresses: Sequence[str], name: str) -> list[int]:
    """Return the servers in the order in which they coordinate a lock (rendezvous hash).

    A server that is gone leaves its locks to many others, and takes no other lock along.
    """

    def weight(server: int) -> bytes:
        return hashlib.sha256(f"{addresses[server]}\n{name}".encode()).digest()

    return sorted(range(len(addresses)), key=weight)


class QuorumVerbs:
    """What a store on several servers does; who carries it out has the connections.

    Args:
        addresses: of the servers, without passwords; all clients should spell them alike, or they
            queue at different coordinators.
        ballot: the votes.
        clock: source of monotonic seconds.
    """

    def __init__(self, addresses: Sequence[str], ballot: Ballot, clock: Clock) -> None:
        """Know nobody's turn yet."""
        self.addresses: Final = tuple(addresses)
        self.ballot: Final = ballot
        self._clock = clock
        self._down: dict[int, float] = {}
        self._missed: set[int] = set()
        self._turns: dict[str, list[int]] = {}  # token -> where it asked for a turn, last here

    # -- the verbs of a lock ----------------------------------------------------------------------

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Verb[Reply]:
        """Have a turn, and then the votes; or queue for a turn. See :meth:`Store.acquire`."""
        _refuse_permits(claim)
        turn = yield from self._at(
            claim.name, owner.token, lambda node: node.acquire(owner, claim, wait=wait)
        )
        if turn.verdict is not Verdict.GRANTED:
            return turn
        return (yield from self._own(owner, claim.name, claim.lease, turn, waits=wait is not None))

    def claim(
        self,
        owner: Owner,
        name: str,
        lease: float,
        *,
        settle: bool = False,
        kept_elsewhere: bool = False,  # noqa: ARG002  # no messages are kept
    ) -> Verb[Reply]:
        """Use a turn to get the votes; see :meth:`Store.claim`."""
        turn = yield from self._at(
            name, owner.token, lambda node: node.claim(owner, name, lease, settle=settle)
        )
        if turn.verdict is not Verdict.GRANTED:
            return turn
        return (yield from self._own(owner, name, lease, turn, waits=True))

    def release(
        self,
        name: str,
        token: str,
        ending: Ending,
        *,
        worker: str = "",
        done_for: float = 3600.0,
        mark: bool = False,
        reserve: Reservation | None = None,
    ) -> Verb[Reply]:
        """Take the votes back, then give up the turn; see :meth:`Store.release`.

        Who cancels while it is its turn gives that up: a turn is not yet the lock.
        """
        answers = yield from self.ballot.withdraw(name, token)
        self._look_who_answers(answers)
        ended = Ending.FINAL if ending is Ending.CANCEL else ending
        yield from self._leave(
            token,
            lambda node: node.release(
                name, token, ended, worker=worker, done_for=done_for, mark=mark, reserve=reserve
            ),
        )
        return Reply(Verdict.RELEASED) if ending is Ending.CANCEL else self._released(answers)

    def extend(self, leases: Iterable[tuple[str, str, float]]) -> Verb[Sequence[bool | None]]:
        """Renew many leases, each by a majority; see :meth:`Store.extend`."""
        asked = list(leases)
        if not asked:
            return []
        held, answers = yield from self.ballot.renew(asked)
        self._look_who_answers(answers)
        if all(each is None for each in held):
            self._complain(answers)
        return held

    def inspect(self, name: str, *, waiters: int = 10) -> Verb[LockView]:
        """Return the lock as it stands: its owner by the votes, its queue at the coordinator."""
        greetings = yield from self._all_greeted(name)
        view: LockView = yield from self._first(
            name, lambda node: node.inspect(name, waiters=waiters)
        )
        token = self._owner(greetings)
        known = next((each for each in view.holders if each.token == token), Holder(token))
        votes = [each for each in greetings.values() if each.token == token]
        left = sorted((each.left for each in votes), reverse=True)[self.ballot.majority - 1 :][:1]
        return LockView(
            name,
            tuple(known._replace(expires_in=each) for each in left if token),
            view.waiters,
            view.waiting,
            limit=1,
            fencing_token=max((each.fencing_token for each in greetings.values()), default=0),
            counters=view.counters,
            paused=view.paused,
        )

    def reset(self, name: str) -> Verb[int]:
        """Take the lock from its owner; see :meth:`Store.reset`."""
        greetings = yield from self._all_greeted(name)
        owner = self._owner(greetings)
        for token in {greeting.token for greeting in greetings.values()} - {""}:
            yield from self.ballot.withdraw(name, token, forced=True)
        yield Each(dict.fromkeys(range(self.ballot.count), lambda n: n.reset(name)), _all)
        return 1 if owner else 0

    def wait(self, name: str, token: str, timeout: float) -> Verb[bool]:
        """Block until it may be the turn of ``token``; see :meth:`Store.wait`."""
        server = (self._turns.get(token) or self._order(name)[:1])[-1]
        try:
            return bool((yield At(server, lambda node: node.wait(name, token, timeout))))
        except BackendUnreachable:
            self._down[server] = self._clock.monotonic() + DOWN
            raise

    def time(self) -> Verb[float]:
        """Return the clock of the first server that answers."""
        return float((yield from self._first("", lambda node: node.time())))

    def _look_who_answers(self, answers: Mapping[int, Any]) -> None:
        """Warn once of each server that does not answer, or refuses, and tell when it does again.

        Args:
            answers: to what every server was asked, and waited for.
        """
        for server in range(self.ballot.count):
            answer = answers.get(server)
            fails = server not in answers or isinstance(answer, BackendError)
            if fails and server not in self._missed:
                self._missed.add(server)
                why = answer or f"It did not answer within {self.ballot.timeout:g} s."
                logger.warning(
                    "celery-singleton-lock: server %d of the quorum (%s) does not vote. Locks go "
                    "on as long as %d of %d servers do. %s",
                    server + 1,
                    self.addresses[server],
                    self.ballot.majority,
                    self.ballot.count,
                    why,
                )
            elif not fails and server in self._missed:
                self._missed.discard(server)
                logger.warning(
                    "celery-singleton-lock: server %d of the quorum (%s) votes again",
                    server + 1,
                    self.addresses[server],
                )

    # -- the servers themselves -------------------------------------------------------------------

    def check(self) -> Verb[Mapping[int, BackendError]]:
        """See whether these servers are a quorum: a majority votes, and none is given twice.

        Returns:
            The servers that are no part of it now, since they did not answer, or refused; and why.

        Raises:
            ConfigurationError: two of them are one.
            BackendUnreachable: too few answer, or too many have started anew.
        """
        answers = yield from self.ballot.greet("celery-singleton-lock probe")
        greetings = self._greetings(answers)
        fresh = sorted(greeting.new_for for greeting in greetings.values() if greeting.new_for > 0)
        lacking = self.ballot.majority - (len(greetings) - len(fresh))
        if lacking > 0:
            raise self._in_the_way(Refused("new", len(greetings), fresh[lacking - 1]))
        silent = BackendUnreachable(f"It did not answer within {self.ballot.timeout:g} s.")
        every = range(self.ballot.count)
        return {n: answers.get(n, silent) for n in every if n not in greetings}

    def admit(self) -> Verb[None]:
        """Have servers vote at once that are new; only who knows that no lock is held may say so.

        Raises:
            BackendUnreachable: a server did not answer; the others vote.
        """
        answers = yield Each(dict.fromkeys(range(self.ballot.count), lambda n: n.admit()), _all)
        if len([a for a in answers.values() if isinstance(a, str)]) < self.ballot.count:
            self._complain(answers)

    def _all_greeted(self, name: str) -> Verb[dict[int, Greeting]]:
        return self._greetings((yield from self.ballot.greet(name)))

    def _greetings(self, answers: Answers) -> dict[int, Greeting]:
        """Return those of a majority.

        Raises:
            BackendError: there is none.
        """
        greetings = {n: each for n, each in answers.items() if isinstance(each, Greeting)}
        if len(greetings) < self.ballot.majority:
            self._complain(answers)
        return greetings

    def _owner(self, greetings: Mapping[int, Greeting]) -> str:
        """Return who has a majority, or nothing."""
        tokens = [greeting.token for greeting in greetings.values() if greeting.token]
        most = max(tokens, key=tokens.count, default="")
        return most if tokens.count(most) >= self.ballot.majority else ""

    # -- turns ------------------------------------------------------------------------------------

    def _own(
        self, owner: Owner, name: str, lease: float, turn: Reply, *, waits: bool
    ) -> Verb[Reply]:
        """Ask for the votes. Who waits keeps its turn meanwhile, and asks again."""
        try:
            result = yield from self.ballot.elect(name, owner.token, lease, turn.fencing_token)
        except ConfigurationError:
            yield from self._give_up(name, owner.token)
            raise
        if isinstance(result, Elected):
            return Reply(Verdict.GRANTED, result.fencing_token, lease, limit=1)
        if waits and result.reason in {"busy", "new"}:
            pause = random.uniform(*TRY_AGAIN)  # noqa: S311  # no secret
            pause += result.left if result.reason == "new" else 0.0
            return Reply(Verdict.WAITING, rank=1, next_look=pause)
        yield from self._give_up(name, owner.token)
        if result.reason == "busy":
            return Reply(Verdict.BLOCKED, next_look=result.left)
        raise self._in_the_way(result)

    def _give_up(self, name: str, token: str) -> Verb[None]:
        """Give up a turn without the lock: the attempt has not ended, so it is not marked done."""
        yield from self._leave(token, lambda node: node.release(name, token, Ending.AGAIN))

    def _leave(self, token: str, call: Callable[[Any], Any]) -> Verb[None]:
        """Give up a turn wherever it may be: a server that did not answer may have granted it.

        If it was asked for in another process, that is anywhere.
        """
        asked = self._turns.pop(token, None) or range(self.ballot.count)
        yield Each(dict.fromkeys(asked, call), _all, token)

    def _at(self, name: str, token: str, call: Callable[[Any], Any]) -> Verb[Reply]:
        """Ask for a turn where it was asked for before, else at the coordinator."""
        known = self._turns.get(token, [])[-1:]
        order = self._order(name)
        if known and known[0] in order[: self._tries]:
            order.sort(key=lambda server: server != known[0])
        reply: Reply = yield from self._first_of(order, call, partial(self._note, token))
        return reply

    def _note(self, token: str, server: int) -> None:
        """Note where a token asks. What others release for us is never heard of: so not all."""
        while token not in self._turns and len(self._turns) >= MOST_TURNS:
            self._turns.pop(next(iter(self._turns)), None)
        asked = self._turns.setdefault(token, [])
        if server in asked:
            asked.remove(server)
        asked.append(server)

    def _first(self, name: str, call: Callable[[Any], Any]) -> Verb[Any]:
        return (yield from self._first_of(self._order(name), call, lambda _: None))

    def _first_of(
        self, order: Sequence[int], call: Callable[[Any], Any], note: Callable[[int], None]
    ) -> Verb[Any]:
        """Ask one server after another until one answers.

        Raises:
            BackendUnreachable: so many did not that the others are no majority.
        """
        answers: dict[int, BackendError] = {}
        for server in order[: self._tries]:
            note(server)  # also if no answer comes: it may have been granted
            try:
                answer = yield At(server, call)
            except BackendError as error:
                self._down[server] = self._clock.monotonic() + DOWN
                answers[server] = error
            else:
                self._down.pop(server, None)
                return answer
        others = self.ballot.count - len(answers)  # they may answer, and are too few
        told = self.ballot.too_few(answers)._replace(answered=others, lacking=sorted(answers))
        raise self._in_the_way(told)

    @property
    def _tries(self) -> int:
        """How many servers to ask: if none of them answers, the others are no majority."""
        return self.ballot.count - self.ballot.majority + 1

    def _order(self, name: str) -> list[int]:
        """Return the coordinators of a lock; those that were just found dead come last."""
        now = self._clock.monotonic()
        return sorted(
            ranked(self.addresses, name), key=lambda server: self._down.get(server, 0.0) > now
        )

    # -- answers ----------------------------------------------------------------------------------

    def _released(self, answers: Answers) -> Reply:
        """Say whether a token had the lock, as far as the servers that answered know.

        Raises:
            BackendUnreachable: too few answered to tell.
        """
        heard = [answer for answer in answers.values() if isinstance(answer, bool)]
        had = sum(heard)
        if len(heard) < self.ballot.majority:
            self._complain(answers)
        owned = had > 0 and had + self.ballot.count - len(heard) >= self.ballot.majority
        return Reply(Verdict.RELEASED if owned else Verdict.ABSENT)

    def _complain(self, answers: Mapping[int, Any]) -> NoReturn:
        """Say why too few servers have answered."""
        raise self._in_the_way(self.ballot.too_few(answers))

    def _in_the_way(self, result: Refused) -> BackendError:
        count = self.ballot.count
        if result.reason == "new":
            msg = (
                f"Of the lock's {count} servers too many have started anew, or lost their data: "
                f"nothing is granted for {result.left:.1f} s, the longest lease that they may have "
                "forgotten. If no lock can be held, QuorumStore.admit() ends the wait."
            )
            return BackendUnreachable(msg)
        needed = f"{self.ballot.majority} are needed"
        some = f"{count - result.answered} of the lock's {count} servers {self._lacking(result)}"
        if result.reason == "refused":
            return BackendRefused(f"{some}, and {needed}: {result.error}")
        first = "refusal" if result.refusing else "error"
        reason = f" The first {first}: {result.error}" if result.error else ""
        return BackendUnreachable(f"{some}, and {needed}.{reason}")

    def _lacking(self, result: Refused) -> str:
        """Say which servers did not answer, and which refused: those want another remedy."""
        silent = [server for server in result.lacking if server not in result.refusing]
        how = {
            f"did not answer within {self.ballot.timeout:g} s": silent,
            "refused": result.refusing,
        }
        return " or ".join(
            f"{what} ({', '.join(self.addresses[server] for server in servers)})"
            for what, servers in how.items()
            if servers
        )


def _refuse_permits(claim: Claim) -> None:
    """Refuse semaphores.

    Raises:
        ConfigurationError: more than one permit.
    """
    if claim.limit != 1:
        msg = (
            f"Lock {claim.name!r} has limit={claim.limit}: several servers together can keep one "
            "permit, not more, since two majorities need not name the same holders. Use limit=1, "
            "or one Redis."
        )
        raise ConfigurationError(msg)


def _all(_answers: Answers) -> bool:
    return False
