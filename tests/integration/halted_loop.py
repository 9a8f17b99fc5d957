"""A worker whose main loop stands still once it has handed a message over to be parked.

As it does under a key callable that takes its time, or where a machine has too little of it. The
agent, which is another thread, goes on. Imported by ``imports`` of its configuration.

If a file ``steps-back`` is there, the worker waits before, until the test lets it park the message,
and nothing is delivered to it any more.
"""

from __future__ import annotations

import os
from pathlib import Path

from celery_singleton_lock.worker.agent.loop import Agent
from support.waiting import eventually

HALTS = Path(os.environ["BOOK_FOLDER"]) / "halts"
GOES_ON = Path(os.environ["BOOK_FOLDER"]) / "goes-on"
STEPS_BACK = Path(os.environ["BOOK_FOLDER"]) / "steps-back"
PARKS = Path(os.environ["BOOK_FOLDER"]) / "parks"

_park = Agent.park


def park(self, request):
    """Hand it over, and stand still until somebody lets the loop go on."""
    if STEPS_BACK.exists():
        consumed, self._queues.consumed = list(self._queues.consumed()), list
        self.store.beat(self.worker, self.realm, consumed, 0)
        HALTS.touch()
        eventually(PARKS.exists, 60, "the test lets it park")
    _park(self, request)
    HALTS.touch()
    eventually(GOES_ON.exists, 60, "the loop goes on")


Agent.park = park
