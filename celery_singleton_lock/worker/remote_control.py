"""Commands for ``celery inspect`` and ``celery control``.

They run in the worker's main loop, so they answer without Redis. A change in Redis is a command for
the agent, which logs the result later.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from celery.worker.control import control_command, inspect_command

from celery_singleton_lock.admin.force_release import force_release
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.fair_group import group_in
from celery_singleton_lock.core.lock_mode import ALL, MODES
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.worker.agent_commands import Call
from celery_singleton_lock.worker.message_stage import BEGUN

if TYPE_CHECKING:
    from celery_singleton_lock.worker.request import LockedRequest

logger: Final = logging.getLogger(__name__)

MOST: Final = 1000
"""Most locks in one reply."""

DECLARED: Final = "declared"
"""Argument that removes a switch."""

NO_LOCKS: Final = {"error": "this worker takes no locks: it has no LockedTask, or all are off"}

UNNAMED: Final = "somebody with access to the broker"

_clock = SystemClock()


@inspect_command(  # type: ignore[untyped-decorator]  # celery is untyped
    signature="[part of a lock's name [most]]", args=[("name", str), ("most", int)]
)
def locks(
    state: Any,
    name: str = "",
    most: int = MOST,
    id: str = "",  # noqa: A002  # as in Celery's commands
    **_: Any,
) -> dict[str, Any]:
    """Show the locks that this worker's tasks hold or are about to hold, and its counters.

    Args:
        state: Celery's state of the worker.
        name: part of the lock's name; empty for all locks.
        most: most locks to list.
        id: id of a task. ``waits_for_redis`` has its messages that wait here for the locks' Redis,
            ``to_park`` those that it has not stored yet, and ``held_back`` those that wait here to
            be requeued.
    """
    runtime = getattr(state.consumer, "singleton_lock_runtime", None)
    if runtime is None:
        return NO_LOCKS
    found = [
        each for each in runtime.dispatcher.in_flight.requests() if name in each.lock_header.name
    ]
    found.sort(key=lambda request: request.lock_header.created_at)
    most = max(0, min(int(most), MOST))
    shown = [_shown(request) for request in found[:most]]
    told = {**runtime.report(), "locks": shown, "locks_left_out": len(found) - len(shown)}
    if id:
        told["waits_for_redis"] = [
            {"locks": _names(request), "refused": refused}
            for request, refused in runtime.dispatcher.held.find(id)
        ]
        told["to_park"] = [
            {"locks": _names(request)}
            for request in runtime.dispatcher.in_flight.parking()
            if request.id == id
        ]
        told["held_back"] = [
            {"locks": _names(request)} for request in runtime.dispatcher.requeues.find(id)
        ]
    return told


def _shown(request: LockedRequest) -> dict[str, Any]:
    """Return the values of a request, for JSON."""
    header = request.lock_header
    return {
        "lock": header.name,
        "locks": _names(request),
        "token": header.token,
        "task": header.task,
        "group": group_in(header.flow),
        "unique": request.unique.key if request.unique else "",
        "follows": request.unique.follows if request.unique else "",
        "id": request.id,
        "state": _state(request),
        "pid": request.worker_pid if request.stage in BEGUN else None,
        "age": round(_clock.monotonic() - header.created_at, 3),
    }


def _names(request: LockedRequest) -> list[str]:
    header = request.lock_header
    return [part.name for part in header.lock_set.parts] if header.lock_set else [header.name]


def _state(request: LockedRequest) -> str:
    """Return the state of a request; the notice of an acquired lock arrives a little later."""
    begun = request.stage in BEGUN
    if begun and request.holds_lock:
        return "lost" if request.lock_lost else "held"
    if request.lock_header.granted:
        return "granted"
    return "waiting" if begun else "sent"


@control_command(  # type: ignore[untyped-decorator]  # celery is untyped
    signature="<enforce|observe|off|declared> [task [who [why]]]",
    args=[("mode", str), ("task", str), ("who", str), ("why", str)],
)
def lock_mode(
    state: Any, mode: str, task: str = ALL, who: str = "", why: str = "", **_: Any
) -> dict[str, Any]:
    """Switch the mode of all tasks, or of one, in all workers; "declared" removes the switch.

    It takes effect at once in the workers that receive the command, even if the locks' Redis does
    not answer.

    Args:
        state: Celery's state of the worker.
        mode: as in the settings, or :data:`DECLARED`.
        task: name of a task, or ``*`` for all.
        who: the operator, for the audit: Celery's messages do not name one.
        why: reason, for the audit.
    """
    runtime = getattr(state.consumer, "singleton_lock_runtime", None)
    if runtime is None:
        return NO_LOCKS
    if mode not in {*MODES, DECLARED}:
        return {"error": f"there is no mode {mode!r}: use {', '.join(MODES)} or {DECLARED}"}
    if task != ALL and task not in runtime.extension.declared():
        return {"error": f"there is no LockedTask {task!r} here"}
    runtime.agent.mode_switches.order(task, None if mode == DECLARED else mode)
    shown = f"(all tasks: {mode})" if task == ALL else f"(task {task}: {mode})"
    op = f"control:{task}:{mode}"  # one id for all workers, so that the audit has one entry
    by = Operator(printable(who) or UNNAMED, via="control", why=why, action="mode", op=op)
    runtime.commands.put(Call(partial(_audit, runtime, shown, by)))
    return {"ok": f"{'all tasks' if task == ALL else task}: {mode}"}


@control_command(  # type: ignore[untyped-decorator]  # celery is untyped
    signature="<token> [who [why]]", args=[("token", str), ("who", str), ("why", str)]
)
def lock_release(state: Any, token: str, who: str = "", why: str = "", **_: Any) -> dict[str, Any]:
    """Take a lock from the task that holds it under this token, and grant it to the next waiter.

    Only the worker that runs the task can do this. If that worker has died, the lease expires. The
    task continues without the lock. The command writes an audit entry, and logs its result.

    Args:
        state: Celery's state of the worker.
        token: as shown by ``inspect locks``.
        who: the operator, for the audit: Celery's messages do not name one.
        why: reason, for the audit.
    """
    runtime = getattr(state.consumer, "singleton_lock_runtime", None)
    if runtime is None:
        return NO_LOCKS
    request = next(
        (r for r in runtime.dispatcher.in_flight.requests() if r.lock_header.token == token), None
    )
    if request is None:
        return {"error": "no task of this worker has this token"}
    by = Operator(printable(who) or UNNAMED, via="control", why=why)
    runtime.commands.put(Call(partial(_release, runtime, request.lock_header.name, token, by)))
    return {"ok": f"{request.lock_header.name!r} will be taken from {request}"}


def _audit(runtime: Any, shown: str, by: Operator) -> None:
    """Write an audit entry; log a warning if Redis does not answer."""
    try:
        admin_of(runtime.agent.store).write_audit_entry(shown, by)
    except SingletonLockError as error:
        logger.warning("celery-singleton-lock: %s is not in the audit: %s", shown, error)


def _release(runtime: Any, name: str, token: str, by: Operator) -> None:
    """Release in the agent's thread; log and report the result."""
    told = {"lock_event": "forced-release", "lock_name": name, "lock_by": by.who}
    try:
        force_release(admin_of(runtime.agent.store), name, token, by)
    except SingletonLockError as error:
        logger.warning("The lock %r was not released for %s: %s", name, by.who, error, extra=told)
    else:
        runtime.agent.tell(by.step(name, "release"))
        logger.warning("The lock %r was taken from its task for %s", name, by.who, extra=told)
