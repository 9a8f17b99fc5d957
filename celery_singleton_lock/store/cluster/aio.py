"""The store on a Redis Cluster, for asyncio: what locks need, and no kept messages."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import redis.asyncio
from redis import exceptions as failures

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.lock_steps import by_task
from celery_singleton_lock.store.redis.aio import Bench
from celery_singleton_lock.store.cluster.sync import ClusterVerbs
from celery_singleton_lock.store.error_mapping import FAILED, explain
from celery_singleton_lock.store.cluster_routing import ELSEWHERE, key_of
from celery_singleton_lock.store.scripts import Script
from celery_singleton_lock.store.message_operations import Batch, Command, Counted, Pop, Wish

AT_ONCE: Final = 16
"""Most commands of a batch that are on their way to a master at once: each takes a connection."""


class AsyncClusterStore:
    """Locks on a Redis Cluster; the verbs of a lock, each a coroutine.

    Args:
        client: redis-py's client of a Cluster for asyncio. It follows slots that move.
        keyspace: where the keys are.
        scripts: the verbs; test builds pass their own.
        claim_lease: seconds in which a waiter must claim its grant.

    Raises (all verbs):
        BackendUnreachable: no answer. The verb may or may not have run; asking again with the same
            token is safe.
        BackendRefused: a server answered with a refusal.
    """

    def __init__(
        self,
        client: redis.asyncio.RedisCluster,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        """Prepare; nothing is sent yet."""
        self.client: Any = client  # redis-py has not annotated most of it
        self.clock = SystemClock()
        keyspace = Keyspace((keyspace or Keyspace()).prefix, spread=True)
        self.verbs = ClusterVerbs(keyspace, scripts, claim_lease)
        self.keyspace = self.verbs.keyspace
        self._benches: dict[str, Bench] = {}

    acquire = by_task(ClusterVerbs.acquire)
    claim = by_task(ClusterVerbs.claim)
    release = by_task(ClusterVerbs.release)
    extend = by_task(ClusterVerbs.extend)
    inspect = by_task(ClusterVerbs.inspect)
    reset = by_task(ClusterVerbs.reset)
    wait = by_task(ClusterVerbs.wait)
    time = by_task(ClusterVerbs.time)

    # -- calls ------------------------------------------------------------------------------------

    async def do(self, wish: Wish) -> Any:
        """Do what a verb wishes for.

        Raises:
            NoScriptError: that master does not know that script.
            BackendError: no answer, or refused.
        """
        try:
            return await self._done(wish)
        except failures.NoScriptError:
            raise
        except FAILED as error:
            raise explain(error) from error

    async def _done(self, wish: Wish) -> Any:
        if isinstance(wish, Command):
            return await self._command(wish)
        if isinstance(wish, Counted):
            return await self._command(wish.command)  # which is sent once
        if isinstance(wish, Batch):
            return await self._sent(wish.commands, wish.patience)
        return await self._pop(wish)  # type: ignore[arg-type]  # the others are for workers

    async def _command(self, command: Command) -> Any:
        """Send a command to the master that has its keys.

        To a node that is named redis-py sends it once. By itself it would repeat a release of which
        the answer was lost (it closes all connections when one node says that the Cluster is
        down), and we could not tell that from a lock that was not ours.
        """
        target = {"target_nodes": await self._node(command.words)}
        return await self.client.execute_command(*command.words, **target, **command.options)

    async def masters(self) -> Sequence[Any]:
        """Return the masters that have slots.

        Raises:
            BackendError: no node answers, or it is no Cluster.
        """
        try:
            await self.client.initialize()
        except FAILED as error:
            raise explain(error) from error
        return sorted(self.client.get_primaries(), key=lambda node: str(node.name))

    async def scan(self, node: Any, words: Sequence[Any]) -> Any:
        """Send SCAN to one master: it tells of the keys there.

        Returns:
            Where to go on, and keys. redis-py tells the former by node.
        """
        try:
            cursors, found = await self.client.execute_command(*words, target_nodes=node)
        except FAILED as error:
            raise explain(error) from error
        return cursors[node.name], found

    async def _node(self, words: Sequence[Any]) -> Any:
        """Return the master for a command; if it has no key (TIME), the same each time."""
        await self.client.initialize()
        if words[0] == "TIME":
            return min(self.client.get_primaries(), key=lambda node: str(node.name))
        try:
            return self.client.get_node_from_key(key_of(words))
        except failures.SlotNotCoveredError:
            await self.client.nodes_manager.initialize()  # somebody may have it by now
            raise

    async def _sent(self, commands: Sequence[Command], patience: float | None) -> list[Any]:
        """Send commands that may be sent twice, some to each master at once, as renewals are.

        An answer may be an error.
        """
        rooms: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        asked = [self._at_known(rooms, command) for command in commands]
        within = [_within(each, patience) for each in asked]
        answers = await asyncio.gather(*within, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, FAILED):
                raise answer
        if patience and any(isinstance(answer, failures.TimeoutError) for answer in answers):
            with suppress(*FAILED):  # another may be the master by now
                await _within(self.client.nodes_manager.initialize(), patience / 2)
        return list(answers)

    async def _at_known(self, rooms: Mapping[str, asyncio.Semaphore], command: Command) -> Any:
        """Send a command to the master that had its keys when the layout was last told.

        redis-py's client would ask for the layout first, once any master was silent; that may be
        asked of the silent one, and all wait for it.
        """
        try:
            node = self.client.get_node_from_key(key_of(command.words))
        except FAILED:  # not told yet
            return await self._command(command)
        async with rooms[node.name]:
            with suppress(*ELSEWHERE, failures.ConnectionError):
                return await node.execute_command(*command.words, **command.options)
            return await self._command(command)  # it has moved, or the connection was closed

    async def _pop(self, pop: Pop) -> bytes | str | None:
        """BLPOP, at the master that has the slot now."""
        node = await self._node(("BLPOP", pop.key))
        bench = self._benches.get(node.name) or self._benches.setdefault(node.name, Bench(node))
        try:
            return await bench.pop(pop)
        except (*ELSEWHERE, failures.ConnectionError) as error:
            with suppress(*FAILED):
                await self.client.execute_command("EXISTS", pop.key)  # learns where the slot is
            msg = f"The lock's slot has moved, or its master is gone: {error}"
            raise BackendUnreachable(msg) from error


async def _within(asked: Awaitable[Any], patience: float | None) -> Any:
    """Wait for an answer for so many seconds.

    Raises:
        TimeoutError: of redis-py; there is none.
    """
    try:
        return await asyncio.wait_for(asked, patience)
    except asyncio.TimeoutError as error:
        msg = f"no answer within {patience:.3g} s"
        raise failures.TimeoutError(msg) from error
