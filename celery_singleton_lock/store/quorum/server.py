"""The operations of one server of a quorum: its vote, and those of any server (no I/O)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.store.operations import Operations
from celery_singleton_lock.store.quorum.values import Bid, ServerState, VoteReply
from celery_singleton_lock.store.replies import seconds, text
from celery_singleton_lock.store.requests import Attempts, Steps
from celery_singleton_lock.store.script_arguments import milliseconds
from celery_singleton_lock.store.scripts import Argument, Call, Script, load_quorum_scripts


class ServerOperations(Operations):
    """The operations of one server of a quorum.

    Args:
        keyspace: names of the keys.
        scripts: the scripts; tests pass their own, those of the quorum included.
        claim_lease: seconds in which a waiter must claim its grant.
    """

    def __init__(
        self,
        keyspace: Keyspace | None = None,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        super().__init__(keyspace, scripts, claim_lease)
        self.scripts: dict[str, Script] = {**load_quorum_scripts(), **self.scripts}

    def vote(self, bid: Bid) -> Steps[VoteReply]:
        """Request the vote."""
        verdict, number, left, now, run = yield from self.run(self._vote_call(bid))
        return VoteReply(text(verdict), int(number), seconds(left), seconds(now), text(run))

    def vote_many(self, bids: Sequence[Bid]) -> Steps[None]:
        """Request many votes in one round trip; the next renewal shows which were given."""
        yield from self.run_many([self._vote_call(bid) for bid in bids])

    def withdraw_vote(self, name: str, token: str, round_: int, keep: float) -> Steps[bool]:
        """Withdraw the vote, and refuse earlier requests for ``keep`` seconds.

        Raises:
            BackendUnreachable: an answer was lost; the vote may have been withdrawn before.
        """
        call = self._call(
            "withdraw_vote", name, token, token=token, round=round_, keep_ms=milliseconds(keep)
        )
        attempts = Attempts()
        had, _ = yield from self.run_counted(call, attempts)
        if not int(had) and attempts.repeated:
            msg = "The answer of a server to the release of a lock was lost."
            raise BackendUnreachable(msg)
        return int(had) == 1

    def renew_votes(
        self, leases: Sequence[tuple[str, str, float]]
    ) -> Steps[list[tuple[bool, int]]]:
        """Renew votes, and the owners' leases of the coordinator's locks, in one round trip."""
        keys = [self.keyspace.vote(name) for name, _, _ in leases]
        arguments: list[Argument] = []
        for _, token, lease in leases:
            arguments += [token, milliseconds(lease)]
        votes = Call(self.scripts["renew_votes"], keys, arguments)
        answers = yield from self.run_many([votes, self._extend_call(leases)])
        if isinstance(answers[0], BackendError):
            raise answers[0]
        return [(int(held) == 1, int(number)) for held, number in answers[0]]

    def server_state(self, name: str, longest: float) -> Steps[ServerState]:
        """Return who has the vote, and the state of the server."""
        call = self._call("server_state", name, "", longest_ms=milliseconds(longest))
        token, number, left, now, run, new_for = yield from self.run(call)
        return ServerState(
            *(text(token), int(number), seconds(left)),
            *(seconds(now), text(run), seconds(new_for)),
        )

    def admit_voter(self) -> Steps[str]:
        """Let the server vote at once, although it is new."""
        answer = yield from self.run(Call(self.scripts["admit_voter"], [self.keyspace.quorum], []))
        return text(answer)

    def _extend_call(self, leases: Iterable[tuple[str, str, float]]) -> Call:
        keys: list[str] = []
        arguments: list[Argument] = []
        for name, token, lease in leases:
            keys += self.keyspace.lock(name)
            arguments += [name, token, milliseconds(lease)]
        return Call(self.scripts["extend"], keys, arguments)

    def _vote_call(self, bid: Bid) -> Call:
        return self._call(
            "vote",
            bid.name,
            bid.token,
            token=bid.token,
            round=bid.round,
            lease_ms=milliseconds(bid.lease),
            fence=bid.fence,
            until_ms=milliseconds(bid.until),
            longest_ms=milliseconds(bid.new_for),
        )

    def _call(self, verb: str, name: str, about: str, **arguments: Argument) -> Call:
        script, space = self.scripts[verb], self.keyspace
        keys = [space.vote(name), space.gone(name, about), space.quorum]
        return Call(script, keys, script.pack(arguments))
