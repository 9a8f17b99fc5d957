"""Purge parked tasks, or drain them to the broker, with a bounded number in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import Any, Final

from celery_singleton_lock.admin.export_parked import PurgedFile
from celery_singleton_lock.admin.multi_lock_views import give_back
from celery_singleton_lock.admin.select_parked import (
    STEP,
    Filter,
    Stays,
    Tally,
    leaving,
    select,
    steps,
)
from celery_singleton_lock.admin.sweep import requeue_expired
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.model import DONE_FOR
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.record_state import TO_END
from celery_singleton_lock.store.message_operations import HOLD
from celery_singleton_lock.store.operator.base import AdminStore, Operator, Waiting

AHEAD: Final = 10.0
"""A drain takes at once the messages that it can send in this number of seconds."""


def purge(
    store: AdminStore,
    wanted: Filter,
    by: Operator,
    *,
    realm: str = "",
    dropped: Callable[[Waiting], None] | None = None,
    done_for: float = DONE_FOR,
    file: PurgedFile | None = None,
) -> Tally:
    """Drop parked tasks permanently. Writes one audit entry per lock.

    Args:
        store: the store of the locks.
        wanted: the tasks.
        by: the operator; ``by.action`` is ``purge``.
        realm: the realm of the broker. Messages of other realms stay parked. If it is empty, those
            of all realms are dropped.
        dropped: called with each dropped task and its message, to store a result.
        done_for: seconds for which duplicate deliveries of a dropped task are discarded, as of
            ``Settings.done_for``.
        file: where the dropped tasks are written, for an import.

    Returns:
        The number of dropped tasks.

    Raises:
        BackendError: Redis did not answer, or refused the command. Earlier tasks stay dropped.
    """
    requeue_expired(store)
    tally = Tally()
    for group in steps(leaving(tally, select(store, wanted), not_purged(realm))):
        tokens = [each.token for each in group]
        if file is not None:
            file.before(group)
        gone = store.drop_waiters(
            group[0].lock, tokens, by, done_for=done_for, whole=dropped is not None
        )
        if file is not None:
            file.after(gone)
        tally.done[group[0].lock] += len(gone)
        tally.skipped["moved meanwhile"] += len(group) - len(gone)
        for each in gone if dropped else ():
            give_back(store, each)
            dropped(each)  # type: ignore[misc]  # not None: the loop is empty without it
    return tally


def not_purged(realm: str) -> Stays:
    """Return what tells why a task is not purged: it may belong to another application.

    Args:
        realm: the realm of the broker; empty: all tasks are purged.
    """
    reason = "of another broker (--any-broker includes them)"
    return lambda each: reason if realm and each.realm != realm else ""


class Pace:
    """Limits the rate of sending.

    Args:
        rate: messages per second; 0 for no limit.
        clock: local time.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self, rate: float, clock: Clock | None = None, sleep: Callable[[float], Any] | None = None
    ) -> None:
        """Create a limiter. The first message may be sent at once."""
        self._rate = rate
        self._clock = clock or SystemClock()
        self._sleep = sleep or Event().wait
        self._next = self._clock.monotonic()

    def wait(self) -> None:
        """Wait until the next message may be sent."""
        if not self._rate:
            return
        now = self._clock.monotonic()
        if self._next > now:
            self._sleep(self._next - now)
        self._next = max(self._next, now) + 1 / self._rate

    @property
    def ahead(self) -> int:
        """Number of messages to take in one step."""
        return STEP if not self._rate else max(1, min(STEP, int(self._rate * AHEAD)))


def drain(
    store: AdminStore,
    wanted: Filter,
    by: Operator,
    *,
    realm: str,
    publish: Callable[[Waiting], None],
    pace: Pace,
) -> Tally:
    """Send parked tasks back to the broker, in the order of their queues, and drop them here.

    Each message is taken out of the queue, published, then dropped. If this process dies in
    between, the message is parked again after :data:`HOLD` seconds: no task is lost, but one may
    run twice. If a worker with this library receives the message before it is dropped, it stays
    parked. Tasks that were parked after the start of the drain, and tasks that a worker must end,
    are not drained.

    Args:
        store: the store of the locks.
        wanted: the tasks.
        by: the operator; ``by.action`` is ``drain``.
        realm: the realm of the broker. Messages of other realms stay parked.
        publish: sends a message to its queue; raises if it cannot.
        pace: limits the rate.

    Returns:
        The number of tasks that were sent and dropped.

    Raises:
        BackendError: Redis did not answer, or refused the command.
        Exception: any error of ``publish``. Messages that were sent before are dropped here.
    """
    requeue_expired(store)
    tally = Tally()
    for group in steps(
        leaving(tally, select(store, wanted), not_drained(store, realm)), pace.ahead
    ):
        _send_off(store, group, by, publish, pace, tally)
    return tally


def not_drained(store: AdminStore, realm: str) -> Stays:
    """Return what tells why a task is not drained.

    Args:
        store: the store of the locks.
        realm: the realm of the broker.
    """
    began = int(store.time() * 1_000_000)

    def stays(each: Waiting) -> str:
        if each.realm != realm:
            return "of another broker"
        if each.state in {"delayed", "settling", "leaving"}:
            return each.state
        if each.state in TO_END:
            return f"{each.state}: a worker has to end it"
        return "parked since" if each.arrival > began else ""

    return stays


def _send_off(  # noqa: PLR0917  # the parts of one step
    store: AdminStore,
    group: list[Waiting],
    by: Operator,
    publish: Callable[[Waiting], None],
    pace: Pace,
    tally: Tally,
) -> None:
    lock, seal, sent = group[0].lock, new_token(), list[str]()
    sealed = store.take_out_messages(lock, [each.token for each in group], HOLD, seal)
    taken = {each.token for each in sealed}
    missed = [each.token for each in group if each.token not in taken]
    granted = _stored(store, lock, missed)
    tally.skipped["granted meanwhile"] += granted
    tally.skipped["ended, dropped or lost by Redis meanwhile"] += len(missed) - granted
    try:
        for each in sealed:
            pace.wait()
            publish(each)
            sent.append(each.token)
    finally:
        # done_for=None: the attempt is not marked as ended, since the sent message must run.
        gone = store.drop_waiters(lock, sent, by, done_for=None, seal=seal)
        dropped = {each.token for each in gone}
        again = _stored(store, lock, [token for token in sent if token not in dropped])
        tally.done[lock] += len(sent) - again
        tally.skipped["parked again by a worker that locks"] += again
        unsent = [each.token for each in sealed[len(sent) :]]
        if unsent:
            store.record_publish_result(lock, seal, unsent, sent=False)
        for each in sealed[: len(sent)]:
            give_back(store, each)


def _stored(store: AdminStore, lock: str, tokens: Sequence[str]) -> int:
    """Return how many of these messages Redis has; it has none after it was restarted empty."""
    return sum(message is not None for message in store.messages(lock, tokens))
