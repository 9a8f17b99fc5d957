"""The store on several independent Redis servers, for threads: a majority decides."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.config.redis_url import check_server, for_redis_py, safe_url
from celery_singleton_lock.config.limits import LONGEST_LEASE
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import BackendError, BackendUnreachable, ConfigurationError
from celery_singleton_lock.core.redis_keys import Keyspace, keyspace_with
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.lock_steps import by_thread
from celery_singleton_lock.store.quorum.votes import Ballot, Each
from celery_singleton_lock.store.quorum.server import NodeVerbs
from celery_singleton_lock.store.quorum.operations import At, QuorumVerbs, Wish
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import Script
from celery_singleton_lock.message_text import a_kind, named

TIMEOUT: Final = 0.25
"""Seconds within which each server must answer."""

AT_ONCE: Final = 8
"""Most requests that are on their way to one server; a dead one must not occupy all threads."""

STALE: Final = 10.0
"""Time-outs after which a request is not sent any more that could not be sent before."""


class RedisNode(RedisStore):
    """One server of a quorum.

    Args:
        client: redis-py client with the time-outs of a quorum, see :func:`node_client`.
        keyspace: where the keys are.
        scripts: the verbs; test builds pass their own.
        claim_lease: seconds in which a waiter must claim its turn.
    """

    verbs: NodeVerbs

    def __init__(
        self,
        client: redis.Redis,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
    ) -> None:
        """Prepare; nothing is sent yet."""
        super().__init__(client, keyspace, claim_lease=claim_lease)
        self.verbs = NodeVerbs(keyspace, scripts, claim_lease)

    vote = by_thread(NodeVerbs.vote)
    vote_many = by_thread(NodeVerbs.vote_many)
    withdraw = by_thread(NodeVerbs.withdraw)
    prolong = by_thread(NodeVerbs.prolong)
    greet = by_thread(NodeVerbs.greet)
    admit = by_thread(NodeVerbs.admit)


class QuorumStore:
    """Locks on an odd number of independent Redis servers: owned is what a majority votes for.

    What that promises, and when one Redis is the better choice: docs/quorum.md.

    Args:
        servers: URLs, or redis-py clients with short time-outs and no retries; three or more. They
            must be independent: no replicas of each other, and none given twice.
        keyspace: where the keys are.
        prefix: first part of every key, in place of it; "csl" unless given.
        timeout: seconds within which each server must answer; for URLs also that of the sockets.
        longest_lease: seconds; the longest lease of any lock on these servers, the same for all
            their clients. A server that was restarted gives no new votes for as long.
        clock: source of monotonic seconds.
        claim_lease: seconds in which a waiter must claim its turn.

    Raises:
        ConfigurationError: an even number of servers, or under three; or two addresses are the
            same. That two addresses lead to one server is found out with the first call.

    Raises (all verbs):
        BackendUnreachable: too few servers answered in time, or too many have been restarted.
        BackendRefused: too many servers refused.
    """

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
        """Prepare; nothing is sent yet."""
        self.clock: Clock = clock or SystemClock()
        self.keyspace = keyspace_with(keyspace, prefix)
        self.ballot: Final = Ballot(
            len(servers), self.clock, timeout=timeout, longest_lease=longest_lease
        )
        clients = [node_client(n, server, timeout) for n, server in enumerate(servers, 1)]
        self.verbs: Final = QuorumVerbs(addresses_of(clients), self.ballot, self.clock)
        self.nodes: Final = [
            RedisNode(client, self.keyspace, claim_lease=claim_lease) for client in clients
        ]
        self._ours = [
            node for node, given in zip(self.nodes, servers, strict=True) if isinstance(given, str)
        ]
        self._crowd = _Crowd(len(clients))
        weakref.finalize(self, self._crowd.close).atexit = False  # the interpreter ends threads

    acquire = by_thread(QuorumVerbs.acquire)
    claim = by_thread(QuorumVerbs.claim)
    release = by_thread(QuorumVerbs.release)
    extend = by_thread(QuorumVerbs.extend)
    inspect = by_thread(QuorumVerbs.inspect)
    reset = by_thread(QuorumVerbs.reset)
    wait = by_thread(QuorumVerbs.wait)
    time = by_thread(QuorumVerbs.time)
    check = by_thread(QuorumVerbs.check)
    admit = by_thread(QuorumVerbs.admit)

    # -- how it is done ---------------------------------------------------------------------------

    def do(self, wish: Wish) -> Any:
        """Do what a verb wishes for.

        Raises:
            BackendError: the one server that was asked did not answer, or refused.
        """
        return wish.call(self.nodes[wish.server]) if isinstance(wish, At) else self._each(wish)

    def _each(self, wish: Each) -> dict[int, Any]:
        """Ask servers at once, until there are answers enough or the time-out is over."""
        heard: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        until = self.clock.monotonic() + self.ballot.timeout
        last = self.clock.monotonic() + self.ballot.timeout * STALE
        for server, call in wish.calls.items():
            ask = functools.partial(self._ask, server, call, heard, last)
            self._crowd.submit(server, wish.about, ask)
        answers: dict[int, Any] = {}
        while len(answers) < len(wish.calls) and not wish.enough(answers):
            try:
                server, answer = heard.get(timeout=max(0.0, until - self.clock.monotonic()))
            except Empty:
                break
            answers[server] = answer
        return answers

    def _ask(
        self,
        server: int,
        call: Callable[[Any], Any],
        heard: SimpleQueue[tuple[int, Any]],
        last: float,
    ) -> None:
        """Ask one server, in a thread of its own. Its sockets time out."""
        if self.clock.monotonic() > last:
            return
        try:
            heard.put((server, call(self.nodes[server])))
        except BackendError as error:
            heard.put((server, error))
        except Exception as error:  # noqa: BLE001  # one server's nonsense must not end the others
            heard.put((server, BackendUnreachable(f"{type(error).__name__}: {error}")))

    def close(self) -> None:
        """Close the connections that this store opened, once what is on its way has arrived."""
        self._crowd.close()
        for node in self.nodes:
            node.close()
        for node in self._ours:
            node.reconnect()  # leaves those alone that are in use

    def hang_up(self) -> None:
        """Close the clients as well: for who made them for this store alone."""
        self._crowd.close()
        for node in self.nodes:
            node.hang_up()


class _Crowd:
    """Threads that ask servers: each server has its own, so that a dead one delays no other.

    What concerns one token reaches a server in the order in which it was asked. A forked child
    begins without threads.

    Args:
        servers: how many.
    """

    def __init__(self, servers: int) -> None:
        """Start nothing yet."""
        self._servers = servers
        self._begin()

    def _begin(self) -> None:
        self._mutex = threading.Lock()
        self._pools: list[ThreadPoolExecutor] = [
            ThreadPoolExecutor(AT_ONCE, f"csl-server-{n + 1}") for n in range(self._servers)
        ]
        self._before: dict[tuple[int, str], Future[None]] = {}
        self._pid = os.getpid()  # last: another thread of a fork must not meet the parent's mutex

    def submit(self, server: int, about: str, ask: Callable[[], None]) -> None:
        """Have ``ask`` called, once what was asked about the same before has ended."""
        if self._pid != os.getpid():
            self._begin()
        key = (server, about)
        with self._mutex:
            before = self._before.get(key) if about else None
            try:
                future = self._pools[server].submit(_after, before, ask)
            except RuntimeError:  # closed, or the interpreter ends and starts no more threads
                future = None
            if about and future is not None:
                self._before[key] = future
        if future is None:
            _after(before, ask)
        elif about:
            future.add_done_callback(functools.partial(self._forget, key))

    def _forget(self, key: tuple[int, str], future: Future[None]) -> None:
        with self._mutex:
            if self._before.get(key) is future:
                del self._before[key]

    def close(self) -> None:
        """End the threads, once what is on its way has arrived."""
        if self._pid == os.getpid():
            for pool in self._pools:
                pool.shutdown(wait=False)


def _after(before: Future[None] | None, ask: Callable[[], None]) -> None:
    if before is not None:
        wait([before])
    ask()


def node_client(
    number: int,
    server: object,
    timeout: float,
    kind: type[Any] = redis.Redis,
    retry: type[Any] = Retry,
) -> Any:
    """Return a client to one server of a quorum: short time-outs, and one retry at most.

    A retry at once is for a connection that the server has closed while it was idle.

    Args:
        number: which server it is, for errors.
        server: a URL, or a client.
        timeout: seconds within which it must answer.
        kind: redis-py's client, for threads or for asyncio.
        retry: its way to try again.

    Raises:
        ConfigurationError: it is neither a URL nor such a client.
    """
    if isinstance(server, kind):
        return server
    where = f"Server {number} of the quorum"
    if not isinstance(server, str):
        other = {"redis.Redis": "threads have Lock", "redis.asyncio.Redis": "asyncio has AsyncLock"}
        hint = other.get(named(type(server)), "")
        url = "a URL or " if kind is redis.Redis else ""  # an AsyncLock takes clients alone
        msg = f"{where} is {a_kind(server)}: give {url}a {named(kind)} client" + (
            f"; {hint}." if hint else "."
        )
        raise ConfigurationError(msg)
    check_server(server, where)
    once_more = retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    try:
        return kind.from_url(
            for_redis_py(server),
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=once_more,
        )
    except ValueError:  # of which the sentence may quote the password
        msg = f"{where} is {safe_url(server)!r}: redis-py cannot read what stands behind the ?."
        raise ConfigurationError(msg) from None


def addresses_of(clients: Iterable[Any]) -> list[str]:
    """Return where clients connect to, without passwords.

    Raises:
        ConfigurationError: two of them to the same place.
    """
    found: list[str] = []
    for client in clients:
        options = client.connection_pool.connection_kwargs
        host, port = options.get("host", "localhost"), options.get("port", 6379)  # redis-py's own
        place = options.get("path") or f"{host}:{port}"
        if place in found:
            msg = (
                f"{place} is given twice in a quorum, and would vote twice (other databases of one "
                "server are no other servers). Give the address of another server."
            )
            raise ConfigurationError(msg)
        found.append(str(place))
    return found
