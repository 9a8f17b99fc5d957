"""The store on several servers as a worker needs it: locks by majority, and no messages.

A message that waits stays with the broker, which outlives these servers as it outlives one. So
there is nothing to deliver, to sweep, or to count here.
"""
# ruff: noqa: ARG002  # the arguments are those of the verbs of any store

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NoReturn

from celery_singleton_lock.errors import BackendError, BackendRefused
from celery_singleton_lock.core.model import (
    Claim,
    Delivery,
    Ending,
    Holder,
    Identity,
    Observations,
    Owner,
    Parcel,
    Parked,
    ParkedMessage,
    Reply,
    Stray,
    new_token,
)
from celery_singleton_lock.store.quorum.sync import QuorumStore
from celery_singleton_lock.store.message_operations import PROBE

_ONE_REDIS: Final = (
    "singleton_lock_backend names several servers. {what} needs one Redis; docs/quorum.md tells "
    "what a quorum does not do."
)


def _refused(what: str) -> BackendRefused:
    return BackendRefused(_ONE_REDIS.format(what=what))


def refuse(what: str) -> NoReturn:
    """Refuse what only one Redis can do.

    Raises:
        BackendRefused: always.
    """
    raise _refused(what)


class TaskQuorum(QuorumStore):
    """Locks of tasks on an odd number of independent servers; see :class:`QuorumStore`."""

    def park(self, owner: Owner, claim: Claim, parcel: Parcel) -> Reply:
        """Refuse: the message stays with the broker."""
        refuse("A parked message")

    def park_many(
        self, parcels: Iterable[tuple[Owner, Claim, Parcel]]
    ) -> Sequence[Reply | BackendError]:
        """Refuse each: the messages stay with the broker."""
        return [_refused("A parked message") for _ in parcels]

    def beat(
        self,
        worker: str,  # see Store
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int = 0,
        *,
        tasks: Collection[str] | None = None,
    ) -> Mapping[str, str]:
        """See whether a majority answers; nobody is told of the worker, since nothing is delivered.

        Raises:
            BackendUnreachable: none does.
        """
        self.check()
        return {}

    def probe(self) -> None:
        """Take and give back a lock that nobody else wants.

        Raises:
            BackendError: a majority does not take it.
        """
        owner = Owner(new_token())
        name = f"{PROBE} {owner.token}"
        self.acquire(owner, Claim(name, lease=1.0))
        self.release(name, owner.token, Ending.FINAL)

    def confirm(self, names: Sequence[str]) -> Sequence[bool]:
        """Refuse."""
        refuse("To wait for replicas")

    def too_few(self) -> str:
        """Refuse."""
        refuse("To wait for replicas")

    def identify(self) -> Identity:
        """Return nothing: no message is kept here that could be lost."""
        return Identity()

    def kept(self, messages: Sequence[ParkedMessage]) -> Sequence[bool]:
        """Return nothing."""
        return []

    def traced(self, messages: Sequence[ParkedMessage]) -> Sequence[bool]:
        """Return nothing."""
        return []

    def vouch(self, tokens: Sequence[str]) -> None:
        """Do nothing."""

    def note_lost(self, notes: Mapping[str, str]) -> None:
        """Do nothing."""

    def receive(self, worker: str, timeout: float) -> Delivery | None:
        """Wait for nothing."""
        threading.Event().wait(timeout)
        return None

    def leave(self, worker: str, realm: str, queues: Iterable[str]) -> None:
        """Do nothing."""

    def kick(
        self,
        name: str,  # see Store
        *,
        worker: str = "",
        realm: str = "",
        patience: float = 0.0,
    ) -> Sequence[Stray]:
        """Do nothing: those who wait look by themselves."""
        return []

    def kick_many(
        self,
        names: Sequence[str],  # see Store
        *,
        worker: str = "",
        realm: str = "",
        patience: float = 0.0,
    ) -> Sequence[Stray]:
        """Do nothing, likewise."""
        return []

    def left(
        self,
        name: str,  # see Store
        seal: str,
        tokens: Sequence[str],
        *,
        sent: bool,
        worker: str = "",
    ) -> int:
        """Do nothing, likewise."""
        return 0

    def take_due(self, limit: int = 100) -> Sequence[str]:
        """Return nothing."""
        return []

    def neglected(self, seconds: float, limit: int = 20) -> Sequence[str]:
        """Return nothing."""
        return []

    def find(self, task_ids: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Return nothing."""
        return []

    def revoke(self, name: str, token: str, *, realm: str, worker: str = "") -> Reply:
        """Refuse: a revoked message is ended where it arrives."""
        refuse("To revoke a parked message")

    def body(self, name: str, token: str) -> bytes | None:
        """Return nothing."""
        return None

    def parked(self, realm: str) -> Mapping[str, Parked]:
        """Return nothing."""
        return {}

    def switches(self) -> Mapping[str, str]:
        """Return nothing."""
        return {}

    def switch(self, task: str, mode: str | None) -> None:
        """Refuse."""
        refuse("To switch the mode of tasks")

    def waited_for(self) -> Sequence[str]:
        """Return nothing."""
        return []

    def let_run(
        self,
        names: Sequence[str],  # see Store
        tasks: Sequence[str],
        most: int,
        *,
        worker: str,
        realm: str,
    ) -> int:
        """Do nothing."""
        return 0

    def observe(
        self,
        owner: Owner,  # see Store
        claim: Claim,
        *,
        waits: bool,
        took: float | None = None,
    ) -> Holder | None:
        """Refuse."""
        refuse('The mode "observe"')

    def observed(self) -> Observations:
        """Refuse."""
        refuse('The mode "observe"')

    def forget_observed(self) -> None:
        """Refuse."""
        refuse('The mode "observe"')

    def describe(self) -> Mapping[str, str]:
        """Return what each server that answers guarantees, as far as they differ all of it."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            try:
                facts = node.describe()
            except BackendError:
                continue
            for fact, value in facts.items():
                found.setdefault(fact, []).append(value)
        return {fact: ", ".join(sorted(set(values))) for fact, values in found.items()}
