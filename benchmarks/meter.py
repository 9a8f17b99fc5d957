"""Count the commands of a Redis server.

There are two ways. ``INFO commandstats`` costs nothing, but does not separate the commands of
clients from those of scripts. ``MONITOR`` does, and shows the client's port, so that a call can be
assigned to a worker's main process or a pool process. It slows the server down, so it is used only
in runs that are not timed.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import redis

from celery_singleton_lock.demo.redis_server import HOST, RedisServer
from celery_singleton_lock.store.scripts import load_scripts

if TYPE_CHECKING:
    from typing_extensions import Self

_LINE = re.compile(rb'^\+?[\d.]+ \[\d+ (lua|\S+?:(\d+))\] "([^"]*)"(?: "([0-9a-f]{40})")?')
_OUR_VERBS = {script.sha: f"evalsha {verb}" for verb, script in load_scripts().items()}


def command_counts(client: redis.Redis) -> dict[str, int]:
    """Return the calls of each command so far, including those inside scripts."""
    stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items()}


def commands(client: redis.Redis) -> int:
    """Return the number of all commands so far, including those inside scripts."""
    return int(client.info("stats")["total_commands_processed"])


def script_cost(client: redis.Redis) -> tuple[int, int]:
    """Return the calls of scripts so far, and their microseconds in the server."""
    entry = client.info("commandstats").get("cmdstat_evalsha", {"calls": 0, "usec": 0})
    return entry["calls"], entry["usec"]


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the increase of each count, without the commands of the measurement."""
    growth = {name: after[name] - before.get(name, 0) for name in after if name != "info"}
    return {name: count for name, count in sorted(growth.items()) if count}


@dataclass(frozen=True)
class Heard:
    """The commands of one server during a block.

    Args:
        seconds: for how long it was listened to.
        by: who -> command -> calls by clients; who is ``main``, ``child`` or ``other``.
        in_scripts: calls made by scripts.
    """

    seconds: float
    by: Mapping[str, Counter[str]]
    in_scripts: int

    def calls(self, *who: str) -> int:
        return sum(sum(self.by[one].values()) for one in who)


class Monitor:
    """Records the commands of a server. Call :meth:`heard` after the block.

    Args:
        server: which.
    """

    def __init__(self, server: RedisServer) -> None:
        self._socket = socket.create_connection((HOST, server.port))
        self._chunks: list[bytes] = []
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._socket.sendall(b"MONITOR\r\n")
        self._socket.recv(5)  # +OK
        self._thread.start()
        self._seconds = -time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds += time.monotonic()
        time.sleep(0.1)  # for commands in transit
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while chunk := self._socket.recv(1 << 20):
            self._chunks.append(chunk)

    def heard(self, owners: Mapping[int, str]) -> Heard:
        """Count the calls. ``owners``: port -> process."""
        by: dict[str, Counter[str]] = {who: Counter() for who in ("main", "child", "other")}
        in_scripts = 0
        for line in b"".join(self._chunks).split(b"\r\n"):
            match = _LINE.match(line)
            if match is None:
                continue
            where, port, command, sha = match.groups()
            if where == b"lua":
                in_scripts += 1
                continue
            name = command.decode().lower()
            if name == "evalsha" and sha:
                name = _OUR_VERBS.get(sha.decode(), name)
            by[owners.get(int(port), "other")][name] += 1
        return Heard(self._seconds, by, in_scripts)
