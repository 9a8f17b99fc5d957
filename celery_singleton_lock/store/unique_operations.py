"""The operations of :class:`UniqueStore` on Redis (no I/O)."""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.core.unique import MOST_PENDING, Announced, EntryState
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.requests import SplitCall, Steps
from celery_singleton_lock.store.script_arguments import lease_of
from celery_singleton_lock.store.script_runner import ScriptRunner


class UniqueOperations(ScriptRunner):
    """Operations about unique calls; arguments as of :class:`ScriptRunner`."""

    def announce(
        self, name: str, key: str, task_id: str, *, instead_of: str = ""
    ) -> Steps[Announced]:
        """Announce a unique call; see :meth:`UniqueStore.announce`."""
        call = self.announce_call(name, key, task_id, instead_of)
        return announced((yield from self.run(call.call(self.keyspace))))

    def announce_call(self, name: str, key: str, task_id: str, instead_of: str) -> SplitCall:
        """Return the call of the script ``announce``."""
        script, own = self.scripts["announce"], (name, key, task_id, instead_of)
        return SplitCall(script, name, own, (lease_of(MOST_PENDING),))

    def confirm_sent(
        self, name: str, key: str, task_id: str, retries: int, seconds: float
    ) -> Steps[bool]:
        """Note that the broker has a unique call; see :meth:`UniqueStore.confirm_sent`."""
        call = self.confirm_call(name, key, task_id, retries, seconds)
        return int((yield from self.run(call.call(self.keyspace)))) == 1

    def confirm_call(
        self, name: str, key: str, task_id: str, retries: int, seconds: float
    ) -> SplitCall:
        """Return the call of the script ``confirm_sent``."""
        script, own = self.scripts["confirm_sent"], (name, key, task_id, retries)
        return SplitCall(script, name, own, (lease_of(seconds),))

    def withdraw(
        self, name: str, key: str, task_id: str, retries: int, *, ended: bool = False
    ) -> Steps[bool]:
        """End the entry of a unique call; see :meth:`UniqueStore.withdraw`."""
        call = self.lock_call(
            "withdraw", name, unique_key=key, task_id=task_id, retries=retries, ended=int(ended)
        )
        return bool((yield from self.run(call)))


def announced(answer: Any) -> Announced:
    """Return the answer to an announcement."""
    state, _, task_id = replies.text(answer).partition("\n")
    return Announced(EntryState(state), task_id)
