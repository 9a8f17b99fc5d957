"""Sends a unique call, unless one like it was sent before (``lock_unique``).

Announce the call in Redis, send it, confirm it. Of several senders that announce at once, the first
one sends; the others wait for its confirmation. If it does not come, one of them sends its own.
So a call is a duplicate only if the broker has, or had, the message of the first one. If Redis does
not answer, the call is sent: the lock still lets one run at a time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from socket import gaierror
from typing import Any, Final, NamedTuple, Protocol

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import SerializationError

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import SystemClock, wall_time
from celery_singleton_lock.core.lock_name_template import ArgumentsDoNotBind
from celery_singleton_lock.core.unique import (
    HEADER,
    MOST_KEPT,
    Announced,
    EntryState,
    UniqueCall,
)
from celery_singleton_lock.errors import BackendError, DuplicateTask
from celery_singleton_lock.events import CallNotSent, Observers

logger: Final = logging.getLogger(__name__)

PENDING_WAIT: Final = 1.0
"""Seconds for which a sender waits for the confirmation of another one."""

LONGEST_WAIT: Final = 3.0
"""Seconds for which a sender waits for confirmations in all. Then it sends its call."""

_POSITIONAL: Final = ("task_id", "producer", "link", "link_error", "shadow")
"""Parameters of Celery's ``apply_async`` that may follow ``args`` and ``kwargs`` by position."""

_CANVAS: Final = ("link", "link_error", "chain", "chord", "group_id", "replaced_task_nesting")
"""If a call has one of these options, other tasks depend on its end."""

_clock: Final = SystemClock()


class SendingStore(Protocol):
    """What a sender needs of a store."""

    def announce(self, name: str, key: str, task_id: str, *, instead_of: str = "") -> Announced:
        """Announce a call."""
        ...

    def confirm_soon(self, name: str, key: str, task_id: str, retries: int, seconds: float) -> None:
        """Note that a call was sent."""
        ...

    def withdraw(self, name: str, key: str, task_id: str, retries: int) -> bool:
        """Note that a call was not sent."""
        ...

    def wait(self, name: str, token: str, timeout: float) -> bool:
        """Wait until another sender has confirmed its call, or has withdrawn it."""
        ...


class Call(NamedTuple):
    """A call of a task with ``lock_unique``.

    Args:
        task: the task.
        options: the lock options of the call.
        name: name of its lock.
        key: what makes two calls of that lock alike.
        sending: options for Celery's ``apply_async``, with ``task_id``.
        has_own_id: whether the caller has given the id, so that others may wait for its result.
    """

    task: Any
    options: LockOptions
    name: str
    key: str
    sending: dict[str, Any]
    has_own_id: bool = False

    @property
    def task_id(self) -> str:
        """Id of its task."""
        return str(self.sending["task_id"])

    @property
    def retries(self) -> int:
        """Number of its retries; 0 for the first attempt."""
        return int(self.sending.get("retries") or 0)

    @property
    def must_be_sent(self) -> bool:
        """Whether it is sent even if it is a duplicate: other tasks depend on it, or it is a retry.

        The last task of a chain has an empty ``chain``. Only a task id of its own shows that a call
        is the body of a chord.
        """
        canvas = any(self.sending.get(option) is not None for option in _CANVAS)
        return self.retries > 0 or (not self.follows and (self.has_own_id or canvas))

    @property
    def follows(self) -> bool:
        """Whether a duplicate is sent, and ends with the result of the first task."""
        return self.options.on_duplicate == "follow"

    @property
    def kept(self) -> float:
        """Seconds for which the entry stays while the broker has the message.

        Raises:
            _WrongTime: an ETA, a countdown or ``expires`` that Celery refuses.
        """
        if isinstance(self.options.unique, float):
            return self.options.unique
        most = _seconds_until(self.sending.get("expires", self.task.expires))
        if most is None:
            given = self.sending.get("countdown") or self.sending.get("eta")
            most = max(0.0, _seconds_until(given) or 0.0) + self.options.unique_max
        return min(max(0.001, most), MOST_KEPT)

    @property
    def header(self) -> list[Any] | None:
        """The message header by which the worker keeps or ends the entry."""
        return self.header_after("")

    def header_after(self, first: str) -> list[Any] | None:
        """Return the header of a call that follows the task ``first``; empty: it follows none."""
        unique = self.options.unique
        if isinstance(unique, float):
            return None
        late = bool(self.task.acks_late)
        until_started = unique == "until_started"
        return UniqueCall(self.name, self.key, until_started, self.kept, late, first).header


def named(rest: tuple[Any, ...]) -> dict[str, Any]:
    """Return by name the positional arguments of Celery's ``apply_async`` after ``kwargs``."""
    return dict(zip(_POSITIONAL, rest, strict=False))


def send_unique(
    call: Callable[[], Call],
    store: Callable[[], SendingStore],
    send: Callable[..., Any],
    sending: dict[str, Any],
    observers: Observers,
) -> Any:
    """Send a call, unless one like it was sent before.

    Args:
        call: returns the call. Raises the errors of computing the lock's name.
        store: returns the store of the locks.
        send: sends a call with these options, and returns Celery's result.
        sending: the options of the call for Celery.
        observers: are notified of a duplicate.

    Returns:
        Celery's result, or that of the first call; ``duplicate`` says which.

    Raises:
        DuplicateTask: one like it was sent, and ``lock_on_duplicate`` is ``"raise"``.
    """
    try:
        unique = call()
        header = unique.header
    except (ArgumentsDoNotBind, _WrongTime):
        return send(**sending)  # Celery raises the error
    if isinstance(unique.options.unique, float) and unique.retries:
        return send(**sending)  # its time counts from the first attempt
    try:
        found = _announced(unique, store())
    except BackendError as error:
        logger.warning("%s[%s] is sent without lock_unique: %s", *_shown(unique), error)
        return marked(send(**sending), duplicate=False)
    if found.state is EntryState.ANNOUNCED:
        return _send_and_confirm(unique, header, store(), send)
    if unique.must_be_sent:
        return marked(send(**sending), duplicate=False)
    return _duplicate(unique, found.task_id, send, observers)


def _announced(call: Call, store: SendingStore) -> Announced:
    """Announce a call, and wait for others that are being sent at the same time."""
    until = _clock.monotonic() + LONGEST_WAIT
    found = store.announce(call.name, call.key, call.task_id)
    while found.state is EntryState.PENDING and not (call.must_be_sent or call.follows):
        if _clock.monotonic() >= until:
            return Announced(EntryState.ANNOUNCED, call.task_id)
        confirmed = store.wait(call.name, f"unique:{found.task_id}", PENDING_WAIT)
        before = "" if confirmed else found.task_id
        found = store.announce(call.name, call.key, call.task_id, instead_of=before)
    return found


def _send_and_confirm(
    call: Call, header: list[Any] | None, store: SendingStore, send: Callable[..., Any]
) -> Any:
    sending = _with_header(call.sending, header)
    about, outer = (call.name, call.key, call.task_id), sys.exc_info()[1]
    try:
        result = send(**sending)
    except Exception as error:
        if _was_not_sent(error, outer):
            _try(lambda: store.withdraw(*about, call.retries))
        raise
    _try(lambda: store.confirm_soon(*about, call.retries, call.kept))
    return marked(result, duplicate=False)


def _with_header(sending: dict[str, Any], header: list[Any] | None) -> dict[str, Any]:
    if header is None:
        return sending
    return {**sending, "headers": {**(sending.get("headers") or {}), HEADER: header}}


def _send_follower(call: Call, first: str, send: Callable[..., Any]) -> Any:
    """Send a duplicate. The workers decide whether the first task has ended meanwhile."""
    logger.info(
        "%s[%s] is sent to have the result of task %s (lock_on_duplicate, lock %r).",
        *_shown(call),
        first,
        call.name,
    )
    result = send(**_with_header(call.sending, call.header_after(first)))
    return marked(result, duplicate=True)


def _was_not_sent(error: BaseException | None, outer: BaseException | None) -> bool:
    """Return whether the error proves that the message was not sent.

    After any other error the broker may have the message. Then the announcement stays, and the next
    sender waits a second before it sends.

    Args:
        error: of sending.
        outer: an error that the caller handled when it sent the call. It proves nothing.
    """
    while error is not None and error is not outer:
        if isinstance(error, (SerializationError, TypeError, ConnectionRefusedError, gaierror)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _try(tell: Callable[[], object]) -> None:
    """Tell Redis how the sending ended. Without an answer, the announcement ends by itself."""
    try:
        tell()
    except BackendError as error:
        logger.warning(
            "Redis did not store whether a unique call was sent; its announcement expires: %s",
            error,
        )


def _duplicate(call: Call, first: str, send: Callable[..., Any], observers: Observers) -> Any:
    if call.follows:
        return _send_follower(call, first, send)
    logger.info(
        "%s[%s] is not sent: task %s was sent before, and still counts (lock_unique, lock %r).",
        *_shown(call),
        first,
        call.name,
    )
    observers.notify(CallNotSent(call.name, call.task.name, call.task_id, of=first))
    if call.options.on_duplicate == "raise":
        msg = (
            f"{call.task.name} is not sent: task {first} of the lock {call.name!r} was sent before "
            "(lock_unique)."
        )
        raise DuplicateTask(msg, call.name, first)
    return marked(call.task.AsyncResult(first), duplicate=True)


def marked(result: Any, *, duplicate: bool) -> Any:
    """Return the result of a call, marked; that of a class of the user may be the id, or None."""
    with suppress(Exception):  # a model of pydantic raises ValueError
        result.duplicate = duplicate
    return result


def _shown(call: Call) -> tuple[str, str]:
    return str(call.task.name), call.task_id


class _WrongTime(Exception):
    """A value that Celery does not accept as a time."""


def _seconds_until(moment: object) -> float | None:
    """Return the seconds until a time, which is a number of seconds from now, or a datetime."""
    if moment is None:
        return None
    if isinstance(moment, (int, float)):
        return float(moment)
    try:
        return float(maybe_make_aware(maybe_iso8601(moment)).timestamp() - wall_time())
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise _WrongTime(moment) from error
