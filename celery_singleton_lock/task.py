"""``LockedTask``: the base class of tasks that run one at a time per key."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from threading import Event, get_ident
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from celery import Task, uuid

from celery_singleton_lock.config.call_options import HEADER, calling, current_call, take_given
from celery_singleton_lock.core.lock_mode import ENFORCE
from celery_singleton_lock.core.model import CurrentLock
from celery_singleton_lock.errors import LockConflict, LockQueueFull, LockWaitTimeout
from celery_singleton_lock.send_by_name import install as install_by_name
from celery_singleton_lock.send_unique import Call, marked, named, send_unique
from celery_singleton_lock.worker.execution.batches import is_running
from celery_singleton_lock.worker.execution.celery_outcome import Run
from celery_singleton_lock.worker.execution.eager import as_failed_if_retry_later, as_sent
from celery_singleton_lock.worker.execution.task_lock import (
    NoLock,
    current_lock,
    current_locks,
    entered,
)
from celery_singleton_lock.worker.extension import Extension
from celery_singleton_lock.worker.install import install, real_app
from celery_singleton_lock.worker.lock_header import AFTER
from celery_singleton_lock.worker.startup_errors import told_in_one_line

if TYPE_CHECKING:
    _Task: TypeAlias = Task[..., Any]  # generic in the package celery-types alone
else:
    _Task = Task


CELERYS_OWN: Final = "celery.app.builtins"
"""Module of Celery's own tasks, such as the one that waits for the parts of a chord."""

_BINDING: Final = 5.0
"""Longest time in seconds for which the first calls wait for the thread that binds their task."""


class LockedTask(_Task):  # type: ignore[misc]  # celery is untyped
    """A task that acquires a lock before it runs: ``@app.task(base=LockedTask, lock_key=…)``.

    Give options to the decorator, or set them as class attributes. All have defaults:

    * ``lock_key``: template of the arguments (``"account:{account_id}"``), or a callable with the
      task's signature. Without it, calls with different arguments have different locks.
    * ``lock_keys``: instead, a list of such templates, or a dict from templates to limits: the
      task acquires all of these locks (docs/several-locks.md).
    * ``lock_args``: instead, names of the arguments that are part of the lock name.
    * ``lock_lease`` (30 seconds), ``lock_limit`` (1), ``lock_on_conflict`` (``"park"``), and the
      others: see :class:`~celery_singleton_lock.config.settings.LockOptions` and docs/settings.md.

    The lock surrounds Celery's own tracing, so it also works in a class that overrides
    ``__call__``, ``before_start`` or ``after_return`` without ``super``. A direct call takes no
    lock. ``apply()`` and ``task_always_eager`` take one if ``singleton_lock_eager`` is set.

    As the app's ``task_cls`` it is the base class of all its tasks. Celery's own ones, such as
    ``celery.chord_unlock``, take no lock.

    This base class replaces Celery's task class for Django. In a Django project it therefore has
    ``delay_on_commit`` and ``apply_async_on_commit`` of that class.

    Raises:
        ConfigurationError: when the app is finalized, if an option is invalid.
    """

    Request = "celery_singleton_lock.worker.request:LockedRequest"
    throws: tuple[Any, ...]

    _lock_extension: Extension | None = None
    _lock_tracer: Callable[..., Any] | None = None
    _lock_bound: Event = Event()
    _lock_binder: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._lock_bound = Event()

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Note which thread binds the task, so that it does not wait for itself."""
        cls._lock_binder = get_ident()
        return super().bind(app)

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the declaration, and install the locks in the app."""
        super().on_bound(app)
        try:
            cls._lock_install(real_app(app))
        finally:
            cls._lock_bound.set()

    @classmethod
    def _lock_install(cls, app: Any) -> None:
        if cls.__module__ == CELERYS_OWN:  # the app's task_cls is LockedTask
            for name, plain in {"Request": Task.Request, "__trace__": None}.items():
                setattr(cls, name, plain)
            return
        cls.throws = (*_as_tuple(cls.throws), LockConflict, LockQueueFull, LockWaitTimeout)
        extension = install(app)
        install_by_name(app)
        cls._lock_extension = extension
        task = cls()
        if task.name is None:  # Celery's register_task() has named its instance alone
            task = next((each for each in app.tasks.values() if type(each) is cls), task)
        if task.name is None:
            return  # its __init__ asks for the app before register_task() names it, and binds again
        with told_in_one_line():
            extension.declare(task)

    @property
    def lock(self) -> CurrentLock:
        """The lock of the running task; without a lock, an object that is never held.

        With ``lock_keys`` it represents all locks, with the name and fencing token of the first.
        """
        return NoLock() if self._lock_is_direct() else current_lock()

    @property
    def locks(self) -> tuple[CurrentLock, ...]:
        """All locks of the running task, in the order of their acquisition; empty without one."""
        return () if self._lock_is_direct() else current_locks()

    def _lock_is_direct(self) -> bool:
        """Return whether the task was called as a function, and not by celery-batches."""
        request = self.request_stack.top  # None in a thread that the task has started
        return request is not None and request.called_directly and not is_running(self.name)

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Send the task, as Celery does.

        Args:
            args: positional arguments of the task.
            kwargs: keyword arguments of the task.
            rest: arguments of Celery's method.
            options: options of Celery's method; also ``lock_key`` (a template),
                ``lock_on_conflict``, ``lock_wait_timeout``, ``lock_priority``, ``lock_unique`` and
                ``lock_on_duplicate`` for this call and its retries.

        Returns:
            Celery's ``AsyncResult``. With ``lock_unique``, its attribute ``duplicate`` says whether
            it is that of a call that was sent before.

        Raises:
            DuplicateTask: a call like this one was sent, and ``lock_on_duplicate`` is ``"raise"``.
            ConfigurationError: a lock option is invalid, or not possible for one call.
        """
        send = partial(super().apply_async, args, kwargs)
        return self._lock_send(send, args, kwargs, {**named(rest), **options})

    def _lock_send(
        self, send: Callable[..., Any], args: Any, kwargs: Any, options: dict[str, Any]
    ) -> Any:
        """Send a call with its lock options in a header, unless it is a duplicate."""
        self._lock_await_bound()
        headers = options.get("headers")
        if headers is not None and not isinstance(headers, Mapping):
            options["headers"] = dict(headers)  # Celery takes pairs, too
        options, extension = self._after_sender(self._with_call(options)), self._lock_extension
        if extension is None or not self._lock_may_be_unique(options):
            return marked(send(**options), duplicate=False)
        lock_options = extension.options_to_send(self, options)
        if lock_options.mode != ENFORCE:
            return marked(send(**options), duplicate=False)
        sending = {**options, "task_id": options.get("task_id") or uuid()}

        def call() -> Call:
            name, key = self._unique_key(args, kwargs, sending)
            has_own_id = sending["task_id"] == options.get("task_id")
            return Call(self, lock_options, name, key, sending, has_own_id)

        return send_unique(call, extension.store, send, sending, extension.observers)

    def _lock_await_bound(self) -> None:
        """Wait for the thread that binds this task to its app.

        Celery registers a task before it binds it. So another thread can get it too early, and its
        call would be sent without lock options. If the ``on_bound`` of a class does not call ours,
        nobody sets the event, and the first call waits for the whole time.
        """
        if self._lock_bound.is_set() or self.app is None:  # to ask for the app may bind it
            return
        if self._lock_binder != get_ident():  # else a handler of on_after_configure calls it
            self._lock_bound.wait(_BINDING)
            self._lock_bound.set()

    def forget_call(self, args: Any = None, kwargs: Any = None, **options: Any) -> bool:
        """Allow a call to be sent again if its message is lost, as after a purge of its queue.

        Without this, the lost call counts until its ``lock_unique_max`` is over. The call of a task
        that is parked or runs still counts.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            options: lock options of the call, and its ``headers``, if they are part of its names.

        Returns:
            Whether a call like this one counted as sent.

        Raises:
            ConfigurationError: a lock option is invalid, or ``lock_keys`` has several locks.
            BackendError: Redis did not answer, or refused the command.
        """
        self._lock_await_bound()
        extension, options = self._lock_extension, self._with_call(options)
        if extension is None or not self._lock_may_be_unique(options):
            return False
        return extension.store().withdraw(*self._unique_key(args, kwargs, options), "", 0)

    def _unique_key(self, args: Any, kwargs: Any, sending: dict[str, Any]) -> tuple[str, str]:
        if sending.get("serializer") != "pickle":
            args, kwargs = as_sent(self, args, kwargs)
        return install(self.app).unique_key(self, args or (), kwargs or {}, sending)

    def _lock_may_be_unique(self, sending: dict[str, Any]) -> bool:
        """Return whether a call has ``lock_unique``. The settings are read only then."""
        call = (sending.get("headers") or {}).get(HEADER)
        unique = getattr(self, "lock_unique", None)
        if isinstance(call, Mapping):  # a caller may set any header
            unique = call.get("lock_unique", unique)
        return unique is not None and not self.app.conf.task_always_eager

    def _with_call(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a call, with its lock options in a header."""
        given = take_given(options)
        if given and self._lock_extension is not None:
            headers = options.get("headers") or {}
            call = {**headers.get(HEADER, {}), **given}
            self._lock_extension.options_of_call(self, call)  # raises ConfigurationError
            options["headers"] = {**headers, HEADER: call}
        return options

    def _after_sender(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a call, marked if the running task sends it at its end.

        Celery itself names the parent of links, of the next task of a chain, and of error
        callbacks. The body has returned then, and the lock is released next.
        """
        parent = options.get("parent_id")
        sender = self.app.current_worker_task if parent and current_locks() else None
        if sender is None or sender.request.id != parent:
            return options
        return {**options, "headers": {**(options.get("headers") or {}), AFTER: parent}}

    def signature_from_request(self, request: Any = None, *args: Any, **options: Any) -> Any:
        """Return a signature for a retry, with the lock options of the call."""
        sig = super().signature_from_request(request, *args, **options)
        call = getattr(request, "lock_call", None) or current_call()
        if call:
            sig.options["headers"] = {**(sig.options.get("headers") or {}), HEADER: call}
        return sig

    def apply(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Run the task in this process; under its lock if ``singleton_lock_eager`` is set.

        Args:
            args: positional arguments of the task.
            kwargs: keyword arguments of the task.
            rest: arguments of Celery's method.
            options: options of Celery's method.

        Returns:
            Celery's ``EagerResult``. If the lock is busy, the task waits here, or ends according to
            its policy: it fails with a :class:`~celery_singleton_lock.errors.LockError`, or is
            skipped (REVOKED).

        Raises:
            LockReentered: a task that holds the lock calls this one, and would wait for itself.
        """
        self._lock_await_bound()
        extension = self._lock_extension
        headers = self._with_call(options).get("headers")
        call = None
        if isinstance(headers, Mapping) and HEADER in headers:  # apply() takes any headers
            call = headers[HEADER]
            options["headers"] = {k: v for k, v in headers.items() if k != HEADER} or None
        if extension is not None and extension.locks_eager(self):
            go = partial(super().apply, args, kwargs, *rest, **options)
            with calling(call):
                return extension.eager.apply(self.app.tasks[self.name], args, kwargs, go)
        with calling(call), entered(None):  # this run has no lock, even if its caller has one
            return as_failed_if_retry_later(super().apply(args, kwargs, *rest, **options))

    def __getattr__(self, name: str) -> Any:
        """Return a method of Celery's task class for Django, in a Django project."""
        if name in _ON_COMMIT:
            return MethodType(_djangos(name), self)
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg, name=name, obj=self)

    def on_replace(self, sig: Any) -> Any:
        """Release the lock of an eager run, because its replacement runs inside it.

        A worker releases the lock at the end of the run.
        """
        if self._lock_extension is not None and self.request.is_eager:
            self._lock_extension.eager.leave(self.request.id)
        return super().on_replace(sig)

    @property
    def __trace__(self) -> Callable[..., Any] | None:
        """The function that a worker calls to run this task: Celery's tracer, inside the lock.

        The lock surrounds the whole tracer, not only ``run``: a blocked task must not send
        ``task_prerun`` and must not store STARTED.
        """
        return None if self._lock_tracer is None else self._lock_traced

    @__trace__.setter
    def __trace__(self, tracer: Callable[..., Any] | None) -> None:
        self._lock_tracer = tracer

    @__trace__.deleter
    def __trace__(self) -> None:
        """Remove the tracer; Celery's own tests do that."""
        del self._lock_tracer

    def _lock_traced(self, uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
        extension, tracer = self._lock_extension, self._lock_tracer
        if extension is None or tracer is None:
            return None
        return extension.trace(Run(self, tracer, uuid, args, kwargs, request or {}))


def _as_tuple(throws: Any) -> tuple[Any, ...]:
    """Return the exception classes in ``throws``, which may also be a single class."""
    return (throws,) if isinstance(throws, type) else tuple(throws or ())


_ON_COMMIT: Final = frozenset({"delay_on_commit", "apply_async_on_commit"})


def _djangos(name: str) -> Callable[..., None]:
    """Return a method of Celery's task class for Django.

    Raises:
        AttributeError: there is no Django project.
    """
    conf = sys.modules.get("django.conf")
    if "DJANGO_SETTINGS_MODULE" in os.environ or (conf and conf.settings.configured):
        try:
            from celery.contrib.django.task import DjangoTask  # noqa: PLC0415  # an extra
        except ImportError:  # Django is not installed
            pass
        else:
            method: Callable[..., None] = getattr(DjangoTask, name)
            return method
    msg = (
        f"{name} waits for the end of a transaction of Django, and there is no Django project. "
        "Install Django and set DJANGO_SETTINGS_MODULE, or use apply_async."
    )
    raise AttributeError(msg, name=name)
