"""What ``celery -A chaos.worker_app`` loads: the storm's tasks, on this library or a wrong one."""

from __future__ import annotations

import json
import os
from typing import Any

from celery.signals import task_received, task_revoked

from celery_singleton_lock.worker.agent.republish import Courier
from celery_singleton_lock.worker.agent_commands import Requeue
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


_requeued = Courier._requeued


def _note_return(courier: Courier, order: Requeue, error: Exception | None) -> None:
    """Note each message that the broker has taken back."""
    if error is None:
        _journal.note("returned", id=order.request.id)
    _requeued(courier, order, error)


Courier._requeued = _note_return
