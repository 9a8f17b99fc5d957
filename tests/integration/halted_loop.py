"""A worker whose main loop stops after it has passed a message on to be parked.

This happens with a slow key callable, or on an overloaded machine. The agent, which is another
thread, keeps running. The worker imports this module by the setting ``imports``.

If a file ``steps-back`` is there, the worker waits before, until the test lets it park the message,
and nothing is delivered to it any more.
"""

from __future__ import annotations

import os
from pathlib import Path

from celery_singleton_lock.worker.agent.loop import Agent
from celery_singleton_lock.worker.agent_commands import Park
from celery_singleton_lock.worker.agent_queue import AgentQueue
from support.waiting import eventually

HALTS = Path(os.environ["BOOK_FOLDER"]) / "halts"
GOES_ON = Path(os.environ["BOOK_FOLDER"]) / "goes-on"
STEPS_BACK = Path(os.environ["BOOK_FOLDER"]) / "steps-back"
PARKS = Path(os.environ["BOOK_FOLDER"]) / "parks"

_put, _start = AgentQueue.put, Agent.start
_agents = []


def start(self):
    _agents.append(self)
    _start(self)


def put(self, command):
    """Pass a message on, then block the loop until the test releases it."""
    if not isinstance(command, Park):
        return _put(self, command)
    if STEPS_BACK.exists():
        heartbeat = _agents[-1]._heartbeat
        queues = heartbeat._queues
        consumed, queues.consumed = list(queues.consumed()), list
        heartbeat._store.worker_heartbeat(heartbeat._worker, heartbeat._realm, consumed, 0)
        HALTS.touch()
        eventually(PARKS.exists, 60, "the test lets it park")
    _put(self, command)
    HALTS.touch()
    return eventually(GOES_ON.exists, 60, "the loop goes on")


Agent.start, AgentQueue.put = start, put
