"""How commands are grouped by the master that has their keys."""

from __future__ import annotations

import io

import pytest
from fakeredis import FakeRedis, FakeServer
from redis import exceptions as failures
from redis.crc import key_slot

from celery_singleton_lock.core.model import Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.redis_keys import BUCKETS
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.cluster_routing import Nodes, as_redis_errors
from celery_singleton_lock.store.requests import Command

MASTERS = 3
SLOTS = 16384


class Node:
    """As a node of older redis-py: it can be compared, and has no hash."""

    def __init__(self, name: str) -> None:
        self.name, self.redis_connection = name, FakeRedis(server=FakeServer())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.name == other.name

    __hash__ = None  # type: ignore[assignment]


class Cluster:
    """The part of redis-py's client that the store uses."""

    def __init__(self) -> None:
        self.nodes = [Node(f"10.0.0.{number}:6379") for number in range(MASTERS)]
        self.asked: set[str] = set()

    def get_node_from_key(self, key):
        raw = key if isinstance(key, bytes) else key.encode()
        return self.nodes[key_slot(raw) * MASTERS // SLOTS]

    def get_nodes(self):
        return self.nodes

    get_primaries = get_nodes

    def get_redis_connection(self, node):
        return node.redis_connection

    def execute_command(self, *words, target_nodes, **options):
        self.asked.add(target_nodes.name)
        return target_nodes.redis_connection.execute_command(*words, **options)


@pytest.fixture
def store():
    return ClusterStore(Cluster())


@pytest.fixture
def names(store):
    """Return the name of a lock for each master."""
    found: dict[str, str] = {}
    for name in (f"lock {number}" for number in range(8 * BUCKETS)):
        node = store.nodes.cluster.get_node_from_key(store.keyspace.lock(name).meta)
        found.setdefault(node.name, name)
    assert len(found) == MASTERS
    return list(found.values())


def test_leases_on_all_masters_are_renewed_with_nodes_that_have_no_hash(store, names):
    who = Owner(new_token(), "", "app.task")
    for name in names:
        assert store.acquire(who, Claim(name, 30.0)).verdict is Verdict.GRANTED
    assert store.extend([(name, who.token, 60.0) for name in names]) == [True] * MASTERS


def test_heartbeats_and_sweeps_reach_all_masters_with_nodes_that_have_no_hash(store, names):
    holder = Owner(new_token(), "", "app.task")
    store.worker_heartbeat("w", "R", ["q"], 300.0)
    for number, name in enumerate(names):
        store.acquire(holder, Claim(name, 30.0))
        waiter = Owner(new_token(), f"id{number}/0/0", "app.task")
        reply = store.park(waiter, Claim(name), MessageToPark(b"body", "R", "q"))
        assert reply.verdict is Verdict.WAITING
    assert set(store.waited_for()) == set(names)
    assert store.sweep_and_grant_many(names, worker="w", realm="R") == []


def test_replicas_of_all_masters_are_asked_with_nodes_that_have_no_hash(store, names):
    keys = [store.keyspace.lock(name).meta for name in (*names, names[0])]
    answers = store.nodes.ask_each(keys, lambda key: [Command(("ECHO", key))])
    assert [[key.encode()] for key in (*keys[:MASTERS], keys[0])] == answers


def test_all_masters_are_probed_with_nodes_that_have_no_hash(store):
    cluster = store.nodes.cluster
    store.probe()
    assert cluster.asked == {node.name for node in cluster.get_nodes()}


def _closed_buffer():
    buffer = io.BytesIO()
    buffer.close()
    buffer.seek(0)


def _no_buffer():
    return None.readline


@pytest.mark.parametrize("fail", [_closed_buffer, _no_buffer])
def test_a_call_whose_connection_another_thread_closed_may_have_been_executed(fail):
    """redis-py 5.1 to 6.4 does so when it looks up the layout."""
    with pytest.raises(failures.ConnectionError, match="before the answer"), as_redis_errors():
        fail()


@pytest.mark.parametrize("name", ["redis_connection", "execute_command"])
def test_a_call_to_a_node_that_is_new_in_the_cluster_was_not_executed(name):
    """The first for threads, the other one for asyncio."""
    with pytest.raises(failures.TryAgainError, match="is moving"), as_redis_errors():
        getattr(None, name)


def _lose_node_while_asking():
    nodes = {"a": 1, "b": 2}
    for name in nodes:
        del nodes[name]


def test_a_task_is_kept_while_threads_look_for_the_layout_of_a_cluster():
    """redis-py before 6.2 raised RuntimeError, and the task ended as FAILURE without a run."""
    with pytest.raises(failures.ConnectionError, match="not known"), as_redis_errors():
        _lose_node_while_asking()


def test_a_layout_that_changes_while_it_is_asked_for_is_asked_for_again_later():
    cluster = Down()
    cluster.initialize = _lose_node_while_asking
    nodes = Nodes(lambda: cluster)
    assert nodes.cluster is cluster
    nodes.refresh_layout()


@pytest.mark.parametrize(
    "error",
    [ValueError("not a number"), AttributeError("'int' object"), RuntimeError("no event loop")],
    ids=repr,
)
def test_an_error_of_a_programmer_is_not_taken_for_one_of_the_cluster(error):
    with pytest.raises(type(error), match=str(error)), as_redis_errors():
        raise error


class Down(Cluster):
    """A Cluster that is down. It counts how often it is asked for its layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts, self.startup_nodes, self.nodes_manager = 0, {}, self

    def initialize(self, *_, **__):
        self.layouts += 1

    def execute_command(self, *words, target_nodes, **options):
        raise failures.ClusterDownError("CLUSTERDOWN The cluster is down")

    def get_redis_connection(self, node):
        return self

    def pipeline(self, *, transaction):
        return DownPipeline()

    def keyslot(self, key):
        return key_slot(key.encode())


class DownPipeline:
    """Its commands are all refused."""

    def __init__(self) -> None:
        self.commands = 0

    def execute_command(self, *_, **__):
        self.commands += 1

    def execute(self, *, raise_on_error):
        return [failures.ClusterDownError("CLUSTERDOWN The cluster is down")] * self.commands


class Uncovered(Down):
    """A Cluster without a master for the slots of the keys."""

    def get_node_from_key(self, key):
        raise failures.SlotNotCoveredError(f"{key}")


@pytest.mark.parametrize("kind", [Down, Uncovered])
def test_a_cluster_that_is_down_is_not_asked_for_its_layout_for_each_bucket(kind):
    """Each time may take a time-out: calls for all buckets took minutes."""
    cluster = kind()
    nodes = ClusterStore(cluster).nodes
    answers = nodes.send_many([Command(("SMEMBERS", f"{{{n}}}")) for n in range(BUCKETS)])
    refused = (failures.ClusterDownError, failures.SlotNotCoveredError)
    assert all(isinstance(answer, refused) for answer in answers)
    assert len(answers) == BUCKETS
    assert cluster.layouts <= MASTERS
