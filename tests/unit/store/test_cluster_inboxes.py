"""The inboxes of a worker on a Redis Cluster, while its connections end."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as NoConnection

from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.cluster.inboxes import Inboxes
from celery_singleton_lock.store.redis.blocking import TOGETHER


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


class FullMaster(OneMaster):
    """The same, with two inboxes that have grants."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        keyspace = Keyspace(spread=True)
        self.inboxes = {
            keyspace.inbox("w", 0): [b"a%d" % n for n in range(TOGETHER)],
            keyspace.inbox("w", 1): [b"b0", b"b1"],
        }

    def send_many(self, commands: list[Any]) -> list[int]:
        """Answer how many grants each inbox has."""
        return [len(self.inboxes.get(each.words[1], ())) for each in commands]

    def send(self, command: Any) -> list[bytes] | None:
        """Answer LPOP with a number of elements."""
        self.asked += 1
        _, key, most = command.words
        found, self.inboxes[key] = self.inboxes[key][:most], self.inboxes[key][most:]
        return found or None


def test_a_connection_closed_while_it_is_read_counts_as_lost_and_logs_no_bug():
    nodes = OneMaster()
    inboxes = Inboxes(nodes, Keyspace(spread=True), "w")
    for _ in range(2):
        with pytest.raises(NoConnection):
            inboxes.receive(5.0)
    assert [one.is_closed for one in nodes.subscriptions] == [True, True]


def test_many_grants_do_not_each_need_a_round_trip():
    """If they come faster than they are read, all are void by then, and none of them ever runs."""
    nodes = FullMaster()
    every = {grant for inbox in nodes.inboxes.values() for grant in inbox}
    inboxes = Inboxes(nodes, Keyspace(spread=True), "w")
    assert {inboxes.receive(5.0) for _ in every} == every
    assert nodes.asked == 3, "one for each inbox, and a second one for the one with a full answer"
