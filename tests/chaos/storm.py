"""A storm: servers, workers, load and a plan of faults; its result is a history."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from celery_singleton_lock.core.lock_view import LockView
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import BackendError
from chaos.defects import FLOW_VARIANTS
from chaos.fault_plan import KILLS_AND_STOPS, Fault, plan
from chaos.fenced_register import Register
from chaos.fleet import CREWS, Fleet, ManagedWorker
from chaos.history import History
from chaos.load import HOT, LOCKS, Load
from chaos.observer import Observer
from chaos.rules import SAFETY, Violation, unsettled, violations_of
from support.older_version import OlderVersion
from support.waiting import eventually

TICK = 0.02
DRAIN = 90.0
"""Longest time in seconds for the remaining tasks after the storm."""

PRESSED = 3
"""Number of locks of a stopped worker for which waiters are published."""

EARLY_LOOK = 1.0
"""Seconds between two checks of the rules during a storm with a defective variant."""


@dataclass
class Report:
    """The result of a storm.

    Attributes:
        history: all that happened.
        violations: what broke a rule.
        faults: how many of each kind struck.
        caught: seconds after its begin at which the first violation was seen; None if none was.
    """

    history: History
    violations: list[Violation] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    caught: float | None = None

    @property
    def struck(self) -> int:
        """Number of kills and stops."""
        return sum(count for kind, count in self.faults.items() if kind in KILLS_AND_STOPS)


class Storm:
    """One storm over one fleet.

    Args:
        folder: where the history is kept.
        seed: of the plan and the load.
        seconds: how long it lasts.
        broker: one of :data:`chaos.broker.BROKERS`.
        broken: a wrong variant of the library, to be caught: the storm ends when it is.
        managed_workers: pool and concurrency of each worker.
        past: an older version of this repository, which every second worker runs.
        flow: whether there are tasks with rates, groups, priorities and quiet periods.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        seconds: float,
        *,
        broker: str = "redis",
        broken: str = "",
        managed_workers: tuple[tuple[str, int], ...] = CREWS,
        past: OlderVersion | None = None,
        flow: bool = False,
    ) -> None:
        self._flow = flow or broken in FLOW_VARIANTS
        self.folder = folder
        self.seed, self.seconds, self.broken = seed, seconds, broken
        self._about = {
            "seed": seed,
            "seconds": seconds,
            "broker": broker,
            "broken": broken,
            "flow": flow,
        }
        self.fleet = Fleet(
            folder,
            broker=broker,
            broken=broken,
            managed_workers=managed_workers,
            past=past,
            flow=self._flow,
        )
        self.faults: Counter[str] = Counter()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._locks_away = False
        self._caught: float | None = None

    def run(self) -> Report:
        """Inject the faults, wait for the remaining tasks, and check the rules."""
        with self.fleet as fleet:
            try:
                fleet.start()
                with Observer(fleet):
                    with Load(fleet, self.seed, flow=self._flow) as load:
                        self._inject_faults(load)
                        if self._caught is None:
                            self._settle(load)
                    if self._caught is None:
                        self._await_quiet()
                if self._caught is None:
                    self._collect()
            finally:
                fleet.keep_logs()
        history = self.history()
        rules = SAFETY if self._caught is not None else None
        return Report(history, violations_of(history, rules), self.faults, self._caught)

    def history(self) -> History:
        """Return the history so far."""
        return History.read(self.fleet.journal.path)

    # -- while it rages ---------------------------------------------------------------------------

    def _inject_faults(self, load: Load) -> None:
        began = time.monotonic()
        self.fleet.journal.note("storm", **self._about)
        load.start()
        faults, look = plan(self.seed, self.seconds), began + EARLY_LOOK
        while (now := time.monotonic()) < began + self.seconds and self._caught is None:
            while faults and faults[0].at <= now - began:
                self._inject(faults.pop(0), load)
            self._tend(now)
            if self.broken and now >= look:
                self._caught = now - began if violations_of(self.history(), SAFETY) else None
                look = time.monotonic() + EARLY_LOOK
            time.sleep(TICK)  # the plan is one of times
        for _, undo in self._later:
            undo()
        self._later = []

    def _tend(self, now: float) -> None:
        """End the faults that are due, and start workers that have ended."""
        due = [undo for at, undo in self._later if at <= now]
        self._later = [(at, undo) for at, undo in self._later if at > now]
        for undo in due:
            undo()
        for managed in self.fleet.managed_workers:
            managed.look()
            if managed.worker is None and not any(managed.start == undo for _, undo in self._later):
                managed.start()

    def _inject(self, fault: Fault, load: Load) -> None:
        """Inject a fault if it has a target; record the result."""
        worker = partial(self._inject_in_worker, load=load)
        strikes: dict[str, Callable[[Fault], bool]] = {
            "kill child": self._strike_child,
            "stop child": self._strike_child,
            "stop main": worker,
            "stop worker": worker,
            "kill worker": worker,
            "retire worker": worker,
            "kill locks": self._strike_locks,
            "stop locks": self._strike_locks,
            "cut broker": self._cut,
            "revoke": lambda fault: self._revoke(fault, load),
            "terminate": lambda fault: self._revoke(fault, load),
        }
        if strikes[fault.kind](fault):
            self.faults[fault.kind] += 1
            self.fleet.journal.note("fault", kind=fault.kind, length=fault.length)

    def _undo(self, seconds: float, undo: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, undo))

    def _strike_child(self, fault: Fault) -> bool:
        managed_workers = [managed for managed in self.fleet.managed_workers if managed.strikable]
        pids = [
            (managed, pid) for managed in managed_workers for pid in managed.worker.child_pids()
        ]
        holders = self._holders()
        pids = [each for each in pids if each[1] in holders] or pids
        if not pids:
            return False
        managed, pid = pids[int(fault.where * len(pids))]
        if fault.kind == "kill child":
            managed.kill_child(pid)
        else:
            self._stop(managed, [pid], fault)
        return True

    def _inject_in_worker(self, fault: Fault, load: Load) -> bool:
        managed_workers = [managed for managed in self.fleet.managed_workers if managed.strikable]
        holders = self._holders()
        busy = [c for c in managed_workers if holders & {c.worker.pid, *c.worker.child_pids()}]
        managed_workers = busy or managed_workers
        if not managed_workers:
            return False
        managed = managed_workers[int(fault.where * len(managed_workers))]
        match fault.kind:
            case "stop main":
                self._stop(managed, [managed.worker.pid], fault)
            case "stop worker":
                pids = [managed.worker.pid, *managed.worker.child_pids()]
                self._stop(managed, pids, fault)
                load.add_waiters(self._held_by(set(pids))[:PRESSED])
            case "kill worker":
                managed.kill()
                self._undo(fault.length, managed.start)
            case _:
                managed.retire()
        return True

    def _holders(self) -> set[int]:
        """Return the processes that hold a hot lock, which has waiters."""
        return {holder.pid for view in self._views(HOT) if view.waiting for holder in view.holders}

    def _held_by(self, pids: set[int]) -> list[str]:
        """Return the locks that these processes hold."""
        views = self._views(LOCKS)
        return [view.name for view in views if pids & {holder.pid for holder in view.holders}]

    def _views(self, locks: Sequence[str]) -> list[LockView]:
        try:
            return [self.fleet.store.inspect(lock, waiters=0) for lock in locks]
        except BackendError:
            return []

    def _stop(self, managed: ManagedWorker, pids: list[int], fault: Fault) -> None:
        managed.stop(pids)
        self._undo(fault.length, managed.go_on)

    def _strike_locks(self, fault: Fault) -> bool:
        if self._locks_away:
            return False
        self._locks_away = True
        self.fleet.journal.note("away")
        locks = self.fleet.locks
        strike, undo = (
            (locks.kill, locks.start) if fault.kind == "kill locks" else (locks.pause, locks.resume)
        )
        strike()
        self._undo(fault.length, lambda: self._bring_back(undo))
        return True

    def _bring_back(self, undo: Callable[[], None]) -> None:
        undo()
        self.fleet.journal.note("back")
        self._locks_away = False

    def _cut(self, _fault: Fault) -> bool:
        self.fleet.journal.note("cut")
        self.fleet.proxy.cut()
        return True

    def _revoke(self, fault: Fault, load: Load) -> bool:
        task_id = load.recent_task(fault.where)
        if task_id is None:
            return False
        terminate = fault.kind == "terminate"
        self.fleet.journal.note("revoke", id=task_id, terminate=terminate)
        self.fleet.app.control.revoke(task_id, terminate=terminate, signal="SIGKILL")
        return True

    # -- after it ---------------------------------------------------------------------------------

    def _settle(self, load: Load) -> None:
        """Stop publishing, and let the published tasks end.

        What is on its way counts as lost by the broker until a worker receives it, so the history
        says that all have ended only if nothing was on its way before.
        """
        load.stop_publishing()
        self.fleet.heal()
        until = time.monotonic() + DRAIN
        while time.monotonic() < until and not (self._is_quiet() and not unsettled(self.history())):
            time.sleep(0.5)  # to read the whole history is dear

    def _look_after_workers(self) -> None:
        for managed in self.fleet.managed_workers:
            managed.look()

    def _await_quiet(self) -> None:
        """Wait until there is no holder, waiter or index entry, then shut down."""
        try:
            eventually(self._is_quiet, 20)
        except AssertionError:
            print("the locks did not become quiet; the rules will tell of it", flush=True)
        self.fleet.stop()

    def _is_quiet(self) -> bool:
        self._look_after_workers()
        quiet = not any(self._content(lock) for lock in LOCKS)
        with self.fleet.locks.client() as client:
            shared = (
                name for kind in ("index", "due") for name in client.scan_iter(f"csl:*:{kind}")
            )
            quiet = quiet and not any(shared)
        return quiet and self.fleet.broker.is_empty()

    def _content(self, lock: str) -> str:
        view = self.fleet.store.inspect(lock)
        live = view.holders or view.waiting or view.adrift or view.bodies
        return str(view) if live else ""

    def _collect(self) -> None:
        """Add the facts that are known only at the end to the history."""
        note = self.fleet.journal.note
        for row in Register(self.folder).rows():
            note("register", at=row.pop("t"), writer=row.pop("pid"), **row)
        content = {self._base(lock): self._content(lock) for lock in LOCKS}
        client = self.fleet.locks.client(decode_responses=True)
        with client:
            for name in client.scan_iter("csl:*"):
                live = content.get(name.rpartition(":")[0], "")
                about = {"name": name, "type": client.type(name), "ttl": client.ttl(name)}
                named = client.hkeys(name) if name.endswith(":index") else []
                note("key", **about, live=live or ", ".join(named))
        for worker, line in self.fleet.complaints():
            note("complaint", worker=worker, text=line)

    @staticmethod
    def _base(lock: str) -> str:
        return Keyspace().lock(lock).holders.rpartition(":")[0]
