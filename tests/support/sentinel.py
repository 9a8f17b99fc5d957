"""A master, a replica and a Sentinel, as processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import redis
from typing_extensions import Self

from celery_singleton_lock.demo import redis_supervisor
from celery_singleton_lock.demo.redis_server import RedisServer, free_ports
from support.replication import is_replicated
from support.waiting import eventually

NAME = "the-master"
DOWN_AFTER = 1.0
"""Seconds of silence after which the Sentinel calls a server down."""


class SentinelSet:
    """A master with one replica, watched by one Sentinel; the other address is dead.

    Args:
        make: starts a Redis: ``make("--replicaof", …)``.
        folder: for the Sentinel's configuration, which it rewrites.
        password: of the servers; the Sentinel has none.
        down_after: seconds of silence after which the Sentinel calls a server down.
    """

    def __init__(
        self,
        make: Callable[..., RedisServer],
        folder: Path,
        password: str = "",
        *,
        down_after: float = DOWN_AFTER,
    ) -> None:
        self._down_after = down_after
        auth = ("--masterauth", password) if password else ()
        self.password = password
        self.servers = [make(*auth, "--repl-diskless-sync-delay", "0", password=password or None)]
        replica = ("--replicaof", f"127.0.0.1 {self.servers[0].port}")
        self.servers.append(make(*auth, *replica, password=password or None))
        self.port, self.dead_port = free_ports(2)
        self._config = folder / f"sentinel-{self.port}.conf"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.await_replica(self.servers[0])
        auth = f"sentinel auth-pass {NAME} {self.password}\n" if self.password else ""
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self._config.parent}\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self.servers[0].port} 1\n{auth}"
            f"sentinel down-after-milliseconds {NAME} {self._down_after * 1000:.0f}\n"
            f"sentinel failover-timeout {NAME} 3000\n"
        )
        with self._config.with_suffix(".log").open("wb") as log:
            # Below a supervisor, as the servers: it ends with this process, whatever ends that.
            supervise = [sys.executable, "-I", "-S", redis_supervisor.__file__]
            server = [str(self.servers[0].provider.path), str(self._config), "--sentinel"]
            self._process = subprocess.Popen(
                [*supervise, "--owner", str(os.getpid()), "--", *server],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        eventually(self._watches, 10, "the Sentinel knows the replica")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(60)

    @property
    def url(self) -> str:
        """The URL as Celery writes it; the first address is dead."""
        login = f":{self.password}@" if self.password else ""
        dead, live = (f"sentinel://{login}127.0.0.1:{p}/0" for p in (self.dead_port, self.port))
        return f"{dead};{live}"

    @property
    def options(self) -> dict[str, str]:
        """What goes with the URL."""
        return {"master_name": NAME}

    def sentinel(self) -> redis.Redis:
        """Return a client of the Sentinel."""
        return redis.Redis(port=self.port, decode_responses=True, socket_timeout=10)

    def master(self) -> RedisServer:
        """Return the server that the Sentinel calls the master."""
        with self.sentinel() as client:
            port = int(client.sentinel_master(NAME)["port"])
        return next(server for server in self.servers if server.port == port)

    def other(self, server: RedisServer) -> RedisServer:
        """Return the server that is not ``server``."""
        return next(each for each in self.servers if each is not server)

    def failover(self) -> None:
        """Promote the replica, in order (SENTINEL FAILOVER); return when it is the master."""
        old = self.master()
        with self.sentinel() as client:
            eventually(lambda: self._ordered(client), 10, "the Sentinel begins a failover")
        self.await_promotion(old)

    def await_promotion(self, old: RedisServer, timeout: float = 20) -> float:
        """Wait until another server is the master; return how long that took, in seconds."""
        began = time.monotonic()
        new = self.other(old)
        with new.client(decode_responses=True) as client:
            eventually(lambda: self.master() is new, timeout, "the Sentinel names the new master")
            eventually(lambda: client.info()["role"] == "master", timeout, "it is one")
        return time.monotonic() - began

    def await_replica(self, master: RedisServer, timeout: float = 15) -> None:
        """Wait until the replica follows."""
        with master.client(decode_responses=True) as client:
            eventually(
                lambda: client.info().get("slave0", {}).get("state") == "online",
                timeout,
                "the replica is online",
            )

    def await_replicated(self, timeout: float = 5) -> None:
        """Wait until the replica has what the master has."""
        with self.master().client() as client:
            eventually(lambda: is_replicated(client), timeout, "replicated")

    def _watches(self) -> bool:
        with contextlib.suppress(redis.RedisError), self.sentinel() as client:
            state = client.sentinel_master(NAME)
            return state["num-slaves"] == 1 and not state["is_sdown"]
        return False

    @staticmethod
    def _ordered(client: redis.Redis) -> bool:
        try:
            client.sentinel_failover(NAME)
        except redis.ResponseError as error:  # NOGOODSLAVE: it has not heard of it lately
            print(error, file=sys.stderr)
            return False
        return True
