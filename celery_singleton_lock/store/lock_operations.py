"""The operations of :class:`LockStore` on Redis (no I/O)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from redis import exceptions as failures

from celery_singleton_lock.core.lock_view import LockView
from celery_singleton_lock.core.model import (
    DONE_FOR,
    Claim,
    Ending,
    Owner,
    Renewal,
    Reply,
    Reservation,
)
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.rate import logged_later
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.requests import Attempts, Pop, SplitCall, Steps
from celery_singleton_lock.store.script_arguments import (
    delete_message_of,
    lease_of,
    place_of,
    usual_of_acquire,
    usual_of_claim,
    usual_of_release,
)
from celery_singleton_lock.store.script_runner import ScriptRunner
from celery_singleton_lock.store.scripts import Argument, Call

AT_ONCE: Final = 32
"""Most leases that one script renews. Redis serves no other client while a script runs."""


class LockOperations(ScriptRunner):
    """Lock operations; arguments as of :class:`ScriptRunner`."""

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Steps[Reply]:
        """Acquire the lock, or queue for it; see :meth:`LockStore.acquire`."""
        call = self.acquire_call(owner, claim, wait)
        return replies.reply((yield from self.run(call.call(self.keyspace))))

    def acquire_call(self, owner: Owner, claim: Claim, wait: float | None) -> SplitCall:
        """Return the call of the script ``acquire``."""
        own = (claim.name, owner.token, owner.attempt, place_of(claim.place), int(claim.copy))
        usual = usual_of_acquire(
            *(claim.lease, claim.limit, claim.max_waiting, wait),
            *(owner.task, owner.worker, owner.host, owner.pid, self.claim_ms),
        )
        if claim.flow:
            script = self.scripts["acquire_with_flow"]
            flow = logged_later(claim.flow) if claim.later else claim.flow
            return SplitCall(script, claim.name, own, (*usual, flow))
        return SplitCall(self._acquire, claim.name, own, usual)

    def claim(
        self,
        owner: Owner,
        name: str,
        lease: float,
        *,
        acks_early: bool = False,
        kept_elsewhere: bool = False,
        later: bool = False,
        limit: int = 0,
    ) -> Steps[Reply]:
        """Start to use a grant; see :meth:`LockStore.claim`."""
        delete_message = delete_message_of(
            acks_early=acks_early, kept_elsewhere=kept_elsewhere, later=later
        )
        call = self.claim_call(owner, name, lease, delete_message, limit)
        return replies.reply((yield from self.run(call.call(self.keyspace))))

    def claim_call(
        self, owner: Owner, name: str, lease: float, delete_message: int, limit: int
    ) -> SplitCall:
        """Return the call of the script ``claim``."""
        usual = usual_of_claim(
            lease, delete_message, owner.worker, owner.host, owner.pid, self.claim_ms, limit
        )
        return SplitCall(self._claim, name, (name, owner.token), usual)

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
        """Release the lock; see :meth:`LockStore.release`."""
        call = self.release_call(name, token, ending, worker, done_for, mark, reserve)
        attempts = Attempts()
        answer = yield from self.run_counted(call.call(self.keyspace), attempts)
        return released(answer, attempts)

    def release_call(  # noqa: PLR0917  # positional, since keywords are slower
        self,
        name: str,
        token: str,
        ending: Ending,
        worker: str,
        done_for: float,
        mark: bool,
        reserve: Reservation | None,
    ) -> SplitCall:
        """Return the call of the script ``release``."""
        kept = ("", "") if reserve is None else (lease_of(reserve.seconds), reserve.attempt)
        own = (name, token, ending.value, int(mark), *kept)
        return SplitCall(
            self._release, name, own, usual_of_release(worker, done_for, self.claim_ms)
        )

    def charge(
        self, name: str, token: str, charge_id: str, amount: int, rates: Sequence[str]
    ) -> Steps[Reply]:
        """Correct what a start has used; see :meth:`RatedStore.charge`."""
        call = self.lock_call(
            "charge",
            name,
            token=token,
            charge_id=charge_id,
            amount=amount,
            rate_ids="\n" + "".join(f"{rate}\n" for rate in rates),
            worker="",
            claim_ms=self.claim_ms,
        )
        return replies.reply((yield from self.run(call)))

    def extend(self, leases: Iterable[tuple[str, str, float]]) -> Steps[Sequence[Renewal]]:
        """Renew many leases; see :meth:`LockStore.extend`."""
        asked = list(leases)
        if not asked:
            return []
        answers: list[Any] = []
        for start in range(0, len(asked), AT_ONCE):
            call = self.extend_call(asked[start : start + AT_ONCE])
            answers += yield from self.run(call)
        refused = [answer for answer in answers if not isinstance(answer, (int, list))]
        if len(refused) == len(asked):
            raise explain(failures.ResponseError(replies.text(refused[0])))
        return [replies.renewal(answer) for answer in answers]

    def extend_call(self, leases: Iterable[tuple[str, str, float]]) -> Call:
        """Return the call of the script ``extend``."""
        keys: list[bytes] = []
        arguments: list[Argument] = []
        for name, token, lease in leases:
            keys += self.keyspace.sent(name)
            arguments += [name, token, lease_of(lease)]
        return Call(self.scripts["extend"], keys, arguments)

    def inspect(self, name: str, *, waiters: int = 10) -> Steps[LockView]:
        """Return the current state of the lock; see :meth:`LockStore.inspect`."""
        call = self.lock_call("inspect", name, waiters=waiters)
        return replies.view(name, (yield from self.run(call)))

    def reset(self, name: str, *, call: str = "") -> Steps[int]:
        """Take the lock from all its holders; see :meth:`LockStore.reset`."""
        asked = call or new_token()
        script = self.lock_call("reset", name, call=asked, claim_ms=self.claim_ms)
        return int((yield from self.run(script)))

    def close_for(self, name: str, seconds: float, why: str) -> Steps[float]:
        """Stop granting the lock for a time; see :meth:`LockStore.close_for`."""
        script = self.lock_call("close_for", name, close_ms=lease_of(seconds), why=why)
        return replies.seconds((yield from self.run(script)))

    def wait(self, name: str, token: str, timeout: float) -> Steps[bool]:
        """Block until ``token`` is granted, or ``timeout`` seconds have passed."""
        return (yield Pop(self.keyspace.wake(name, token), timeout)) is not None


def released(answer: Any, attempts: Attempts) -> Reply:
    """Return the reply to a release."""
    reply = replies.reply(answer)
    return reply._replace(repeated=True) if attempts.repeated else reply
