"""``@locked``: a function, method or coroutine that runs under a lock named by its arguments.

::

    @locked("report:{report_id}", client, lease=60, wait_timeout=10)
    def build(report_id): ...
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, ParamSpec, Protocol, TypeVar, overload

import redis
import redis.asyncio

from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.config.argument_checks import (
    checked_seconds,
    finished,
    goes_on_after_its_call,
)
from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.errors import (
    ConfigurationError,
    LockConflict,
    LockReentered,
    LockTimeout,
)
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.core.lock_name_template import OF_FUNCTION, ArgumentsDoNotBind, compile_name
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.store.redis.valkey import AsyncValkeyClient, ValkeyClient
from celery_singleton_lock.lock.renewals import OnLost
from celery_singleton_lock.message_text import a_kind

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Client = (
    redis.Redis | redis.asyncio.Redis | ValkeyClient | AsyncValkeyClient | Store | AsyncRedisStore
)
Key = str | Callable[..., str] | None

CONFLICTS: Final = ("wait", "skip", "fail")
"""What a call does that finds its lock busy."""


class Same(Protocol):
    """A decorator that changes no type."""

    def __call__(self, function: F, /) -> F:
        """Decorate."""
        ...


class OrNone(Protocol):
    """A decorator of what may be skipped: then its result is None."""

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
    limit: int = ...,
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
    limit: int = ...,
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
    limit: int = 1,
    renew: bool = True,
    prefix: str | None = None,
    on_lost: OnLost | None = None,
    raise_on_release_error: bool = True,
) -> Any:
    """Run a function under a lock that is named by its arguments, as a task's is.

    Args:
        key: the lock's name as a template of arguments, ``"report:{report_id}"``; or a callable
            with the function's parameters that returns it; or None: the function's name and a
            digest of all its arguments. ``self`` and ``cls`` are no arguments, but a callable gets
            them.
        backend: redis-py client (for coroutines one for asyncio), a store, or a callable that
            returns one when the function is first called.
        on_conflict: what a call does that finds the lock busy: ``wait``, ``skip`` (return None) or
            ``fail``.
        lease: seconds of ownership; renewed while the function runs.
        wait_timeout: most seconds to wait; None for as long as it takes.
        limit: how many calls may run at once.
        renew: renew the lease. Otherwise it ends, also while the function runs.
        prefix: first part of the keys, "csl" unless given; a store has its own.
        on_lost: called with name and token when the lock is lost while the function runs.
        raise_on_release_error: whether a call raises LockNotOwned at its end if its lock was lost
            meanwhile; False: it logs a warning, and returns what the function has returned.

    Returns:
        What decorates the function. Put it below ``@classmethod`` and ``@staticmethod``.

    Raises:
        ConfigurationError: the key names an argument that the function does not have, or an option
            is wrong: when decorating. The decorated function raises LockTimeout or LockConflict,
            which tell the holder and what is left of its lease; LockReentered, if it would wait for
            itself; ConfigurationError, if the function returns an awaitable or a generator, which
            would run without the lock; LockNameError, if its arguments make no name; LockNotOwned
            at its end, if the lock was lost; and BackendError.
    """
    _refuse_slips(key, backend)
    options = {
        "lease": lease,
        "limit": limit,
        "renew": renew,
        "prefix": prefix,
        "on_lost": on_lost,
        "raise_on_release_error": raise_on_release_error,
        "blocking": _conflict(on_conflict, wait_timeout) == "wait",
        "blocking_timeout": wait_timeout,
    }

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _refuse_what_is_no_call(function)
        guard = _Guard(function, key, backend, on_conflict, options)
        return guard.task() if inspect.iscoroutinefunction(function) else guard.thread()

    return decorate


def _refuse_slips(key: object, backend: object) -> None:
    """Refuse what stands in another's place: the function, or the client.

    Raises:
        ConfigurationError: something does.
    """
    if isinstance(backend, str) and not (key is None or isinstance(key, str) or callable(key)):
        msg = (
            f"@locked has {a_kind(key)} as its key and a str as its backend: they are swapped. The "
            "key comes first: @locked(key, client)."
        )
    elif backend is None and inspect.isroutine(key) and key.__name__ != "<lambda>":
        msg = (
            f"@locked stands above {key.__qualname__} without a key and a client: write "
            f'@locked("{key.__name__}", client), or with its arguments, such as '
            '"report:{report_id}".'
        )
    elif backend is None:
        msg = "@locked has no backend: write @locked(key, client), with a Redis client."
    else:
        return
    raise ConfigurationError(msg)


class _Guard:
    """One decorated function."""

    def __init__(
        self,
        function: Callable[..., Any],
        key: Key,
        backend: Any,
        on_conflict: str,
        options: dict[str, Any],
    ) -> None:
        """Check how its lock is named.

        Raises:
            ConfigurationError: it cannot be named so.
        """
        name = f"{function.__module__}.{function.__qualname__}"
        self._behind_self = int(_is_method(function) and not callable(key))
        bound = bool(self._behind_self)
        self._namer = compile_name(name, function, lock_key=key, bound=bound, wording=OF_FUNCTION)
        self._function = function
        self._make_backend = _once(backend)
        self._on_conflict = on_conflict
        self._options = options
        self._inside: set[tuple[object, str]] = set()

    def thread(self) -> Callable[..., Any]:
        """Return the function for threads."""
        function = self._function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                name = self._name(args, kwargs)
            except ArgumentsDoNotBind:
                return function(*args, **kwargs)  # which fails by itself
            inside = False
            with self._once_by(threading.get_ident(), name):
                try:
                    with Lock(self._make_backend(), name, **self._options):
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
                name = self._name(args, kwargs)
            except ArgumentsDoNotBind:
                return await function(*args, **kwargs)  # which fails by itself
            inside = False
            with self._once_by(asyncio.current_task(), name):
                try:
                    async with AsyncLock(self._make_backend(), name, **self._options):
                        inside = True
                        return finished(await function(*args, **kwargs), function.__qualname__)
                except LockTimeout as busy:
                    if inside:
                        raise
                    return self._refused(busy)

        return call

    def _name(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        return self._namer.name(args[self._behind_self :], kwargs)

    def _refused(self, busy: LockTimeout) -> None:
        """Do what a call does that did not get its lock.

        Raises:
            LockTimeout: it has waited.
            LockConflict: it does not wait.
        """
        if self._on_conflict == "wait":
            raise busy
        if self._on_conflict == "fail":
            raise LockConflict(busy.message, busy.name, busy.holder, busy.expires_in) from None

    @contextmanager
    def _once_by(self, who: object, name: str) -> Iterator[None]:
        """Let nobody wait for itself: each call has a lock object of its own.

        Raises:
            LockReentered: this thread or task is inside already.
        """
        if (who, name) in self._inside:
            msg = f"{self._function.__qualname__} runs under lock {name!r}, and called itself."
            raise LockReentered(msg, name)
        self._inside.add((who, name))
        try:
            yield
        finally:
            self._inside.discard((who, name))


def _conflict(on_conflict: object, wait_timeout: object) -> str:
    """Check what a call does that finds its lock busy.

    Raises:
        ConfigurationError: it is nothing that a function can do.
    """
    if on_conflict not in CONFLICTS:
        hint = " Only a task can be parked or requeued." if on_conflict in _OF_TASKS else ""
        msg = f"on_conflict is {on_conflict!r}: use one of {', '.join(CONFLICTS)}.{hint}"
        raise ConfigurationError(msg)
    if wait_timeout is not None:
        checked_seconds("wait_timeout", wait_timeout, 0.001, MAX_WAIT)
        if on_conflict != "wait":
            msg = f"wait_timeout goes with on_conflict='wait': {on_conflict!r} does not wait."
            raise ConfigurationError(msg)
    return str(on_conflict)


_OF_TASKS: Final = ("park", "requeue")


def _refuse_what_is_no_call(function: object) -> None:
    """Refuse what does not end when its call returns.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(function, (classmethod, staticmethod)):
        kind = type(function).__name__
        msg = f"Put @locked below @{kind}, next to the function."
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        msg = "@locked cannot hold a lock while a generator is read. Use `with Lock(…)` inside."
    elif inspect.isfunction(function) and goes_on_after_its_call(function):
        msg = (
            f"@locked stands above another decorator of {function.__qualname__}, which is a "
            "coroutine function or a generator: its body may run after the call has returned. Put "
            "@locked below that decorator, next to a coroutine function; in a generator use "
            "`with Lock(…)`."
        )
    elif not inspect.isfunction(function):
        msg = f"@locked decorates functions, not {function!r}."
    else:
        return
    raise ConfigurationError(msg)


def _is_method(function: Callable[..., Any]) -> bool:
    first = next(iter(inspect.signature(function).parameters), "")
    return first in {"self", "cls"}


def _once(backend: Any) -> Callable[[], Any]:
    """Return what returns the backend: asked once, if it is a callable."""
    if not callable(backend):
        return lambda: backend
    return functools.cache(backend)
