"""The store on a Redis Cluster, for threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.redis_keys import BUCKETS, Keyspace
from celery_singleton_lock.store.cluster.inboxes import Inboxes
from celery_singleton_lock.store.cluster.operations import ClusterOperations, weakest
from celery_singleton_lock.store.cluster_routing import Nodes
from celery_singleton_lock.store.error_mapping import FAILED, explain
from celery_singleton_lock.store.operations import PROBE
from celery_singleton_lock.store.redis.blocking import block_of
from celery_singleton_lock.store.redis.sync import RedisStore, confirmed, explained
from celery_singleton_lock.store.requests import (
    NO_REPLICAS,
    SLACK,
    Batch,
    Command,
    Confirm,
    Counted,
    Pop,
    Replicas,
    Request,
)
from celery_singleton_lock.store.scripts import Script


class ClusterStore(RedisStore):
    """Locks on a Redis Cluster. Arguments as of :class:`RedisStore`, except for this one.

    Args:
        client: redis-py's client of a Cluster, or :class:`Nodes`, which makes it at its first use.
    """

    def __init__(
        self,
        client: redis.RedisCluster | Nodes,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
        quarantine: bool | None = False,
        replicas: Replicas = NO_REPLICAS,
    ) -> None:
        keyspace = Keyspace((keyspace or Keyspace()).prefix, spread=True)
        operations = ClusterOperations(
            keyspace, scripts, claim_lease, quarantine=quarantine, replicas=replicas
        )
        self.operations: ClusterOperations = operations
        self._probe_each = operations.probe_each
        self.keyspace: Keyspace = operations.keyspace
        self.nodes: Nodes = client if isinstance(client, Nodes) else Nodes.of(client)
        self.clock: Clock = SystemClock()
        self._fast_path = None
        self._blocking_nodes: dict[float, Nodes] = {}
        self._inboxes: dict[str, Inboxes] = {}
        # Not at exit: a thread may still use a connection, and would fail.
        weakref.finalize(self, _close_all, self._blocking_nodes, self._inboxes).atexit = False

    # -- requests ---------------------------------------------------------------------------------

    def _done(self, request: Request) -> Any:
        if isinstance(request, Command):
            return self._command(request)
        if isinstance(request, Counted):
            return self.nodes.send(request.command, request.attempts)
        if isinstance(request, Batch):
            return self.nodes.send_many(request.commands, request.patience)
        if isinstance(request, Pop):
            return self._pop(request)
        if isinstance(request, Confirm):
            return self._confirm(request)
        return self._inboxes_of(request.worker).receive(request.seconds)

    def _command(self, command: Command) -> Any:
        """Send a command; one without a key, such as TIME, always to the same master."""
        if command.words[0] in {"TIME", "INFO", "CONFIG GET"}:
            return _at(self.nodes.masters()[0], command)
        return self.nodes.send(command)

    def _confirm(self, request: Confirm) -> list[bool]:
        """Ask each master that has one of the keys; a silent one confirms nothing."""
        told = self.nodes.ask_each(request.keys, request.replicas.confirming)
        return [
            not any(isinstance(answer, Exception) for answer in answers)
            and confirmed(answers, request)
            for answers in told
        ]

    def probe(self) -> None:
        """Acquire and release a lock that nobody else uses, on each master."""
        names = [f"{PROBE} {number}" for number in range(8 * BUCKETS)]
        with explained(self.reconnect):
            chosen = list(self.nodes.each(names, lambda name: self.keyspace.lock(name).meta))
        carry_out(self._probe_each(chosen), self.do)

    def describe(self) -> Mapping[str, str]:
        """Return what the weakest of the masters guarantees."""
        plans = [(self.operations.describe(), _asking(each)) for each in self.servers()]
        return weakest([carry_out(plan, do) for plan, do in plans])

    def servers(self) -> Sequence[redis.Redis]:
        """Return a client of each server that has keys: the masters."""
        with explained(self.reconnect):
            return self.nodes.masters()

    # -- connections ------------------------------------------------------------------------------

    def _pop(self, pop: Pop) -> bytes | str | None:
        """Call BLPOP on connections for blocks of this length; follow a slot that moves."""
        block, longest = block_of(pop)
        nodes = self._blocking_nodes.get(longest) or self._blocking_nodes.setdefault(
            longest, self.nodes.for_blocking(longest + SLACK)
        )
        found = nodes.send_once(Command(("BLPOP", pop.key, block)))
        return None if found is None else found[1]

    def _inboxes_of(self, worker: str) -> Inboxes:
        found = self._inboxes.get(worker)
        return found or self._inboxes.setdefault(worker, Inboxes(self.nodes, self.keyspace, worker))

    def reconnect(self) -> None:
        """Ask for the layout again, since a server is no longer a master."""
        for nodes in (self.nodes, *self._blocking_nodes.values()):
            nodes.refresh_layout()

    def hang_up(self) -> None:
        """Close the client as well, if it was made for this store alone."""
        self.close()
        self.nodes.close()

    def close(self) -> None:
        """Close the connections that this store opened; the caller's client stays open."""
        _close_all(self._blocking_nodes, self._inboxes)


def _close_all(blocking: dict[float, Nodes], inboxes: dict[str, Inboxes]) -> None:
    while blocking:
        blocking.popitem()[1].close()
    while inboxes:
        inboxes.popitem()[1].close()


def _at(client: redis.Redis, command: Command) -> Any:
    master: Any = client  # redis-py has not annotated this method
    return master.execute_command(*command.words, **command.options)


def _asking(client: redis.Redis) -> Callable[[Request], Any]:
    """Return a function that carries out single commands on one master."""

    def do(request: Request) -> Any:
        try:
            return _at(client, request)  # type: ignore[arg-type]  # describe() yields only commands
        except FAILED as error:
            raise explain(error) from error

    return do
