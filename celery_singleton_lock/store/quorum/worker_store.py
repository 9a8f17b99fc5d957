"""The store on several servers for workers: locks by a majority, and no parked messages.

Messages of blocked tasks stay with the broker. So there is nothing to deliver, to sweep or to count
here, and the methods of :class:`MessageStore` find nothing.
"""
# ruff: noqa: ARG002  # the arguments are those of :class:`Store`

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NoReturn

from celery_singleton_lock.core.lock_view import Parked
from celery_singleton_lock.core.model import SCHEMA, Claim, Ending, Identity, Owner, Reply, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import (
    Delivery,
    MessageToPark,
    ParkedMessage,
    SweepReply,
)
from celery_singleton_lock.core.unique import Announced
from celery_singleton_lock.errors import BackendError, BackendRefused
from celery_singleton_lock.store.operations import PROBE
from celery_singleton_lock.store.quorum.sync import QuorumStore

_ONE_REDIS: Final = (
    "singleton_lock_backend names several servers. {what} needs one Redis; docs/quorum.md lists "
    "what a quorum cannot do."
)


def _refused(what: str) -> BackendRefused:
    return BackendRefused(_ONE_REDIS.format(what=what))


def refuse(what: str) -> NoReturn:
    """Refuse an operation that needs one Redis.

    Raises:
        BackendRefused: always.
    """
    raise _refused(what)


class TaskQuorum(QuorumStore):
    """Locks of tasks on an odd number of independent servers; see :class:`QuorumStore`."""

    def charge(
        self, name: str, token: str, charge_id: str, amount: int, rates: Sequence[str]
    ) -> Reply:
        """Refuse: a quorum counts no starts."""
        refuse("A charge")

    def announce(self, name: str, key: str, task_id: str, *, instead_of: str = "") -> Announced:
        """Refuse: a quorum has no entries of unique calls."""
        refuse("A unique call")

    def confirm_sent(self, name: str, key: str, task_id: str, retries: int, seconds: float) -> bool:
        """Refuse likewise."""
        refuse("A unique call")

    def confirm_soon(self, name: str, key: str, task_id: str, retries: int, seconds: float) -> None:
        """Refuse likewise."""
        refuse("A unique call")

    def withdraw(
        self, name: str, key: str, task_id: str, retries: int, *, ended: bool = False
    ) -> bool:
        """Refuse likewise."""
        refuse("A unique call")

    def park(self, owner: Owner, claim: Claim, message: MessageToPark) -> Reply:
        """Refuse: the message stays with the broker."""
        refuse("A parked message")

    def park_many(
        self, messages: Iterable[tuple[Owner, Claim, MessageToPark]]
    ) -> Sequence[Reply | BackendError]:
        """Refuse each: the messages stay with the broker."""
        return [_refused("A parked message") for _ in messages]

    def worker_heartbeat(
        self,
        worker: str,
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int = 0,
        *,
        tasks: Collection[str] | None = None,
        stopped: Mapping[str, float] | None = None,
        light: bool = False,
    ) -> Mapping[str, str]:
        """Check that a majority answers. The worker is not recorded, since nothing is delivered.

        Raises:
            BackendUnreachable: no majority answers.
        """
        self.check()
        return {}

    def list_running(
        self,
        worker: str,
        new: Collection[tuple[str, str, str]],
        gone: Collection[tuple[str, str, str]],
        seconds: float,
    ) -> None:
        """Do nothing: no command reads the locks of a quorum."""

    def fleet_size(self, realm: str, queues: Iterable[str]) -> int:
        """Return 0: workers are not recorded."""
        return 0

    def inbox_size(self, worker: str) -> int:
        """Return 0: nothing arrives."""
        return 0

    def probe(self) -> None:
        """Acquire and release a lock that nobody else uses.

        Raises:
            BackendError: a majority does not vote.
        """
        owner = Owner(new_token())
        name = f"{PROBE} {owner.token}"
        self.acquire(owner, Claim(name, lease=1.0))
        self.release(name, owner.token, Ending.FINAL)

    def identify(self) -> Identity:
        """Return no markers: no message is stored here that could be lost."""
        return Identity()

    def schema(self, needed: str = SCHEMA) -> str:  # a quorum has no flow control
        """Return this version's: a worker compares those of the servers when it starts."""
        return SCHEMA

    def has_messages(self, messages: Sequence[ParkedMessage]) -> Sequence[bool]:
        """Return nothing."""
        return []

    def has_traces(self, messages: Sequence[ParkedMessage]) -> Sequence[bool]:
        """Return nothing."""
        return []

    def vouch(self, tokens: Sequence[str]) -> None:
        """Do nothing."""

    def note_lost(self, notes: Mapping[str, str]) -> None:
        """Do nothing."""

    def receive(self, worker: str, timeout: float) -> Delivery | None:
        """Wait; nothing arrives."""
        threading.Event().wait(timeout)
        return None

    def leave(self, worker: str, realm: str, queues: Iterable[str]) -> None:
        """Do nothing."""

    def sweep_and_grant(
        self,
        name: str,
        *,
        worker: str = "",
        realm: str = "",
        patience: float = 0.0,
    ) -> SweepReply:
        """Do nothing: waiters ask again by themselves."""
        return SweepReply()

    def sweep_and_grant_many(
        self,
        names: Sequence[str],
        *,
        worker: str = "",
        realm: str = "",
        patience: float = 0.0,
    ) -> SweepReply:
        """Do nothing."""
        return SweepReply()

    def record_publish_result(
        self,
        name: str,
        seal: str,
        tokens: Sequence[str],
        *,
        sent: bool,
        worker: str = "",
    ) -> int:
        """Do nothing."""
        return 0

    def take_due_locks(self, limit: int = 100) -> Sequence[str]:
        """Return nothing."""
        return []

    def unswept_locks(self, seconds: float, limit: int = 20) -> Sequence[str]:
        """Return nothing."""
        return []

    def locate_tasks(self, task_ids: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Return nothing."""
        return []

    def deliver_revoked(self, name: str, token: str, *, realm: str, worker: str = "") -> Reply:
        """Find nothing: the worker that receives a revoked message ends its task."""
        return Reply(Verdict.ABSENT)

    def body(self, name: str, token: str) -> bytes | None:
        """Return nothing."""
        return None

    def bodies_of(self, parked: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """Return nothing."""
        return [None] * len(parked)

    def parked(self, realm: str, queues: Collection[str] | None = None) -> Mapping[str, Parked]:
        """Return nothing."""
        return {}

    def switches(self) -> Mapping[str, str]:
        """Return nothing: no mode can be switched."""
        return {}

    def switch(self, task: str, mode: str | None) -> None:
        """Refuse."""
        refuse("To switch the mode of tasks")

    def waited_for(self) -> Sequence[str]:
        """Return nothing."""
        return []

    def deliver_unlocked(
        self,
        names: Sequence[str],
        tasks: Sequence[str],
        most: int,
        *,
        worker: str,
        realm: str,
    ) -> int:
        """Do nothing."""
        return 0

    def record_observation(
        self,
        owner: Owner,
        claim: Claim,
        *,
        waits: bool,
        took: float | None = None,
    ) -> Reply | None:
        """Refuse."""
        refuse('The mode "observe"')

    def describe(self) -> Mapping[str, str]:
        """Return the facts of all servers that answer; different values are joined by commas."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            try:
                facts = node.describe()
            except BackendError:
                continue
            for fact, value in facts.items():
                found.setdefault(fact, []).append(value)
        return {fact: ", ".join(sorted(set(values))) for fact, values in found.items()}
