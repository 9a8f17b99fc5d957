"""From which queue a message came, and which queues give each worker a copy of their own."""

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
    """What the agent must know of the worker's consumer."""

    def consumed(self) -> Iterable[str]:
        """Names of the queues that this worker consumes."""
        ...

    def queue_of(self, request: LockedRequest) -> str:
        """Name of the queue from which a message came."""
        ...


class Consumed:
    """The queues of a consumer.

    Args:
        consumer: Celery's.
    """

    def __init__(self, consumer: Any) -> None:
        """Look at the consumer anew each time: queues come and go."""
        self._consumer = consumer
        self._tags: dict[str, str] = {}

    def consumed(self) -> Iterable[str]:
        """Return the names of the queues that are consumed now."""
        self._note_tags()
        return list(self._queues())

    def declared(self, name: str) -> Any:
        """Return the queue of this name as it is consumed here, or None."""
        return self._queues().get(name)

    def queue_of(self, request: LockedRequest) -> str:
        """Return the queue from which a message came, as far as the broker tells.

        AMQP tells it by the tag of the consumer. The routing key does not: after native delayed
        delivery it has a delay before it, and several queues may be bound by one.
        """
        info = request.message.delivery_info or {}
        tag = str(info.get("consumer_tag"))
        self._note_tags()
        return self._tags.get(tag) or self._routed_to(info.get("exchange"), info.get("routing_key"))

    def _note_tags(self) -> None:
        """Remember tags: a lost connection makes others, while messages of the old one are here."""
        tags = dict(getattr(self._consumer.task_consumer, "_active_tags", None) or {})
        for name, tag in tags.items():
            self._tags.pop(tag, None)
            self._tags[tag] = name
        while len(self._tags) > max(MOST_TAGS, len(tags)):
            del self._tags[next(iter(self._tags))]

    def _routed_to(self, exchange: str | None, key: str | None) -> str:
        queues = self._queues()
        for name, entry in queues.items():
            if exchange and any(
                bound == exchange and leads(pattern, kind, key)
                for bound, kind, pattern in _bindings(entry)
            ):
                return name
        return key if key in queues else next(iter(queues), key or "")

    def broadcast(self) -> frozenset[str]:
        """Return the names of the exchanges from which every worker gets a copy."""
        return frozenset(
            bound
            for entry in self._queues().values()
            if isinstance(entry, Broadcast)
            for bound, _, _ in _bindings(entry)
        )

    def _queues(self) -> dict[str, Any]:
        return dict(self._consumer.app.amqp.queues.consume_from)


def _bindings(queue: Any) -> Iterator[tuple[str, str, str]]:
    """Yield exchange, its type, and routing key of each binding of a queue."""
    for binding in [queue, *queue.bindings]:
        if binding.exchange:
            yield binding.exchange.name, binding.exchange.type, binding.routing_key or ""


def leads(pattern: str, kind: str, key: str | None) -> bool:
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
    """Refuse a locked task that is routed to a queue of which each worker gets a copy."""
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
    """Return the declared queue to which a task goes unless its sender says otherwise, or None."""
    name, router = task.name, app.amqp.router
    try:
        route = router.lookup_route(name) or {}
    except Exception:  # noqa: BLE001  # a router of the user's that wants a real call
        route = {}
    to = route if isinstance(route, str) else route.get("queue", getattr(task, "queue", None))
    queues = app.amqp.queues
    return to if isinstance(to, Queue) else queues.aliases.get(to) or dict.get(queues, to)
