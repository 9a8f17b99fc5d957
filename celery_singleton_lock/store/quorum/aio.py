"""The store on several independent Redis servers, for asyncio: a majority decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import redis.asyncio
from redis import exceptions as failures
from redis.asyncio.retry import Retry

from celery_singleton_lock.config.limits import LONGEST_LEASE
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.core.redis_keys import Keyspace, keyspace_with
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.lock_steps import by_task
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.quorum.votes import Ballot, Each
from celery_singleton_lock.store.quorum.server import NodeVerbs
from celery_singleton_lock.store.quorum.sync import TIMEOUT, addresses_of, node_client
from celery_singleton_lock.store.quorum.operations import At, QuorumVerbs, Wish
from celery_singleton_lock.store.scripts import Script

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncRedisNode(AsyncRedisStore):
    """One server of a quorum; see :class:`~celery_singleton_lock.store.quorum.sync.RedisNode`."""

    verbs: NodeVerbs

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        """Prepare; nothing is sent yet."""
        super().__init__(client, keyspace, claim_lease=claim_lease)
        self.verbs = NodeVerbs(keyspace, scripts, claim_lease)

    vote = by_task(NodeVerbs.vote)
    vote_many = by_task(NodeVerbs.vote_many)
    withdraw = by_task(NodeVerbs.withdraw)
    prolong = by_task(NodeVerbs.prolong)
    greet = by_task(NodeVerbs.greet)
    admit = by_task(NodeVerbs.admit)


class AsyncQuorumStore:
    """Locks on an odd number of independent Redis servers; :class:`QuorumStore` for asyncio.

    Args:
        servers: URLs, or redis-py clients for asyncio with short time-outs and no retries; three or
            more, independent of each other, and none given twice.
        keyspace: where the keys are.
        prefix: first part of every key, in place of it; "csl" unless given.
        timeout: seconds within which each server must answer.
        longest_lease: seconds; the longest lease of any lock on these servers, the same for all
            their clients. A server that was restarted gives no new votes for as long.
        clock: source of monotonic seconds.
        claim_lease: seconds in which a waiter must claim its turn.

    Raises:
        ConfigurationError: as of :class:`QuorumStore`.

    Raises (all verbs):
        BackendUnreachable: too few servers answered in time, or too many have been restarted.
        BackendRefused: too many servers refused.
    """

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
        """Prepare; nothing is sent yet."""
        self.clock: Clock = clock or SystemClock()
        self.keyspace = keyspace_with(keyspace, prefix)
        self.ballot: Final = Ballot(
            len(servers), self.clock, timeout=timeout, longest_lease=longest_lease
        )
        clients: list[redis.asyncio.Redis] = [
            node_client(n, server, timeout, redis.asyncio.Redis, Retry)
            for n, server in enumerate(servers, 1)
        ]
        self.verbs: Final = QuorumVerbs(addresses_of(clients), self.ballot, self.clock)
        self.nodes: Final = [
            AsyncRedisNode(client, self.keyspace, claim_lease=claim_lease) for client in clients
        ]
        self._ours = [
            client for client, given in zip(clients, servers, strict=True) if isinstance(given, str)
        ]
        self._before: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._aloft: set[asyncio.Task[None]] = set()

    acquire = by_task(QuorumVerbs.acquire)
    claim = by_task(QuorumVerbs.claim)
    release = by_task(QuorumVerbs.release)
    extend = by_task(QuorumVerbs.extend)
    inspect = by_task(QuorumVerbs.inspect)
    reset = by_task(QuorumVerbs.reset)
    wait = by_task(QuorumVerbs.wait)
    time = by_task(QuorumVerbs.time)
    check = by_task(QuorumVerbs.check)
    admit = by_task(QuorumVerbs.admit)

    async def __aenter__(self) -> Self:
        """Have the connections closed at the end."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close them."""
        await self.aclose()

    # -- how it is done ---------------------------------------------------------------------------

    async def do(self, wish: Wish) -> Any:
        """Do what a verb wishes for.

        Raises:
            BackendError: the one server that was asked did not answer, or refused.
        """
        if isinstance(wish, At):
            return await wish.call(self.nodes[wish.server])
        return await self._each(wish)

    async def _each(self, wish: Each) -> dict[int, Any]:
        """Ask servers at once, until there are answers enough or the time-out is over."""
        loop = asyncio.get_running_loop()
        until, answers = loop.time() + self.ballot.timeout, dict[int, Any]()
        waiting = {
            self._ask(server, wish.about, call, answers) for server, call in wish.calls.items()
        }
        while waiting and not wish.enough(answers) and loop.time() < until:
            _, waiting = await asyncio.wait(
                waiting, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
        return dict(answers)

    def _ask(
        self, server: int, about: str, call: Callable[[Any], Any], answers: dict[int, Any]
    ) -> asyncio.Task[None]:
        """Ask one server in a task that goes on when its answer is not waited for any more."""
        key = (server, about)
        before = self._before.get(key) if about else None
        task = asyncio.get_running_loop().create_task(self._hear(key, before, call, answers))
        self._aloft.add(task)
        task.add_done_callback(self._aloft.discard)
        if about:
            self._before[key] = task
        return task

    async def _hear(
        self,
        key: tuple[int, str],
        before: asyncio.Task[None] | None,
        call: Callable[[Any], Any],
        answers: dict[int, Any],
    ) -> None:
        """Ask once what was asked about the same token before has ended; its sockets time out."""
        if before is not None and not before.done():
            await asyncio.wait({before})
        server = key[0]
        try:
            answers[server] = await call(self.nodes[server])
        except BackendError as error:
            answers[server] = error
        except (failures.RedisError, OSError, ValueError) as error:
            answers[server] = BackendUnreachable(f"{type(error).__name__}: {error}")
        finally:
            if self._before.get(key) is asyncio.current_task():
                del self._before[key]

    async def aclose(self) -> None:
        """Close the connections that this store opened, once what is on its way has arrived."""
        if self._aloft:
            await asyncio.wait(set(self._aloft))
        for client in self._ours:
            await client.aclose()
