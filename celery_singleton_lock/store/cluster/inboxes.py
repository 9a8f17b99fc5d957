"""The inboxes of a worker on a Redis Cluster, one per bucket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from random import randrange
from typing import Any, Final

from redis import exceptions as failures

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.redis_keys import BUCKETS, Keyspace
from celery_singleton_lock.store.cluster_routing import Nodes
from celery_singleton_lock.store.error_mapping import FAILED
from celery_singleton_lock.store.redis.blocking import TOGETHER
from celery_singleton_lock.store.requests import Command

LOOK: Final = 5.0
"""Seconds after which all inboxes are read, even without a notification.

A notification is lost if the node that the worker is subscribed to is cut off, or if the ACL user
has no right to the channel. A grant lapses if its worker does not receive it in time.
"""
_CLOSED: Final = "Connection closed by another thread."


class Inboxes:
    """The inboxes of a worker, and the notifications that say which of them has an element.

    A call cannot block on lists in several slots. So the scripts also publish the bucket to a
    channel, and the Cluster forwards that to all of its nodes. A notification can be lost, so all
    inboxes are also read every :data:`LOOK` seconds.

    Args:
        nodes: the Cluster.
        keyspace: names of the keys.
        worker: id of the worker.
    """

    def __init__(self, nodes: Nodes, keyspace: Keyspace, worker: str) -> None:
        self._nodes, self._keyspace, self._worker = nodes, keyspace, worker
        self._clock = SystemClock()
        self._full: deque[int] = deque()
        self._read: deque[bytes | str] = deque()
        self._next_look, self._master = 0.0, randrange(1000)  # noqa: S311  # workers subscribe to different masters
        self._subscription: Any = None
        self._mutex = threading.Lock()

    def receive(self, seconds: float) -> bytes | str | None:
        """Return an element of one of the inboxes, or None after ``seconds``."""
        until = self._clock.monotonic() + seconds
        with self._mutex:
            while True:
                self._subscribe()
                if (found := self._open()) is not None:
                    return found
                left = until - self._clock.monotonic()
                if left <= 0:
                    return None
                self._wait(min(left, self._next_look - self._clock.monotonic()))

    def _subscribe(self) -> None:
        """Subscribe; elements that came before are found by reading all inboxes."""
        if self._subscription is None:
            masters: Sequence[Any] = self._nodes.masters()
            self._master += 1  # another node each time, since the last one may have died
            subscription = masters[self._master % len(masters)].pubsub()
            subscription.subscribe(self._keyspace.bell(self._worker))
            self._subscription, self._next_look = subscription, 0.0

    def _open(self) -> bytes | str | None:
        """Take an element out of an inbox that may have some."""
        if self._clock.monotonic() >= self._next_look:
            self._check_all()
        while self._full and not self._read:
            words = ("LPOP", self._keyspace.inbox(self._worker, self._full[0]), TOGETHER)
            found: Sequence[bytes | str] | None = self._nodes.send(Command(words))
            self._read.extend(found or ())
            if found is None or len(found) < TOGETHER:
                self._full.popleft()
        return self._read.popleft() if self._read else None

    def _check_all(self) -> None:
        keys = [self._keyspace.inbox(self._worker, bucket) for bucket in range(BUCKETS)]
        answers = self._nodes.send_many([Command(("LLEN", key)) for key in keys])
        if all(isinstance(answer, Exception) for answer in answers):
            raise answers[0]
        found = [b for b, length in enumerate(answers) if isinstance(length, int) and length]
        if found and self._next_look:
            self._unsubscribe()  # a notification was lost
        self._full.extend(found)
        self._next_look = self._clock.monotonic() + LOOK

    def _wait(self, seconds: float) -> None:
        """Wait for a notification."""
        try:
            message = self._subscription.get_message(
                ignore_subscribe_messages=True, timeout=max(0.0, seconds)
            )
        except ValueError as error:  # another thread closed the connection meanwhile
            self._unsubscribe()
            raise failures.ConnectionError(_CLOSED) from error
        except BaseException:
            self._unsubscribe()
            raise
        if message is not None and message["type"] == "message":
            self._full.append(int(message["data"]))

    def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with suppress(*FAILED):
                subscription.close()

    def close(self) -> None:
        """Close the subscription."""
        with self._mutex:
            self._unsubscribe()
