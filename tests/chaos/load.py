"""Publishes tasks over hot and cold keys, and records their final states."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from itertools import chain as chain_of
from typing import Any

from celery import chain
from celery.utils import uuid
from typing_extensions import Self

from chaos.fault_plan import LEASE
from chaos.fleet import Fleet
from chaos.rules import READY
from chaos.tasks import ALL, LOCK, base_of, keys_of, limit_of
from support.checked_thread import CheckedThread

PAUSE = 0.1
"""Seconds between two publications."""

MOST_OPEN = 45
"""Largest number of young tasks without a final state."""

YOUNG = 20.0
"""Seconds for which a task counts as young: a lost one must not block the load."""

MOST_OF_KEY = 15
"""Largest number of open tasks of one key: those left at the storm's end must run then."""

BURSTS = {"rated": 18, "smooth": 6}
"""Number of short tasks that arrive at once: on a slow machine, only these reach the rates."""

BURST_PERIOD = 12.0
"""Seconds between two bursts."""

FORGOTTEN = 150.0
"""Seconds for which a task counts as open."""

HOT_KEYS = [f"hot{n}" for n in range(3)]
KEYS = HOT_KEYS * 16 + [f"warm{n}" for n in range(8)] * 2
KEYS += [f"cold{n}" for n in range(30)]
TRIOS = [f"trio{n}" for n in range(3)]
LEADS = [f"cold{n}" for n in range(6)]
HOT = [LOCK.format(key=key) for key in HOT_KEYS]
FLOW_KEYS = {
    "rated": ["rate0"],
    "rated_early": ["rate1"],
    "smooth": ["smooth0"],
    "fair": [f"fair0/{group}" for group in "aaaab"],
    "settles": ["settles0"],
    "once": ["once0", "once1"],
    "follows": ["follows0", "follows1"],
    "preempts": ["preempts0"],
}
"""Keys of tasks with flow control, which share them with no other."""
LOCKS = sorted(
    {LOCK.format(key=base_of(key)) for key in chain_of(KEYS, TRIOS, *FLOW_KEYS.values())}
)

WEIGHTS = {
    "early": 8,
    "late": 8,
    "early3": 4,
    "late3": 4,
    "keep": 2,
    "keep_late": 2,
    "requeue": 1,
    "wait": 1,
    "several": 2,
    "several_late": 4,
    "several_requeue": 1,
    "several_mixed": 2,
}


FLOW_WEIGHTS = {
    **{name: weight / 2 for name, weight in WEIGHTS.items()},
    "rated": 3,
    "rated_early": 2,
    "smooth": 3,
    "fair": 10,
    "urgent": 3,
    "later": 3,
    "settles": 6,
    "once": 4,
    "follows": 4,
    "preempts": 4,
}
UNIQUE = frozenset({"once", "follows"})
"""Tasks of which a call is compared with earlier ones. A call with a task id of its own is not."""


class Load:
    """Publishes tasks until :meth:`stop_publishing`; records final states until the end.

    Args:
        fleet: the servers and workers.
        seed: seed of the tasks. The rate depends on the fleet.
        flow: whether tasks with flow control are among them.
    """

    def __init__(self, fleet: Fleet, seed: int, *, flow: bool = False) -> None:
        self._flow = flow
        self._weights = FLOW_WEIGHTS if flow else WEIGHTS
        self._fleet = fleet
        self._random = random.Random(seed)
        self._open: dict[str, tuple[float, list[str]]] = {}  # start time and keys
        self._recent: list[str] = []
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._threads = [CheckedThread(job) for job in (self._publish_loop, self._record_states)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._ended.set()
        for thread in self._threads:
            thread.join(10)

    def stop_publishing(self) -> None:
        """Stop publishing."""
        self._stopped.set()
        self._threads[0].join(10)

    def recent_task(self, where: float) -> str | None:
        """Return the id of a recent task, picked by a number from 0 to 1."""
        recent = self._recent[-20:]
        return recent[int(where * len(recent))] if recent else None

    def add_waiters(self, locks: Sequence[str]) -> None:
        """Publish waiters for these locks, so that a failed holder is followed by another one."""
        for lock in locks:
            key = lock.removeprefix(LOCK.format(key=""))
            task = "late3" if key in TRIOS else "early"
            for _ in range(limit_of(task) + 2):
                self._send(task, key, hold=1.5)

    def start(self) -> None:
        """Publish tasks that run longer than their leases without a check, each with one waiter."""
        for key in LEADS:
            self._send("late", key, hold=1.4 * LEASE, quiet=True)
            self._send("early", key)

    def _send(self, task: str, key: str, **kwargs: Any) -> None:
        link = self._fleet.app.tasks[task].si(key, **kwargs).set(task_id=uuid())
        self._note(link, None)
        link.apply_async()

    def _publish_loop(self) -> None:
        next_burst = time.monotonic()
        while not self._stopped.wait(PAUSE):
            if self._flow and time.monotonic() >= next_burst:
                self._publish_burst()
                next_burst += BURST_PERIOD
            young = time.monotonic() - YOUNG
            if sum(since > young for since, _ in list(self._open.values())) < MOST_OPEN:
                self._publish()

    def _publish_burst(self) -> None:
        for task, number in BURSTS.items():
            for _ in range(number):
                self._send(task, *FLOW_KEYS[task], hold=0.02)

    def _publish(self) -> None:
        if self._random.random() < 0.1:
            links = [
                self._signature(name) for name in self._random.sample(["early", "late"] * 2, 3)
            ]
        else:
            links = [
                self._signature(
                    self._random.choices(list(self._weights), [*self._weights.values()])[0]
                )
            ]
        if any(self._has_enough(key) for link in links for key in keys_of(link.args[0])):
            return
        if len(links) == 1 and links[0].task in UNIQUE:
            self._send_unique(links[0])
            return
        before = None
        for link in links:
            self._note(link, before)
            before = link.options["task_id"]
        chain(*links).apply_async() if len(links) > 1 else links[0].apply_async()

    def _send_unique(self, link: Any) -> None:
        """Send a call three times, of which two are duplicates, if Redis answers."""
        del link.options["task_id"]
        for call in (link.clone() for _ in range(3)):
            since = time.monotonic()
            result = call.apply_async()
            if result.duplicate and call.task == "once":
                self._fleet.journal.note("duplicate", id=result.id, since=since)
            else:
                self._note(call.set(task_id=result.id), None)
            result.backend = None  # it would unsubscribe when it is collected, after the storm

    def _has_enough(self, key: str) -> bool:
        known = time.monotonic() - FORGOTTEN
        open_tasks = list(self._open.values())
        return sum(key in of and since > known for since, of in open_tasks) >= MOST_OF_KEY

    def _signature(self, task: str) -> Any:
        rng = self._random
        key = self._key(task)
        mean = 0.5 if set(keys_of(key)) & set(HOT_KEYS) else 0.35
        kwargs: dict[str, Any] = {"hold": round(rng.expovariate(1 / mean), 3)}
        options: dict[str, Any] = {"task_id": uuid()}
        kind = rng.random()
        if kind < 0.08:  # longer than its lease
            kwargs.update(hold=round(LEASE * rng.uniform(1.1, 1.8), 3), quiet=rng.random() < 0.6)
        elif kind < 0.14:
            options[rng.choice(["time_limit", "soft_time_limit"])] = 1
            kwargs["hold"] = round(rng.uniform(0.5, 2.0), 3)
        elif kind < 0.3:
            kwargs["retries"] = rng.randint(1, 2)
        return self._fleet.app.tasks[task].si(key, **kwargs).set(**options)

    def _key(self, task: str) -> str | list[str]:
        """Return a task's key, or its keys in any order, with repetitions."""
        rng = self._random
        if task in FLOW_KEYS:
            return rng.choice(FLOW_KEYS[task])
        if task == "several_mixed":
            return [rng.choice(KEYS), rng.choice(TRIOS)]
        if "lock_keys" in ALL[task]:
            return rng.choices(rng.choices(KEYS, k=3), k=3)
        return rng.choice(TRIOS if limit_of(task) > 1 else KEYS)

    def _note(self, link: Any, before: str | None) -> None:
        task_id = link.options["task_id"]
        self._fleet.journal.note(
            "published",
            id=task_id,
            task=link.task,
            key=link.args[0],
            late=bool(ALL[link.task].get("acks_late")),
            after=before,
            kwargs=dict(link.kwargs),
            options={k: v for k, v in link.options.items() if k.endswith("time_limit")},
        )
        self._open[task_id] = time.monotonic(), keys_of(link.args[0])
        self._recent.append(task_id)

    def _record_states(self) -> None:
        while not self._ended.wait(0.3):
            waiting = list(self._open)
            if not waiting:
                continue
            for raw in self._fleet.results.mget([f"celery-task-meta-{i}" for i in waiting]):
                meta = json.loads(raw) if raw else {}
                if meta.get("status") in READY:
                    self._fleet.journal.note("final", id=meta["task_id"], state=meta["status"])
                    self._open.pop(meta["task_id"], None)
