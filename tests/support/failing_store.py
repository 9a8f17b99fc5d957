"""A store in which one call fails. The calls of each client are counted by name."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

from redis import exceptions as failures

from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore

VERBS = (
    *(
        "acquire",
        "release",
        "park_many",
        "claim",
        "extend",
        "sweep_and_grant",
        "sweep_and_grant_many",
        "record_publish_result",
    ),
    *(
        "take_due_locks",
        "unswept_locks",
        "inspect",
        "deliver_revoked",
        "locate_tasks",
        "body",
        "bodies_of",
        "parked",
        "switches",
    ),
    *(
        "waited_for",
        "deliver_unlocked",
        "worker_heartbeat",
        "fleet_size",
        "inbox_size",
        "list_running",
        "leave",
        "identify",
        "has_messages",
        "has_traces",
        "vouch",
    ),
    *("note_lost", "receive", "time", "probe", "schema", "locate_token", "list_waiters"),
)
"""What a worker asks a store for."""


class Moment(Enum):
    """When a call fails."""

    BEFORE = "before it took effect"
    AFTER = "its reply is lost"


KINDS: dict[str, Callable[[], Exception]] = {
    "connection": lambda: failures.ConnectionError("Connection closed by server."),
    "timeout": lambda: failures.TimeoutError("Timeout reading from socket"),
    "READONLY": lambda: failures.ReadOnlyError("You can't write against a read only replica."),
    "LOADING": lambda: failures.BusyLoadingError("Redis is loading the dataset in memory"),
    "BUSY": lambda: failures.ResponseError("BUSY Redis is busy running a script."),
    "OOM": lambda: failures.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    "MOVED": lambda: failures.MovedError("3999 127.0.0.1:6381"),
    "NOPERM": lambda: failures.NoPermissionError("this user has no permissions"),
    "WRONGTYPE": lambda: failures.ResponseError("WRONGTYPE Operation against a wrong kind of key"),
}
"""What the server, or the way to it, answers."""

REFUSALS = frozenset({"OOM", "MOVED", "NOPERM", "WRONGTYPE"})
"""Answers that do not pass by themselves."""


class Failure(NamedTuple):
    """Which call fails, and how."""

    verb: str
    number: int
    moment: Moment
    kind: str

    def __str__(self) -> str:
        return f"{self.verb}[{self.number}], {self.kind}, {self.moment.value}"


class FailingStores:
    """Counts the calls of all stores but those that are left out, and has one of them fail.

    Args:
        failure: which call fails; None for none.
        then_silent: whether every later call fails too, before it takes effect.

    Attributes:
        counts: calls of each verb so far.
        failed: whether the failure has come.
    """

    def __init__(self, failure: Failure | None, *, then_silent: bool = False) -> None:
        self._then_silent = then_silent
        self.counts: Counter[str] = Counter()
        self.failed = False
        self._failure = failure
        self._spared: list[Any] = []
        self._mutex = threading.Lock()
        self._within = threading.local()

    def spare(self, client: Any) -> None:
        """Leave the calls of a client out: those of the test itself."""
        self._spared.append(client)

    @contextmanager
    def installed(self) -> Iterator[FailingStores]:
        """Count, and fail, within a ``with`` block."""
        own = [(kind, verb) for kind in (RedisStore, RedisAdminStore) for verb in VERBS]
        found = {(kind, verb): vars(kind)[verb] for kind, verb in own if verb in vars(kind)}
        for (kind, verb), function in found.items():
            setattr(kind, verb, self._failing(verb, function))
        try:
            yield self
        finally:
            for (kind, verb), function in found.items():
                setattr(kind, verb, function)

    def _failing(self, verb: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(store: Any, *args: Any, **kwargs: Any) -> Any:
            if store.client in self._spared or getattr(self._within, "a_call", False):
                return function(store, *args, **kwargs)
            moment = self._moment_of(verb)
            if moment is Moment.BEFORE:
                raise self._error()
            self._within.a_call = True
            try:
                answer = function(store, *args, **kwargs)
            finally:
                self._within.a_call = False
            if moment is Moment.AFTER:
                raise self._error()
            return answer

        return call

    def _moment_of(self, verb: str) -> Moment | None:
        """Count a call; return when it fails, or None."""
        with self._mutex:
            self.counts[verb] += 1
            failure = self._failure
            if self.failed and self._then_silent:
                return Moment.BEFORE
            if failure is None or (verb, self.counts[verb]) != failure[:2]:
                return None
            self.failed = True
            return failure.moment

    def _error(self) -> Exception:
        assert self._failure is not None
        return explain(KINDS[self._failure.kind]())
