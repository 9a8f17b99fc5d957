"""``@locked``: run a function, method or coroutine under a lock named by its arguments.

::

    @locked("report:{report_id}", client, lease=60, wait_timeout=10)
    def build(report_id): ...
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

import redis
import redis.asyncio

from celery_singleton_lock.config.argument_checks import BARE_KEY, finished, warn_of_bare_name
from celery_singleton_lock.core.lock_name_template import (
    OF_FUNCTION,
    ArgumentsDoNotBind,
    compile_name,
)
from celery_singleton_lock.core.priority import (
    PriorityOf,
    PriorityOption,
    checked_priority,
    compile_priority,
    is_computed_priority,
)
from celery_singleton_lock.core.rate import RateOption, rates_of
from celery_singleton_lock.core.start_cost import compile_costs
from celery_singleton_lock.errors import LockConflict, LockReentered, LockTimeout
from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.lock.decorator_checks import (
    check_arguments,
    check_function,
    checked_conflict,
)
from celery_singleton_lock.lock.lease import OnLost
from celery_singleton_lock.lock.running_calls import noted
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.base import LockStore
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.redis.valkey import AsyncValkeyClient, ValkeyClient

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Client = (
    redis.Redis
    | redis.asyncio.Redis
    | ValkeyClient
    | AsyncValkeyClient
    | LockStore
    | AsyncRedisStore
)
Key = str | Callable[..., str] | None


class Same(Protocol):
    """A decorator that keeps the type of the function."""

    def __call__(self, function: F, /) -> F:
        """Decorate."""
        ...


class OrNone(Protocol):
    """A decorator of a function that may be skipped: its result is then None."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> Callable[P, Coroutine[Any, Any, T | None]]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> Callable[P, T | None]: ...


@overload
def locked(
    key: Key,
    backend: Client | Callable[[], Client],
    *,
    on_conflict: Literal["skip"],
    lease: float = ...,
    wait_timeout: None = ...,
    limit: int | None = ...,
    rate: RateOption = ...,
    priority: PriorityOption = ...,
    renew: bool = ...,
    prefix: str | None = ...,
    on_lost: OnLost | None = ...,
    raise_on_release_error: bool = ...,
) -> OrNone: ...
@overload
def locked(
    key: Key,
    backend: Client | Callable[[], Client],
    *,
    on_conflict: Literal["wait", "fail"] = ...,
    lease: float = ...,
    wait_timeout: float | None = ...,
    limit: int | None = ...,
    rate: RateOption = ...,
    priority: PriorityOption = ...,
    renew: bool = ...,
    prefix: str | None = ...,
    on_lost: OnLost | None = ...,
    raise_on_release_error: bool = ...,
) -> Same: ...
def locked(
    key: Key,
    backend: Client | Callable[[], Client] | None = None,
    *,
    on_conflict: str = "wait",
    lease: float = 30.0,
    wait_timeout: float | None = None,
    limit: int | None = 1,
    rate: RateOption = None,
    priority: PriorityOption = 0.0,
    renew: bool = True,
    prefix: str | None = None,
    on_lost: OnLost | None = None,
    raise_on_release_error: bool = True,
) -> Any:
    """Run a function under a lock that is named by its arguments, like a task's lock.

    Args:
        key: the lock's name as a template of arguments, ``"report:{report_id}"``, or a callable
            that has the function's parameters and returns the name. None: the name is the
            function's name and a digest of all its arguments. ``self`` and ``cls`` are passed to a
            callable, and are otherwise not arguments.
        backend: redis-py client (for coroutines one for asyncio), a store, or a callable that
            returns one when the function is first called.
        on_conflict: what a call does if the lock is busy: ``wait``, ``skip`` (return None) or
            ``fail``.
        lease: seconds for which the lock is held without a renewal; it is renewed while the
            function runs.
        wait_timeout: longest wait in seconds; None for no limit.
        limit: how many calls may run at once; None, with a rate, for any number.
        rate: how many calls may start in a period: ``"100/m"``, a
            :class:`~celery_singleton_lock.Rate`, or a list of these.
        priority: seconds of head start in the queue, as a number, a template of arguments
            (``"{urgency}"``), or a callable that has the function's parameters.
        renew: whether the lease is renewed. Otherwise it may end while the function runs.
        prefix: first part of the keys; "csl" by default. A store has its own.
        on_lost: called with name and token if the lock is lost while the function runs.
        raise_on_release_error: whether a call raises LockNotOwned at its end if its lock was lost
            meanwhile; False: it logs a warning, and returns the function's result.

    Returns:
        The decorator. Put it below ``@classmethod`` and ``@staticmethod``.

    Raises:
        ConfigurationError: the key names an unknown argument, or an option is invalid.

    Raises by the decorated function:
        LockTimeout: the wait has timed out; has the holder and the rest of its lease.
        LockConflict: the lock is busy, with ``on_conflict="fail"``; has the same fields.
        LockReentered: the call would wait for itself.
        LockNameError: the name cannot be computed.
        LockCostError: the cost of the start cannot be computed, or is above the rate.
        ConfigurationError: the function returned an awaitable or a generator, whose work would run
            without the lock.
        LockNotOwned: at the end of the call, since the lock was lost.
        BackendError: Redis did not answer, or refused.
    """
    check_arguments(key, backend)
    options = {
        "lease": lease,
        "limit": limit,
        "rate": rates_of(rate) or None,
        "priority": checked_priority("priority", priority),
        "renew": renew,
        "prefix": prefix,
        "on_lost": on_lost,
        "raise_on_release_error": raise_on_release_error,
        "blocking": checked_conflict(on_conflict, wait_timeout) == "wait",
        "blocking_timeout": wait_timeout,
    }

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        check_function(function)
        guard = _Guard(function, key, backend, on_conflict, options)
        warn_of_bare_name(f"{guard.name}: the key", key, function, BARE_KEY, depth=2)
        return guard.task() if inspect.iscoroutinefunction(function) else guard.thread()

    return decorate


class _Guard:
    """One decorated function.

    Raises:
        ConfigurationError: the key is invalid for this function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        key: Key,
        backend: Any,
        on_conflict: str,
        options: dict[str, Any],
    ) -> None:
        name = self.name = f"{function.__module__}.{function.__qualname__}"
        self._rates_of = compile_costs(
            name,
            function,
            options["rate"] or (),
            bound=_is_method(function),
            wording=OF_FUNCTION,
        )
        self._behind_self = int(_is_method(function) and not callable(key))
        bound = bool(self._behind_self)
        self._namer = compile_name(name, function, lock_key=key, bound=bound, wording=OF_FUNCTION)
        self._function = function
        self._make_backend = _once(backend)
        self._on_conflict = on_conflict
        self._options = options
        self._head_start: PriorityOf | None = None
        self._before_priority = int(_is_method(function) and isinstance(options["priority"], str))
        if is_computed_priority(options["priority"]):
            self._head_start = compile_priority(
                name,
                function,
                options["priority"],
                "priority",
                bound=bool(self._before_priority),
                wording=OF_FUNCTION,
            )
        self._inside: set[tuple[int, object, str]] = set()  # a forked child inherits the entries

    def thread(self) -> Callable[..., Any]:
        """Return the function for threads."""
        function = self._function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                name, options = self._name(args, kwargs), self._options_of(args, kwargs)
            except ArgumentsDoNotBind:
                return function(*args, **kwargs)  # it raises TypeError
            inside = False
            with self._once_by(threading.get_ident(), name):
                try:
                    with Lock(self._make_backend(), name, **options):
                        inside = True
                        return finished(function(*args, **kwargs), function.__qualname__)
                except LockTimeout as busy:
                    if inside:
                        raise
                    return self._refused(busy)

        return call

    def task(self) -> Callable[..., Any]:
        """Return the coroutine function."""
        function = self._function

        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                name, options = self._name(args, kwargs), self._options_of(args, kwargs)
            except ArgumentsDoNotBind:
                return await function(*args, **kwargs)  # it raises TypeError
            inside = False
            with self._once_by(asyncio.current_task(), name):
                try:
                    async with AsyncLock(self._make_backend(), name, **options):
                        inside = True
                        return finished(await function(*args, **kwargs), function.__qualname__)
                except LockTimeout as busy:
                    if inside:
                        raise
                    return self._refused(busy)

        return call

    def _name(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        return self._namer.name(args[self._behind_self :], kwargs)

    def _options_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the lock of a call.

        Raises:
            ConfigurationError: the priority cannot be computed, or is not a number.
            LockCostError: a cost cannot be computed, or is above its rate.
        """
        options = self._options
        if any(rate.is_computed for rate in options["rate"] or ()):
            options = {**options, "rate": self._rates_of(args, kwargs, None)}
        if self._head_start is None:
            return options
        start = self._head_start(args[self._before_priority :], kwargs, None)
        return {**options, "priority": start.seconds}

    def _refused(self, busy: LockTimeout) -> None:
        """Handle a busy lock.

        Raises:
            LockTimeout: the call has waited.
            LockConflict: the call must not wait.
        """
        if self._on_conflict == "wait":
            raise busy
        if self._on_conflict == "fail":
            facts = (busy.name, busy.holder, busy.expires_in, busy.waits_for)
            raise LockConflict(busy.message, *facts) from None

    def _once_by(self, who: object, name: str) -> AbstractContextManager[None]:
        """Refuse a nested call that would wait for the outer one; each has its own lock object.

        Raises:
            LockReentered: this thread or task already runs the function under this lock.
        """
        mine = (os.getpid(), who, name)
        if mine in self._inside:
            msg = (
                f"{self._function.__qualname__} runs under lock {name!r} and called itself, so it "
                "would wait for itself."
            )
            raise LockReentered(msg, name)
        return noted(self._inside, mine)


def _is_method(function: Callable[..., Any]) -> bool:
    first = next(iter(inspect.signature(function).parameters), "")
    return first in {"self", "cls"}


def _once(backend: Any) -> Callable[[], Any]:
    """Return a function that returns the backend; a callable is called once."""
    if not callable(backend):
        return lambda: backend
    return functools.cache(backend)
