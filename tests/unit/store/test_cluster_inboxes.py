"""The inboxes of a worker on a Redis Cluster, while its connections end."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as NoConnection

from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.cluster.inboxes import Inboxes


class ClosedSubscription:
    """A subscription whose connection another thread closes while it is read."""

    def __init__(self) -> None:
        self.is_closed = False

    def subscribe(self, channel: str) -> None:
        """Subscribe."""

    def get_message(self, **options: Any) -> None:
        """Fail as redis-py's buffer does."""
        raise ValueError("I/O operation on closed file.")

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True


class OneMaster:
    """Nodes of a Cluster with one master, whose inboxes are empty."""

    def __init__(self) -> None:
        self.subscriptions: list[ClosedSubscription] = []

    def masters(self) -> list[OneMaster]:
        """Return the master."""
        return [self]

    def pubsub(self) -> ClosedSubscription:
        """Return a new subscription."""
        self.subscriptions.append(ClosedSubscription())
        return self.subscriptions[-1]

    def send_many(self, commands: list[Any]) -> list[int]:
        """Answer that all inboxes are empty."""
        return [0] * len(commands)


def test_a_connection_closed_while_it_is_read_counts_as_lost_and_logs_no_bug():
    nodes = OneMaster()
    inboxes = Inboxes(nodes, Keyspace(spread=True), "w")
    for _ in range(2):
        with pytest.raises(NoConnection):
            inboxes.receive(5.0)
    assert [one.is_closed for one in nodes.subscriptions] == [True, True]
