"""Publishes tasks over hot and cold keys, and notes how they end."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from celery import chain
from celery.utils import uuid
from typing_extensions import Self

from chaos.fleet import Fleet
from chaos.rules import READY
from chaos.fault_plan import LEASE
from chaos.tasks import LOCK, TASKS, keys_of, limit_of
from support.checked_thread import CandidThread

PAUSE = 0.1
"""Seconds between two publications."""

MOST_OPEN = 45
"""So many young tasks without a final state are enough."""

YOUNG = 20.0
"""Seconds for which a task counts there: a lost one must not hold up the others."""

MOST_OF_KEY = 15
"""So many open tasks of one key are enough: what waits at the storm's end must be served then."""

FORGOTTEN = 150.0
"""Seconds for which a task counts there."""

HOT_KEYS = [f"hot{n}" for n in range(3)]
KEYS = HOT_KEYS * 16 + [f"warm{n}" for n in range(8)] * 2
KEYS += [f"cold{n}" for n in range(30)]
TRIOS = [f"trio{n}" for n in range(3)]
LEADS = [f"cold{n}" for n in range(6)]
HOT = [LOCK.format(key=key) for key in HOT_KEYS]
LOCKS = sorted({LOCK.format(key=key) for key in [*KEYS, *TRIOS]})

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


class Crowd:
    """Publishes until told to stop; notes final states until the end.

    Args:
        fleet: whom to ask.
        seed: of what is published; how fast depends on the fleet.
    """

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._dice = random.Random(seed)
        self._open: dict[str, tuple[float, list[str]]] = {}  # since when, and of which keys
        self._recent: list[str] = []
        self._silent = threading.Event()
        self._ended = threading.Event()
        self._threads = [CandidThread(job) for job in (self._talk, self._hear)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._silent.set()
        self._ended.set()
        for thread in self._threads:
            thread.join(10)

    def hush(self) -> None:
        """Publish no more."""
        self._silent.set()
        self._threads[0].join(10)

    def somebody(self, where: float) -> str | None:
        """Return the id of a recent task, picked by a number from 0 to 1."""
        recent = self._recent[-20:]
        return recent[int(where * len(recent))] if recent else None

    def press(self, locks: Sequence[str]) -> None:
        """Have others wait for these locks, so that whoever holds them is succeeded if it fails."""
        for lock in locks:
            key = lock.removeprefix(LOCK.format(key=""))
            task = "late3" if key in TRIOS else "early"
            for _ in range(limit_of(task) + 2):
                self._send(task, key, hold=1.5)

    def lead(self) -> None:
        """Begin with tasks that outlast their leases and do not look, each with one behind it."""
        for key in LEADS:
            self._send("late", key, hold=1.4 * LEASE, quiet=True)
            self._send("early", key)

    def _send(self, task: str, key: str, **kwargs: Any) -> None:
        link = self._fleet.app.tasks[task].si(key, **kwargs).set(task_id=uuid())
        self._note(link, None)
        link.apply_async()

    def _talk(self) -> None:
        while not self._silent.wait(PAUSE):
            young = time.monotonic() - YOUNG
            if sum(since > young for since, _ in list(self._open.values())) < MOST_OPEN:
                self._publish()

    def _publish(self) -> None:
        if self._dice.random() < 0.1:
            links = [self._signature(name) for name in self._dice.sample(["early", "late"] * 2, 3)]
        else:
            links = [self._signature(self._dice.choices(list(WEIGHTS), [*WEIGHTS.values()])[0])]
        if any(self._has_enough(key) for link in links for key in keys_of(link.args[0])):
            return
        before = None
        for link in links:
            self._note(link, before)
            before = link.options["task_id"]
        chain(*links).apply_async() if len(links) > 1 else links[0].apply_async()

    def _has_enough(self, key: str) -> bool:
        known = time.monotonic() - FORGOTTEN
        open_tasks = list(self._open.values())
        return sum(key in of and since > known for since, of in open_tasks) >= MOST_OF_KEY

    def _signature(self, task: str) -> Any:
        dice = self._dice
        key = self._key(task)
        mean = 0.5 if set(keys_of(key)) & set(HOT_KEYS) else 0.35
        kwargs: dict[str, Any] = {"hold": round(dice.expovariate(1 / mean), 3)}
        options: dict[str, Any] = {"task_id": uuid()}
        kind = dice.random()
        if kind < 0.08:  # longer than its lease
            kwargs.update(hold=round(LEASE * dice.uniform(1.1, 1.8), 3), quiet=dice.random() < 0.6)
        elif kind < 0.14:
            options[dice.choice(["time_limit", "soft_time_limit"])] = 1
            kwargs["hold"] = round(dice.uniform(0.5, 2.0), 3)
        elif kind < 0.3:
            kwargs["retries"] = dice.randint(1, 2)
        return self._fleet.app.tasks[task].si(key, **kwargs).set(**options)

    def _key(self, task: str) -> str | list[str]:
        """Return a task's key; of one of several locks its keys, in any order, some named twice."""
        dice = self._dice
        if task == "several_mixed":
            return [dice.choice(KEYS), dice.choice(TRIOS)]
        if "lock_keys" in TASKS[task]:
            return dice.choices(dice.choices(KEYS, k=3), k=3)
        return dice.choice(TRIOS if limit_of(task) > 1 else KEYS)

    def _note(self, link: Any, before: str | None) -> None:
        task_id = link.options["task_id"]
        self._fleet.journal.note(
            "published",
            id=task_id,
            task=link.task,
            key=link.args[0],
            late=bool(TASKS[link.task].get("acks_late")),
            after=before,
            kwargs=dict(link.kwargs),
            options={k: v for k, v in link.options.items() if k.endswith("time_limit")},
        )
        self._open[task_id] = time.monotonic(), keys_of(link.args[0])
        self._recent.append(task_id)

    def _hear(self) -> None:
        while not self._ended.wait(0.3):
            waiting = list(self._open)
            if not waiting:
                continue
            for raw in self._fleet.results.mget([f"celery-task-meta-{i}" for i in waiting]):
                meta = json.loads(raw) if raw else {}
                if meta.get("status") in READY:
                    self._fleet.journal.note("final", id=meta["task_id"], state=meta["status"])
                    self._open.pop(meta["task_id"], None)
