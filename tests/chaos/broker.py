"""The broker of a storm, with connections that are cut."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Final

import redis
from typing_extensions import Self

from celery_singleton_lock.demo.redis_provider import find_provider
from celery_singleton_lock.demo.redis_server import RedisServer
from support.rabbitmq import RabbitMQ
from support.redelivery import redelivery_after

VISIBILITY: Final = 8.0
"""Seconds after which Redis delivers again what was not acknowledged."""


class RedisBroker:
    """Redis: it loses what is on its way to a worker that is killed, see ``test_broker_gap.py``."""

    options: Final[dict[str, Any]] = redelivery_after(VISIBILITY)

    def __init__(self, folder: Path) -> None:
        self._server = RedisServer(find_provider(os.environ.get("CSL_TEST_REDIS") or None))
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._exit.enter_context(self._server)
        self._client = self._exit.enter_context(redis.Redis.from_url(self._server.url))
        self.port, self.url = self._server.port, self._server.url
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def is_empty(self) -> bool:
        """Whether all messages are acknowledged."""
        return not self._client.hlen("unacked") and not self._client.llen("celery")


class RabbitBroker:
    """RabbitMQ: it loses nothing."""

    options: Final[dict[str, Any]] = {"confirm_publish": True}  # a retry is not lost with its cut

    def __init__(self, folder: Path) -> None:
        self._server = RabbitMQ(folder / "rabbit")
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._exit.enter_context(self._server)
        self._vhost = self._exit.enter_context(self._server.vhost())
        self.port, self.url = self._server.port, self._vhost.url
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def is_empty(self) -> bool:
        """Whether all messages are acknowledged."""
        return not any(depth.ready or depth.unacked for depth in self._vhost.depths().values())


BROKERS: Final = {"redis": RedisBroker, "rabbitmq": RabbitBroker}
