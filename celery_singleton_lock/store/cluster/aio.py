"""The store on a Redis Cluster, for asyncio: locks, without parked messages."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import redis.asyncio
from redis import exceptions as failures

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.lock_steps import by_task
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.store.cluster.operations import ClusterOperations
from celery_singleton_lock.store.cluster_routing import ELSEWHERE, as_redis_errors, key_of
from celery_singleton_lock.store.error_mapping import FAILED, explain
from celery_singleton_lock.store.redis.aio import BlockingConnections
from celery_singleton_lock.store.requests import Batch, Command, Counted, Pop, Request
from celery_singleton_lock.store.scripts import Script

AT_ONCE: Final = 16
"""Most commands of a batch that are sent to a master at once: each takes a connection."""


class AsyncClusterStore:
    """Locks on a Redis Cluster: the operations that AsyncLock needs, as coroutines.

    Args:
        client: redis-py's client of a Cluster for asyncio. It follows slots that move.
        keyspace: names of the keys.
        scripts: the scripts; tests pass their own.
        claim_lease: seconds in which a waiter must claim its grant.

    Raises (all operations):
        BackendUnreachable: no answer. The operation may have run; a further call with the same
            token is safe.
        BackendRefused: a server refused.
    """

    has_rates = True

    def __init__(
        self,
        client: redis.asyncio.RedisCluster,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        self.client: Any = client  # redis-py has not annotated most of it
        self.clock: SystemClock = SystemClock()
        keyspace = Keyspace((keyspace or Keyspace()).prefix, spread=True)
        self.operations: ClusterOperations = ClusterOperations(keyspace, scripts, claim_lease)
        self.keyspace: Keyspace = self.operations.keyspace
        self._blocking: dict[str, BlockingConnections] = {}

    acquire: Final = by_task(ClusterOperations.acquire)
    claim: Final = by_task(ClusterOperations.claim)
    release: Final = by_task(ClusterOperations.release)
    extend: Final = by_task(ClusterOperations.extend)
    charge: Final = by_task(ClusterOperations.charge)
    inspect: Final = by_task(ClusterOperations.inspect)
    reset: Final = by_task(ClusterOperations.reset)
    close_for: Final = by_task(ClusterOperations.close_for)
    wait: Final = by_task(ClusterOperations.wait)
    time: Final = by_task(ClusterOperations.time)

    # -- requests ---------------------------------------------------------------------------------

    async def do(self, request: Request) -> Any:
        """Carry out a request of an operation.

        Raises:
            NoScriptError: the master does not know the script.
            BackendError: no answer, or refused.
        """
        try:
            return await self._done(request)
        except failures.NoScriptError:
            raise
        except FAILED as error:
            raise explain(error) from error

    async def _done(self, request: Request) -> Any:
        if isinstance(request, Command):
            return await self._command(request)
        if isinstance(request, Counted):
            return await self._command(request.command)  # it is sent once
        if isinstance(request, Batch):
            return await self._sent(request.commands, request.patience)
        return await self._pop(request)  # type: ignore[arg-type]  # the others are for workers

    async def _command(self, command: Command) -> Any:
        """Send a command to the master that has its keys.

        With ``target_nodes`` redis-py sends it once. Without it, redis-py would repeat a release
        whose answer was lost (it closes all connections if one node says that the Cluster is down).
        The second answer would look like the answer to the release of a lost lock.
        """
        target = {"target_nodes": await self._node(command.words)}
        with as_redis_errors():
            return await self.client.execute_command(*command.words, **target, **command.options)

    async def masters(self) -> Sequence[Any]:
        """Return the masters that have slots.

        Raises:
            BackendError: no node answers, or the server is not a node of a Cluster.
        """
        try:
            with as_redis_errors():
                await self.client.initialize()
        except FAILED as error:
            raise explain(error) from error
        return sorted(self.client.get_primaries(), key=lambda node: str(node.name))

    async def scan(self, node: Any, words: Sequence[Any]) -> Any:
        """Send SCAN to one master.

        Returns:
            The next cursor, which redis-py returns by node, and keys.
        """
        try:
            cursors, found = await self.client.execute_command(*words, target_nodes=node)
        except FAILED as error:
            raise explain(error) from error
        return cursors[node.name], found

    async def _node(self, words: Sequence[Any]) -> Any:
        """Return the master for a command; for one without a key (TIME), always the same."""
        with as_redis_errors():
            await self.client.initialize()
            if words[0] == "TIME":
                return min(self.client.get_primaries(), key=lambda node: str(node.name))
            try:
                return self.client.get_node_from_key(key_of(words))
            except failures.SlotNotCoveredError:
                await self.client.nodes_manager.initialize()  # a master may have the slot now
                raise

    async def _sent(self, commands: Sequence[Command], patience: float | None) -> list[Any]:
        """Send commands that are safe to repeat, some to each master at once.

        An answer may be an error.
        """
        semaphores: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(AT_ONCE)
        )
        asked = [self._at_known(semaphores, command) for command in commands]
        within = [_within(each, patience) for each in asked]
        answers = await asyncio.gather(*within, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, FAILED):
                raise answer
        if patience and any(isinstance(answer, failures.TimeoutError) for answer in answers):
            with suppress(*FAILED), as_redis_errors():  # another node may be the master now
                await _within(self.client.nodes_manager.initialize(), patience / 2)
        return list(answers)

    async def _at_known(self, semaphores: Mapping[str, asyncio.Semaphore], command: Command) -> Any:
        """Send a command to the master that has its keys in the known layout.

        After a time-out of any master, redis-py's client would first ask for the layout, perhaps
        the silent master itself, and all commands would wait for that.
        """
        try:
            node = self.client.get_node_from_key(key_of(command.words))
        except FAILED:  # the layout is not known yet
            return await self._command(command)
        async with semaphores[node.name]:
            with suppress(*ELSEWHERE, failures.ConnectionError), as_redis_errors():
                return await node.execute_command(*command.words, **command.options)
            return await self._command(command)  # the slot has moved, or the connection was closed

    async def _pop(self, pop: Pop) -> bytes | str | None:
        """Call BLPOP on the master that has the slot now."""
        node = await self._node(("BLPOP", pop.key))
        connections = self._blocking.get(node.name) or self._blocking.setdefault(
            node.name, BlockingConnections(node)
        )
        try:
            return await connections.pop(pop)
        except (*ELSEWHERE, failures.ConnectionError) as error:
            with suppress(*FAILED), as_redis_errors():
                await self.client.execute_command(
                    "EXISTS", pop.key
                )  # the client learns where the slot is
            msg = f"The lock's slot has moved, or its master is gone: {error}"
            raise BackendUnreachable(msg) from error


async def _within(asked: Awaitable[Any], patience: float | None) -> Any:
    """Wait for an answer for ``patience`` seconds.

    Raises:
        redis.TimeoutError: no answer arrived in time.
    """
    try:
        return await asyncio.wait_for(asked, patience)
    except asyncio.TimeoutError as error:
        msg = f"no answer within {patience:.3g} s"
        raise failures.TimeoutError(msg) from error
