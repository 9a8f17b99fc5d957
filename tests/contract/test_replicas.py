"""WAIT before a parked message is acknowledged: until a replica has it, the broker keeps it."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import BackendUnreachable, ConfigurationError
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.requests import Confirm, Replicas
from support.replication import is_replicated
from support.waiting import eventually

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("replication")]

ONE = Replicas(1, 0.2)


class Pair:
    """A store on a master with one replica, which can be stopped."""

    def __init__(self, store, replica, another):
        self.store, self.replica = store, replica
        self.another = another
        """Makes a store with connections of its own."""


@pytest.fixture(params=["redis", "cluster"])
def pair(request, make_redis):
    with ExitStack() as stack:
        if request.param == "redis":
            master = make_redis("--repl-diskless-sync-delay", "0")
            replica = make_redis("--replicaof", f"127.0.0.1 {master.port}")
            connect, kind = master.client, RedisStore
            client = stack.enter_context(connect())
            eventually(lambda: is_replicated(client), 10, "the replica follows")
        else:
            cluster = request.getfixturevalue("replicated_cluster")
            connect, kind = cluster.client, ClusterStore
            client = stack.enter_context(closing(connect()))
            cluster.flush(client)
            cluster.set_patience(15_000)  # a master that stands still keeps its slots
            stack.callback(cluster.set_patience)
            replica = cluster.partner(cluster.owner(Keyspace().lock("a").meta))
            stack.callback(replica.resume)  # the next test has the same Cluster
        store = stack.enter_context(closing(kind(client, replicas=ONE)))
        yield Pair(store, replica, lambda: kind(stack.enter_context(closing(connect()))))


def to_park(*owners):
    return [(who, Claim("a"), MessageToPark(b"body", "R", "q")) for who in owners]


def parked(store, who):
    """Park a message; return the reply once a replica has the message."""

    def kept():
        (reply,) = store.park_many(to_park(who))
        return not isinstance(reply, BackendUnreachable) and reply

    return eventually(kept)


def test_a_message_that_no_replica_has_is_not_reported_as_parked(pair):
    """It waits, and is parked once: asked again when the replica follows, it is safe."""
    store = pair.store
    holder, who = Owner(new_token()), Owner(new_token(), "id/0/0")
    store.acquire(holder, Claim("a"))
    pair.replica.pause()
    for _ in range(2):
        (answer,) = store.park_many(to_park(who))
        assert isinstance(answer, BackendUnreachable)
        assert "singleton_lock_replicas_wait" in str(answer)
    pair.replica.resume()
    assert parked(store, who).verdict is Verdict.WAITING
    assert store.inspect("a").bodies == 1
    store.release("a", holder.token, Ending.FINAL)
    assert store.inspect("a").waiting <= 1


@pytest.mark.full
def test_replicas_are_asked_for_what_another_connection_wrote(pair):
    """From Redis 7.2 on, WAIT on a connection that has written nothing confirms all at once."""
    store = pair.store
    assert parked(store, Owner(new_token(), "id/0/0")).verdict is Verdict.WAITING
    request = Confirm([store.keyspace.waited("a")], ONE)
    pair.replica.pause()
    store.acquire(Owner(new_token()), Claim("a"))
    with closing(pair.another()) as idle:
        assert idle.do(request) == [False]
        pair.replica.resume()
        eventually(lambda: idle.do(request) == [True], 5, "the replica follows")


def test_what_is_not_kept_waits_for_no_replica(pair):
    """A message that is done, or for which there is no room, may be acknowledged or refused."""
    store = pair.store
    store.acquire(Owner(new_token()), Claim("a"))
    pair.replica.pause()
    none = Claim("a", max_waiting=0)
    (answer,) = store.park_many(
        [(Owner(new_token(), "id/0/0"), none, MessageToPark(b"", "R", "q"))]
    )
    assert answer.verdict is Verdict.FULL
    pair.replica.resume()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replicas_wait", -1),
        ("replicas_wait", "1"),
        ("replicas_timeout", 0),
        ("replicas_timeout", 0.001),
        ("replicas_timeout", 2),
    ],
)
def test_settings_that_cannot_be_are_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"singleton_lock_{name}"):
        parse_settings({f"singleton_lock_{name}": value}.get)
