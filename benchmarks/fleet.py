"""The commands of an idle worker, and of a thousand of them.

A thousand workers do not fit on one machine. So the commands of a real idle worker are recorded
while a thousand others are registered, and are then sent again under the names of all of them, each
on its own connections and at the recorded intervals. A worker that sends less in a large fleet is
recorded in one.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import re
import resource
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks.meter import command_counts, grown
from benchmarks.rig import Rig
from celery_singleton_lock.demo.redis_server import HOST, RedisServer
from celery_singleton_lock.store.operator.redis import RedisAdminStore

if TYPE_CHECKING:
    from typing_extensions import Self

FILES: Final = 16_384
"""Open files that two connections of each simulated worker need, in the servers too."""

ADAPT: Final = 10.0
"""Seconds in which the recorded worker may learn that its fleet has grown."""

_LINE: Final = re.compile(rb"^\+?([\d.]+) \[\d+ (\S+?):(\d+)\] (.*)$")
_WORD: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_BLOCKING: Final = frozenset({b"BLPOP", b"BRPOP", b"BLMOVE", b"BLMPOP", b"BRPOPLPUSH", b"BZPOPMIN"})
_OF_A_CONNECTION: Final = frozenset({b"HELLO", b"CLIENT", b"SELECT", b"AUTH"})


@dataclass(frozen=True)
class Sent:
    """A command of the recorded worker.

    Args:
        at: seconds after the start of the recording.
        words: the command and its arguments.
    """

    at: float
    words: tuple[bytes, ...]

    @property
    def blocks(self) -> bool:
        return self.words[0].upper() in _BLOCKING

    def encoded(self) -> bytes:
        parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in self.words]
        return b"*%d\r\n%s" % (len(parts), b"".join(parts))


def measure(workers: int, seconds: float) -> dict[str, Any]:
    """Return the commands of one idle worker, and the load of many.

    Args:
        workers: size of the simulated fleet.
        seconds: duration of each of the three measurements.
    """
    allow_files()
    with Rig(["locked"], 2, 100) as rig, rig.locks.client(decode_responses=False) as client:
        rig.settle()
        alone = commands_while(rig.locks, seconds, lambda: time.sleep(seconds))
        store = RedisAdminStore(client)
        ((real, about),) = store.workers().items()
        names = names_like(real, workers)
        for name in names:
            store.worker_heartbeat(name, about["realm"], about["queues"], 600.0, 2, tasks=())
        time.sleep(ADAPT)
        sent = record(rig.locks, set(rig.workers["locked"].ports()), seconds)
        among = commands_while(rig.locks, seconds, lambda: time.sleep(seconds))
        replay = Replay(rig.locks.port, real, names, sent, seconds)
        with replay:
            replay.run(min(3.0, seconds))
            before = processor_seconds(rig.locks)
            fleet = commands_while(rig.locks, seconds, lambda: replay.run(seconds))
            used = processor_seconds(rig.locks) - before
        store.close()
    return {
        "commands_per_second": sum(alone.values()),
        "commands_per_second_by_name": alone,
        "commands_per_second_in_the_fleet": sum(among.values()),
        "sent_per_second_in_the_fleet": round(len(sent) / seconds, 1),
        "fleet": workers,
        "fleet_commands_per_second": round(sum(fleet.values())),
        "fleet_sent_of_due": round(replay.sent / max(1, replay.due), 3),
        "fleet_share_of_a_core": round(used / seconds, 3),
    }


def allow_files() -> None:
    """Raise the limit of open files, for this process and the servers that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def names_like(worker: str, count: int) -> list[str]:
    """Return ids of workers, as long as a real one, so that a recorded command can be rewritten."""
    return [f"{worker[:-5]}{number:05d}" for number in range(count)]


def processor_seconds(server: RedisServer) -> float:
    return float(sum(psutil.Process(server.pid).cpu_times()[:2]))


def commands_while(server: RedisServer, seconds: float, run: Any) -> dict[str, float]:
    """Return name -> commands a second, those of clients and those inside scripts."""
    with server.client() as client:
        before = command_counts(client)
        run()
        growth = grown(before, command_counts(client))
    return {name: round(count / seconds, 2) for name, count in growth.items()}


def record(server: RedisServer, ports: set[int], seconds: float) -> list[Sent]:
    """Return what the clients with these ports send."""
    with socket.create_connection((HOST, server.port)) as listener:
        listener.sendall(b"MONITOR\r\n")
        listener.settimeout(0.1)
        chunks, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                chunks.append(listener.recv(1 << 20))
    return list(parsed(b"".join(chunks).split(b"\r\n")[1:-1], ports))


def parsed(lines: Sequence[bytes], ports: set[int]) -> Iterator[Sent]:
    """Yield the commands of these ports in lines of MONITOR; those of scripts have no port."""
    first = 0.0
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        first = first or float(match[1])
        words = tuple(unescaped(word) for word in _WORD.findall(match[4]))
        if int(match[3]) in ports and words[0].upper() not in _OF_A_CONNECTION:
            yield Sent(float(match[1]) - first, words)


def unescaped(word: bytes) -> bytes:
    return word.decode("unicode_escape").encode("latin-1")


class Replay:
    """Sends recorded commands in the names of many workers.

    Args:
        port: of the server.
        real: id of the recorded worker.
        names: ids of the simulated workers.
        sent: the recording.
        period: its duration in seconds; it is repeated.

    Attributes:
        due: number of commands that were due.
        sent: number of commands that were sent.
    """

    def __init__(
        self, port: int, real: str, names: Sequence[str], sent: Sequence[Sent], period: float
    ) -> None:
        self.due = 0
        self.sent = 0
        self._port = port
        self._real = real.encode()
        self._names = [name.encode() for name in names]
        self._recorded = [(each.at, each.encoded(), each.blocks) for each in sent]
        self._period = period
        self._answers = selectors.DefaultSelector()
        self._lines: list[tuple[socket.socket, socket.socket]] = []
        self._next: list[tuple[float, int, int]] = []

    def __enter__(self) -> Self:
        phases = random.Random(1)
        began = time.monotonic()
        for number in range(len(self._names)):
            self._lines.append((self._connection(), self._connection()))
            phase = phases.uniform(0.0, self._period)
            for at, (offset, _, _) in enumerate(self._recorded):
                due = began + (offset + phase) % self._period
                heapq.heappush(self._next, (due, number, at))
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        for pair in self._lines:
            for each in pair:
                each.close()

    def _connection(self) -> socket.socket:
        made = socket.create_connection((HOST, self._port))
        made.setblocking(False)  # noqa: FBT003  # the socket's own
        self._answers.register(made, selectors.EVENT_READ)
        return made

    def run(self, seconds: float) -> None:
        """Send for some seconds. What is late is sent as soon as possible, and counted."""
        self.due = self.sent = 0
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            while self._next[0][0] <= now:
                due, number, at = heapq.heappop(self._next)
                self._send(number, at)
                heapq.heappush(self._next, (due + self._period, number, at))
            pause = min(until, self._next[0][0]) - time.monotonic()
            for key, _ in self._answers.select(max(0.0, pause)):
                with contextlib.suppress(BlockingIOError):
                    key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
        late = sum(due <= until for due, _, _ in self._next)
        self.due = self.sent + late

    def _send(self, number: int, at: int) -> None:
        _, command, blocks = self._recorded[at]
        command = command.replace(self._real, self._names[number])
        self._lines[number][blocks].sendall(command)
        self.sent += 1
