"""The store on a Redis or Valkey server, for asyncio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio
from redis import exceptions as failures
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from celery_singleton_lock.core.clock import Clock, clock_for
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.lock_steps import by_task
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.redis.sync import confirmed
from celery_singleton_lock.store.scripts import Script
from celery_singleton_lock.store.message_operations import (
    LONGEST_BLOCK,
    SHORTEST_BLOCK,
    SLACK,
    Batch,
    Command,
    Confirm,
    Counted,
    Pop,
    Verbs,
    Wish,
)
from celery_singleton_lock.store.redis.fast_path import POOL_WANTS, demoted


class AsyncRedisStore:
    """Locks on one Redis server; the verbs of :class:`Store`, each a coroutine.

    Args:
        client: redis-py client for asyncio; replies may be decoded or not.
        keyspace: where the keys are.
        scripts: the verbs; test builds pass their own.
        claim_lease: seconds in which a waiter must claim its grant.

    Raises (all verbs):
        BackendUnreachable: no answer. The verb may or may not have run; asking again with the same
            token is safe.
        BackendRefused: the server answered with a refusal.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        """Prepare; nothing is sent yet."""
        self.client = client
        self.clock: Clock = clock_for(client)
        self.verbs = Verbs(keyspace, scripts, claim_lease)
        self.keyspace = self.verbs.keyspace
        self._bench = Bench(client.connection_pool)

    acquire = by_task(Verbs.acquire)
    park = by_task(Verbs.park)
    park_many = by_task(Verbs.park_many)
    claim = by_task(Verbs.claim)
    release = by_task(Verbs.release)
    extend = by_task(Verbs.extend)
    kick = by_task(Verbs.kick)
    kick_many = by_task(Verbs.kick_many)
    left = by_task(Verbs.left)
    take_due = by_task(Verbs.take_due)
    neglected = by_task(Verbs.neglected)
    inspect = by_task(Verbs.inspect)
    reset = by_task(Verbs.reset)
    revoke = by_task(Verbs.revoke)
    find = by_task(Verbs.find)
    body = by_task(Verbs.body)
    parked = by_task(Verbs.parked)
    switches = by_task(Verbs.switches)
    switch = by_task(Verbs.switch)
    waited_for = by_task(Verbs.waited_for)
    let_run = by_task(Verbs.let_run)
    observe = by_task(Verbs.observe)
    observed = by_task(Verbs.observed)
    forget_observed = by_task(Verbs.forget_observed)
    beat = by_task(Verbs.beat)
    leave = by_task(Verbs.leave)
    receive = by_task(Verbs.receive)
    wait = by_task(Verbs.wait)
    time = by_task(Verbs.time)
    probe = by_task(Verbs.probe)
    schema = by_task(Verbs.schema)
    describe = by_task(Verbs.describe)

    # -- calls ------------------------------------------------------------------------------------

    async def do(self, wish: Wish) -> Any:
        """Do what a verb wishes for.

        Raises:
            NoScriptError: the server does not know that script.
            BackendError: no answer, or refused.
        """
        try:
            return await self._done(wish)
        except failures.NoScriptError:
            raise
        except (failures.RedisError, OSError) as error:
            if demoted(error):
                await self.reconnect()
            raise explain(error) from error

    async def _done(self, wish: Wish) -> Any:
        if isinstance(wish, Command):
            return await self._command(wish)
        if isinstance(wish, Counted):
            return await self._counted(wish)
        if isinstance(wish, Batch):
            return await self._sent(wish.commands)
        if isinstance(wish, Confirm):
            answers = await self._sent(wish.replicas.confirming(wish.keys[0]))
            return [confirmed(answers, wish)] * len(wish.keys)
        return await self._bench.pop(wish)  # type: ignore[arg-type]  # Receive is for Cluster

    async def _command(self, command: Command) -> Any:
        client: Any = self.client  # redis-py has not annotated this one
        return await client.execute_command(*command.words, **command.options)

    async def _counted(self, wish: Counted) -> Any:
        if self.client.single_connection_client:  # which guards its connection itself
            return await self._command(wish.command)
        return await send_counted(self.client.connection_pool, wish)

    async def _sent(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip; an answer may be an error."""
        async with self.client.pipeline(transaction=False) as pipe:
            told: Any = pipe
            for command in commands:
                told.execute_command(*command.words, **command.options)
            answers: list[Any] = await told.execute(raise_on_error=False)
        if any(isinstance(answer, Exception) and demoted(answer) for answer in answers):
            await self.reconnect()
        return answers

    async def reconnect(self) -> None:
        """Close what is idle, so that the next call asks anew where the server is."""
        await self.client.connection_pool.disconnect(inuse_connections=False)


async def send_counted(pool: Any, wish: Counted, wants: Sequence[str] = POOL_WANTS) -> Any:
    """Send a command as redis-py's client does, with its retries, and note whether it had any."""
    connection = await pool.get_connection(*wants)

    async def exchange() -> Any:
        await connection.send_command(*wish.command.words)
        return await connection.read_response()

    async def failed(_error: Exception) -> None:
        wish.attempts.repeated = True
        await connection.disconnect(nowait=True)

    try:
        return await connection.retry.call_with_retry(exchange, failed)
    except failures.ResponseError:
        raise  # an answer, and it was read
    except BaseException:
        await connection.disconnect(nowait=True)  # the answer may still come
        raise
    finally:
        await pool.release(connection)


class Bench:
    """Where those sit who wait: on connections of their own, so that releases find the pool free.

    A connection is used again while anybody else waits. The last who gets up closes all, so nobody
    has to close a lock, and no loop ends with an open connection of ours.

    Args:
        pool: whose address and options to take; or a node of a Cluster.
    """

    def __init__(self, pool: Any) -> None:
        """Open nothing yet."""
        self._pool = pool
        self._idle: list[Any] = []
        self._sitting = 0

    async def pop(self, pop: Pop) -> bytes | str | None:
        """BLPOP with a time-out of the socket above the block, and no second try.

        redis-py 8's defaults (a 5 s socket time-out and ten retries) turned ``blpop(key, 7)`` into
        an error after 58.9 s; a retried BLPOP would also swallow an element.
        """
        self._sitting += 1
        connection = self._idle.pop() if self._idle else self._new()
        try:
            found = await _popped(connection, pop)
        except BaseException:
            await connection.disconnect(nowait=True)  # its answer may still come
            raise
        else:
            self._idle.append(connection)
        finally:
            self._sitting -= 1
            await self._close_if_empty()
        return None if found is None else found[1]

    def _new(self) -> Any:
        options = dict(self._pool.connection_kwargs)
        options.pop("retry_on_timeout", None)
        options.update(retry=Retry(NoBackoff(), 0), retry_on_error=[])
        return self._pool.connection_class(**options)

    async def _close_if_empty(self) -> None:
        while self._idle and not self._sitting:
            await self._idle.pop().disconnect(nowait=True)


async def _popped(connection: Any, pop: Pop) -> Any:
    """Wait on a connection."""
    block = min(max(pop.seconds, SHORTEST_BLOCK), LONGEST_BLOCK)
    await connection.connect()
    await connection.send_command("BLPOP", pop.key, block)
    return await connection.read_response(timeout=block + SLACK)
