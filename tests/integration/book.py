"""The tests' side of the app in taskbook.py: send tasks, open gates, read the journal and locks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest
import redis
from celery import states
from kombu import Connection

from celery_singleton_lock import Lock
from celery_singleton_lock.core.lock_view import LockView
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from integration.taskbook import Journal, build
from support import fork_server
from support.ci import skip_or_fail
from support.waiting import eventually
from support.workers import QUICK, CeleryWorker

if TYPE_CHECKING:
    from typing_extensions import Self


def only(*pools: str) -> pytest.MarkDecorator:
    """Run a test that uses the module's worker with these pools alone."""
    return pytest.mark.parametrize("pool", pools, indirect=True, scope="module")


def only_kind(*kinds: str) -> pytest.MarkDecorator:
    """Run a test with these brokers only."""
    return pytest.mark.parametrize("kind", kinds, indirect=True)


POOLS = "CSL_TEST_POOLS"
"""Environment variable with the pools to test, such as ``gevent,solo``. Needs ``--full``."""


def pools(*usual: str) -> list[str]:
    """Return the pools on which a module is played: these, unless others are asked for."""
    return os.environ.get(POOLS, ",".join(usual)).split(",")


def needs_pool(pool: str) -> None:
    """Skip on a laptop, fail in CI, where the pool's library is not installed."""
    if pool in ("gevent", "eventlet") and find_spec(pool) is None:
        skip_or_fail(f"the pool {pool} is not installed: pip install {pool}")


LONG_LEASE: Final = 60.0
"""Seconds of a lease that does not end within a test."""

SAFE_LEASE: Final = 15.0
"""Seconds of a lease that does not end while a process stands still for ten seconds."""


class Book:
    """An app, its journal, and the Redis of its locks.

    Args:
        url: broker, result backend and, unless ``lock_url`` is given, locks.
        folder: for the journal and the gates.
        backend: result backend.
        lock_url: the Redis of the locks, as the test reaches it.
        conf: settings of the app, for tests and workers.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        backend: str | None = None,
        lock_url: str | None = None,
        conf: Mapping[str, Any] | None = None,
    ) -> None:
        self.url, self.backend = url, backend or url
        self.conf = dict(conf or {})
        self.app = build(self.url, self.backend, folder, self.conf)
        # No subscription per task: these outlive their server, and complain of it.
        self.app.backend.on_task_call = lambda *_: None
        self.app.backend.remove_pending_result = lambda result: result
        self.journal = Journal(folder)
        self._entries: list[dict[str, Any]] = []
        self._offset = 0
        self.client = redis.Redis.from_url(lock_url or url)
        self.broker = redis.Redis.from_url(url) if url.startswith("redis") else None
        self.store = RedisAdminStore(
            self.client, Keyspace(self.conf.get("singleton_lock_prefix", "csl"))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        self.client.close()
        if self.broker is not None:
            self.broker.close()
        self.app.close()

    # -- workers ----------------------------------------------------------------------------------

    def worker(self, *, env: Mapping[str, str] | None = None, **options: Any) -> CeleryWorker:
        """Return a worker of this book, not started."""
        conf = {**self.conf, **options.pop("conf", {})}
        return CeleryWorker(
            options.pop("app", "integration.worker_app"),
            options.pop("broker", self.url),
            backend=self.backend,
            args=(*QUICK, *options.pop("args", ())),
            env={
                "C_FORCE_ROOT": "1",  # pickle
                "BOOK_FOLDER": str(self.journal.folder),
                "BOOK_CONF": json.dumps(conf),
                **(env or {}),
            },
            **options,
        )

    @contextmanager
    def beat(self, schedule: Mapping[str, Any], folder: Path) -> Iterator[None]:
        """Run a beat process with a schedule; it ends with the block."""
        conf = {**self.conf, "beat_schedule": schedule, "beat_max_loop_interval": 0.2}
        command = [sys.executable, "-m", "celery", "-A", "integration.worker_app", "beat"]
        command += ["--schedule", str(folder / "schedule"), "--pidfile", "", "-l", "INFO"]
        env = self.worker(conf=conf).environment
        with (folder / "beat.log").open("wb") as log:
            beat = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
            try:
                yield
            finally:
                beat.kill()
                beat.wait(60)

    # -- tasks ------------------------------------------------------------------------------------

    def send(self, task: str, key: Any, n: Any = 0, **options: Any) -> str:
        """Send a task; what is no argument of it is an option of ``apply_async``. Return its id."""
        kwargs = {k: options.pop(k) for k in ("hold", "end", "extra") if k in options}
        return str(self.app.tasks[task].apply_async((key, n), kwargs, **options).id)

    def start_holder(
        self, key: Any, n: Any = 0, task: str = "act", *, gate: str = "", **options: Any
    ) -> str:
        """Start a task that holds the key's lock until its gate ``<key>-<n>`` opens.

        Args:
            key: the task's key.
            n: the task's number.
            task: name of the task.
            gate: name of another gate.
            options: see :meth:`send`.

        Returns:
            The task's id.
        """
        task_id = self.send(task, key, n, hold=gate or f"{key}-{n}", **options)
        self.started(task_id)
        return task_id

    def put(self, body: Mapping[str, Any]) -> str:
        """Send as clients in other languages do: a JSON object, without headers. Return its id."""
        with Connection(self.url) as connection, connection.SimpleQueue("celery") as queue:
            queue.put(
                json.dumps(body),
                serializer=None,
                content_type="application/json",
                content_encoding="utf-8",
            )
        return str(body["id"])

    def open(self, gate: str) -> None:
        """Let those go on who wait for a gate."""
        (self.journal.folder / f"gate-{gate}").touch()

    def state(self, result: str) -> str:
        """Return the state that the backend has now."""
        return str(self._meta(result)["status"])

    def outcome(self, result: str, timeout: float = 15) -> tuple[str, Any]:
        """Wait for a task's end, and return its state and result."""
        meta = eventually(
            lambda: (m := self._meta(result))["status"] in states.READY_STATES and m,
            timeout,
            lambda: f"{result} ready; {self._meta(result)}",
        )
        return meta["status"], meta["result"]

    def value(self, result: str, timeout: float = 15) -> Any:
        """Wait for a task's success, and return its value."""
        state, value = self.outcome(result, timeout)
        assert state == states.SUCCESS, f"{result} ended {state}: {value!r}"
        return value

    def _meta(self, result: str) -> dict[str, Any]:
        backend = self.app.backend
        backend._cache.clear()
        return dict(backend.get_task_meta(result))

    # -- journal ----------------------------------------------------------------------------------

    def events(self, event: str | None = None, **facts: Any) -> list[dict[str, Any]]:
        """Return the events, in order, that have these facts."""
        found = self._read()
        return [
            entry
            for entry in found
            if (event is None or entry["e"] == event)
            and all(entry.get(name) == value for name, value in facts.items())
        ]

    def _read(self) -> list[dict[str, Any]]:
        """Return all events; only what is new is read."""
        if self.journal.path.exists():
            with self.journal.path.open("rb") as file:
                file.seek(self._offset)
                lines, end, _ = file.read().rpartition(b"\n")  # the last may be half written yet
            self._entries += map(json.loads, lines.splitlines())
            self._offset += len(lines + end)
        return self._entries

    def journal_tail(self, lines: int = 60) -> str:
        """Return the last events."""
        return "\n".join(str(entry) for entry in self.events()[-lines:])

    def starts(self, key: Any = None, **facts: Any) -> list[dict[str, Any]]:
        """Return the starts of a key's tasks, in order."""
        return self.events("start", **({} if key is None else {"key": str(key)}), **facts)

    def started(self, result: str, timeout: float = 15, times: int = 1) -> dict[str, Any]:
        """Wait until a task has started (for the n-th time), and return that event."""
        found = eventually(
            lambda: len(f := self.starts(id=result)) >= times and f,
            timeout,
            lambda: f"start {times} of {result}; {self._meta(result)}",
        )
        return found[times - 1]

    def order(self, key: Any) -> list[Any]:
        """Return the ``n`` of a key's tasks in the order in which they started."""
        return [start["n"] for start in self.starts(key)]

    def runs(self, key: Any) -> list[tuple[float, float, dict[str, Any]]]:
        """Return (begin, end, start) of each run; one that was killed ends with its process."""
        entries = self.events()
        runs = []
        for index, entry in enumerate(entries):
            if entry["e"] != "start" or entry["key"] != str(key):
                continue
            end = next((e["t"] for e in entries[index:] if _ends(e, entry)), float("inf"))
            runs.append((entry["t"], end, entry))
        return runs

    def peak(self, key: Any) -> int:
        """Return how many tasks of a key ran at once, at most."""
        steps = sorted(
            [step for begin, end, _ in self.runs(key) for step in ((begin, 1), (end, -1))]
        )
        peak = now = 0
        for _, step in steps:
            now += step
            peak = max(peak, now)
        return peak

    def kill_child(self, pid: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Kill a process in which a task runs; return when."""
        self.journal.note("killed", victim=pid)
        os.kill(pid, number)
        return float(self.events("killed", victim=pid)[-1]["t"])

    def kill_worker(self, worker: CeleryWorker) -> float:
        """Kill a worker's main process; its children die with it. Return when."""
        pids = [worker.pid, *worker.child_pids()]
        worker.kill()
        eventually(lambda: not any(alive(pid) for pid in pids), 10, "the pool's children are gone")
        for pid in pids:
            self.journal.note("killed", victim=pid)
        return float(self.events("killed", victim=pids[0])[-1]["t"])

    # -- locks ------------------------------------------------------------------------------------

    def view(self, key: Any, lock: str = "k:{}") -> LockView:
        """Return the present state of a key's lock."""
        return self.store.inspect(lock.format(key))

    def await_waiting(
        self, key: Any, count: int, lock: str = "k:{}", timeout: float = 10
    ) -> LockView:
        """Wait until so many are parked."""
        return eventually(
            lambda: (
                (v := self.view(key, lock)).waiting + v.adrift == count and v.bodies >= count and v
            ),
            timeout,
            lambda: f"{count} waiting for {key}: {self.view(key, lock)}",
        )

    def park_backlog(self, keys: Sequence[str], each: int, seconds: float) -> None:
        """Park some tasks of each key while its lock is held, and then release all locks.

        Args:
            keys: the keys.
            each: number of tasks of each key.
            seconds: how long each task runs.
        """
        with ExitStack() as held:
            for key in keys:
                held.enter_context(Lock(self.client, f"k:{key}", lease=120))
            for n in range(each):
                for key in keys:
                    self.send("act", key, n, hold=seconds)
            for key in keys:
                self.await_waiting(key, each, timeout=30)

    def await_free(self, key: Any, timeout: float = 5, lock: str = "k:{}") -> None:
        """Wait until the lock has no holder, no waiter and no parked message."""

        def free() -> bool:
            view = self.view(key, lock)
            return not (view.holders or view.waiting or view.adrift or view.bodies)

        eventually(free, timeout, lambda: f"{key} free: {self.view(key, lock)}")

    def await_arrived(self, result: str, key: Any, timeout: float = 10) -> None:
        """Wait until a task waits for its lock, or no longer has to."""

        def arrived() -> bool:
            waiters = [waiter.task_id for waiter in self.view(key).waiters]
            return result in waiters or bool(self.starts(id=result)) or self.has_ended(result)

        eventually(arrived, timeout, lambda: f"{result} waits: {self.view(key)}")

    def lapses(self, key: Any) -> int:
        """Return how many leases of a key's lock have ended instead of being released."""
        return int(self.view(key).counters.get("lapses", 0))

    def has_ended(self, result: str) -> bool:
        """Return whether a task has a final state."""
        return self.state(result) in states.READY_STATES

    def await_renewal(self, key: Any, *, lock: str = "k:{}", timeout: float = 20) -> None:
        """Wait until the lease of each holder has been extended."""

        def ends() -> dict[str, float]:
            now = self.store.time()  # before the view, whose ends then are rather too late
            return {each.token: now + each.expires_in for each in self.view(key, lock).holders}

        before = ends()
        assert before, "somebody holds the lock"
        eventually(
            lambda: all(ends().get(token, 0) > end + 0.5 for token, end in before.items()),
            timeout,
            lambda: f"renewed: {before}, {ends()}",
        )

    def consumers(self, queue: str = "celery") -> list[str]:
        """Return the names of the workers to which Redis gives grants of a queue's messages."""
        now = self.store.time() * 1000
        routes = self.client.scan_iter(f"csl:fleet:route:*:{queue}")
        members = [each for key in routes for each in self.client.zrangebyscore(key, now, "inf")]
        return sorted(member.decode().partition("@")[0] for member in members)

    def workers_with_a_free_slot(self) -> list[str]:
        """Return the names of the workers whose last heartbeat told of a free slot."""
        free = {key: self.client.get(key) for key in self.client.keys("csl:fleet:free:*")}
        names = [key.decode().split(":")[-1] for key, slots in free.items() if int(slots or 0) > 0]
        return sorted(name.partition("@")[0] for name in names)

    def await_consumers(self, *workers: CeleryWorker, queue: str = "celery") -> None:
        """Wait until these workers, and no others, get the grants of a queue's messages."""
        names = sorted(worker.name for worker in workers)
        eventually(
            lambda: self.consumers(queue) == names,
            message=lambda: f"{names} consume {queue}: {self.consumers(queue)}",
        )

    def unacked(self) -> int:
        """Return the number of unacknowledged messages."""
        return int(self.broker.hlen("unacked"))

    def queued(self, queue: str = "celery") -> int:
        """Return how many messages lie in the broker."""
        return int(self.broker.llen(queue))

    def await_drained(self, queue: str, timeout: float = 10) -> None:
        """Wait until the broker has no message in a queue, and awaits no word of any."""
        eventually(
            lambda: self.queued(queue) == 0 and self.unacked() == 0, timeout, f"{queue} drained"
        )


def _ends(entry: dict[str, Any], start: dict[str, Any]) -> bool:
    if entry["e"] in ("killed", "dying"):
        return bool(entry.get("victim", entry["pid"]) == start["pid"])
    return (
        bool(
            entry["e"] == "end" and entry["id"] == start["id"] and entry["fence"] == start["fence"]
        )
        and entry["pid"] == start["pid"]
    )


def alive(pid: int) -> bool:
    """Return whether a process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class _Standing:
    """Workers that serve a whole module."""

    workers: ClassVar[list[CeleryWorker]] = []

    @contextmanager
    def __call__(self, worker: CeleryWorker) -> Iterator[CeleryWorker]:
        """Start a worker that outlives a test."""
        worker.start(wait=False)
        CeleryWorker.started.remove(worker)
        self.workers.append(worker)
        try:
            worker.await_ready()
            yield worker
            if fork_server.MEASURED:  # what it has covered is written as it ends in order
                worker.stop()
        finally:
            self.workers.remove(worker)
            worker.forget()


standing = _Standing()
