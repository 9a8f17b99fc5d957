"""The lock of a batch of celery-batches: one for all of its messages, taken in the pool slot.

celery-batches collects messages in the main process and sends each batch to the pool itself. So a
batch does not pass the dispatcher, and cannot be parked: it waits for its lock in the slot.
"""

from __future__ import annotations

import logging
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from celery.exceptions import ImproperlyConfigured

from celery_singleton_lock.config.call_options import HEADER
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.events import LockRefused, log_keys
from celery_singleton_lock.worker.execution.tracer import Run, Turned, entered, fail, in_place, mark_skipped, take_out
from celery_singleton_lock.worker.dispatch.notifier import REFUSALS
from celery_singleton_lock.core.model import new_token
from celery_singleton_lock.core.lock_mode import ENFORCE, OBSERVE
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.lock_header import Stamp
from celery_singleton_lock.message_text import printable

logger = logging.getLogger(__name__)

_running: ContextVar[str] = ContextVar("celery_singleton_lock_batch", default="")


def is_batches(task: Any) -> bool:
    """Return whether celery-batches sends a task's messages to the pool, in its own way."""
    module = sys.modules.get("celery_batches")
    if module is None or not isinstance(task, module.Batches):
        return False
    kind = type(task)
    return kind.Strategy is module.Batches.Strategy and kind.flush is module.Batches.flush


def is_running(task_name: str) -> bool:
    """Return whether the code that asks runs in a batch of a task."""
    return _running.get() == task_name


# -- at worker start -------------------------------------------------------------------------------


def refuse_unsupported(task_name: str, declared: Mapping[str, Any], options: LockOptions) -> None:
    """Refuse what a batch cannot have.

    Args:
        task_name: of a task for which :func:`is_batches` is true.
        declared: its lock options, as declared.
        options: its lock options, with the settings.

    Raises:
        ImproperlyConfigured: its lock depends on the arguments of one call, or an option needs a
            message of its own.
    """
    if not _has_one_name(declared):
        msg = (
            f"task {task_name} is a task of celery-batches: a batch has one lock, and its name "
            "cannot depend on one call. Declare lock_args=[], or a lock_key (or lock_keys) of "
            'plain text without fields, such as lock_key="import".'
        )
        raise ImproperlyConfigured(msg)
    for option, is_wrong, remedy in (
        ("on_conflict", options.on_conflict == "requeue", '"wait", "park", "skip" or "fail"'),
        ("max_waiting", options.max_waiting is not None, "None"),
        ("on_retry", options.on_retry == "keep", '"release"'),
        ("on_lost", options.on_lost == "abort", '"report"'),
        ("hold_for", options.hold_for is not None, "None"),
    ):
        if is_wrong:
            msg = (
                f"task {task_name} is a task of celery-batches, and lock_{option} is "
                f"{getattr(options, option)!r}, which a batch cannot have: it has no message of "
                f"its own. Declare lock_{option} as {remedy}, or leave it and "
                f"singleton_lock_{option} out."
            )
            raise ImproperlyConfigured(msg)


def _has_one_name(declared: Mapping[str, Any]) -> bool:
    keys = declared.get("lock_keys")
    keys = [declared.get("lock_key")] if keys is None else list(keys)
    if keys == [None]:
        args = declared.get("lock_args")
        return args is not None and not args
    return all(isinstance(key, str) and not _fields(key) for key in keys)


def _fields(template: str) -> list[str]:
    return [name for _, name, *_ in string.Formatter().parse(template) if name is not None]


# -- in the main process ---------------------------------------------------------------------------


def join(crew: Any) -> None:
    """Have each batch of this worker take its lock. After each connection anew, as strategies are.

    Args:
        crew: of the worker.

    Raises:
        ImproperlyConfigured: this version of celery-batches does not use the pool as known.
    """
    for name in crew.extension.declared():
        task = crew.extension.app.tasks[name]
        if is_batches(task):
            if getattr(task, "_pool", None) is not crew.consumer.pool:
                msg = (
                    f"task {name}: this version of celery-batches sends batches to the pool in an "
                    "unknown way, so no lock would be taken. Use celery-batches 0.11."
                )
                raise ImproperlyConfigured(msg)
            task._pool = BatchPool(crew)  # noqa: SLF001  # there is no other place
            task.flush = partial(_flush, type(task).flush, task)


def _flush(flush: Callable[..., Any], task: Any, requests: Any) -> Any:
    """Send a batch. Celery notes the canvas of a message where its context is asked for."""
    for request in requests:
        request._context  # noqa: B018, SLF001  # then the child can tell the chord of a refusal
    return flush(task, requests)


class Refused(NamedTuple):
    """What a pool process returns of a batch that did not run.

    Args:
        lock: name.
        policy: why, as in :class:`~celery_singleton_lock.events.LockRefused`; empty: another error.
        reason: for people, of a batch that was skipped.
    """

    lock: str
    policy: str
    reason: str


class BatchPool:
    """Sends batches to the pool such that each takes its lock there.

    Args:
        crew: of the worker.
    """

    def __init__(self, crew: Any) -> None:
        """Keep the worker's parts."""
        self._crew = crew

    def apply_async(
        self, target: Callable[..., Any], args: Any, *, callback: Callable[..., Any], **options: Any
    ) -> Any:
        """Send a batch to the pool.

        Args:
            target: what celery-batches calls in the pool.
            args: its arguments: the task, and the requests.
            callback: called with the result.
            options: as the pool's.
        """
        task, batch, *_ = args
        mode = self._crew.modes.of(task.name)
        returned = partial(self._returned, callback, batch[0])
        return self._crew.consumer.pool.apply_async(
            run_batch, (mode, target, *args), callback=returned, **options
        )

    def _returned(self, callback: Callable[..., Any], requests: list[Any], result: Any) -> None:
        if isinstance(result, Refused):
            self._crew.mailbox.post(self._tell, requests, result)
            result = None
        callback(result)

    def _tell(self, requests: list[Any], refused: Refused) -> None:
        """Tell observers, the log and Celery's events. Runs in the main loop."""
        for request in requests:
            event = LockRefused(refused.lock, request.name, request.id, policy=refused.policy)
            if refused.policy:
                self._crew.herald.observers.notify(event)
                self._crew.herald.announce(event)
            if refused.reason:
                logger.info(
                    "Task %s[%s] was skipped: %s",
                    request.name,
                    printable(request.id),
                    refused.reason,
                    extra=log_keys(event),
                )


# -- in the pool -----------------------------------------------------------------------------------


def run_batch(
    mode: str, target: Callable[..., Any], task: Any, batch: tuple[list[Any]], *rest: Any
) -> Any:
    """Run a batch under the lock of its task. Raises no error, since nobody would hear it.

    Args:
        mode: of the task, now.
        target: what celery-batches calls in the pool.
        task: of the batch.
        batch: its requests.
        rest: further arguments of ``target``.

    Returns:
        What ``target`` returns; or :class:`Refused`.
    """
    requests = [request for request in batch[0] if _is_usable(task, request)]
    if not requests:
        return None
    go = partial(_go, target, task, (requests,), *rest)
    if mode == ENFORCE:
        return _locked(go, task, requests)
    return _observed(go, task) if mode == OBSERVE else go()


def _observed(go: Callable[[], Any], task: Any) -> Any:
    extension, token = task._lock_extension, new_token()  # noqa: SLF001  # our own
    name = extension.name_of(task, ([],), {})
    stamp = Stamp("", token, token, task.name, "", observed=name)
    run = Run(task, lambda *_: go(), token, (), {}, {})
    return extension.gate.trace(run, stamp, extension.options(task))


def _locked(go: Callable[[], Any], task: Any, requests: list[Any]) -> Any:
    extension = task._lock_extension  # noqa: SLF001  # our own
    name, options = extension.name_of(task, ([],), {}), extension.options(task)
    lock = in_place(extension.store(), name, options)
    try:
        held = extension.gate.take_alone(lock, task.name, options)
    except Turned as turned:
        return _skipped(task, requests, lock.name, turned.reason)
    except Exception as error:  # noqa: BLE001  # ours, or a time limit
        return _failed(task, requests, lock.name, error)
    if not held:
        return go()
    with _releasing(lock, task.name), entered(lock):
        return go()


def _skipped(task: Any, requests: list[Any], lock: str, reason: str) -> Refused:
    _end_each(task, requests, lambda run: mark_skipped(run, reason))
    return Refused(lock, "skip", reason)


def _failed(task: Any, requests: list[Any], lock: str, error: Exception) -> Refused:
    _end_each(task, requests, lambda run: fail(run, error))
    policy = next((name for kind, name in REFUSALS.items() if isinstance(error, kind)), "")
    return Refused(lock, policy, "")


def _go(target: Callable[..., Any], task: Any, *args: Any) -> Any:
    token = _running.set(task.name)
    try:
        return target(task, *args)
    finally:
        _running.reset(token)


@contextmanager
def _releasing(lock: Any, task_name: str) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            lock.release()
        except SingletonLockError as error:
            logger.warning("batch of %s: %s", task_name, error)


def _is_usable(task: Any, request: Any) -> bool:
    """Return whether a request may be part of a batch; one with lock options of its own fails."""
    run = _run_of(task, request)
    call = take_out(run.request, HEADER)
    if call is None:
        return True
    try:
        task._lock_extension.options_of_call(task, call)  # noqa: SLF001  # our own
    except Exception as error:  # noqa: BLE001  # a message may say anything
        _failed(task, [request], "", error)
        return False
    return True


def _end_each(task: Any, requests: list[Any], end: Callable[[Run], object]) -> None:
    """Store the end of each request; if that fails with one, tell, and go on."""
    for request in requests:
        try:
            end(_run_of(task, request))
        except Exception:
            logger.exception(
                "%s[%s] did not run, and its end could not be stored",
                task.name,
                printable(request.id),
            )


def _run_of(task: Any, request: Any) -> Run:
    return Run(
        task,
        _unused,
        request.id,
        request.args,
        request.kwargs,
        dict(request.request_dict or {}),
    )


def _unused(*_: Any) -> None:
    """Stand in for a tracer: a request of a batch is not run alone."""
