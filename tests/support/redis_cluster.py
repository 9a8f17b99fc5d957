"""A Redis Cluster with three masters, and replicas if asked for, as processes on this machine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import redis
from redis.cluster import ClusterNode
from typing_extensions import Self

from celery_singleton_lock.demo.redis_provider import Provider
from celery_singleton_lock.demo.redis_server import RedisServer
from support.waiting import eventually

MASTERS = 3
SLOTS = 16384
DOWN_AFTER = 6000
"""Milliseconds of silence after which the others call a node down; longer than any pause."""

VOTES_AFTER = 1000
"""The same during a failover: a master votes again for the same replica after twice as long."""

GIVEN_UP = 6.0
"""Seconds after which a replica that found no majority has given up, and may be asked again: five,
says Redis. Masters vote once in a while only, and may have done so for the last test."""


class RedisCluster:
    """Masters with a third of the slots each; master ``n`` has replica ``n + 3``, if there are any.

    Args:
        provider: whose server runs.
        replicas: of each master: 0 or 1.
        args: further arguments of each server.
    """

    def __init__(self, provider: Provider, replicas: int = 0, args: tuple[str, ...] = ()) -> None:
        self._down_after = DOWN_AFTER if replicas else 5 * DOWN_AFTER  # nobody could take over
        patience = str(self._down_after)
        mode = ("--cluster-enabled", "yes", "--cluster-node-timeout", patience)
        more = ("--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0")
        count = MASTERS * (1 + replicas)
        self.servers = [RedisServer(provider, args=(*mode, *more, *args)) for _ in range(count)]
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as ends:
            for server in self.servers:
                ends.enter_context(server)
            self._join()
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def masters(self) -> list[RedisServer]:
        """Return those that were made masters."""
        return self.servers[:MASTERS]

    @property
    def url(self) -> str:
        """The URL of the locks' backend."""
        places = ",".join(f"127.0.0.1:{server.port}" for server in self.masters)
        return f"redis+cluster://{places}"

    def client(self) -> redis.RedisCluster:
        """Return redis-py's client."""
        nodes = [ClusterNode("127.0.0.1", server.port) for server in self.servers]
        return redis.RedisCluster(startup_nodes=nodes, socket_timeout=10)

    @staticmethod
    def flush(client: redis.RedisCluster) -> None:
        """Empty all masters; the client may take for one who has failed over."""
        for node in client.get_nodes():
            with contextlib.suppress(redis.ReadOnlyError):
                client.get_redis_connection(node).flushall()

    def owner(self, key: str) -> RedisServer:
        """Return the server that has the slot of a key."""
        with contextlib.closing(self.client()) as client:
            port = client.get_node_from_key(key).port
        return next(server for server in self.servers if server.port == port)

    def partner(self, server: RedisServer) -> RedisServer:
        """Return the replica of a master, or the master of a replica."""
        return self.servers[(self.servers.index(server) + MASTERS) % len(self.servers)]

    def another(self, master: RedisServer) -> RedisServer:
        """Return a master that is not this one; they may have swapped places with replicas."""
        with contextlib.closing(self.client()) as client:
            ports = {node.port for node in client.get_primaries()}
        return next(s for s in self.servers if s.port in ports and s is not master)

    def failover(self, old: RedisServer) -> None:
        """Have the replica of a master take its place, in order; return when it has."""
        new = self.partner(old)
        with new.client(decode_responses=True) as client, self._quick_votes():
            eventually(lambda: client.info()["master_link_status"] == "up", 10, "it follows")
            asked = -math.inf

            def is_promoted() -> bool:
                nonlocal asked
                if client.info()["role"] == "master":
                    return True
                if time.monotonic() > asked + GIVEN_UP:
                    asked = time.monotonic()
                    client.execute_command("CLUSTER", "FAILOVER")
                return False

            eventually(is_promoted, 20, "it is promoted")

    @contextlib.contextmanager
    def _quick_votes(self) -> Iterator[None]:
        """Let masters vote again soon after their last vote."""
        self.set_patience(VOTES_AFTER)
        try:
            yield
        finally:
            self.set_patience(self._down_after)

    def set_patience(self, milliseconds: int = DOWN_AFTER) -> None:
        """Set the time of silence after which the others call a node down."""
        for server in self.servers:
            with server.client() as client:
                client.config_set("cluster-node-timeout", milliseconds)

    def move(self, slot: int, old: RedisServer, new: RedisServer) -> None:
        """Move a slot, with its keys."""
        with old.client(decode_responses=True) as one, new.client(decode_responses=True) as other:
            old_id, new_id = (c.execute_command("CLUSTER", "MYID") for c in (one, other))
            other.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
            one.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
            while keys := one.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                one.execute_command("MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *keys)
            other.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
            one.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)

    # -- start ------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Give out the slots and let all meet: what ``redis-cli --cluster create`` does."""
        clients = [server.client(decode_responses=True) for server in self.servers]
        with contextlib.ExitStack() as ends:
            for client in clients:
                ends.enter_context(client)
            for number, client in enumerate(clients[:MASTERS]):
                first, last = (SLOTS * n // MASTERS for n in (number, number + 1))
                client.execute_command("CLUSTER", "ADDSLOTS", *range(first, last))
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for server in self.servers[1:]:
                clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port)
            for client in clients:
                eventually(lambda c=client: self._knows_all(c), 15, "all have met")
            ids = [client.execute_command("CLUSTER", "MYID") for client in clients]
            for number, client in enumerate(clients[MASTERS:]):
                client.execute_command("CLUSTER", "REPLICATE", ids[number])
            for client in clients:
                eventually(lambda c=client: self._is_ok(c), 15, "the Cluster is up")
            for client in clients[MASTERS:]:
                eventually(lambda c=client: c.info()["master_link_status"] == "up", 15)

    def _knows_all(self, client: redis.Redis) -> bool:
        found = client.execute_command("CLUSTER INFO")
        return int(found["cluster_known_nodes"]) == len(self.servers)

    @staticmethod
    def _is_ok(client: redis.Redis) -> bool:
        found = client.execute_command("CLUSTER INFO")
        return found["cluster_state"] == "ok" and int(found["cluster_slots_assigned"]) == SLOTS
