"""One server of a quorum: its vote, and the verbs of any server (no I/O)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.store.quorum.votes import Bid, Greeting, Voice
from celery_singleton_lock.store.replies import seconds, text
from celery_singleton_lock.store.scripts import Argument, Call, Script, load_quorum_scripts
from celery_singleton_lock.store.message_operations import Attempts, Verb, Verbs


class NodeVerbs(Verbs):
    """The verbs of one server of a quorum.

    Args:
        keyspace: where the keys are.
        scripts: test builds pass their own, those of the quorum included.
        claim_lease: seconds in which a waiter must claim its turn.
    """

    def __init__(
        self,
        keyspace: Keyspace | None = None,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        """Prepare."""
        super().__init__(keyspace, scripts, claim_lease)
        self.scripts = {**load_quorum_scripts(), **self.scripts}

    def vote(self, bid: Bid) -> Verb[Voice]:
        """Ask for the vote."""
        verdict, number, left, now, run = yield from self.run(self._vote_call(bid))
        return Voice(text(verdict), int(number), seconds(left), seconds(now), text(run))

    def vote_many(self, bids: Sequence[Bid]) -> Verb[None]:
        """Ask for many votes in one round trip; the next renewal tells which were given."""
        yield from self.run_many([self._vote_call(bid) for bid in bids])

    def withdraw(self, name: str, token: str, round_: int, keep: float) -> Verb[bool]:
        """Take the vote back, and refuse what was asked for before for ``keep`` seconds.

        Raises:
            BackendUnreachable: an answer was lost; the vote may have been taken back before it.
        """
        call = self._call(
            "withdraw", name, token, token=token, round=round_, keep_ms=_milliseconds(keep)
        )
        attempts = Attempts()
        had, _ = yield from self.run_counted(call, attempts)
        if not int(had) and attempts.repeated:
            msg = "The answer of a server to the release of a lock was lost."
            raise BackendUnreachable(msg)
        return int(had) == 1

    def prolong(self, leases: Sequence[tuple[str, str, float]]) -> Verb[list[tuple[bool, int]]]:
        """Keep votes for longer, and the turns of their owners, in one round trip."""
        keys = [self.keyspace.vote(name) for name, _, _ in leases]
        arguments: list[Argument] = []
        for _, token, lease in leases:
            arguments += [token, _milliseconds(lease)]
        votes = Call(self.scripts["renew"], keys, arguments)
        answers = yield from self.run_many([votes, self._turns(leases)])
        if isinstance(answers[0], BackendError):
            raise answers[0]
        return [(int(held) == 1, int(number)) for held, number in answers[0]]

    def greet(self, name: str, longest: float) -> Verb[Greeting]:
        """Ask who has the vote, and how the server is."""
        call = self._call("greet", name, "", longest_ms=_milliseconds(longest))
        token, number, left, now, run, new_for = yield from self.run(call)
        return Greeting(
            *(text(token), int(number), seconds(left)),
            *(seconds(now), text(run), seconds(new_for)),
        )

    def admit(self) -> Verb[str]:
        """Have the server vote at once, although it is new."""
        answer = yield from self.run(Call(self.scripts["admit"], [self.keyspace.quorum], []))
        return text(answer)

    def _turns(self, leases: Iterable[tuple[str, str, float]]) -> Call:
        keys: list[str] = []
        arguments: list[Argument] = []
        for name, token, lease in leases:
            keys += self.keyspace.lock(name)
            arguments += [name, token, _milliseconds(lease)]
        return Call(self.scripts["extend"], keys, arguments)

    def _vote_call(self, bid: Bid) -> Call:
        return self._call(
            "vote",
            bid.name,
            bid.token,
            token=bid.token,
            round=bid.round,
            lease_ms=_milliseconds(bid.lease),
            fence=bid.fence,
            until_ms=_milliseconds(bid.until),
            longest_ms=_milliseconds(bid.new_for),
        )

    def _call(self, verb: str, name: str, about: str, **arguments: Argument) -> Call:
        script, space = self.scripts[verb], self.keyspace
        keys = [space.vote(name), space.gone(name, about), space.quorum]
        return Call(script, keys, script.pack(arguments))


def _milliseconds(duration: float) -> Any:
    return round(duration * 1000)
