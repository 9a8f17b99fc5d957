"""The store on several independent Redis servers, for threads."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final

import redis

from celery_singleton_lock.config.limits import LONGEST_LEASE
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.lock_steps import by_thread
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.redis_keys import Keyspace, keyspace_with
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.store.quorum.clients import addresses_of, node_client
from celery_singleton_lock.store.quorum.coordinators import At
from celery_singleton_lock.store.quorum.operations import QuorumOperations, Request
from celery_singleton_lock.store.quorum.server import ServerOperations
from celery_singleton_lock.store.quorum.server_threads import ServerThreads
from celery_singleton_lock.store.quorum.values import Each
from celery_singleton_lock.store.quorum.votes import Votes
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import Script

TIMEOUT: Final = 0.25
"""Seconds within which each server must answer."""

STALE: Final = 10.0
"""A request that could not be sent within this many time-outs is dropped."""


class RedisNode(RedisStore):
    """One server of a quorum.

    Args:
        client: redis-py client with the time-outs of a quorum, see :func:`node_client`.
        keyspace: names of the keys.
        scripts: the scripts; tests pass their own.
        claim_lease: seconds in which a waiter must claim its grant.
    """

    operations: ServerOperations

    def __init__(
        self,
        client: redis.Redis,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        super().__init__(client, keyspace, claim_lease=claim_lease)
        self.operations = ServerOperations(keyspace, scripts, claim_lease)

    vote: Final = by_thread(ServerOperations.vote)
    vote_many: Final = by_thread(ServerOperations.vote_many)
    withdraw_vote: Final = by_thread(ServerOperations.withdraw_vote)
    renew_votes: Final = by_thread(ServerOperations.renew_votes)
    server_state: Final = by_thread(ServerOperations.server_state)
    admit_voter: Final = by_thread(ServerOperations.admit_voter)


class QuorumStore:
    """Locks on an odd number of independent Redis servers: the owner has a majority of votes.

    docs/quorum.md says what that promises, and when one Redis is the better choice.

    Args:
        servers: URLs, or redis-py clients with short time-outs and no retries; three or more. They
            must be independent: no replicas of each other, and none given twice.
        keyspace: names of the keys.
        prefix: first part of every key, instead of ``keyspace``; "csl" by default.
        timeout: seconds within which each server must answer; for URLs also that of the sockets.
        longest_lease: seconds; the longest lease of any lock on these servers, the same for all
            clients. A server that was restarted gives no new votes for this time.
        clock: source of monotonic seconds.
        claim_lease: seconds in which a waiter must claim its grant.

    Raises:
        ConfigurationError: an even number of servers, or under three; or two addresses are the
            same. Two addresses of one server are detected in the first call.

    Raises (all operations):
        BackendUnreachable: too few servers answered in time, or too many were restarted.
        BackendRefused: too many servers refused.
    """

    has_rates = False

    def __init__(
        self,
        servers: Sequence[str | redis.Redis],
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
        clients = [node_client(n, server, timeout) for n, server in enumerate(servers, 1)]
        self.operations: Final = QuorumOperations(addresses_of(clients), self.votes, self.clock)
        self.nodes: Final = [
            RedisNode(client, self.keyspace, claim_lease=claim_lease) for client in clients
        ]
        self._ours = [
            node for node, given in zip(self.nodes, servers, strict=True) if isinstance(given, str)
        ]
        self._threads = ServerThreads(len(clients))
        weakref.finalize(self, self._threads.close).atexit = False  # the interpreter ends threads

    acquire: Final = by_thread(QuorumOperations.acquire)
    claim: Final = by_thread(QuorumOperations.claim)
    release: Final = by_thread(QuorumOperations.release)
    extend: Final = by_thread(QuorumOperations.extend)
    inspect: Final = by_thread(QuorumOperations.inspect)
    reset: Final = by_thread(QuorumOperations.reset)
    close_for: Final = by_thread(QuorumOperations.close_for)
    wait: Final = by_thread(QuorumOperations.wait)
    time: Final = by_thread(QuorumOperations.time)
    check: Final = by_thread(QuorumOperations.check)
    admit: Final = by_thread(QuorumOperations.admit)

    # -- requests ---------------------------------------------------------------------------------

    def do(self, request: Request) -> Any:
        """Carry out a request of an operation.

        Raises:
            BackendError: a request to one server got no answer, or was refused.
        """
        return (
            request.call(self.nodes[request.server])
            if isinstance(request, At)
            else self._each(request)
        )

    def _each(self, request: Each) -> dict[int, Any]:
        """Ask servers at once, until the answers suffice or the time-out has passed."""
        arrived: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        until = self.clock.monotonic() + self.votes.timeout
        last = self.clock.monotonic() + self.votes.timeout * STALE
        for server, call in request.calls.items():
            ask = functools.partial(self._ask, server, call, arrived, last)
            self._threads.submit(server, request.about, ask)
        answers: dict[int, Any] = {}
        while len(answers) < len(request.calls) and not request.enough(answers):
            try:
                server, answer = arrived.get(timeout=max(0.0, until - self.clock.monotonic()))
            except Empty:
                break
            answers[server] = answer
        return answers

    def _ask(
        self,
        server: int,
        call: Callable[[Any], Any],
        arrived: SimpleQueue[tuple[int, Any]],
        last: float,
    ) -> None:
        """Ask one server, in one of its threads. The sockets have a time-out."""
        if self.clock.monotonic() > last:
            return
        try:
            arrived.put((server, call(self.nodes[server])))
        except BackendError as error:
            arrived.put((server, error))
        except Exception as error:  # noqa: BLE001  # an error of one server must not affect the others
            arrived.put((server, BackendUnreachable(f"{type(error).__name__}: {error}")))

    def close(self) -> None:
        """Close the connections that this store opened, after the current requests."""
        self._threads.close()
        for node in self.nodes:
            node.close()
        for node in self._ours:
            node.reconnect()  # not those that are in use

    def hang_up(self) -> None:
        """Close the clients as well, if they were made for this store alone."""
        self._threads.close()
        for node in self.nodes:
            node.hang_up()
