"""Which server of a quorum coordinates a lock: the one where callers queue for it (no I/O)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.store.quorum.values import Each, wait_for_all

DOWN: Final = 1.0
"""Seconds for which a server that did not answer is the last one to be asked."""

MOST_TOKENS: Final = 10_000
"""Most tokens whose coordinators are remembered; others may be queued on any server."""


class At(NamedTuple):
    """A request to one server; the answer is the server's. An error is a BackendError.

    Args:
        server: its number.
        call: what to call on it.
    """

    server: int
    call: Callable[[Any], Any]


def ranked(addresses: Sequence[str], name: str) -> list[int]:
    """Return the servers in the order in which they coordinate a lock (rendezvous hashing).

    If a server fails, its locks are spread over all others, and no other lock moves.
    """

    def weight(server: int) -> bytes:
        return hashlib.sha256(f"{addresses[server]}\n{name}".encode()).digest()

    return sorted(range(len(addresses)), key=weight)


class Coordinators:
    """Asks the coordinators of locks, and remembers where tokens queue.

    Args:
        addresses: of the servers, without passwords.
        tries: how many servers to ask: if none of them answers, the others are not a majority.
        failure: returns the error to raise then, given the errors of these servers.
        clock: source of monotonic seconds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tries: int,
        failure: Callable[[Mapping[int, BackendError]], BackendError],
        clock: Clock,
    ) -> None:
        self._addresses = tuple(addresses)
        self._tries = tries
        self._failure = failure
        self._clock = clock
        self._down: dict[int, float] = {}
        self._asked: dict[str, list[int]] = {}  # token -> servers that it has asked, in order

    def queue(self, name: str, token: str, call: Callable[[Any], Any]) -> Plan[At, Any]:
        """Call the server that this token has asked before, else the coordinator."""
        known = self._asked.get(token, [])[-1:]
        order = self._order(name)
        if known and known[0] in order[: self._tries]:
            order.sort(key=lambda server: server != known[0])
        return (yield from self._first_of(order, call, token))

    def ask(self, name: str, call: Callable[[Any], Any]) -> Plan[At, Any]:
        """Call the coordinator of a lock, or else the next server that answers."""
        return (yield from self._first_of(self._order(name), call, ""))

    def leave(self, token: str, call: Callable[[Any], Any]) -> Plan[Each, None]:
        """Call all servers where a token may queue: one that did not answer may have granted it.

        If another process has queued the token, all servers are called.
        """
        asked = self._asked.pop(token, None) or range(len(self._addresses))
        yield Each(dict.fromkeys(asked, call), wait_for_all, token)

    def server_of(self, name: str, token: str) -> int:
        """Return the server where a token queues."""
        return (self._asked.get(token) or self._order(name)[:1])[-1]

    def is_down(self, server: int) -> None:
        """Record that a server did not answer."""
        self._down[server] = self._clock.monotonic() + DOWN

    def _first_of(
        self, order: Sequence[int], call: Callable[[Any], Any], token: str
    ) -> Plan[At, Any]:
        answers: dict[int, BackendError] = {}
        for server in order[: self._tries]:
            if token:
                self._remember(token, server)  # even without an answer: it may have been granted
            try:
                answer = yield At(server, call)
            except BackendError as error:
                self.is_down(server)
                answers[server] = error
            else:
                self._down.pop(server, None)
                return answer
        raise self._failure(answers)

    def _remember(self, token: str, server: int) -> None:
        """Record where a token queues; others may release it, so the number is limited."""
        while token not in self._asked and len(self._asked) >= MOST_TOKENS:
            self._asked.pop(next(iter(self._asked)), None)
        asked = self._asked.setdefault(token, [])
        if server in asked:
            asked.remove(server)
        asked.append(server)

    def _order(self, name: str) -> list[int]:
        """Return the coordinators of a lock in order; those that are down come last."""
        now = self._clock.monotonic()
        return sorted(
            ranked(self._addresses, name), key=lambda server: self._down.get(server, 0.0) > now
        )
