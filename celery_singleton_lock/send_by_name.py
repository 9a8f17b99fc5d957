"""Applies the lock options of a task to calls that are sent by its name: ``app.send_task``."""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from celery import Celery

_ATTRIBUTE: Final = "_celery_singleton_lock_by_name"


def install(app: Celery) -> None:
    """Let ``app.send_task`` know ``lock_unique``, and the lock options of one call.

    An app whose tasks are used does that itself. Call it in a program that only sends tasks by name
    (``app.send_task``, beat, ``signature("name")``), and declare there each task with
    ``lock_unique`` under its name, with its parameters and lock options; its body is not used.
    A second call has no effect.

    Args:
        app: the Celery app.
    """
    if hasattr(app, _ATTRIBUTE):
        return
    original: Any = app.send_task
    following = tuple(inspect.signature(original).parameters)[3:]  # after name, args and kwargs

    @wraps(original)
    def send_task(
        name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        send = partial(original, name, args, kwargs)
        task = None if options.get("task_type") is not None else app.tasks.get(name)
        send_by_name = getattr(task, "_lock_send", None)
        if send_by_name is None:  # `task.apply_async` has called, or the task has no lock
            return send(*rest, **options)
        given = dict(zip(following, rest, strict=False))
        return send_by_name(send, args, kwargs, {**given, **options})

    app.send_task = send_task
    setattr(app, _ATTRIBUTE, True)
