"""The operations of a store on several servers (no I/O).

Callers queue for a lock at one of the servers, its coordinator, which has an ordinary lock of the
same name. The coordinator follows from the name, and is the same for all clients. If it does not
answer, the next server takes over. A caller that holds the coordinator's lock requests the votes
(:mod:`celery_singleton_lock.store.quorum.votes`), and owns the lock with a majority of them. If two
coordinators are in use at once, waits may be longer and the order of arrival may be lost, but two
tokens never own the lock.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.core.lock_view import Holder, LockView, WaitsFor
from celery_singleton_lock.core.model import (
    DONE_FOR,
    Claim,
    Ending,
    Owner,
    Renewal,
    Reply,
    Reservation,
    Verdict,
)
from celery_singleton_lock.errors import BackendError, BackendUnreachable, ConfigurationError
from celery_singleton_lock.store.operations import PROBE
from celery_singleton_lock.store.quorum.availability import Availability
from celery_singleton_lock.store.quorum.coordinators import At, Coordinators
from celery_singleton_lock.store.quorum.values import (
    Answers,
    Each,
    Elected,
    NotElected,
    ServerState,
    wait_for_all,
)
from celery_singleton_lock.store.quorum.votes import Votes

T = TypeVar("T")

TRY_AGAIN: Final = (0.02, 0.08)
"""Least and most seconds until the first in the queue requests votes again. The time is random, so
that two tokens that have prevented each other's majority do not try again at the same time."""

Request: TypeAlias = At | Each
Steps: TypeAlias = Plan[Request, T]


class QuorumOperations:
    """The operations of :class:`LockStore` on several servers.

    Args:
        addresses: of the servers, without passwords; all clients should spell them alike, or they
            queue at different coordinators.
        votes: the votes of these servers.
        clock: source of monotonic seconds.
    """

    def __init__(self, addresses: Sequence[str], votes: Votes, clock: Clock) -> None:
        self.addresses: Final = tuple(addresses)
        self.votes: Final = votes
        self._availability = Availability(self.addresses, votes)
        self._coordinators = Coordinators(
            self.addresses,
            votes.count - votes.majority + 1,
            self._availability.no_coordinator,
            clock,
        )

    # -- lock operations --------------------------------------------------------------------------

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Steps[Reply]:
        """Acquire the coordinator's lock, and then the votes; see :meth:`LockStore.acquire`."""
        _refuse_permits(claim)
        reply: Reply = yield from self._coordinators.queue(
            claim.name, owner.token, lambda node: node.acquire(owner, claim, wait=wait)
        )
        if reply.verdict is not Verdict.GRANTED:
            return reply
        waits = wait is not None
        return (yield from self._elected(owner, claim.name, claim.lease, reply, waits=waits))

    def claim(
        self,
        owner: Owner,
        name: str,
        lease: float,
        *,
        acks_early: bool = False,
        kept_elsewhere: bool = False,  # noqa: ARG002  # no messages are stored
        later: bool = False,  # noqa: ARG002  # there are no rates
        limit: int = 0,
    ) -> Steps[Reply]:
        """Claim the coordinator's lock, and then request votes; see :meth:`LockStore.claim`."""
        reply: Reply = yield from self._coordinators.queue(
            name,
            owner.token,
            lambda node: node.claim(owner, name, lease, acks_early=acks_early, limit=limit),
        )
        if reply.verdict is not Verdict.GRANTED:
            return reply
        return (yield from self._elected(owner, name, lease, reply, waits=True))

    def _elected(
        self, owner: Owner, name: str, lease: float, granted: Reply, *, waits: bool
    ) -> Steps[Reply]:
        """Request the votes. A caller that waits keeps the coordinator's lock, and tries again."""
        try:
            result = yield from self.votes.elect(name, owner.token, lease, granted.fencing_token)
        except ConfigurationError:
            yield from self._give_up(name, owner.token)
            raise
        if isinstance(result, Elected):
            return Reply(Verdict.GRANTED, result.fencing_token, lease, limit=1)
        if waits and result.reason in {"busy", "new"}:
            pause = random.uniform(*TRY_AGAIN)  # noqa: S311  # no secret
            pause += result.left if result.reason == "new" else 0.0
            return Reply(Verdict.WAITING, rank=1, next_look=pause, waits_for=WaitsFor.HOLDER)
        yield from self._give_up(name, owner.token)
        if result.reason == "busy":
            return Reply(Verdict.BLOCKED, next_look=result.left, waits_for=WaitsFor.HOLDER)
        raise self._availability.error_for(result)

    def _give_up(self, name: str, token: str) -> Steps[None]:
        """Release the coordinator's lock; the attempt has not ended, so it is not marked done."""
        yield from self._coordinators.leave(
            token, lambda node: node.release(name, token, Ending.AGAIN)
        )

    def release(
        self,
        name: str,
        token: str,
        ending: Ending,
        *,
        worker: str = "",
        done_for: float = DONE_FOR,
        mark: bool = False,
        reserve: Reservation | None = None,
    ) -> Steps[Reply]:
        """Withdraw the votes, then release the coordinator's lock; see :meth:`LockStore.release`.

        A CANCEL also releases the coordinator's lock, whose holder does not own the lock yet.
        """
        answers = yield from self.votes.withdraw(name, token)
        self._availability.log_changes(answers)
        ended = Ending.FINAL if ending is Ending.CANCEL else ending
        yield from self._coordinators.leave(
            token,
            lambda node: node.release(
                name, token, ended, worker=worker, done_for=done_for, mark=mark, reserve=reserve
            ),
        )
        return Reply(Verdict.RELEASED) if ending is Ending.CANCEL else self._released(answers)

    def _released(self, answers: Answers) -> Reply:
        """Return whether a token had the lock, by the answers that arrived.

        Raises:
            BackendUnreachable: too few answered to tell.
        """
        arrived = [answer for answer in answers.values() if isinstance(answer, bool)]
        had = sum(arrived)
        if len(arrived) < self.votes.majority:
            raise self._availability.too_few(answers)
        owned = had > 0 and had + self.votes.count - len(arrived) >= self.votes.majority
        return Reply(Verdict.RELEASED if owned else Verdict.ABSENT)

    def extend(self, leases: Iterable[tuple[str, str, float]]) -> Steps[Sequence[Renewal]]:
        """Renew many leases, each by a majority; see :meth:`LockStore.extend`."""
        asked = list(leases)
        if not asked:
            return []
        held, answers = yield from self.votes.renew(asked)
        self._availability.log_changes(answers)
        if all(each is None for each in held):
            raise self._availability.too_few(answers)
        return held

    def inspect(self, name: str, *, waiters: int = 10) -> Steps[LockView]:
        """Return the state of the lock: its owner by the votes, its queue at the coordinator."""
        states = yield from self._states_of(name)
        view: LockView = yield from self._coordinators.ask(
            name, lambda node: node.inspect(name, waiters=waiters)
        )
        token = self._owner(states)
        known = next((each for each in view.holders if each.token == token), Holder(token))
        votes = [each for each in states.values() if each.token == token]
        left = sorted((each.left for each in votes), reverse=True)[self.votes.majority - 1 :][:1]
        return LockView(
            name,
            tuple(known._replace(expires_in=each) for each in left if token),
            view.waiters,
            view.waiting,
            limit=1,
            fencing_token=max((each.fencing_token for each in states.values()), default=0),
            counters=view.counters,
            paused=view.paused,
            waits_for=WaitsFor.HOLDER if left and token else None,
            next_look=left[0] if left and token else 0.0,
        )

    def reset(self, name: str, *, call: str = "") -> Steps[int]:
        """Take the lock from its owner; see :meth:`LockStore.reset`."""
        states = yield from self._states_of(name)
        owner = self._owner(states)
        for token in {state.token for state in states.values()} - {""}:
            yield from self.votes.withdraw(name, token, forced=True)
        every = range(self.votes.count)
        yield Each(dict.fromkeys(every, lambda n: n.reset(name, call=call)), wait_for_all)
        return 1 if owner else 0

    def close_for(self, name: str, seconds: float, why: str) -> Steps[float]:
        """Refuse: the servers have no common state beside the votes.

        Raises:
            ConfigurationError: always.
        """
        del seconds, why
        yield from ()
        msg = (
            f"lock {name!r} cannot be closed for a time: a quorum of servers has no common state "
            "for that. Use one Redis, or a Cluster, for it."
        )
        raise ConfigurationError(msg)

    def wait(self, name: str, token: str, timeout: float) -> Steps[bool]:
        """Block until the coordinator's lock may be granted; see :meth:`LockStore.wait`."""
        server = self._coordinators.server_of(name, token)
        try:
            return bool((yield At(server, lambda node: node.wait(name, token, timeout))))
        except BackendUnreachable:
            self._coordinators.is_down(server)
            raise

    def time(self) -> Steps[float]:
        """Return the clock of the first server that answers."""
        return float((yield from self._coordinators.ask("", lambda node: node.time())))

    # -- the servers ------------------------------------------------------------------------------

    def check(self) -> Steps[Mapping[int, BackendError]]:
        """Check that these servers are a quorum: a majority votes, and none is given twice.

        Returns:
            The servers that do not vote now, since they did not answer or refused, with the errors.

        Raises:
            ConfigurationError: two servers are the same.
            BackendUnreachable: too few answer, or too many were restarted.
        """
        answers = yield from self.votes.server_states(PROBE)
        states = self._majority_of(answers)
        fresh = sorted(state.new_for for state in states.values() if state.new_for > 0)
        lacking = self.votes.majority - (len(states) - len(fresh))
        if lacking > 0:
            refused = NotElected("new", len(states), fresh[lacking - 1])
            raise self._availability.error_for(refused)
        every, silent = range(self.votes.count), self._availability.silent()
        return {n: answers.get(n, silent) for n in every if n not in states}

    def admit(self) -> Steps[None]:
        """Let restarted servers vote at once. Call this only if no lock can be held.

        Raises:
            BackendUnreachable: a server did not answer; the others vote.
        """
        answers = yield Each(
            dict.fromkeys(range(self.votes.count), lambda n: n.admit_voter()), wait_for_all
        )
        if len([a for a in answers.values() if isinstance(a, str)]) < self.votes.count:
            raise self._availability.too_few(answers)

    def _states_of(self, name: str) -> Steps[dict[int, ServerState]]:
        return self._majority_of((yield from self.votes.server_states(name)))

    def _majority_of(self, answers: Answers) -> dict[int, ServerState]:
        """Return the states of the servers that answered.

        Raises:
            BackendError: they are not a majority.
        """
        states = {n: each for n, each in answers.items() if isinstance(each, ServerState)}
        if len(states) < self.votes.majority:
            raise self._availability.too_few(answers)
        return states

    def _owner(self, states: Mapping[int, ServerState]) -> str:
        """Return the token with a majority of votes, or an empty text."""
        tokens = [state.token for state in states.values() if state.token]
        most = max(tokens, key=tokens.count, default="")
        return most if tokens.count(most) >= self.votes.majority else ""


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
