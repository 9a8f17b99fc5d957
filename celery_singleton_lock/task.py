"""``LockedTask``: the base class of tasks that run one at a time per key."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Final

from celery import Task

from celery_singleton_lock.worker.execution.batches import is_running
from celery_singleton_lock.config.call_options import HEADER, calling, current_call, take_given
from celery_singleton_lock.errors import LockConflict, LockQueueFull, LockWaitTimeout
from celery_singleton_lock.worker.extension import Extension, install
from celery_singleton_lock.worker.execution.tracer import (
    NoLock,
    Run,
    current_lock,
    current_locks,
    entered,
)
from celery_singleton_lock.core.model import CurrentLock
from celery_singleton_lock.worker.startup_errors import told_in_one_line


class LockedTask(Task):  # type: ignore[misc]  # celery is untyped
    """A task that takes a lock before it runs: ``@app.task(base=LockedTask, lock_key=…)``.

    Options, all of them optional, are given to the decorator or as class attributes:

    * ``lock_key``: template over the arguments (``"account:{account_id}"``), or a callable with the
      task's signature; without it each different call has its own lock.
    * ``lock_keys``: instead, a list of such templates, or a dict of them with the limit of each:
      the task takes all of these locks (docs/several-locks.md).
    * ``lock_args``: instead, names of the arguments that count.
    * ``lock_lease`` (30 seconds), ``lock_limit`` (1), ``lock_on_conflict`` (``"park"``),
      ``lock_wait_timeout``, ``lock_max_waiting``, ``lock_on_full``, ``lock_on_retry``,
      ``lock_on_lost``, ``lock_on_backend_error``: see
      :class:`~celery_singleton_lock.config.settings.LockOptions`.

    The lock is taken around Celery's own tracing, so overriding ``__call__``, ``before_start`` or
    ``after_return`` without ``super`` does not disarm it. A direct call takes none; ``apply()`` and
    ``task_always_eager`` take one if ``singleton_lock_eager`` is set.

    In a Django project a task has ``delay_on_commit`` and ``apply_async_on_commit``, as of Celery's
    task class for Django, which this base class replaces.

    Raises:
        ConfigurationError: when the app is finalized, if an option is wrong.
    """

    Request = "celery_singleton_lock.worker.request:LockedRequest"

    _lock_extension: Extension | None = None
    _lock_tracer: Callable[..., Any] | None = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the declaration, and join the app's workers."""
        super().on_bound(app)
        cls.throws = (*_as_tuple(cls.throws), LockConflict, LockQueueFull, LockWaitTimeout)
        extension = install(app)
        cls._lock_extension = extension
        with told_in_one_line():
            extension.declare(cls())

    @property
    def lock(self) -> CurrentLock:
        """The lock of the running task; an inert one in an unlocked run.

        With ``lock_keys`` it stands for all of them, with the name and fencing token of the first.
        """
        return NoLock() if self._lock_is_direct() else current_lock()

    @property
    def locks(self) -> tuple[CurrentLock, ...]:
        """All locks of the running task, in the order in which they were taken; empty without."""
        return () if self._lock_is_direct() else current_locks()

    def _lock_is_direct(self) -> bool:
        """Return whether the task was called as a function; celery-batches calls it so, too."""
        request = self.request_stack.top  # None in a thread that the task has started
        return request is not None and request.called_directly and not is_running(self.name)

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Send the task, as Celery does.

        Args:
            args: positional arguments of the task.
            kwargs: keyword arguments of the task.
            rest: as Celery's.
            options: as Celery's; and ``lock_key`` (a template), ``lock_on_conflict`` and
                ``lock_wait_timeout`` for this call alone, and for retries of its run.

        Returns:
            Celery's ``AsyncResult``.

        Raises:
            ConfigurationError: a lock option is wrong, or cannot be given to one call.
        """
        return super().apply_async(args, kwargs, *rest, **self._with_call(options))

    def _with_call(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a call, with those about its lock in a header."""
        given = take_given(options)
        if given and self._lock_extension is not None:
            headers = options.get("headers") or {}
            call = {**headers.get(HEADER, {}), **given}
            self._lock_extension.options_of_call(self, call)  # raises what is wrong
            options["headers"] = {**headers, HEADER: call}
        return options

    def signature_from_request(self, request: Any = None, *args: Any, **options: Any) -> Any:
        """Return a signature for a retry, which has the lock options of its attempt's call."""
        sig = super().signature_from_request(request, *args, **options)
        call = getattr(request, "lock_call", None) or current_call()
        if call:
            sig.options["headers"] = {**(sig.options.get("headers") or {}), HEADER: call}
        return sig

    def apply(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Run the task here and now; under its lock if ``singleton_lock_eager`` is set.

        Args:
            args: positional arguments of the task.
            kwargs: keyword arguments of the task.
            rest: as Celery's.
            options: as Celery's.

        Returns:
            Celery's ``EagerResult``. A task that found its lock busy has waited in place; or, as
            its policy says, failed with a :class:`~celery_singleton_lock.errors.LockError`, or was
            skipped (REVOKED).

        Raises:
            LockReentered: a task that holds the lock calls this one, and would wait for itself.
        """
        extension = self._lock_extension
        headers = dict(self._with_call(options).get("headers") or {})
        call = headers.pop(HEADER, None)
        if call is not None:
            options["headers"] = headers or None
        if extension is not None and extension.locks_eager(self):
            go = partial(super().apply, args, kwargs, *rest, **options)
            with calling(call):
                return extension.eager.apply(self.app.tasks[self.name], args, kwargs, go)
        with (
            calling(call),
            entered(None),
        ):  # this run holds nothing, whatever the one around it does
            return super().apply(args, kwargs, *rest, **options)

    def __getattr__(self, name: str) -> Any:
        """Return what Celery's task class for Django adds, where there is a Django project."""
        if name in _ON_COMMIT:
            return MethodType(_djangos(name), self)
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg, name=name, obj=self)

    def on_replace(self, sig: Any) -> Any:
        """Give the lock of an eager run back: its replacement runs inside of it, and takes its own.

        In a worker that goes without saying.
        """
        if self._lock_extension is not None and self.request.is_eager:
            self._lock_extension.eager.leave(self.request.id)
        return super().on_replace(sig)

    @property
    def __trace__(self) -> Callable[..., Any] | None:
        """What a worker calls to run this task: Celery's tracer, behind the gate.

        Here rather than around ``run``: a task that is turned away must not have sent
        ``task_prerun`` or stored STARTED.
        """
        return None if self._lock_tracer is None else self._lock_traced

    @__trace__.setter
    def __trace__(self, tracer: Callable[..., Any] | None) -> None:
        self._lock_tracer = tracer

    @__trace__.deleter
    def __trace__(self) -> None:
        """Forget the tracer, as if it were an attribute: Celery's own tests do that."""
        del self._lock_tracer

    def _lock_traced(self, uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
        extension, tracer = self._lock_extension, self._lock_tracer
        if extension is None or tracer is None:
            return None
        return extension.trace(Run(self, tracer, uuid, args, kwargs, request or {}))


def _as_tuple(throws: Any) -> tuple[Any, ...]:
    """Return the exception classes that a task expects; Celery takes one class, too."""
    return (throws,) if isinstance(throws, type) else tuple(throws or ())


_ON_COMMIT: Final = frozenset({"delay_on_commit", "apply_async_on_commit"})


def _djangos(name: str) -> Callable[..., None]:
    """Return a method of Celery's task class for Django, by which alone a project is known.

    Raises:
        AttributeError: there is no Django project here.
    """
    conf = sys.modules.get("django.conf")
    if "DJANGO_SETTINGS_MODULE" in os.environ or (conf and conf.settings.configured):
        try:
            from celery.contrib.django.task import DjangoTask  # noqa: PLC0415  # an extra
        except ImportError:  # no Django after all
            pass
        else:
            method: Callable[..., None] = getattr(DjangoTask, name)
            return method
    msg = (
        f"{name} waits for the end of a transaction of Django, and there is no Django project "
        "here: install Django, and set DJANGO_SETTINGS_MODULE. Or use apply_async."
    )
    raise AttributeError(msg, name=name)
