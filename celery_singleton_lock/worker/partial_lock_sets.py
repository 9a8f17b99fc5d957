"""Renews the locks that parked tasks hold while they wait for the next one of their lock set.

If a task holds its first locks and the next one is busy, it is parked at the busy one and continues
to hold the first ones. The worker that parked it renews their leases, until a worker gets the
message and renews them itself. If the first worker dies before that, the leases end. The worker
that gets the message notices that before the task runs. The task then starts over at its first
lock, with its old place.

A message stays parked at the previous lock until it is parked at the next one. If the worker dies
in between, there are two messages. The first lock recognises the copy, so only one of them runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_set import LockSet
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.core.parked_message import Delivery, MessageToPark, UntakenMessage
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.lock_header import LockHeader, options_of, singles
from celery_singleton_lock.worker.lock_set_header import begun_again, own_lock_set
from celery_singleton_lock.worker.message_codec import pack, unpack
from celery_singleton_lock.worker.redis_health import for_each

if TYPE_CHECKING:
    from celery_singleton_lock.store.operator.base import Standing

logger: Final = logging.getLogger(__name__)

_STAYS: Final = frozenset(
    {"parked", "granted", "overdue", "replaced", "revoked", "too_costly", "above_rate", "leaving"}
)
"""States of a message in which the locks that it holds are renewed.

Not ``adrift``: other tasks would wait until a worker consumes its queue. Not ``running``: the
worker that runs the task renews them.
"""


@dataclass(slots=True)
class _Entry:
    """A message that this worker has parked, and that holds locks.

    Args:
        lock_header: the header of the message, with the name of the lock for which it waits.
        lock_set: its locks.
        options: the options of its task.
        look_at: monotonic time of the next check; infinite until it is parked.
    """

    lock_header: LockHeader
    lock_set: LockSet
    options: LockOptions
    look_at: float = math.inf


class PartialLockSets:
    """Renews the locks that the parked messages of this worker hold.

    The watchdog renews; the agent's thread checks which messages still wait.

    Args:
        store: the agent's store.
        watchdog: the worker's watchdog.
        worker: id of this worker.
        look: lock name, token -> the record of the message.
    """

    def __init__(
        self,
        store: Store,
        watchdog: Watchdog,
        worker: str,
        look: Callable[[str, str], Standing],
    ) -> None:
        self._store = store
        self._watchdog = watchdog
        self._worker = worker
        self._look = look
        self._clock: Clock = store.clock
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        """Return the number of messages that hold locks."""
        return len(self._entries)

    def begin(self, header: LockHeader, options: LockOptions) -> None:
        """Start to renew the locks of a message that is about to be parked. Does not wait."""
        lock_set = header.lock_set
        if lock_set is None or not lock_set.kept:
            return
        self._entries[header.token] = _Entry(header, lock_set, options)
        for part in lock_set.kept:
            self._watchdog.watch_later(
                part.name, part.token, options.lease, held=True, on_lost=self._on_lost
            )

    def free(self, header: LockHeader) -> None:
        """Release the locks that a task which starts over still holds.

        Raises:
            BackendError: Redis did not answer; repeat the call.
        """
        for part in header.lock_set.frees if header.lock_set else ():
            self._store.release(part.name, part.token, Ending.AGAIN, worker=self._worker)

    def leave_previous_queue(self, header: LockHeader, lease: float) -> None:
        """Remove a message that is now parked from its previous queue.

        If the task holds the lock of that queue, it continues to hold it.

        Raises:
            BackendError: Redis did not answer; repeat the call.
        """
        lock_set, entry = header.lock_set, self._entries.get(header.token)
        if entry is not None:
            entry.look_at = self._clock.monotonic() + lease / 3
        if lock_set is None or lock_set.left is None:
            return
        left, tokens = lock_set.left, [part.token for part in lock_set.parts]
        if left.token in tokens:
            one = singles(header)[tokens.index(left.token)]
            owner = Owner(left.token, one.attempt, header.task, self._worker)
            self._store.claim(owner, left.name, lease, kept_elsewhere=True, later=one.later)
            return
        reply = self._store.release(left.name, left.token, Ending.FINAL, worker=self._worker)
        if reply.verdict is Verdict.ABSENT:  # Redis may have lost it there; it has other tokens now
            before = (left, *lock_set.frees)
            self._store.vouch(sorted({base_of(part.token) for part in before}))

    def taken_over(self, token: str) -> None:
        """Stop tracking a message that is delivered here: the dispatcher renews its locks."""
        self._entries.pop(token, None)

    def give_back(self, message: Delivery | UntakenMessage) -> None:
        """Release the locks of a message that does not run now: its task starts over.

        Raises:
            BackendError: Redis did not answer; the leases end.
        """
        self.drop(message.token)
        lock_set = own_lock_set(message)
        for part in lock_set.kept if lock_set else ():
            self._store.release(part.name, part.token, Ending.AGAIN, worker=self._worker)

    def look(self) -> None:
        """Check which of the messages still wait; stop renewing the locks of the others.

        Their leases end, unless a worker runs them.

        Raises:
            BackendError: Redis did not answer.
        """
        now = self._clock.monotonic()
        entries = list(self._entries.items())  # the main loop and the watchdog change it meanwhile
        for_each([each for each in entries if each[1].look_at <= now], self._look_at)

    def _look_at(self, kept: tuple[str, _Entry]) -> None:
        token, entry = kept
        waiting = self._look(entry.lock_header.name, token).waiting
        if waiting is not None and waiting.state in _STAYS:
            entry.look_at = self._clock.monotonic() + entry.options.lease / 3
        else:
            self.drop(token)

    def drop(self, token: str) -> None:
        """Stop renewing the locks of a message."""
        entry = self._entries.pop(token, None)
        for part in entry.lock_set.kept if entry else ():
            self._watchdog.forget(part.token, patience=0)

    def begin_all_again(self, until: float) -> None:
        """Let the tasks start over elsewhere, since this worker stops and renews no locks.

        If there is no time for a message, the leases that it holds end, with the same effect.

        Args:
            until: monotonic time at which to stop.

        Raises:
            BackendError: Redis did not answer.
        """
        for_each(list(self._entries.items()), partial(self._begin_again_in_time, until))

    def _begin_again_in_time(self, until: float, kept: tuple[str, _Entry]) -> None:
        if self._clock.monotonic() < until:
            self._begin_again(*kept)

    def _begin_again(self, token: str, entry: _Entry) -> None:
        """Park a copy of a message at its first lock; then take the message out of its queue.

        The first lock is held until the end of this method, so the copy waits for it. If the
        message was granted its lock meanwhile, its task runs with the locks that it holds, and the
        copy is dropped after its end.
        """
        lock_set, waits_for = entry.lock_set, entry.lock_header.name
        waiting, body = self._look(waits_for, token).waiting, self._store.body(waits_for, token)
        if waiting is None or waiting.state != "parked" or body is None:
            return
        again = begun_again(entry.lock_header, lock_set, frees=())
        first, limit = singles(again)[0], options_of(again, 0, entry.options).limit
        kept = pack(unpack(body), again.lock_set.header() if again.lock_set else {})
        reply = self._store.park(
            Owner(first.token, first.attempt, first.task),
            Claim(
                first.name,
                entry.options.lease,
                limit,
                lock_set.place,
                copy=lock_set.place or 1,
                flow=first.flow,
            ),
            MessageToPark(kept, waiting.realm, waiting.queue, waiting.wait),
        )
        if reply.verdict not in {Verdict.WAITING, Verdict.TWIN}:
            return  # taken for a copy of an ended message: the original stays
        if self._store.release(waits_for, token, Ending.CANCEL).verdict is Verdict.RELEASED:
            for part in reversed(lock_set.kept):
                self._store.release(part.name, part.token, Ending.AGAIN)

    def close(self) -> None:
        """Stop renewing all locks, since the agent ends."""
        for token in list(self._entries):
            self.drop(token)

    def _on_lost(self, _name: str, token: str) -> None:
        """Stop renewing the other locks of the message too: its task must start over."""
        for waiting, entry in list(self._entries.items()):
            if any(part.token == token for part in entry.lock_set.kept):
                self.drop(waiting)
