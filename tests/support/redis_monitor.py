"""The commands that a Redis server receives, by its command MONITOR."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import redis

from celery_singleton_lock.store.scripts import load_scripts
from support.waiting import eventually

if TYPE_CHECKING:
    from typing_extensions import Self


class RedisMonitor:
    """Records the commands of clients, without those inside scripts.

    Args:
        url: URL of a real Redis.
    """

    def __init__(self, url: str) -> None:
        # Without a time-out: it may receive nothing for as long as the machine is busy.
        self._client = redis.Redis.from_url(url, socket_timeout=None)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._verbs = {script.sha: verb for verb, script in load_scripts().items()}
        self.commands: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(lambda: self._client.ping() and self.commands, 10, "MONITOR shows a PING")
        return self

    def __exit__(self, *_: object) -> None:
        self._client.connection_pool.disconnect()
        self._thread.join(10)

    def _listen(self) -> None:
        try:
            with self._client.monitor() as monitor:
                for entry in monitor.listen():
                    if entry["client_type"] != "lua" and entry["command"] != "PING":
                        self.commands.append(entry["command"])
                    elif not self.commands:
                        self.commands.append("CLIENT")
        except (redis.RedisError, OSError, ValueError, AttributeError):
            return  # closed

    def about(self, word: str) -> list[str]:
        """Return the commands that name a lock or a key."""
        return [command for command in list(self.commands) if word in command]

    def scripts(self, verb: str) -> list[str]:
        """Return the calls of a script."""
        return [c for c in list(self.commands) if self._kind(c) == f"EVALSHA {verb}"]

    def kinds(self, without: str = "\0") -> set[str]:
        """Return the names of the commands, without those that contain a word."""
        return {self._kind(c) for c in list(self.commands) if without not in c}

    def _kind(self, command: str) -> str:
        words = command.split(" ")
        name = words[0].upper()
        return f"{name} {self._verbs.get(words[1], '?')}" if name == "EVALSHA" else name
