"""Kills pool processes that run a task."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from typing import Final

from celery_singleton_lock.demo.history import History, Hold, Kill
from celery_singleton_lock.demo.shop import EventFile
from celery_singleton_lock.demo.workload import HOT

STOPPING: Final = 0.005
"""Seconds from SIGSTOP until a process has stopped."""


class Killer:
    """Kills processes that run a task, spread over a run.

    Args:
        kills: number of kills.
        orders: number of orders of the run.
        seed: seed of the random choice.
    """

    def __init__(self, kills: int, orders: int, seed: int) -> None:
        """Plan after how many orders each kill is due. The last 15 % of the orders have no kill."""
        self._due = deque(round(orders * 0.85 * (i + 1) / (kills + 1)) for i in range(kills))
        self._random = random.Random(seed)  # noqa: S311  # no secret

    def kill_if_due(self, history: History, events: EventFile) -> Kill | None:
        """Kill a process if a kill is due and a task runs."""
        if not self._due or len(history.finished()) < self._due[0]:
            return None
        victim = self._choose(history)
        if victim is None:
            return None
        kill = _kill_in_task(victim, history, events)
        if kill is not None:
            self._due.popleft()
        return kill

    def _choose(self, history: History) -> Hold | None:
        """Choose a running task; every second time one of the hot product."""
        hot = history.holding(HOT) if len(self._due) % 2 == 0 else []
        candidates = hot or list(history.running.values())
        return self._random.choice(candidates) if candidates else None


def _kill_in_task(victim: Hold, history: History, events: EventFile) -> Kill | None:
    """Stop the process, check that it still runs that task, and only then kill it."""
    try:
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(STOPPING)
        history.add(events.read())
        if history.running.get(victim.pid) is not victim:
            os.kill(victim.pid, signal.SIGCONT)
            return None
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return history.kill(victim.pid, time.monotonic())
