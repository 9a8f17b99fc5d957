"""Ends a duplicate with the result of the first task (``lock_on_duplicate="follow"``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from celery import states
from celery.app.trace import build_tracer
from celery.backends.base import DisabledBackend
from celery.exceptions import SecurityError
from kombu.exceptions import SerializationError, SerializerNotInstalled

from celery_singleton_lock.config.option_checks import Place
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.worker.execution.celery_outcome import Run, bare, ignored, mark_skipped
from celery_singleton_lock.worker.not_started import NotStarted

logger: Final = logging.getLogger(__name__)

_UNREADABLE: Final = (SecurityError, SerializationError, SerializerNotInstalled)
"""Errors of reading a result that are final: each later read would fail as well."""


def why_no_results(task: Any) -> str:
    """Return why the results of a task are not stored where others read them; empty if they are."""
    if task.ignore_result:
        return "ignore_result=True stores no result. Leave it out"
    backend = task.backend
    if isinstance(backend, DisabledBackend):
        return 'there is no result backend. Set result_backend, such as "redis://…"'
    if any(cls.__module__ == "celery.backends.rpc" for cls in type(backend).__mro__):
        return (
            "the result backend rpc:// sends each result to its caller only. Set result_backend to "
            'one that stores results, such as "redis://…"'
        )
    return ""


def check_results(task: Any, options: LockOptions) -> None:
    """Refuse a task whose duplicates could not find the result of the first one.

    Args:
        task: the task.
        options: its options.

    Raises:
        ConfigurationError: its results are not stored.
    """
    follows = options.unique is not None and options.on_duplicate == "follow"
    reason = follows and why_no_results(task)
    if reason:
        told = f"a duplicate ends with the first task's stored result, and {reason}"
        Place("lock_on_duplicate", task.name).refuse("follow", f'{told}, or use "existing"')


class FirstFailed(Exception):  # logs and monitors show it as the error itself
    """The error of the first task, as reported to the worker's main process.

    Celery takes some errors for the end of the process that reports them, such as WorkerLostError.
    It would end the task once more: its error callbacks and its chord would be called twice.
    """

    def __repr__(self) -> str:
        """Return the text of the error itself."""
        return str(self)


def follow(run: Run, not_started: NotStarted) -> Any:
    """End a run with the result of the first task, if there is one.

    Args:
        run: of the follower.
        not_started: says which task is the first one.

    Returns:
        What Celery's tracer returns. Without a result, the main process queues the message.
    """
    first = not_started.reason
    try:
        found = (
            {} if why_no_results(run.task) else run.task.backend.get_task_meta(first, cache=False)
        )
    except _UNREADABLE as error:
        logger.warning(
            "%s[%s] cannot read the result of task %s, and queues without it: %r",
            *(run.task.name, run.uuid, first, error),
        )
        found = {}
    except Exception as error:  # noqa: BLE001  # of the backend's client, or a soft time limit
        logger.warning(
            "%s[%s] cannot read the result of task %s yet: %r",
            *(run.task.name, run.uuid, first, error),
        )
        return ignored(NotStarted(Outcome.GONE))
    result = found.get("result")
    match found.get("status"):
        case states.SUCCESS:
            return _end_as_celery_does(run, lambda: result)
        case states.FAILURE if isinstance(result, Exception):
            return _end_as_celery_does(run, lambda: _raise(result))
        case states.REVOKED:
            reason = f"task {first}, whose result it has, was revoked (lock_on_duplicate)"
            mark_skipped(run, reason)
            return ignored(NotStarted(Outcome.SKIP_FOLLOWING, reason))
        case _:
            return ignored(not_started)


def _raise(error: Exception) -> None:
    raise error from None  # the log shows this error only


def _end_as_celery_does(run: Run, body: Callable[[], Any]) -> Any:
    """Call Celery's tracer with another body, so that links, chain and chord go on."""
    task = object.__new__(type(run.task))
    vars(task).update(vars(run.task))
    task.run = lambda *_args, **_kwargs: body()
    app, hostname = task.app, run.request.get("hostname")
    trace = build_tracer(task.name, task, app.loader, hostname, app=app)
    outcome = trace(run.uuid, run.args, run.kwargs, run.request)
    if outcome.info is not None and outcome.info.state == states.FAILURE:
        outcome.retval.exception = FirstFailed(repr(bare(outcome.retval.exception)))
    return outcome
