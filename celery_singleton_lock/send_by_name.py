"""Applies the lock options of a task to calls that are sent by its name: ``app.send_task``."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final

from celery import Celery

from celery_singleton_lock.worker.install import real_app

_ATTRIBUTE: Final = "_celery_singleton_lock_by_name"

_POSITIONAL: Final = tuple(inspect.signature(Celery.send_task).parameters)[1:]
"""Parameters of Celery's ``send_task``, in their order; the first is the name."""

_mutex: Final = threading.RLock()


def install(app: Celery) -> None:
    """Make ``app.send_task`` apply ``lock_unique`` and the lock options of one call.

    An app that uses its own tasks does that by itself. Call this in a program that only sends tasks
    by name (``app.send_task``, beat, ``signature("name")``), and declare there each task with
    ``lock_unique`` under its name, with its parameters and lock options; its body is not used.
    A second call has no effect.

    Args:
        app: the Celery app.
    """
    if hasattr(app, _ATTRIBUTE):
        return
    app = real_app(app)
    with _mutex:  # threads of a web program may bind its first tasks at once
        if not hasattr(app, _ATTRIBUTE):
            _wrap_send_task(app)


def _wrap_send_task(app: Celery) -> None:
    own = vars(app).get("send_task")
    if hasattr(own, "assert_called"):
        return  # a mock of a test, which asks it for its calls

    @wraps(app.send_task)
    def send_task(*args: Any, **options: Any) -> Any:
        original = _of_class(app) if own is None else own
        given = {**dict(zip(_POSITIONAL, args, strict=False)), **options}
        send_by_name = _sender(app, given)
        if send_by_name is None or len(args) > len(_POSITIONAL):
            return original(*args, **options)
        name, task_args, task_kwargs = (given.pop(key, None) for key in _POSITIONAL[:3])
        send = partial(original, name, task_args, task_kwargs)
        return send_by_name(send, task_args, task_kwargs, given)

    app.send_task = send_task
    setattr(app, _ATTRIBUTE, True)


def _sender(app: Celery, given: dict[str, Any]) -> Callable[..., Any] | None:
    """Return a function that sends a call with its lock options.

    Return None if ``task.apply_async`` is the caller, or if the task has no lock.
    """
    if given.get("task_type") is not None or not isinstance(given.get("name"), str):
        return None
    try:
        task = app.tasks[given["name"]]  # an app's own registry may have no get()
    except KeyError:
        return None
    found: Callable[..., Any] | None = getattr(task, "_lock_send", None)
    return found


def _of_class(app: Celery) -> Callable[..., Any]:
    """Return the method of the app's class, which may have been replaced since."""
    found: Any = inspect.getattr_static(type(app), "send_task")
    bound: Callable[..., Any] = found
    if hasattr(type(found), "__get__"):
        bound = found.__get__(app, type(app))
    return bound
