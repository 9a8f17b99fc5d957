"""The tasks of the storm: each records the state of its lock, and writes to a register."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, Task

from celery_singleton_lock import LockedTask, Rate, RetryLater, current_lock, current_locks
from celery_singleton_lock.config.limits import NO_LIMIT
from chaos.fenced_register import Register
from integration.taskbook import Journal

LOCK = "k:{key}"
LEASE = 3.0
GLANCE = 0.1
"""Seconds between two looks of a task at its lock."""

_MAIN = os.getpid()
"""The worker's main process: its children are forks of it."""

LATE = {"acks_late": True, "reject_on_worker_lost": True}
SEVERAL = {"lock_key": None, "lock_keys": [f"k:{{key[{n}]}}" for n in range(3)]}
"""Three locks, fewer where a key is named twice."""

REQUEUE = {"lock_on_conflict": "requeue", "lock_requeue_delay": 0.2, "lock_requeue_max": 0.8}
TASKS: dict[str, dict[str, Any]] = {
    "early": {},
    "late": LATE,
    "early3": {"lock_limit": 3},
    "late3": {**LATE, "lock_limit": 3},
    "keep": {"lock_on_retry": "keep"},
    "keep_late": {**LATE, "lock_on_retry": "keep"},
    "requeue": REQUEUE,
    "wait": {**LATE, "lock_on_conflict": "wait", "lock_wait_timeout": 120},
    "several": SEVERAL,
    "several_late": {**SEVERAL, **LATE},
    "several_requeue": {**SEVERAL, **REQUEUE},
    "several_mixed": {**LATE, "lock_key": None, "lock_keys": {"k:{key[0]}": 1, "k:{key[1]}": 3}},
}
"""Name -> declaration. The first argument is a key, or the keys of a task of several locks."""


def lock_of(key: str, *_: Any, **__: Any) -> str:
    """Return the lock of a key that names a group, ``fair0/a``."""
    return LOCK.format(key=base_of(key))


def group_of(key: str, *_: Any, **__: Any) -> str:
    """Return the group in a key."""
    return key.partition("/")[2]


def base_of(key: str) -> str:
    """Return a key without the group."""
    return key.partition("/")[0]


def urgency_of(_key: str, hold: float = 0.1, *_: Any, **__: Any) -> float:
    """Return the head start of a task: short ones go first."""
    return 2.0 if hold < 0.2 else 0.0


GROUP_LIMIT = 2
FLOW: dict[str, dict[str, Any]] = {
    "rated": {**LATE, "lock_limit": None, "lock_rate": "12/5s"},
    "rated_early": {"lock_rate": "8/5s"},
    "smooth": {**LATE, "lock_limit": None, "lock_rate": Rate("4/s", kind="smooth", burst=2)},
    "fair": {
        **LATE,
        "lock_key": lock_of,
        "lock_limit": 3,
        "lock_fair_by": group_of,
        "lock_fair_limit": GROUP_LIMIT,
    },
    "urgent": {**LATE, "lock_priority": urgency_of},
    "later": LATE,
    "settles": {**LATE, "lock_debounce": 1.2, "lock_debounce_max": 4},
    "once": {**LATE, "lock_unique": "until_done"},
    "follows": {**LATE, "lock_unique": "until_done", "lock_on_duplicate": "follow"},
    "preempts": {**LATE, "lock_on_conflict": "preempt"},
}
"""As :data:`TASKS`, of a storm with flow control."""

ALL = {**TASKS, **FLOW}
RATED = {"rated": (12, 5.0), "rated_early": (8, 5.0), "smooth": (2, 0.25)}
"""Name -> how many starts are within any time of so many seconds."""


def limit_of(task: str) -> int:
    """Return how many may hold a lock of the task, if it has one."""
    return int(ALL[task].get("lock_limit", 1) or NO_LIMIT)


def requeues(task: str) -> bool:
    """Return whether its worker holds a denied task back, and sends it to the broker again."""
    return ALL[task].get("lock_on_conflict") == "requeue"


def keys_of(key: str | list[str]) -> list[str]:
    """Return the keys that a task's first argument names, each once."""
    return [base_of(key)] if isinstance(key, str) else sorted(set(key))


def limits_of(task: str, key: str | list[str]) -> dict[str, int]:
    """Return how many may hold each of a task's keys."""
    several = ALL[task].get("lock_keys")
    if isinstance(several, dict):
        return dict(zip(key, several.values(), strict=True))
    return dict.fromkeys(keys_of(key), limit_of(task))


class Watched(LockedTask):
    """A locked task whose history shows when a process had it.

    An early-acknowledged task may be lost with a process only if that had asked for its lock.
    """

    journal: Journal

    @property
    def __trace__(self) -> Callable[..., Any] | None:
        traced = super().__trace__
        return None if traced is None else partial(self._noted, traced)

    @__trace__.setter
    def __trace__(self, tracer: Callable[..., Any] | None) -> None:
        LockedTask.__trace__.fset(self, tracer)

    def _noted(self, traced: Callable[..., Any], uuid: str, *args: Any) -> Any:
        self.journal.note("asks", id=uuid)
        unheard = False
        try:
            outcome = traced(uuid, *args)
            turned = getattr(outcome[1], "retval", None)  # None if the task has succeeded
            unheard = getattr(turned, "verdict", "") == "unavailable"
            return outcome
        finally:
            self.journal.note("left", id=uuid, to=_MAIN if unheard else None)


class Run:
    """One run of a body: what it believes of its lock, and what it writes."""

    def __init__(
        self, task: Task, key: str | list[str], journal: Journal, register: Register
    ) -> None:
        self.lock = current_lock()
        self._journal, self._register = journal, register
        self.name = f"{os.getpid()}-{os.urandom(4).hex()}"
        limits = limits_of(task.name, key)
        prefix = LOCK.format(key="")
        fences = {each.name.removeprefix(prefix): each.fencing_token for each in current_locks()}
        self._locks = {key: (fences[key], limit) for key, limit in limits.items()}
        self._until = self._known_until()
        self._lost = False
        self._journal.note(
            "start",
            run=self.name,
            id=task.request.id,
            attempt=task.request.retries,
            task=task.name,
            locks=self._locks,
            main=_MAIN,
            worker=task.request.hostname,
            until=self._until,
            group=group_of(key) if isinstance(key, str) else "",
        )

    def glance(self) -> None:
        """Ask whether the lock is held, as a careful task does; note news."""
        if not self._lost and not self.lock.held:
            self._lost = True
            self._journal.note("lost", run=self.name)
        elif not self._lost and (until := self._known_until()) > self._until + 0.001:
            self._until = until
            self._journal.note("held", run=self.name, until=until)

    def write(self, kind: str = "write") -> None:
        """Write to the registers. With more than one holder no token can tell who is late."""
        for key, (fence, limit) in self._locks.items():
            if limit == 1:
                self._register.write(key, fence, self.name, kind)

    def end(self) -> None:
        """Note the end of the body."""
        self._journal.note("end", run=self.name)

    def _known_until(self) -> float:
        """Return when the lease ends as far as this process knows; no later than that."""
        now = time.monotonic()
        return now + self.lock.expires_in


def build(
    broker: str, backend: str, folder: str | Path, conf: Mapping[str, Any], *, flow: bool = False
) -> Celery:
    """Return the app.

    Args:
        broker: URL.
        backend: URL.
        folder: for the journal and the registers.
        conf: settings.
        flow: whether it has the tasks with flow control.
    """
    app = Celery("chaos", broker=broker, backend=backend, set_as_current=False)
    app.conf.update(conf)
    journal, register = Journal(folder), Register(folder)

    def act(
        self: Task,
        key: str | list[str],
        hold: float = 0.1,
        quiet: bool = False,
        retries: int = 0,
    ) -> float:
        """Hold, write, and be tried again ``retries`` times. Who is quiet looks at the end only."""
        run = Run(self, key, journal, register)
        try:
            run.write("enter")
            _hold(run, hold, GLANCE if not quiet else hold)
            run.write()
            run.glance()
            if self.name == "later" and _is_first(Path(folder, f"later-{self.request.id}")):
                journal.note("later", run=run.name)
                raise RetryLater(0.4, why="storm")
            if self.request.retries < retries:
                journal.note("again", id=self.request.id, attempt=self.request.retries + 1)
                raise self.retry(countdown=0.2 + hold, max_retries=retries)
            return hold
        finally:
            run.end()

    for name, options in (ALL if flow else TASKS).items():
        app.task(
            bind=True,
            base=Watched,
            name=name,
            shared=False,
            journal=journal,
            **{"lock_key": LOCK, **options},
        )(act)
    app.finalize()
    return app


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _hold(run: Run, seconds: float, nap: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, nap))  # the task works for so long
        if nap == GLANCE:
            run.glance()
