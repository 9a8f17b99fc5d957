"""Commands for ``celery inspect`` and ``celery control``: what a worker knows, and what to do.

They run in the worker's main loop, so they tell what the worker knows itself, and hand on what
wants Redis to the agent: its answer comes later, in the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from celery.worker.control import control_command, inspect_command

from celery_singleton_lock.clock import SystemClock
from celery_singleton_lock.modes import ALL, MODES

if TYPE_CHECKING:
    from celery_singleton_lock.request import LockedRequest

MOST: Final = 1000
"""Most locks of a worker that an answer names."""

DECLARED: Final = "declared"
"""Stands for a mode where the switch is to be taken away."""

NO_LOCKS: Final = {"error": "this worker keeps no locks: it has no LockedTask, or all are off"}

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
    found = [each for each in crew.desk.requests() if name in each.stamp.name]
    found.sort(key=lambda request: request.stamp.stamped_at)
    most = max(0, min(int(most), MOST))
    shown = [_told(request) for request in found[:most]]
    return {**crew.report(), "locks": shown, "locks_left_out": len(found) - len(shown)}


def _told(request: LockedRequest) -> dict[str, Any]:
    """Return what is known of one; for JSON."""
    stamp = request.stamp
    return {
        "lock": stamp.name,
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
    signature="<enforce|observe|off|declared> [task]", args=[("mode", str), ("task", str)]
)
def lock_mode(state: Any, mode: str, task: str = ALL, **_: Any) -> dict[str, Any]:
    """Switch the mode of all tasks, or of one, in the whole fleet; "declared" ends that.

    It counts at once in the workers that hear this, also if the locks' Redis does not answer.

    Args:
        state: Celery's.
        mode: as in the settings, or :data:`DECLARED`.
        task: name of a task.
    """
    crew = getattr(state.consumer, "singleton_lock_crew", None)
    if crew is None:
        return NO_LOCKS
    if mode not in {*MODES, DECLARED}:
        return {"error": f"there is no mode {mode!r}: use {', '.join(MODES)} or {DECLARED}"}
    if task != ALL and task not in crew.extension.declared():
        return {"error": f"there is no LockedTask {task!r} here"}
    crew.agent.switch(task, None if mode == DECLARED else mode)
    return {"ok": f"{'all tasks' if task == ALL else task}: {mode}"}
