"""The time until the next task starts after each kind of failure, compared with its bound.

In a storm too much happens at once to measure one failure. Here one failure happens at a time, on
the storm's servers, with the storm's lease.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery.utils import uuid
from typing_extensions import Self

from celery_singleton_lock.core.model import CLAIM_LEASE, Claim, Ending, Owner
from celery_singleton_lock.core.owner_token import new_token
from chaos.fault_plan import LEASE
from chaos.fleet import Fleet
from chaos.history import Event, History
from chaos.tasks import LOCK
from support.waiting import eventually

SWEEP = 2.0
"""Seconds that the next sweep, and the way to a pool, may take on a busy machine."""

TRIES = 3
"""How often a scene is played, at most, until it is in time."""

LONG = 60.0
"""Seconds that a holder runs who is not to end by itself."""

CREWS = (("prefork", 2), ("prefork", 2))


@dataclass(frozen=True)
class Measured:
    """What one scene showed.

    Args:
        scene: what happened.
        promised: seconds within which the next one must begin.
        seconds: what it took, each time.
        late: what it took when it was played again, since that was too long.
    """

    scene: str
    promised: float
    seconds: tuple[float, ...]
    late: tuple[float, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether the promise was kept each time."""
        return max(self.seconds) <= self.promised


Scene = Callable[["Stage"], float]
SCENES: dict[str, tuple[float, Scene]] = {}


def scene(name: str, promised: float) -> Callable[[Scene], Scene]:
    """Give a scene its name and bound."""

    def register(function: Scene) -> Scene:
        SCENES[name] = (promised, function)
        return function

    return register


class Stage:
    """Two workers, their locks, and what they noted.

    Args:
        folder: of the history.
        broken: variant of the library.
    """

    def __init__(self, folder: Path, *, broken: str = "") -> None:
        self.fleet = Fleet(folder, broken=broken, managed_workers=CREWS)
        self._number = 0
        self.key = self.lock = ""

    def __enter__(self) -> Self:
        self.fleet.__enter__()
        self.fleet.start()
        return self

    def __exit__(self, *about: object) -> None:
        self.fleet.__exit__(*about)

    def measure(self, name: str, times: int) -> Measured:
        """Play a scene some times; each of them again, twice at most, if it took too long.

        What is late by design is late each time; else the machine was busy.
        """
        promised, play = SCENES[name]
        seconds: list[float] = []
        late: list[float] = []
        for _ in range(times):
            tries = [self._play(play)]
            while tries[-1] > promised and len(tries) < TRIES:
                tries.append(self._play(play))
            seconds.append(tries.pop())
            late += tries
        return Measured(name, promised, tuple(seconds), tuple(late))

    def _play(self, play: Scene) -> float:
        self._number += 1
        self.key = f"scene{self._number}"
        self.lock = LOCK.format(key=self.key)
        self.fleet.heal()
        return play(self)

    def send(self, hold: float = 0.0) -> str:
        """Send a task on the scene's lock; return its id."""
        task_id = uuid()
        self.fleet.app.tasks["early"].apply_async((self.key, hold), task_id=task_id)
        return task_id

    def begun(self, task_id: str) -> Event:
        """Wait until a task has begun, and return that event."""

        def found() -> list[Event]:
            history = History.read(self.fleet.journal.path)
            return [event for event in history.of("start") if event["id"] == task_id]

        eventually(self.fleet.journal.path.exists, 10)
        return eventually(found, 20, lambda: f"{task_id} begins; {self.view()}")[0]

    def view(self) -> Any:
        """Return the scene's lock."""
        return self.fleet.store.inspect(self.lock)

    def parked(self) -> str:
        """Send a task, and wait until it is parked; return its id."""
        task_id = self.send()
        eventually(lambda: self.view().bodies == 1, 10, lambda: f"parked: {self.view()}")
        return task_id

    def held(self) -> tuple[Event, Any]:
        """Have a task hold the lock; return its start, and where its worker is."""
        start = self.begun(self.send(LONG))
        eventually(
            self.fleet.broker.is_empty, 5, "acknowledged: else it comes again, and runs long"
        )
        return start, self.managed_worker_of(start)

    def managed_worker_of(self, start: Event) -> Any:
        """Return where the worker of a run is."""
        return next(
            managed for managed in self.fleet.managed_workers if managed.worker.pid == start["main"]
        )

    def client(self, lease: float, *, wait: float | None = None) -> str:
        """Take the lock, or queue for it, as a client that does nothing after; return its token."""
        token = new_token()
        self.fleet.store.acquire(Owner(token), Claim(self.lock, lease), wait=wait)
        return token


@scene("the holder's child process is killed", SWEEP)
def holder_child(stage: Stage) -> float:
    start, managed = stage.held()
    waiting = stage.parked()
    killed = time.monotonic()
    managed.kill_child(start["pid"])
    return stage.begun(waiting)["t"] - killed


@scene("the holder's whole worker is killed", LEASE + SWEEP)
def holder_worker(stage: Stage) -> float:
    _, managed = stage.held()
    waiting = stage.parked()
    killed = time.monotonic()
    managed.kill()
    return stage.begun(waiting)["t"] - killed


@scene("a waiting client is granted the lock, and is dead", CLAIM_LEASE + SWEEP)
def dead_waiter(stage: Stage) -> float:
    holder = stage.client(LONG)
    stage.client(LONG, wait=30.0)
    waiting = stage.parked()
    released = time.monotonic()
    stage.fleet.store.release(stage.lock, holder, Ending.FINAL)
    return stage.begun(waiting)["t"] - released


@scene("the grant reaches nobody (lost wake)", min(CLAIM_LEASE, LEASE) + SWEEP)
def lost_wake(stage: Stage) -> float:
    """It goes into the inbox of a worker that has just died, and lived for all that is known."""
    store = stage.fleet.store
    holder = stage.client(LONG)
    waiting = stage.parked()
    (route,) = store.client.scan_iter(f"{store.keyspace.fleet}:route:*:celery")
    realm = route.decode().split(":")[-2]
    store.worker_heartbeat("ghost", realm, ["celery"], 1.0)
    released = time.monotonic()
    store.release(stage.lock, holder, Ending.FINAL, worker="ghost")
    store.client.delete(store.keyspace.inbox("ghost"))
    return stage.begun(waiting)["t"] - released


@scene("a lease ends while the fleet is idle", SWEEP)
def idle_fleet(stage: Stage) -> float:
    taken = time.monotonic()
    stage.client(LEASE)
    waiting = stage.parked()
    return stage.begun(waiting)["t"] - (taken + LEASE)


@scene("a worker with a delivered grant is killed", min(CLAIM_LEASE, LEASE) + SWEEP)
def delivered(stage: Stage) -> float:
    """Its main process is stopped, so that the grant stays where it was delivered to."""
    start = stage.begun(stage.send(1.0))
    managed = stage.managed_worker_of(start)
    waiting = stage.parked()
    os.kill(managed.worker.pid, signal.SIGSTOP)
    granted = lambda: [h.state for h in stage.view().holders] == ["granted"]  # noqa: E731
    eventually(granted, 10, lambda: f"granted: {stage.view()}")
    killed = time.monotonic()
    managed.kill()
    return stage.begun(waiting)["t"] - killed


@scene("all workers are killed, and one comes back", SWEEP)
def nobody_there(stage: Stage) -> float:
    stage.client(1.0)
    waiting = stage.parked()
    for managed in stage.fleet.managed_workers:
        managed.kill()
    routes = f"{stage.fleet.store.keyspace.fleet}:route:*:celery"
    eventually(lambda: not live_workers(stage, routes), 10, "the fleet knows that nobody lives")
    managed = stage.fleet.managed_workers[0]
    managed.start()
    eventually(lambda: managed.look() or managed.ready, 30, "ready")
    ready = time.monotonic()
    return max(0.0, stage.begun(waiting)["t"] - ready)


def live_workers(stage: Stage, routes: str) -> int:
    """Return how many workers the fleet knows to live."""
    client, now = stage.fleet.store.client, stage.fleet.store.time() * 1000
    return sum(client.zcount(route, now, "+inf") for route in client.scan_iter(routes))


def measure(folder: Path, times: int = 3, *, broken: str = "") -> list[Measured]:
    """Play all scenes, each ``times`` times."""
    with Stage(folder, broken=broken) as stage:
        return [stage.measure(name, times) for name in SCENES]


def table(found: list[Measured]) -> str:
    """Return what was measured, for people."""
    rows = ["what happened                                      promised   longest   shortest"]
    for each in found:
        mark = "" if each.kept else "   BROKEN"
        if each.late:
            mark += f"   late before: {', '.join(f'{took:.2f} s' for took in each.late)}"
        longest, shortest = max(each.seconds), min(each.seconds)
        rows.append(
            f"{each.scene:50} {each.promised:6.1f} s {longest:7.2f} s {shortest:8.2f} s{mark}"
        )
    return "\n".join(rows)
