"""The lock of a batch of celery-batches: one lock for all of its messages.

celery-batches collects messages in the main process and sends each batch to the pool itself. So a
batch does not pass the dispatcher and cannot be parked. It waits for its lock in the pool slot.
"""

from __future__ import annotations

import logging
import string
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NamedTuple

from celery.exceptions import ImproperlyConfigured

from celery_singleton_lock.config.call_options import HEADER
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.lock_mode import ENFORCE, OBSERVE
from celery_singleton_lock.core.lock_name_template import is_computed
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.events import LockRefused, log_keys
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.worker.execution.celery_outcome import Run, fail, mark_skipped, take_out
from celery_singleton_lock.worker.execution.task_lock import and_then, entered, in_place, let_go
from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.not_started import REFUSALS, NotStarted

logger: Final = logging.getLogger(__name__)

_running: ContextVar[str] = ContextVar("celery_singleton_lock_batch", default="")


def is_batches(task: Any) -> bool:
    """Return whether celery-batches, unmodified, sends a task's messages to the pool."""
    module = sys.modules.get("celery_batches")
    if module is None or not isinstance(task, module.Batches):
        return False
    kind = type(task)
    return kind.Strategy is module.Batches.Strategy and kind.flush is module.Batches.flush


def is_running(task_name: str) -> bool:
    """Return whether the caller runs in a batch of a task."""
    return _running.get() == task_name


# -- at worker start -------------------------------------------------------------------------------


def refuse_unsupported(task_name: str, declared: Mapping[str, Any], options: LockOptions) -> None:
    """Refuse options that a batch cannot have.

    Args:
        task_name: name of a task for which :func:`is_batches` is true.
        declared: its lock options, as declared.
        options: its lock options, with defaults from the settings.

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
        (
            "on_conflict",
            options.on_conflict in {"requeue", "preempt"},
            '"wait", "park", "skip" or "fail"',
        ),
        ("max_waiting", options.max_waiting is not None, "None"),
        ("on_retry", options.on_retry == "keep", '"release"'),
        ("on_lost", options.on_lost == "abort", '"report"'),
        ("hold_for", options.hold_for is not None, "None"),
        ("priority", options.has_computed_priority, "a number"),
        ("fair_by", options.has_computed_group, "a name, with limit and weight as numbers"),
        ("rate", options.has_computed_costs, "rates whose costs are numbers"),
        ("debounce", options.debounce is not None, "None"),
        ("unique", options.unique is not None, "None"),
        ("limit", is_computed(declared.get("lock_limit")), "a number"),
        ("rate", is_computed(declared.get("lock_rate")), 'a rate such as "100/m"'),
    ):
        if is_wrong:
            given = declared.get(f"lock_{option}", getattr(options, option))
            msg = (
                f"task {task_name} is a task of celery-batches, and lock_{option} is "
                f"{given!r}, which a batch cannot have: it has no message of "
                f"its own. Declare lock_{option} as {remedy}, or remove it and "
                f"singleton_lock_{option}."
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


def lock_batches(runtime: Any) -> None:
    """Make each batch of this worker acquire its lock. Call this again after each new connection.

    Args:
        runtime: the worker's runtime.

    Raises:
        ImproperlyConfigured: this version of celery-batches uses the pool in an unknown way.
    """
    for name in runtime.extension.declared():
        task = runtime.extension.app.tasks[name]
        if is_batches(task):
            if getattr(task, "_pool", None) is not runtime.consumer.pool:
                msg = (
                    f"task {name}: this version of celery-batches sends batches to the pool in an "
                    "unknown way, so no lock would be taken. Use celery-batches 0.11."
                )
                raise ImproperlyConfigured(msg)
            task.flush = partial(_flush, runtime, task)


def _flush(runtime: Any, task: Any, requests: Any) -> Any:
    """Send a batch. Reading its context makes Celery store the canvas of a message."""
    for request in requests:
        request._context  # noqa: B018, SLF001  # the child needs the chord if the batch is refused
    # celery-batches has no public hook. It sets the pool anew after each pool_restart.
    task._pool = BatchPool(runtime)  # noqa: SLF001
    return type(task).flush(task, requests)


class RefusedBatch(NamedTuple):
    """What a pool process returns for a batch that did not run.

    Args:
        lock: the lock's name.
        policy: as in :class:`~celery_singleton_lock.events.LockRefused`; empty for other errors.
        reason: why the batch was skipped, as text; empty if it failed.
        waits_for: as in ``LockRefused``.
    """

    lock: str
    policy: str
    reason: str
    waits_for: str = ""


class BatchPool:
    """Sends batches to the pool so that each acquires its lock there.

    Args:
        runtime: the worker's runtime.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def apply_async(
        self, target: Callable[..., Any], args: Any, *, callback: Callable[..., Any], **options: Any
    ) -> Any:
        """Send a batch to the pool.

        Args:
            target: the function that celery-batches calls in the pool.
            args: its arguments: the task, and the requests.
            callback: called with the result.
            options: options of the pool's ``apply_async``.
        """
        task, batch, *_ = args
        mode = self._runtime.modes.of(task.name)
        returned = partial(self._returned, callback, batch[0])
        return self._runtime.consumer.pool.apply_async(
            run_batch, (mode, target, *args), callback=returned, **options
        )

    def _returned(self, callback: Callable[..., Any], requests: list[Any], result: Any) -> None:
        if isinstance(result, RefusedBatch):
            self._runtime.loop_channel.post(self._tell, requests, result)
            result = None
        callback(result)

    def _tell(self, requests: list[Any], refused: RefusedBatch) -> None:
        """Report the refusal to observers, the log and Celery's events. Runs in the main loop."""
        for request in requests:
            about = (refused.lock, request.name, request.id)
            event = LockRefused(*about, policy=refused.policy, waits_for=refused.waits_for)
            if refused.policy:
                self._runtime.notifier.observers.notify(event)
                self._runtime.notifier.announce(event)
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
    """Run a batch under the lock of its task. Does not raise if the lock is refused.

    Args:
        mode: the present mode of the task.
        target: the function that celery-batches calls in the pool.
        task: the task of the batch.
        batch: its requests.
        rest: further arguments of ``target``.

    Returns:
        The result of ``target``, or :class:`RefusedBatch`.
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
    header = LockHeader("", token, token, task.name, "", observed=name)
    run = Run(task, lambda *_: go(), token, (), {}, {})
    return extension.tracer.trace(run, header, extension.options(task))


def _locked(go: Callable[[], Any], task: Any, requests: list[Any]) -> Any:
    extension = task._lock_extension  # noqa: SLF001  # our own
    name, options = extension.name_of(task, ([],), {}), extension.options(task)
    lock = in_place(extension.store(), name, options)
    locked = partial(_run_locked, go, task, requests, lock, options)
    return and_then(partial(let_go, lock, f"batch of {task.name}"), locked)


def _run_locked(
    go: Callable[[], Any], task: Any, requests: list[Any], lock: Any, options: LockOptions
) -> Any:
    """Acquire the lock and run the batch. The caller releases the lock."""
    try:
        held = task._lock_extension.undispatched.take(lock, task.name, options)  # noqa: SLF001  # our own
    except NotStarted as not_started:
        return _skipped(task, requests, lock.name, not_started)
    except Exception as error:  # noqa: BLE001  # an error of this package, or a time limit
        return _failed(task, requests, lock.name, error)
    with entered(lock if held else None):
        return go()


def _skipped(task: Any, requests: list[Any], lock: str, not_started: NotStarted) -> RefusedBatch:
    _end_each(task, requests, lambda run: mark_skipped(run, not_started.reason))
    return RefusedBatch(lock, "skip", not_started.reason, not_started.waits_for)


def _failed(task: Any, requests: list[Any], lock: str, error: Exception) -> RefusedBatch:
    _end_each(task, requests, lambda run: fail(run, error))
    policy = next((name for kind, name in REFUSALS.items() if isinstance(error, kind)), "")
    return RefusedBatch(lock, policy, "", getattr(error, "waits_for", ""))


def _go(target: Callable[..., Any], task: Any, *args: Any) -> Any:
    before = _running.get()
    try:
        _running.set(task.name)
        return target(task, *args)
    finally:
        _running.set(before)


def _is_usable(task: Any, request: Any) -> bool:
    """Return whether a request may be in a batch. End it if its own lock options are invalid."""
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
    """Store the end of each request. Log an error, and continue with the next request."""
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
    """Take the place of the tracer of a request, which a batch does not use."""
