"""A task book on each broker: Redis, RabbitMQ with classic queues, RabbitMQ with quorum queues."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.book import Book
from support.rabbitmq import VirtualHost
from support.waiting import eventually

BROKERS = ("redis", "classic", "quorum")


def queues(kind: str, names: Sequence[str], **options: Any) -> dict[str, dict[str, Any]]:
    """Return ``task_queues`` with a topic exchange, which native delayed delivery needs.

    Args:
        kind: one of :data:`BROKERS`.
        names: of the queues; each is its own routing key.
        options: further arguments of each queue, such as ``max_priority``.
    """
    arguments = {} if kind == "redis" else {"x-queue-type": kind}
    return {
        name: {
            "exchange": "tasks",
            "exchange_type": "topic" if kind == "quorum" else "direct",
            "routing_key": name,
            "queue_arguments": arguments,
            **options,
        }
        for name in names
    }


class BrokerBook(Book):
    """A task book that knows what is left in its broker, whichever that is.

    Args:
        kind: one of :data:`BROKERS`.
        redis_url: result backend and locks; the broker too if ``kind`` says so.
        folder: for journal and gates.
        vhost: the broker, unless it is Redis.
        names: the queues; those that ``task_queues`` in ``conf`` declares, if it does.
        conf: settings.
    """

    def __init__(
        self,
        kind: str,
        redis_url: str,
        folder: Path,
        *,
        vhost: VirtualHost | None = None,
        names: Sequence[str] = ("celery",),
        conf: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.kind, self.vhost = kind, vhost
        conf = {"task_queues": queues(kind, names), "task_default_queue": names[0], **(conf or {})}
        conf.setdefault("task_default_routing_key", conf["task_default_queue"])
        # 28 queues that are declared in a fraction of the time; one test uses the default.
        conf.setdefault("broker_native_delayed_delivery_queue_type", "classic")
        self.names = list(conf["task_queues"])
        super().__init__(
            redis_url if vhost is None else vhost.url,
            folder,
            backend=redis_url,
            lock_url=options.pop("lock_url", redis_url),
            conf=conf,
            **options,
        )

    def unacked(self) -> int:
        """Return the number of unacknowledged messages."""
        if self.vhost is None:
            return super().unacked()
        return sum(depth.unacked for depth in self.vhost.depths().values())

    def queued(self, queue: str = "celery") -> int:
        """Return how many messages lie in a queue of the broker, whatever their priority."""
        if self.vhost is None:
            lists = (queue, *(f"{queue}\x06\x16{step}" for step in (3, 6, 9)))
            return sum(super(BrokerBook, self).queued(name) for name in lists)
        return self.vhost.depths()[queue].ready

    def left(self) -> int:
        """Return how many messages the broker still has of any of the queues."""
        return self.unacked() + sum(self.queued(name) for name in self.names)

    def await_settled(self, *keys: Any, timeout: float = 10) -> None:
        """Wait until the locks are free, and the broker has no message and awaits no word."""
        for key in keys:
            self.await_free(key, timeout)
        eventually(lambda: self.left() == 0, timeout, lambda: f"settled: {self.left()}")

    def cut(self) -> float:
        """Cut all connections to the broker; return when."""
        if self.vhost is not None:
            self.vhost.cut()
        else:
            for client in self.broker.client_list():
                if client["addr"] != self.broker.client_info()["addr"]:
                    self.broker.client_kill_filter(_id=client["id"])
        return time.monotonic()
