"""The store on several independent Redis servers, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import redis.asyncio
from redis.asyncio.retry import Retry

from celery_singleton_lock.config.limits import LONGEST_LEASE
from celery_singleton_lock.core import loop_tasks
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.lock_steps import by_task
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.redis_keys import Keyspace, keyspace_with
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.store.quorum.clients import addresses_of, node_client
from celery_singleton_lock.store.quorum.coordinators import At
from celery_singleton_lock.store.quorum.operations import QuorumOperations, Request
from celery_singleton_lock.store.quorum.server import ServerOperations
from celery_singleton_lock.store.quorum.sync import TIMEOUT
from celery_singleton_lock.store.quorum.values import Each
from celery_singleton_lock.store.quorum.votes import Votes
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.scripts import Script

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncRedisNode(AsyncRedisStore):
    """One server of a quorum; see :class:`~celery_singleton_lock.store.quorum.sync.RedisNode`."""

    operations: ServerOperations

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        super().__init__(client, keyspace, claim_lease=claim_lease)
        self.operations = ServerOperations(keyspace, scripts, claim_lease)

    vote: Final = by_task(ServerOperations.vote)
    vote_many: Final = by_task(ServerOperations.vote_many)
    withdraw_vote: Final = by_task(ServerOperations.withdraw_vote)
    renew_votes: Final = by_task(ServerOperations.renew_votes)
    server_state: Final = by_task(ServerOperations.server_state)
    admit_voter: Final = by_task(ServerOperations.admit_voter)


class AsyncQuorumStore:
    """Locks on an odd number of independent Redis servers; :class:`QuorumStore` for asyncio.

    Args:
        servers: URLs, or redis-py clients for asyncio with short time-outs and no retries; three or
            more, independent of each other, and none given twice.
        keyspace: names of the keys.
        prefix: first part of every key, instead of ``keyspace``; "csl" by default.
        timeout: seconds within which each server must answer.
        longest_lease: seconds; the longest lease of any lock on these servers, the same for all
            clients. A server that was restarted gives no new votes for this time.
        clock: source of monotonic seconds.
        claim_lease: seconds in which a waiter must claim its grant.

    Raises:
        ConfigurationError: as of :class:`QuorumStore`.

    Raises (all operations):
        BackendUnreachable: too few servers answered in time, or too many were restarted.
        BackendRefused: too many servers refused.
    """

    has_rates = False

    def __init__(
        self,
        servers: Sequence[str | redis.asyncio.Redis],
        keyspace: Keyspace | None = None,
        *,
        prefix: str | None = None,
        timeout: float = TIMEOUT,
        longest_lease: float = LONGEST_LEASE,
        clock: Clock | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.keyspace: Keyspace = keyspace_with(keyspace, prefix)
        self.votes: Final = Votes(
            len(servers), self.clock, timeout=timeout, longest_lease=longest_lease
        )
        clients: list[redis.asyncio.Redis] = [
            node_client(n, server, timeout, redis.asyncio.Redis, Retry)
            for n, server in enumerate(servers, 1)
        ]
        self.operations: Final = QuorumOperations(addresses_of(clients), self.votes, self.clock)
        self.nodes: Final = [
            AsyncRedisNode(client, self.keyspace, claim_lease=claim_lease) for client in clients
        ]
        self._ours = [
            client for client, given in zip(clients, servers, strict=True) if isinstance(given, str)
        ]
        self._before: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()

    acquire: Final = by_task(QuorumOperations.acquire)
    claim: Final = by_task(QuorumOperations.claim)
    release: Final = by_task(QuorumOperations.release)
    extend: Final = by_task(QuorumOperations.extend)
    inspect: Final = by_task(QuorumOperations.inspect)
    reset: Final = by_task(QuorumOperations.reset)
    close_for: Final = by_task(QuorumOperations.close_for)
    wait: Final = by_task(QuorumOperations.wait)
    time: Final = by_task(QuorumOperations.time)
    check: Final = by_task(QuorumOperations.check)
    admit: Final = by_task(QuorumOperations.admit)

    async def __aenter__(self) -> Self:
        """Return self; the end of the block closes the connections."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close the connections."""
        await self.aclose()

    # -- requests ---------------------------------------------------------------------------------

    async def do(self, request: Request) -> Any:
        """Carry out a request of an operation.

        Raises:
            BackendError: a request to one server got no answer, or was refused.
        """
        if isinstance(request, At):
            return await request.call(self.nodes[request.server])
        return await self._each(request)

    async def _each(self, request: Each) -> dict[int, Any]:
        """Ask servers at once, until the answers suffice or the time-out has passed."""
        loop = asyncio.get_running_loop()
        until, answers = loop.time() + self.votes.timeout, dict[int, Any]()
        waiting = {
            self._ask(server, request.about, call, answers)
            for server, call in request.calls.items()
        }
        while waiting and not request.enough(answers) and loop.time() < until:
            _, waiting = await asyncio.wait(
                waiting, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
        return dict(answers)

    def _ask(
        self, server: int, about: str, call: Callable[[Any], Any], answers: dict[int, Any]
    ) -> asyncio.Task[None]:
        """Ask one server in a task, which continues when its answer is no longer awaited."""
        key = (server, about)
        before = self._before.get(key) if about else None
        task = loop_tasks.start(self._hear(server, before, call, answers))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        if about:
            self._before[key] = task
            task.add_done_callback(partial(self._forget, key))
        return task

    def _forget(self, key: tuple[int, str], task: asyncio.Task[None]) -> None:
        if self._before.get(key) is task:
            del self._before[key]

    async def _hear(
        self,
        server: int,
        before: asyncio.Task[None] | None,
        call: Callable[[Any], Any],
        answers: dict[int, Any],
    ) -> None:
        """Ask one server, when earlier requests about the same token have ended.

        That wait ends, since the sockets have a time-out.
        """
        if before is not None and not before.done():
            await asyncio.wait({before})
        try:
            answers[server] = await call(self.nodes[server])
        except BackendError as error:
            answers[server] = error
        except Exception as error:  # noqa: BLE001  # an error of one server must not affect the others
            answers[server] = BackendUnreachable(f"{type(error).__name__}: {error}")

    async def aclose(self) -> None:
        """Close the connections that this store opened, after the current requests."""
        if self._running:
            await asyncio.wait(set(self._running))
        for client in self._ours:
            await client.aclose()
