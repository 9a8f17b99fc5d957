"""The queues that a worker consumes, and the queue from which a message came."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from celery.exceptions import ImproperlyConfigured
from kombu.common import Broadcast
from kombu.entity import Queue

if TYPE_CHECKING:
    from celery_singleton_lock.worker.request import LockedRequest

MOST_TAGS: Final = 1000
"""Consumer tags that are remembered; a connection has one per queue."""


class Queues(Protocol):
    """The queues of the worker, as the agent uses them."""

    def consumed(self) -> Iterable[str]:
        """Names of the queues that this worker consumes."""
        ...

    def queue_of(self, request: LockedRequest) -> str:
        """Name of the queue from which a message came."""
        ...

    def why_deleted_unconsumed(self, name: str) -> str:
        """Why the broker deletes a queue without consumers; empty if it keeps it."""
        ...


class Consumed:
    """The queues of a consumer.

    Args:
        consumer: Celery's consumer.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._tags: dict[str, str] = {}

    def consumed(self) -> Iterable[str]:
        """Return the names of the queues that are consumed now."""
        self._note_tags()
        return list(self._queues())

    def declared(self, name: str) -> Any:
        """Return the kombu queue of this name if the worker consumes it, else None."""
        return self._queues().get(name)

    def why_deleted_unconsumed(self, name: str) -> str:
        """Return why the broker deletes a queue without consumers; empty if it keeps it."""
        queue = self.declared(name)
        arguments = getattr(queue, "queue_arguments", None) or {}
        if getattr(queue, "auto_delete", False):
            return "auto_delete"
        expires = getattr(queue, "expires", None) is not None or "x-expires" in arguments
        return "expires" if expires else ""

    def queue_of(self, request: LockedRequest) -> str:
        """Return the queue from which a message came, or the most likely one.

        With AMQP the tag of the consumer identifies it. The routing key does not: native delayed
        delivery adds a delay to it, and several queues may be bound by one key.
        """
        info = request.message.delivery_info or {}
        tag = str(info.get("consumer_tag"))
        self._note_tags()
        return self._tags.get(tag) or self._routed_to(info.get("exchange"), info.get("routing_key"))

    def _note_tags(self) -> None:
        """Remember the tags: messages of an old connection may still be here after a reconnect."""
        tags = dict(getattr(self._consumer.task_consumer, "_active_tags", None) or {})
        for name, tag in tags.items():
            self._tags.pop(tag, None)
            self._tags[tag] = name
        while len(self._tags) > max(MOST_TAGS, len(tags)):
            del self._tags[next(iter(self._tags))]

    def _routed_to(self, exchange: str | None, key: str | None) -> str:
        consumed = self._queues()
        queues = self._consumer.app.amqp.queues
        every: dict[str, Any] = {**consumed, **queues}  # also those that are no longer consumed
        for name, entry in every.items():
            if exchange and any(
                bound == exchange and binding_matches(pattern, kind, key)
                for bound, kind, pattern in _bindings(entry)
            ):
                return name
        return key if key in every else next(iter(consumed), key or "")

    def broadcast(self) -> frozenset[str]:
        """Return the names of the exchanges that send each message to every worker."""
        return frozenset(
            bound
            for entry in self._queues().values()
            if isinstance(entry, Broadcast)
            for bound, _, _ in _bindings(entry)
        )

    def _queues(self) -> dict[str, Any]:
        return dict(self._consumer.app.amqp.queues.consume_from)


def _bindings(queue: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the exchange, its type, and the routing key of each binding of a queue."""
    for binding in [queue, *queue.bindings]:
        if binding.exchange:
            yield binding.exchange.name, binding.exchange.type, binding.routing_key or ""


def binding_matches(pattern: str, kind: str, key: str | None) -> bool:
    """Return whether an exchange of this kind passes a routing key to a binding."""
    if kind == "fanout":
        return True
    if kind != "topic":
        return pattern == key
    words = {"*": r"[^.]+", "#": r".*"}
    regex = r"\.".join(words.get(word) or re.escape(word) for word in pattern.split("."))
    regex = regex.replace(r"\..*", r"(\..*)?").replace(r".*\.", r"(.*\.)?")
    return re.fullmatch(regex, key or "") is not None


def refuse_broadcast(app: Any, task: Any) -> None:
    """Refuse a locked task that is routed to a broadcast queue.

    Raises:
        ImproperlyConfigured: the task is routed to a broadcast queue.
    """
    queue = routed_to(app, task)
    if isinstance(queue, Broadcast):
        name = queue.exchange.name
        msg = (
            f"task {task.name}: it is routed to the Broadcast queue {name!r}, so every "
            "worker would run it, one after the other, under one lock and one task id. Route it "
            "to a usual queue, or declare it without LockedTask."
        )
        raise ImproperlyConfigured(msg)


def routed_to(app: Any, task: Any) -> Any:
    """Return the declared queue to which a task is routed by default, or None."""
    name, router = task.name, app.amqp.router
    try:
        route = router.lookup_route(name) or {}
    except Exception:  # noqa: BLE001  # a router of the user may need a real call
        route = {}
    to = route if isinstance(route, str) else route.get("queue", getattr(task, "queue", None))
    queues = app.amqp.queues
    return to if isinstance(to, Queue) else queues.aliases.get(to) or dict.get(queues, to)
