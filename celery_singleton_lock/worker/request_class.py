"""The request classes that Celery derives, and whether their requests pass the dispatcher."""

from __future__ import annotations

from typing import Any

from celery.worker import strategy
from celery.worker.strategy import hybrid_to_proto2, proto1_to_proto2
from kombu.utils.imports import symbol_by_name

from celery_singleton_lock.worker.request import LockedRequest


def read_as_celery(message: Any, *, utc: bool) -> dict[str, Any]:
    """Return the arguments with which Celery's strategy creates a request, for each protocol.

    Args:
        message: the message.
        utc: whether the app uses UTC.
    """
    payload = message.payload
    if "args" in payload:  # protocol 1, also with the headers of protocol 2
        body, headers, decoded, utc = hybrid_to_proto2(message, payload)
    elif "task" not in message.headers:
        body, headers, decoded, utc = proto1_to_proto2(message, payload)
    else:
        body, headers, decoded = message.body, message.headers, False
    return {"body": body, "headers": headers, "decoded": decoded, "utc": utc}


def passes(cls: Any) -> bool:
    """Return whether requests of a class report to their dispatcher."""
    return issubclass(cls, LockedRequest) and all(
        getattr(getattr(cls, method), "__module__", "") == LockedRequest.__module__
        for method in ("execute_using_pool", "on_success")
    )


def request_class(task: Any, consumer: Any) -> Any:
    """Return the request class that Celery's strategy derives for a task."""
    derive: Any = strategy.create_request_cls  # the name that Celery's strategy uses
    return derive(
        symbol_by_name(task.Request),
        task,
        consumer.pool,
        consumer.hostname,
        consumer.event_dispatcher,
        app=consumer.app,
    )


def why_alone(task: Any, *, by_dispatcher: bool) -> tuple[str, str]:
    """Return why a task's messages bypass the dispatcher, and what to change.

    Args:
        task: a locked task.
        by_dispatcher: whether the consumer sends messages to the dispatcher.
    """
    if not by_dispatcher:
        return (
            "another bootstep replaced consumer.on_task_request",
            "Let that step call the former value of consumer.on_task_request.",
        )
    base = symbol_by_name(task.Request)
    if not issubclass(base, LockedRequest):
        return (
            f"its Request class is {base.__module__}.{base.__qualname__}",
            "Derive that class from celery_singleton_lock.worker.request.LockedRequest.",
        )
    return (
        "this version of Celery creates request classes in an unknown way",
        "Use a version of Celery that this package supports.",
    )
