"""WAIT before a parked message counts as kept: what a failover could lose, the broker keeps too."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from celery_singleton_lock.errors import BackendUnreachable, ConfigurationError
from celery_singleton_lock.model import Claim, Ending, Owner, Parcel, Verdict, new_token
from celery_singleton_lock.settings import parse_settings
from celery_singleton_lock.store.cluster import ClusterStore
from celery_singleton_lock.store.redis import RedisStore
from celery_singleton_lock.store.verbs import Replicas
from support.waiting import eventually

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("replication")]

ONE = Replicas(1, 0.2)


class Pair:
    """A store on a master with one replica, which can be stopped."""

    def __init__(self, store, replica):
        self.store, self.replica = store, replica


@pytest.fixture(params=["redis", "cluster"])
def pair(request, make_redis):
    with ExitStack() as stack:
        if request.param == "redis":
            master = make_redis("--repl-diskless-sync-delay", "0")
            replica = make_redis("--replicaof", f"127.0.0.1 {master.port}")
            client = stack.enter_context(master.client())
            eventually(lambda: client.wait(1, 100) == 1, 10, "the replica follows")
            store = RedisStore(client, replicas=ONE)
        else:
            cluster = request.getfixturevalue("replicated_cluster")
            client = stack.enter_context(closing(cluster.client()))
            cluster.flush(client)
            store = ClusterStore(client, replicas=ONE)
            master = cluster.owner(store.keyspace.lock("a").meta)
            replica = cluster.partner(master)
            stack.callback(replica.resume)  # the next test has the same Cluster
        stack.enter_context(closing(store))
        yield Pair(store, replica)


def parcels(*owners):
    return [(who, Claim("a"), Parcel(b"body", "R", "q")) for who in owners]


def test_what_no_replica_has_is_not_told_to_be_kept(pair):
    """It waits, and is parked once: asked again when the replica follows, it is safe."""
    store = pair.store
    holder, who = Owner(new_token()), Owner(new_token(), "id/0/0")
    store.acquire(holder, Claim("a"))
    pair.replica.pause()
    for _ in range(2):
        (answer,) = store.park_many(parcels(who))
        assert isinstance(answer, BackendUnreachable)
        assert "singleton_lock_replicas_wait" in str(answer)
    pair.replica.resume()
    eventually(lambda: not isinstance(store.park_many(parcels(who))[0], BackendUnreachable), 5)
    assert store.park_many(parcels(who))[0].verdict is Verdict.WAITING
    assert store.inspect("a").bodies == 1
    store.release("a", holder.token, Ending.FINAL)
    assert store.inspect("a").waiting <= 1


def test_what_is_not_kept_waits_for_no_replica(pair):
    """A message that is done, or for which there is no room, may be acknowledged or refused."""
    store = pair.store
    store.acquire(Owner(new_token()), Claim("a"))
    pair.replica.pause()
    none = Claim("a", max_waiting=0)
    (answer,) = store.park_many([(Owner(new_token(), "id/0/0"), none, Parcel(b"", "R", "q"))])
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
