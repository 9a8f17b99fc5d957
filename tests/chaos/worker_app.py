"""``celery -A chaos.worker_app``: the storm's tasks, with the library or a defective variant."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from celery.signals import task_received, task_revoked, worker_init

from celery_singleton_lock.worker.agent.republish import Republisher
from celery_singleton_lock.worker.agent_commands import Requeue
from celery_singleton_lock.worker.request import LockedRequest
from chaos.defects import VARIANTS
from chaos.tasks import build
from integration.taskbook import Journal

if os.environ.get("CHAOS_BROKEN"):
    VARIANTS[os.environ["CHAOS_BROKEN"]]()

app = build(
    os.environ["CELERY_BROKER_URL"],
    os.environ["CELERY_RESULT_BACKEND"],
    os.environ["CHAOS_FOLDER"],
    json.loads(os.environ["CHAOS_CONF"]),
    flow=bool(os.environ.get("CHAOS_FLOW")),
)
_journal = Journal(os.environ["CHAOS_FOLDER"])


@task_received.connect
def _note(request: Any, **_: object) -> None:
    """Note each message that arrives, from the broker or from the locks' Redis."""
    attempt = request.request_dict.get("retries") or 0
    _journal.note("received", id=request.id, attempt=attempt)


@task_revoked.connect
def _note_end(request: Any, terminated: bool, **_: object) -> None:
    """Note each message that is thrown away because its task was revoked."""
    if not terminated:
        _journal.note("discarded", id=request.id)


TICK = 0.1
"""Seconds between two looks at the clock."""

STOOD = 1.0
"""Seconds of standing still that are noted. A lease is renewed two seconds before its end."""


@worker_init.connect
def _note_standstills(**_: object) -> None:
    """Note when the main process stood still though the storm had not stopped it."""
    threading.Thread(target=_watch_clock, daemon=True).start()


def _watch_clock() -> None:
    before = time.monotonic()
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        if now - before > STOOD:
            _journal.note("stood", victim=os.getpid(), since=before)
        before = now


_requeued = Republisher._requeued


def _note_return(
    republisher: Republisher,
    command: Requeue,
    held: Sequence[LockedRequest],
    error: Exception | None,
) -> None:
    """Note each message that the broker has taken back."""
    if error is None:
        _journal.note("returned", id=command.request.id)
    _requeued(republisher, command, held, error)


Republisher._requeued = _note_return
