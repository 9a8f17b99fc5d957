"""The store on a Redis or Valkey server, for asyncio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import redis.asyncio
from redis import exceptions as failures
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from celery_singleton_lock.core.clock import Clock, clock_for
from celery_singleton_lock.core.lock_steps import by_task
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.error_mapping import FAILED, demoted, explain
from celery_singleton_lock.store.operations import Operations
from celery_singleton_lock.store.redis.counted import POOL_WANTS
from celery_singleton_lock.store.redis.sync import confirmed
from celery_singleton_lock.store.requests import (
    LONGEST_BLOCK,
    SHORTEST_BLOCK,
    SLACK,
    Batch,
    Command,
    Confirm,
    Counted,
    Pop,
    Request,
)
from celery_singleton_lock.store.scripts import Script


class AsyncRedisStore:
    """Locks on one Redis server. Its operations are coroutines.

    It has those of :class:`Store`, without those for unique calls and for lost data.

    Args:
        client: redis-py client for asyncio; replies may be decoded or not.
        keyspace: names of the keys.
        scripts: the scripts; tests pass their own.
        claim_lease: seconds in which a waiter must claim its grant.

    Raises (all operations):
        BackendUnreachable: no answer. The operation may have run; a further call with the same
            token is safe.
        BackendRefused: the server refused.
    """

    has_rates = True

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        self.client = client
        self.clock: Clock = clock_for(client)
        self.operations: Operations = Operations(keyspace, scripts, claim_lease)
        self.keyspace: Keyspace = self.operations.keyspace
        self._blocking = BlockingConnections(client.connection_pool)

    acquire: Final = by_task(Operations.acquire)
    park: Final = by_task(Operations.park)
    park_many: Final = by_task(Operations.park_many)
    claim: Final = by_task(Operations.claim)
    release: Final = by_task(Operations.release)
    extend: Final = by_task(Operations.extend)
    charge: Final = by_task(Operations.charge)
    sweep_and_grant: Final = by_task(Operations.sweep_and_grant)
    sweep_and_grant_many: Final = by_task(Operations.sweep_and_grant_many)
    record_publish_result: Final = by_task(Operations.record_publish_result)
    take_due_locks: Final = by_task(Operations.take_due_locks)
    unswept_locks: Final = by_task(Operations.unswept_locks)
    inspect: Final = by_task(Operations.inspect)
    reset: Final = by_task(Operations.reset)
    close_for: Final = by_task(Operations.close_for)
    deliver_revoked: Final = by_task(Operations.deliver_revoked)
    locate_tasks: Final = by_task(Operations.locate_tasks)
    body: Final = by_task(Operations.body)
    bodies_of: Final = by_task(Operations.bodies_of)
    parked: Final = by_task(Operations.parked)
    switches: Final = by_task(Operations.switches)
    switch: Final = by_task(Operations.switch)
    waited_for: Final = by_task(Operations.waited_for)
    deliver_unlocked: Final = by_task(Operations.deliver_unlocked)
    record_observation: Final = by_task(Operations.record_observation)
    observations: Final = by_task(Operations.observations)
    clear_observations: Final = by_task(Operations.clear_observations)
    worker_heartbeat: Final = by_task(Operations.worker_heartbeat)
    list_running: Final = by_task(Operations.list_running)
    fleet_size: Final = by_task(Operations.fleet_size)
    inbox_size: Final = by_task(Operations.inbox_size)
    leave: Final = by_task(Operations.leave)
    receive: Final = by_task(Operations.receive)
    wait: Final = by_task(Operations.wait)
    time: Final = by_task(Operations.time)
    probe: Final = by_task(Operations.probe)
    schema: Final = by_task(Operations.schema)
    describe: Final = by_task(Operations.describe)

    # -- requests ---------------------------------------------------------------------------------

    async def do(self, request: Request) -> Any:
        """Carry out a request of an operation.

        Raises:
            NoScriptError: the server does not know the script.
            BackendError: no answer, or refused.
        """
        try:
            return await self._done(request)
        except failures.NoScriptError:
            raise
        except FAILED as error:
            if demoted(error):
                await self.reconnect()
            raise explain(error) from error

    async def _done(self, request: Request) -> Any:
        if isinstance(request, Command):
            return await self._command(request)
        if isinstance(request, Counted):
            return await self._counted(request)
        if isinstance(request, Batch):
            return await self._sent(request.commands)
        if isinstance(request, Confirm):
            answers = await self._sent(request.replicas.confirming(request.keys[0]))
            return [confirmed(answers, request)] * len(request.keys)
        return await self._blocking.pop(request)  # type: ignore[arg-type]  # Receive is for Cluster

    async def _command(self, command: Command) -> Any:
        client: Any = self.client  # redis-py has not annotated this method
        return await client.execute_command(*command.words, **command.options)

    async def _counted(self, request: Counted) -> Any:
        if self.client.single_connection_client:
            return await send_counted_alone(self.client, request)
        return await send_counted(self.client.connection_pool, request)

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
        """Close idle connections, so that the next call looks up the master's address again."""
        await self.client.connection_pool.disconnect(inuse_connections=False)


async def send_counted(pool: Any, request: Counted, wants: Sequence[str] = POOL_WANTS) -> Any:
    """Send a command with the client's retries, and note whether it was repeated."""
    connection = await pool.get_connection(*wants)
    try:
        return await exchange_counted(connection, request)
    finally:
        await pool.release(connection)


async def send_counted_alone(client: Any, request: Counted) -> Any:
    """Send a command as :func:`send_counted` does, on the only connection of a client."""
    await client.initialize()
    async with client._single_conn_lock:  # noqa: SLF001  # it has no public name
        return await exchange_counted(client.connection, request)


async def exchange_counted(connection: Any, request: Counted) -> Any:
    """Send a command with the connection's retries, and note whether it was repeated."""

    async def exchange() -> Any:
        await connection.send_command(*request.command.words)
        return await connection.read_response()

    async def failed(_error: Exception) -> None:
        request.attempts.repeated = True
        await connection.disconnect(nowait=True)

    try:
        return await connection.retry.call_with_retry(exchange, failed)
    except failures.ResponseError:
        raise  # an answer, which was read
    except BaseException:
        await connection.disconnect(nowait=True)  # the answer may still arrive
        raise


class BlockingConnections:
    """Connections for calls that block, so that releases find the client's pool free.

    A connection is reused while another call blocks. The last call to return closes all of them. So
    a lock needs no close(), and leaves no open connection at the end of an event loop.

    Args:
        pool: its address and options are used; or a node of a Cluster.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._idle: list[Any] = []
        self._waiting = 0

    async def pop(self, pop: Pop) -> bytes | str | None:
        """Call BLPOP, without retries, with a socket time-out that exceeds the block.

        redis-py 8's defaults (a 5 s socket time-out and ten retries) turned ``blpop(key, 7)`` into
        an error after 58.9 s; a retried BLPOP would also lose an element.
        """
        self._waiting += 1
        connection = self._idle.pop() if self._idle else self._new()
        try:
            found = await _popped(connection, pop)
        except BaseException:
            await connection.disconnect(nowait=True)  # the answer may still arrive
            raise
        else:
            self._idle.append(connection)
        finally:
            self._waiting -= 1
            await self._close_if_empty()
        return None if found is None else found[1]

    def _new(self) -> Any:
        options = dict(self._pool.connection_kwargs)
        options.pop("retry_on_timeout", None)
        options.update(retry=Retry(NoBackoff(), 0), retry_on_error=[])
        return self._pool.connection_class(**options)

    async def _close_if_empty(self) -> None:
        while self._idle and not self._waiting:
            await self._idle.pop().disconnect(nowait=True)


async def _popped(connection: Any, pop: Pop) -> Any:
    """Block on a connection."""
    block = min(max(pop.seconds, SHORTEST_BLOCK), LONGEST_BLOCK)
    await connection.connect()
    await connection.send_command("BLPOP", pop.key, block)
    return await connection.read_response(timeout=block + SLACK)
