"""The locks that parked tasks keep while they wait for another of theirs.

A task that has its first locks and finds the next one busy keeps them, and is parked at that one.
The worker that has parked it renews what it keeps until another, or itself, gets the message: then
who got it goes on renewing. If that worker dies meanwhile the kept locks lapse; whoever gets the
message finds that out before it runs, and the task begins again: at its first lock, with the place
of its arrival.

Until a message is kept at its next lock, it stays kept at the last one: who dies in between leaves
two, of which the first lock lets one run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from celery_singleton_lock.core.lock_set import Bundle, Names, Part, bundle_in
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.worker.execution.tracer import options_of
from celery_singleton_lock.core.model import (
    Claim,
    Delivery,
    Ending,
    Owner,
    Parcel,
    Stray,
    Verdict,
    new_token,
)
from celery_singleton_lock.worker.publisher import pack, unpack
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.lock_header import Stamp, singles
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.lock.renewals import Watchdog

if TYPE_CHECKING:
    from celery_singleton_lock.store.operator.base import Standing

logger = logging.getLogger(__name__)

_STAYS: Final = frozenset({"parked", "granted", "overdue", "replaced", "revoked", "leaving"})
"""States of a message in which what it keeps is renewed for it.

Not ``adrift``: it would keep others waiting for as long as no worker consumes its queue. And not
``running``: who runs it renews.
"""


# -- what a stamp becomes --------------------------------------------------------------------------


def bundled(stamp: Stamp, names: Names) -> Stamp:
    """Return the stamp of a task that takes these locks; its token is that for the first."""
    parts = [Part(name, new_token(), limit) for name, limit in names.keys]
    parts[0] = parts[0]._replace(token=stamp.token)
    return stamp._replace(
        name=str(names) if stamp.name else "", bundle=Bundle(tuple(parts), place=stamp.place)
    )


def renewed(bundle: Bundle, token: str) -> Bundle | None:
    """Return the bundle of a message that was delivered before, to one who may still run.

    Args:
        bundle: what was kept with it: those tokens are the other's.
        token: under which it now holds the lock at which it was kept.

    Returns:
        None if what it kept is the other's, so that it has to begin again.
    """
    if bundle.at:
        return None
    first, *others = bundle.parts
    parts = (first._replace(token=token), *(part._replace(token=new_token()) for part in others))
    return bundle._replace(parts=parts)


def onward(stamp: Stamp, bundle: Bundle, further: Bundle | None) -> Stamp:
    """Return the stamp of a delivery that was turned away after it had taken some of its locks.

    Args:
        stamp: of the delivery.
        bundle: its own.
        further: how far it has come; None if it has to begin again.
    """
    if further is None:
        return begun_again(stamp, bundle, frees=bundle.kept)
    return _moved(stamp, further)


def _moved(stamp: Stamp, bundle: Bundle) -> Stamp:
    here = bundle.here
    return stamp._replace(
        name=here.name,
        token=here.token,
        bundle=bundle,
        place=bundle.place,
        granted=False,
        announce=True,
    )


def begun_again(stamp: Stamp, bundle: Bundle, *, frees: tuple[Part, ...]) -> Stamp:
    """Return the stamp of a task that lost a lock that it had kept.

    It has tokens that nobody had before, and counts as one of two copies: the first lock tells.

    Args:
        stamp: of a delivery that was granted the lock at which its message is kept.
        bundle: what was kept with it.
        frees: locks that may still be held for it, and are its own beyond doubt.
    """
    parts = tuple(Part(part.name, new_token(), part.limit) for part in bundle.parts)
    left = Part(stamp.name, stamp.token)
    return stamp._replace(
        name=parts[0].name,
        token=parts[0].token,
        bundle=Bundle(parts, place=bundle.place, left=left, frees=frees),
        place=bundle.place,
        copy=True,
        granted=False,
        announce=True,
    )


def time_left(stamp: Stamp, timeout: float | None, now: float) -> float | None:
    """Return for how many seconds a task may wait for this lock: it has waited for others.

    Args:
        stamp: of the delivery.
        timeout: ``lock_wait_timeout``.
        now: monotonic seconds.
    """
    if timeout is None or stamp.bundle is None or stamp.bundle.left is None:
        return timeout
    return max(0.01, timeout - (now - stamp.stamped_at))


# -- what the agent does ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    """A message that this worker has parked, and that keeps locks.

    Args:
        stamp: of the message; its name is that of the lock for which it waits.
        bundle: its locks.
        options: of its task.
        look_at: monotonic time of the next look; none before it is parked.
    """

    stamp: Stamp
    bundle: Bundle
    options: LockOptions
    look_at: float = math.inf


class Kept:
    """Renews what the parked messages of this worker keep. Looks in the agent's thread.

    Args:
        store: the agent's.
        watchdog: the worker's.
        worker: its id.
        look: lock name, token -> where it stands.
    """

    def __init__(
        self,
        store: Store,
        watchdog: Watchdog,
        worker: str,
        look: Callable[[str, str], Standing],
    ) -> None:
        """Keep nothing yet."""
        self._store = store
        self._watchdog = watchdog
        self._worker = worker
        self._look = look
        self._clock: Clock = store.clock
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        """Return how many messages keep locks."""
        return len(self._entries)

    def begin(self, stamp: Stamp, options: LockOptions) -> None:
        """Renew what a message keeps that is about to be parked. Does not wait."""
        bundle = stamp.bundle
        if bundle is None or not bundle.kept:
            return
        self._entries[stamp.token] = _Entry(stamp, bundle, options)
        for part in bundle.kept:
            self._watchdog.watch_later(
                part.name, part.token, options.lease, held=True, on_lost=self._on_lost
            )

    def free(self, stamp: Stamp) -> None:
        """Give back what a task still holds that begins again.

        Raises:
            BackendError: Redis did not answer; ask again.
        """
        for part in stamp.bundle.frees if stamp.bundle else ():
            self._store.release(part.name, part.token, Ending.AGAIN, worker=self._worker)

    def settle(self, stamp: Stamp, lease: float) -> None:
        """Drop a message that is parked where it was kept before.

        The lock there stays its own, if it is one of those that it keeps.

        Raises:
            BackendError: Redis did not answer; ask again.
        """
        bundle, entry = stamp.bundle, self._entries.get(stamp.token)
        if entry is not None:
            entry.look_at = self._clock.monotonic() + lease / 3
        if bundle is None or bundle.left is None:
            return
        left, tokens = bundle.left, [part.token for part in bundle.parts]
        if left.token in tokens:
            attempt = singles(stamp)[tokens.index(left.token)].attempt
            owner = Owner(left.token, attempt, stamp.task, self._worker)
            self._store.claim(owner, left.name, lease, kept_elsewhere=True)
        else:
            self._store.release(left.name, left.token, Ending.FINAL, worker=self._worker)

    def taken_over(self, token: str) -> None:
        """Leave to the desk what a message keeps that has come back here; it renews it now."""
        self._entries.pop(token, None)

    def give_back(self, message: Delivery | Stray) -> None:
        """Release what a message keeps that does not run now: it begins again.

        Raises:
            BackendError: Redis did not answer; the leases end.
        """
        self.drop(message.token)
        bundle = own_bundle(message)
        for part in bundle.kept if bundle else ():
            self._store.release(part.name, part.token, Ending.AGAIN, worker=self._worker)

    def look(self) -> None:
        """See which of the messages still wait; what the others kept is renewed no more.

        It lapses, unless somebody runs them.

        Raises:
            BackendError: Redis did not answer.
        """
        now = self._clock.monotonic()
        for token, entry in list(self._entries.items()):
            if entry.look_at > now:
                continue
            waiting = self._look(entry.stamp.name, token).waiting
            if waiting is not None and waiting.state in _STAYS:
                entry.look_at = now + entry.options.lease / 3
            else:
                self.drop(token)

    def drop(self, token: str) -> None:
        """Renew no more what a message keeps."""
        entry = self._entries.pop(token, None)
        for part in entry.bundle.kept if entry else ():
            self._watchdog.forget(part.token, patience=0)

    def hand_over(self, until: float) -> None:
        """Let the messages begin again elsewhere: this worker ends, and nobody would renew.

        What is not done in time lapses; then they do so as well.

        Args:
            until: monotonic time until which this may take.

        Raises:
            BackendError: Redis did not answer.
        """
        for token, entry in list(self._entries.items()):
            if self._clock.monotonic() < until:
                self._hand_over(token, entry)

    def _hand_over(self, token: str, entry: _Entry) -> None:
        """Queue a message at its first lock, behind itself; then take it out of its other line.

        There its like waits while the lock is held, and comes next when it is given back. Who has
        been granted the other lock meanwhile goes on with what is kept, and ends both.
        """
        bundle, waits_for = entry.bundle, entry.stamp.name
        waiting, body = self._look(waits_for, token).waiting, self._store.body(waits_for, token)
        if waiting is None or waiting.state != "parked" or body is None:
            return
        again = begun_again(entry.stamp, bundle, frees=())
        first, limit = singles(again)[0], options_of(again, 0, entry.options).limit
        kept = pack(unpack(body), again.bundle.header() if again.bundle else {})
        self._store.park(
            Owner(first.token, first.attempt, first.task),
            Claim(first.name, entry.options.lease, limit, bundle.place, copy=True),
            Parcel(kept, waiting.realm, waiting.queue, waiting.wait),
        )
        if self._store.release(waits_for, token, Ending.CANCEL).verdict is Verdict.RELEASED:
            for part in reversed(bundle.kept):
                self._store.release(part.name, part.token, Ending.AGAIN)

    def close(self) -> None:
        """Renew nothing more: nobody would look any more."""
        for token in list(self._entries):
            self.drop(token)

    def _on_lost(self, _name: str, token: str) -> None:
        """Let the rest lapse as well: nobody can use it any more."""
        for waiting, entry in list(self._entries.items()):
            if any(part.token == token for part in entry.bundle.kept):
                self.drop(waiting)


def own_bundle(delivery: Delivery | Stray) -> Bundle | None:
    """Return the bundle of a message, if what it keeps is its own beyond doubt.

    That is so for the first delivery since it was parked. A later one follows one that may run.
    """
    bundle = bundle_in(delivery.body)
    return bundle if bundle is not None and bundle.here.token == delivery.token else None
