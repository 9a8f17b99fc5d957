"""Clients for calls that block, beside the client of a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.store.requests import LONGEST_BLOCK, SHORTEST_BLOCK, SLACK, Pop

BLOCKS: Final = (1.0, 3.0, 10.0, LONGEST_BLOCK)
"""Lengths of blocking calls, in seconds; there is a client for each."""

TOGETHER: Final = 100
"""Most elements of an inbox that are read together."""

AT_ONCE: Final = 0.5
"""Seconds within which an element arrives that was there already."""

MANY: Final = 2**31
"""Connections of a pool for blocking calls. Each waiter needs one; redis-py 8's default is 100."""


def block_of(pop: Pop) -> tuple[float, float]:
    """Return for how long a call blocks, and which of :data:`BLOCKS` its client is for."""
    block = min(max(pop.seconds, SHORTEST_BLOCK), LONGEST_BLOCK)
    return block, next(most for most in BLOCKS if block <= most)


class BlockingClients:
    """Clients for blocking calls of several lengths, so that a stalled server is noticed in time.

    redis-py 8's defaults (a 5 s socket time-out and ten retries) turned ``blpop(key, 7)`` into an
    error after 58.9 s; a retried BLPOP would also lose an element.

    Args:
        make: returns a client, given the most seconds for which it blocks.
    """

    def __init__(self, make: Callable[[float], redis.Redis]) -> None:
        self._make = make
        self._clients: dict[float, redis.Redis] = {}

    def pop(self, pop: Pop) -> bytes | str | None:
        """Call BLPOP, without retries, on a connection whose socket time-out exceeds the block."""
        block, longest = block_of(pop)
        client = self.client(longest)
        try:
            found: Any = client.blpop([pop.key], timeout=block)
        except BaseException:  # an interruption may leave an unread reply on the connection
            client.connection_pool.disconnect(inuse_connections=False)
            raise
        return None if found is None else found[1]

    def client(self, longest: float) -> redis.Redis:
        """Return the client for blocks of this length.

        Several threads may each create one at the same time. The dictionary keeps the first; the
        others have not connected.
        """
        found = self._clients.get(longest)
        return found or self._clients.setdefault(longest, self._make(longest))

    def reconnect(self) -> None:
        """Close idle connections."""
        for client in list(self._clients.values()):
            client.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close all connections."""
        while self._clients:
            # redis-py does not close a pool that it was given.
            self._clients.popitem()[1].connection_pool.disconnect()


class InboxReader:
    """Reads the inbox of a worker: elements that come one after another are read together.

    A grant that waits in the inbox for five seconds is void, and is then granted again to the end
    of the list. With one element for each round trip, a worker could get more grants than it reads,
    and all of them would be void for as long as it lives.

    Args:
        clock: source of monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._read: deque[bytes | str] = deque()  # of two threads, while a worker stops
        self._at_once = False

    def read(
        self,
        pop_one: Callable[[], bytes | str | None],
        pop_many: Callable[[int], Sequence[bytes | str] | None],
    ) -> bytes | str | None:
        """Return the next element; None: none came.

        Only if the last one came at once, further ones may be there. So a worker that gets few
        grants sends no further command.

        Args:
            pop_one: waits for an element.
            pop_many: returns up to so many elements, and does not wait.
        """
        if self._at_once and not self._read:
            self._read.extend(pop_many(TOGETHER) or ())
        try:
            return self._read.popleft()
        except IndexError:
            began = self._clock.monotonic()
            found = pop_one()
            self._at_once = found is not None and self._clock.monotonic() - began < AT_ONCE
            return found


def blocking_client(
    client: redis.Redis,
    longest: float,
    kind: type[Any] = redis.Redis,
    pool_kind: type[Any] = redis.ConnectionPool,
) -> redis.Redis:
    """Return a client of the same server, without retries, whose socket time-out exceeds a block.

    Args:
        client: the client to copy.
        longest: most seconds for which a call blocks.
        kind: class of the client.
        pool_kind: class of its pool.
    """
    pool = client.connection_pool
    options = dict(pool.connection_kwargs)
    options.update(socket_timeout=longest + SLACK, retry=Retry(NoBackoff(), 0), retry_on_error=[])
    options.pop("retry_on_timeout", None)
    blocking_pool = pool_kind(
        connection_class=pool.connection_class, max_connections=MANY, **options
    )
    made: redis.Redis = kind(connection_pool=blocking_pool)
    return made
