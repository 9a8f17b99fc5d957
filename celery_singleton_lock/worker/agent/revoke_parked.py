"""Ends what revoked tasks have in Redis: parked messages, reservations, and unique calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from celery.worker.state import revoked as revoked_tasks

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.model import Ending, Verdict
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent_commands import DeliverRevoked, TrackReservation
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.redis_health import for_each


class RevokeParked:
    """Ends the parked messages, reservations and unique calls of tasks in Celery's ``revoked`` set.

    Args:
        store: the agent's store.
        realm: hash of the broker's URL.
        commands: the queue of the agent.
        taker: returns the id of the worker to which a release may grant; empty if there is none.
        granted: task ids -> lock name and token of each grant that this worker has for them.
        end_unique: ends the unique calls of those task ids that wait in this worker.
        withdraw: called with the token of each message that a revoke has taken out of its queue, or
            whose grant it has ended: a request with that token must no longer begin.
    """

    def __init__(
        self,
        store: Store,
        *,
        realm: str,
        commands: AgentQueue,
        taker: Callable[[], str],
        granted: Callable[[Collection[str]], Iterable[tuple[str, str]]],
        end_unique: Callable[[Iterable[str]], None],
        withdraw: Callable[[str], None],
    ) -> None:
        self._store = store
        self._granted = granted
        self._end_unique = end_unique
        self._withdraw = withdraw
        self._realm = realm
        self._commands = commands
        self._taker = taker
        self._clock: Clock = store.clock
        self._tracked: dict[str, TrackReservation] = {}
        self._seen: set[str] = set()

    def track(self, reservation: TrackReservation) -> None:
        """Track a reservation, to end it when its task is revoked."""
        self._tracked[reservation.token] = reservation

    def parked(self, task_id: str) -> None:
        """End a task that has just been parked if it was revoked before."""
        if task_id in revoked_tasks:
            self._commands.put(DeliverRevoked((task_id,)))

    def check(self) -> None:
        """End tasks that were revoked since the last call, also by mingle or a state file."""
        known = set(revoked_tasks)
        news = known - self._seen
        self._seen = known
        if news:
            self._end_unique(news)
            self._commands.put(DeliverRevoked(tuple(news)))

    def deliver(self, command: DeliverRevoked) -> None:
        """Deliver the parked messages of revoked tasks, so that a worker ends them.

        Those that were granted their lock and wait for a slot are included. If another worker
        received the revoke first, only this worker finds the grants that it has.

        Raises:
            BackendError: Redis did not answer.
        """
        found = (*self._store.locate_tasks(command.task_ids), *self._granted(command.task_ids))
        for_each(list(dict.fromkeys(found)), self._deliver)

    def _deliver(self, found: tuple[str, str]) -> None:
        name, token = found
        reply = self._store.deliver_revoked(name, token, realm=self._realm, worker=self._taker())
        if reply.verdict is Verdict.RELEASED:
            self._withdraw(token)

    def free(self) -> None:
        """End the reservations of tasks that were revoked before their next attempt.

        Raises:
            BackendError: Redis did not answer.
        """
        for_each(list(self._tracked.values()), self._free)

    def _free(self, reservation: TrackReservation) -> None:
        ended = reservation.until <= self._clock.monotonic()
        if reservation.task_id in revoked_tasks and not ended:
            self._store.release(
                reservation.name, reservation.token, Ending.FINAL, worker=self._taker()
            )
        if reservation.task_id in revoked_tasks or ended:
            del self._tracked[reservation.token]
