"""Commands for ``celery inspect`` and ``celery control``: what a worker knows, and what to do.

They run in the worker's main loop, so they tell what the worker knows itself, and hand on what
wants Redis to the agent: its answer comes later, in the log.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from celery.worker.control import control_command, inspect_command

from celery_singleton_lock.admin.force_release import force_release
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.core.lock_mode import ALL, MODES
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.message_text import printable

if TYPE_CHECKING:
    from celery_singleton_lock.worker.request import LockedRequest

logger = logging.getLogger(__name__)

MOST: Final = 1000
"""Most locks of a worker that an answer names."""

DECLARED: Final = "declared"
"""Stands for a mode where the switch is to be taken away."""

NO_LOCKS: Final = {"error": "this worker keeps no locks: it has no LockedTask, or all are off"}

UNNAMED: Final = "somebody with access to the broker"

_clock = SystemClock()


@inspect_command(  # type: ignore[untyped-decorator]  # celery is untyped
    signature="[part of a lock's name [most]]", args=[("name", str), ("most", int)]
)
def locks(state: Any, name: str = "", most: int = MOST, **_: Any) -> dict[str, Any]:
    """Locks that this worker's tasks hold, or are about to; what it has parked, lost, ....

    Args:
        state: Celery's.
        name: only locks that have this in their name.
        most: most locks to name.
    """
    crew = getattr(state.consumer, "singleton_lock_crew", None)
    if crew is None:
        return NO_LOCKS
    found = [each for each in crew.desk.flights.requests() if name in each.stamp.name]
    found.sort(key=lambda request: request.stamp.stamped_at)
    most = max(0, min(int(most), MOST))
    shown = [_told(request) for request in found[:most]]
    return {**crew.report(), "locks": shown, "locks_left_out": len(found) - len(shown)}


def _told(request: LockedRequest) -> dict[str, Any]:
    """Return what is known of one; for JSON."""
    stamp = request.stamp
    return {
        "lock": stamp.name,
        "locks": [part.name for part in stamp.bundle.parts] if stamp.bundle else [stamp.name],
        "token": stamp.token,
        "task": stamp.task,
        "id": request.id,
        "state": _state(request),
        "pid": request.worker_pid if request.accepted else None,
        "age": round(_clock.monotonic() - stamp.stamped_at, 3),
    }


def _state(request: LockedRequest) -> str:
    """Return where a request stands; that a lock was taken is heard a little later."""
    if request.took and (request.accepted or not request.stamp.granted):
        return "held"
    if request.stamp.granted:
        return "granted"
    return "waiting" if request.accepted else "sent"


@control_command(  # type: ignore[untyped-decorator]  # celery is untyped
    signature="<enforce|observe|off|declared> [task [who [why]]]",
    args=[("mode", str), ("task", str), ("who", str), ("why", str)],
)
def lock_mode(
    state: Any, mode: str, task: str = ALL, who: str = "", why: str = "", **_: Any
) -> dict[str, Any]:
    """Switch the mode of all tasks, or of one, in the whole fleet; "declared" ends that.

    It counts at once in the workers that hear this, also if the locks' Redis does not answer.

    Args:
        state: Celery's.
        mode: as in the settings, or :data:`DECLARED`.
        task: name of a task, or ``*`` for all.
        who: who orders it, for the audit: Celery's messages do not tell.
        why: reason, for the audit.
    """
    crew = getattr(state.consumer, "singleton_lock_crew", None)
    if crew is None:
        return NO_LOCKS
    if mode not in {*MODES, DECLARED}:
        return {"error": f"there is no mode {mode!r}: use {', '.join(MODES)} or {DECLARED}"}
    if task != ALL and task not in crew.extension.declared():
        return {"error": f"there is no LockedTask {task!r} here"}
    crew.agent.switch(task, None if mode == DECLARED else mode)
    shown = f"(all tasks: {mode})" if task == ALL else f"(task {task}: {mode})"
    op = f"control:{task}:{mode}"  # all workers hear it, and their entries of the audit are one
    by = Operator(printable(who) or UNNAMED, via="control", why=why, action="mode", op=op)
    crew.agent.run_errand(partial(_remark, crew, shown, by))
    return {"ok": f"{'all tasks' if task == ALL else task}: {mode}"}


@control_command(  # type: ignore[untyped-decorator]  # celery is untyped
    signature="<token> [who [why]]", args=[("token", str), ("who", str), ("why", str)]
)
def lock_release(state: Any, token: str, who: str = "", why: str = "", **_: Any) -> dict[str, Any]:
    """Take a lock from the task that holds it under this token, and grant it to who is next.

    Only the worker that runs the task does it; of one that is dead the lease ends by itself. The
    task is not ended: it runs on without the lock. Audited; what came of it is in the log.

    Args:
        state: Celery's.
        token: as ``inspect locks`` tells it.
        who: who orders it, for the audit: Celery's messages do not tell.
        why: reason, for the audit.
    """
    crew = getattr(state.consumer, "singleton_lock_crew", None)
    if crew is None:
        return NO_LOCKS
    request = next((r for r in crew.desk.flights.requests() if r.stamp.token == token), None)
    if request is None:
        return {"error": "no task of this worker has this token"}
    by = Operator(printable(who) or UNNAMED, via="control", why=why)
    crew.agent.run_errand(partial(_release, crew, request.stamp.name, token, by))
    return {"ok": f"{request.stamp.name!r} will be taken from {request}"}


def _remark(crew: Any, shown: str, by: Operator) -> None:
    """Put into the audit what was ordered, if Redis answers; the log has it in any case."""
    try:
        admin_of(crew.agent.store).remark(shown, by)
    except SingletonLockError as error:
        logger.warning("celery-singleton-lock: %s is not in the audit: %s", shown, error)


def _release(crew: Any, name: str, token: str, by: Operator) -> None:
    """Release in the agent's thread, and tell what came of it."""
    told = {"lock_event": "forced-release", "lock_name": name, "lock_by": by.who}
    try:
        force_release(admin_of(crew.agent.store), name, token, by)
    except SingletonLockError as error:
        logger.warning("The lock %r was not released for %s: %s", name, by.who, error, extra=told)
    else:
        crew.agent.tell(by.step(name, "release"))
        logger.warning("The lock %r was taken from its task for %s", name, by.who, extra=told)
