"""Runs scripts by their digests, alone or many in one round trip (no I/O)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis import exceptions as failures

from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.requests import (
    NO_REPLICAS,
    Attempts,
    Batch,
    Command,
    Counted,
    Replicas,
    Steps,
    by_digest,
    by_text,
)
from celery_singleton_lock.store.script_arguments import ACQUIRE, CLAIM, RELEASE, lease_of
from celery_singleton_lock.store.scripts import Argument, Call, Script, load_scripts


class ScriptRunner:
    """Base class of all operations: the keys, the scripts, and the methods that run scripts.

    Args:
        keyspace: names of the keys.
        scripts: the scripts; tests pass their own.
        claim_lease: seconds in which a waiter must claim its grant.
        quarantine: as of :func:`load_scripts`.
        replicas: how many must have a message before it counts as parked.
    """

    def __init__(
        self,
        keyspace: Keyspace | None = None,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
        *,
        quarantine: bool | None = False,
        replicas: Replicas = NO_REPLICAS,
    ) -> None:
        self.keyspace: Keyspace = keyspace or Keyspace()
        self.quarantine: bool | None = quarantine
        self.replicas: Replicas = replicas
        self.scripts: dict[str, Script] = dict(scripts or load_scripts(quarantine=quarantine))
        self._acquire = self.scripts["acquire"].taking(ACQUIRE)
        self._claim = self.scripts["claim"].taking(CLAIM)
        self._release = self.scripts["release"].taking(RELEASE)
        self.claim_ms: int = lease_of(claim_lease)

    def lock_call(self, verb: str, name: str, **arguments: Argument) -> Call:
        """Return the call of a script for one lock."""
        script = self.scripts[verb]
        return Call(script, self.keyspace.sent(name), script.pack({"name": name, **arguments}))

    def run(self, call: Call) -> Steps[Any]:
        """Run a script by its digest; send its text only if the server does not know it."""
        try:
            return (yield by_digest(call))
        except failures.NoScriptError:
            return (yield by_text(call))

    def run_counted(self, call: Call, attempts: Attempts) -> Steps[Any]:
        """Run a script as :meth:`run` does, and note in ``attempts`` whether it was repeated."""
        try:
            return (yield Counted(by_digest(call), attempts))
        except failures.NoScriptError:
            return (yield Counted(by_text(call), attempts))

    def run_many(self, calls: Sequence[Call], *, patience: float | None = None) -> Steps[list[Any]]:
        """Run scripts in one round trip; an answer is a reply, or the error of that call alone.

        Scripts that the server does not know run again in order, one by one. The first call sends
        the text, and the server then knows it. SCRIPT LOAD would need a separate permission.

        Args:
            calls: the scripts.
            patience: see :class:`Batch`.
        """
        if not calls:
            return []
        answers = yield Batch([by_digest(call) for call in calls], patience)
        return (yield from self.answers_to(calls, answers))

    def answers_to(self, calls: Sequence[Call], answers: Sequence[Any]) -> Steps[list[Any]]:
        """Return the answers to many calls, as :meth:`answer_to` does."""
        final = []
        for call, answer in zip(calls, answers, strict=True):
            final.append((yield from self.answer_to(call, answer)))
        return final

    def answer_to(self, call: Call, answer: Any) -> Steps[Any]:
        """Return the answer to one of many calls, or its error; run an unknown script again."""
        if not isinstance(answer, failures.NoScriptError):
            return explain(answer) if isinstance(answer, Exception) else answer
        try:
            return (yield from self.run(call))
        except BackendError as error:
            return error

    def time(self) -> Steps[float]:
        """Return the server's clock, in seconds."""
        whole, micro = yield Command(("TIME",))
        return float(whole) + float(micro) / 1_000_000

    @staticmethod
    def send_each(commands: Iterable[Command]) -> Steps[list[Any]]:
        """Send commands in one round trip; raise the first error."""
        answers = yield Batch(list(commands))
        for answer in answers:
            if isinstance(answer, Exception):
                raise explain(answer) from answer
        return list(answers)
