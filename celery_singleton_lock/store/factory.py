"""Creates the store for an address or a client: one server, Sentinels, or a Cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from celery_singleton_lock.config.redis_url import BackendAddress
from celery_singleton_lock.config.url_text import CLUSTER
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.cluster_routing import Nodes
from celery_singleton_lock.store.connect import connect, for_cluster
from celery_singleton_lock.store.operator.redis import ClusterAdminStore, RedisAdminStore
from celery_singleton_lock.store.quorum.worker_store import TaskQuorum, refuse
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.redis.valkey import ValkeyClient, ValkeyStore, is_valkey
from celery_singleton_lock.store.requests import NO_REPLICAS, Replicas


def open_store(
    address: BackendAddress,
    options: Mapping[str, Any],
    prefix: str,
    *,
    patience: float,
    direct: bool = False,
    quarantine: bool | None = False,
    replicas: Replicas = NO_REPLICAS,
) -> RedisStore:
    """Return a store with its own connections. Nothing is sent yet.

    Args:
        address: of the locks.
        options: of the user, for redis-py's client; they override the defaults of this library.
        prefix: first part of every key.
        patience: seconds within which a server must answer.
        direct: send acquire and release without redis-py's client, where that is possible.
        quarantine: as of :class:`RedisStore`; ignored by locks in memory.
        replicas: as of :class:`RedisStore`; ignored by locks in memory.
    """
    if address.scheme in CLUSTER:
        nodes = Nodes(for_cluster(address, options, patience=patience))
        return ClusterStore(nodes, Keyspace(prefix), quarantine=quarantine, replicas=replicas)
    client = connect(address, options, patience=patience)
    if address.in_memory:
        return RedisStore(client, Keyspace(prefix), direct=direct)
    return RedisStore(
        client, Keyspace(prefix), direct=direct, quarantine=quarantine, replicas=replicas
    )


def open_admin_store(
    address: BackendAddress,
    options: Mapping[str, Any],
    prefix: str,
    *,
    patience: float,
    quarantine: bool | None = False,
) -> RedisAdminStore:
    """Return a store for operators; arguments as of :func:`open_store`."""
    store = open_store(address, options, prefix, patience=patience, quarantine=quarantine)
    return admin_of(store)


def admin_of(store: RedisStore | TaskQuorum) -> RedisAdminStore:
    """Return a store for operators on the connections of a worker's store.

    Raises:
        BackendRefused: the store is a quorum; one of its servers does not know the majority.
    """
    if isinstance(store, TaskQuorum):
        refuse("That")
    quarantine = store.operations.quarantine
    if isinstance(store, ClusterStore):
        return ClusterAdminStore(store.nodes, store.keyspace, quarantine=quarantine)
    return RedisAdminStore(store.client, store.keyspace, quarantine=quarantine)


def store_on(
    client: redis.Redis | redis.RedisCluster | ValkeyClient, keyspace: Keyspace | None
) -> RedisStore:
    """Return the store on a client of the caller."""
    if isinstance(client, redis.RedisCluster):
        return ClusterStore(client, keyspace)
    given: Any = client
    kind = ValkeyStore if is_valkey(given) else RedisStore
    return kind(given, keyspace)
