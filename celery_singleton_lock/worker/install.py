"""Adds the locks of an app to its workers and its commands, and registers observers."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, get_args

from celery import Celery

import celery_singleton_lock.worker.celery_hook  # noqa: F401  # adds a startup check
from celery_singleton_lock.events import (
    Event,
    Listener,
)
from celery_singleton_lock.worker.extension import Extension

_ATTRIBUTE: Final = "_celery_singleton_lock"
_COMMANDS: Final = "celery.worker.control"
_STEPS: Final = {
    "worker": "celery_singleton_lock.worker.bootsteps:WorkerStep",
    "consumer": "celery_singleton_lock.worker.bootsteps:ConsumerStep",
}
_METRICS: Final = "celery_singleton_lock.metrics:MetricsStep"

_mutex: Final = threading.RLock()


def install(app: Celery) -> Extension:
    """Return the app's extension. The first call creates it and adds its steps to the workers."""
    found: Extension | None = getattr(app, _ATTRIBUTE, None)
    if found is not None:
        return found
    refuse_other_than_app(app, "install")
    with _mutex:  # threads of a web program may bind its first tasks at once
        return getattr(app, _ATTRIBUTE, None) or _new_extension(real_app(app))


def real_app(app: Any) -> Any:
    """Return the app for which a proxy stands: Celery's ``current_app``, or one of werkzeug."""
    is_proxy = hasattr(type(app), "_get_current_object")  # its __class__ is that of the app
    return app._get_current_object() if is_proxy else app  # noqa: SLF001  # the only way


def refuse_other_than_app(app: object, function: str) -> None:
    """Raise TypeError if an argument is not a Celery app, nor a proxy of one."""
    if not isinstance(app, Celery):
        msg = f"{function}() got {app!r:.200}: give the Celery app as its first argument."
        raise TypeError(msg)


def _new_extension(app: Celery) -> Extension:
    extension = Extension(app)
    setattr(app, _ATTRIBUTE, extension)
    for blueprint, step in _STEPS.items():
        app.steps[blueprint].add(step)
    app.steps["consumer"].add(_METRICS)
    _close_with(app, extension)
    if _COMMANDS in sys.modules:  # in `celery inspect`; in a worker, the bootstep imports it
        importlib.import_module("celery_singleton_lock.worker.remote_control")
    return extension


def _close_with(app: Celery, extension: Extension) -> None:
    """Close the extension when the app is closed; Celery has no signal for that."""
    close = app.close

    def closing() -> None:
        extension.close()
        close()

    app.close = closing


_Call = TypeVar("_Call", bound=Callable[[Any], object])


def observe(app: Celery, *kinds: type[Event]) -> Callable[[_Call], _Call]:
    """Call a function with each event of the given types: ``@observe(app, LeaseLost)``.

    It is called in the main process of each worker of the app, in the thread that reports the
    event. That thread waits for the function, so put longer work into a queue. If it raises, the
    error is logged and has no other effect.

    Args:
        app: the Celery app.
        kinds: types from :mod:`celery_singleton_lock.events`; without them, all events.

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        TypeError: ``app`` is not a Celery app, or one of ``kinds`` is not an event type.
    """
    refuse_other_than_app(app, "observe")
    given: tuple[Any, ...] = kinds  # a caller may pass anything
    for kind in given:
        if not isinstance(kind, type) or not issubclass(kind, _EVENTS):
            msg = f"observe() got {kind!r}: give types from celery_singleton_lock.events."
            raise TypeError(msg)

    def register(call: _Call) -> _Call:
        install(app).observers.add(Listener(call, kinds or _EVENTS))
        return call

    return register


_EVENTS: Final = get_args(Event)
