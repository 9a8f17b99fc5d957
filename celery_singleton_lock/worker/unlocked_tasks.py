"""Refuses tasks with lock options that are not LockedTasks: they would run without their lock."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final
from weakref import WeakSet

from celery import bootsteps
from celery.exceptions import ImproperlyConfigured
from kombu.utils.functional import maybe_evaluate

from celery_singleton_lock.config.settings import TASK_OPTIONS
from celery_singleton_lock.worker.startup_errors import told_in_one_line

logger: Final = logging.getLogger(__name__)

_LOCKED_TASK: Final = "celery_singleton_lock.task"
_CELERYS_OWN: Final = "celery.app.builtins"
_NOBODYS: Final = frozenset({"builtins", "celery"})
"""Packages whose task classes do not read lock options."""

_warned: Final[WeakSet[type]] = WeakSet()
"""Classes that a warning was logged for. A worker checks its tasks twice."""


class UnlockedStep(bootsteps.Step):  # type: ignore[misc]  # celery is untyped
    """Checks all tasks with lock options before the worker takes a message."""

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        with told_in_one_line():
            refuse_unlocked(worker.app)


def refuse_unlocked(app: Any) -> None:
    """Refuse the tasks of an app that have lock options and are not LockedTasks.

    If LockedTask was not imported, the options of a user's task class may belong to that class, and
    so may those that it has as attributes. Then only a warning is logged.

    Args:
        app: the app.

    Raises:
        ImproperlyConfigured: a task has lock options and is not a LockedTask.
    """
    for name in sorted(app.tasks):
        task = app.tasks[name]
        if _is_locked(task):
            continue
        option = _explicit_option(app, task)
        if option and (_LOCKED_TASK in sys.modules or _is_plain(task)):
            msg = (
                f"task {name}: {option} is set, but the task is not a LockedTask, so no lock would "
                "be taken. Declare it with base=LockedTask (from celery_singleton_lock import "
                "LockedTask), or remove the option."
            )
            raise ImproperlyConfigured(msg)
        kind = type(task) if option else _declaring_class(task)
        if kind is None or kind in _warned:
            continue
        _warned.add(kind)
        logger.warning(
            "celery-singleton-lock: task %s has %s, and its class %s is not derived from "
            "LockedTask: this package takes no lock for it. If it should, derive that class from "
            "celery_singleton_lock.LockedTask.",
            name,
            option or min(vars(kind).keys() & set(TASK_OPTIONS)),
            (type(task).__mro__[1] if option else kind).__qualname__,
        )


def _is_locked(task: Any) -> bool:
    return any(cls.__module__ == _LOCKED_TASK for cls in type(task).__mro__)


def _is_plain(task: Any) -> bool:
    """Return whether the decorator has created a task without a base class of the user."""
    kind = type(task)
    modules = {cls.__module__.partition(".")[0] for cls in kind.__mro__[1:]}
    return "_decorated" in vars(kind) and modules <= _NOBODYS


def _explicit_option(app: Any, task: Any) -> str:
    """Return a lock option of this task that does not come from annotations for all tasks."""
    carried = vars(type(task)).keys() & set(TASK_OPTIONS)
    if not carried:
        return ""
    of_all: set[str] = set()
    of_task: set[str] = set()
    for each in map(maybe_evaluate, app.annotations):
        of_all |= _names(each, "annotate_any")
        of_task |= _names(each, "annotate", task)
    return min(carried - (of_all - of_task), default="")


def _declaring_class(task: Any) -> type | None:
    """Return the base class that has lock options as attributes, unless the task is Celery's."""
    bases = () if type(task).__module__ == _CELERYS_OWN else type(task).__mro__[1:]
    return next((cls for cls in bases if vars(cls).keys() & set(TASK_OPTIONS)), None)


def _names(annotation: Any, method: str, *of: Any) -> set[str]:
    return set(getattr(annotation, method, lambda *_: None)(*of) or ())
