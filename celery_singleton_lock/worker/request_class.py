"""How Celery makes requests of messages, and whether those pass a worker's desk."""

from __future__ import annotations

from typing import Any

from celery.worker import strategy
from celery.worker.strategy import hybrid_to_proto2, proto1_to_proto2
from kombu.utils.imports import symbol_by_name

from celery_singleton_lock.worker.request import LockedRequest


def read_as_celery(message: Any, *, utc: bool) -> dict[str, Any]:
    """Return what Celery's strategy gives a request of a message, whichever its protocol.

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
    """Return whether requests of a class tell their desk how they go on."""
    return issubclass(cls, LockedRequest) and all(
        getattr(getattr(cls, method), "__module__", "") == LockedRequest.__module__
        for method in ("execute_using_pool", "on_success")
    )


def request_class(task: Any, consumer: Any) -> Any:
    """Return the request class that Celery's strategy derives for a task."""
    derive: Any = strategy.create_request_cls  # by the name that Celery's strategy itself uses
    return derive(
        symbol_by_name(task.Request),
        task,
        consumer.pool,
        consumer.hostname,
        consumer.event_dispatcher,
        app=consumer.app,
    )


def why_alone(task: Any, *, by_desk: bool) -> tuple[str, str]:
    """Return why a task's messages pass by, and what to change.

    Args:
        task: of a locked task.
        by_desk: whether the desk stands before the pool.
    """
    if not by_desk:
        return (
            "another bootstep replaced consumer.on_task_request",
            "Let that step call what it found there.",
        )
    base = symbol_by_name(task.Request)
    if not issubclass(base, LockedRequest):
        return (
            f"its Request class is {base.__module__}.{base.__qualname__}",
            "Derive that class from celery_singleton_lock.worker.request.LockedRequest.",
        )
    return (
        "this Celery makes request classes in an unknown way",
        "Use a Celery that this version supports.",
    )
