"""The grants that come to a worker: taken, or given back once it takes no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.lock_set import bundle_in
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.worker.partial_lock_sets import Kept, own_bundle
from celery_singleton_lock.worker.loop_channel import guarded
from celery_singleton_lock.core.model import Delivery, Ending, Verdict, base_of
from celery_singleton_lock.worker.agent_commands import End, Leave
from celery_singleton_lock.worker.lock_header import Stamp
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent_queue import RETRY, Tray

WAIT: Final = 1.0
"""Seconds for which one look into the inbox waits."""


class Inbox:
    """Takes what other workers, or this one, push into the worker's list of grants.

    Args:
        store: the agent's.
        worker: id of this worker.
        kept: what parked messages keep meanwhile.
        orders: the agent's.
        pass_on: makes a request of a delivery; runs in the main loop.
        post: runs a call in the main loop.
        stands_still: tells whether the main loop makes no calls at present.
        reject: has the broker reject a message that its task has rejected.

    Attributes:
        delivered: how many grants were passed on.
        replaced: how many others, of tasks that were replaced in line.
        passed: how many grants went on to workers that could begin them sooner.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        kept: Kept,
        orders: Tray,
        pass_on: Callable[[Delivery], None],
        post: Callable[..., None],
        stands_still: Callable[[], bool],
        reject: Callable[[Delivery], None],
    ) -> None:
        """Take grants from now on."""
        self.delivered = 0
        self.replaced = 0
        self.passed = 0
        self._store = store
        self._worker = worker
        self._kept = kept
        self._orders = orders
        self._pass_on = pass_on
        self._post = post
        self._stands_still = stands_still
        self._arrived: dict[str, Delivery] = {}
        self._reject = reject
        self._retired = threading.Event()

    # -- life -------------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Wait for a grant, and lay it into the tray. A round of a thread.

        Returns:
            False once the worker takes no more grants.
        """
        if self._retired.is_set():
            return False
        try:
            delivery = self._store.receive(self._worker, WAIT)
        except BackendError:
            self._retired.wait(RETRY)
        else:
            if delivery is not None:
                self._orders.put(delivery)
        return True

    @property
    def retired(self) -> bool:
        """Whether the worker takes no more grants."""
        return self._retired.is_set()

    def retire(self) -> None:
        """Take no more grants, and have the fleet told. Does not wait."""
        if not self._retired.is_set():
            self._retired.set()
            self._orders.put(Leave())

    def taker(self) -> str:
        """Return the worker that may be granted a lock here: this one, or nobody if retired."""
        return "" if self._retired.is_set() else self._worker

    # -- in the main loop -------------------------------------------------------------------------

    def drop(self, delivery: Delivery) -> None:
        """Settle a message that this worker cannot run, and has told so."""
        self._orders.put(End(self._stamp_of(delivery), Ending.FINAL, None))

    def give_back(self, delivery: Delivery) -> None:
        """Return a message to its place in line: this worker cannot run it, another can."""
        self._orders.put(End(self._stamp_of(delivery), Ending.AGAIN, None))

    def put_off(self, delivery: Delivery) -> None:
        """Return a message that cannot be received: others pass, and it is tried again."""
        self._orders.put(End(self._stamp_of(delivery), Ending.UNREAD, None))

    def reject(self, delivery: Delivery) -> None:
        """End a message that has come back too often: the broker is to dead-letter it."""
        self._orders.put(End(self._stamp_of(delivery), Ending.REJECT, None))

    def _stamp_of(self, delivery: Delivery) -> Stamp:
        """Return a stamp for what is not run here."""
        bundle = own_bundle(delivery)
        attempt = "//" if bundle else ""
        stamp = Stamp(delivery.name, delivery.token, attempt, "", self._worker, granted=True)
        return stamp._replace(bundle=bundle)

    # -- in the agent's thread --------------------------------------------------------------------

    def deliver(self, delivery: Delivery) -> None:
        """Pass a grant on, with its message.

        Raises:
            BackendError: Redis did not answer; the grant lapses, and is made again.
        """
        if self._retired.is_set():
            self._return(delivery)
            return
        if delivery.body is None:
            delivery = self._fetched(delivery)
            if delivery.body is None:
                return
        if delivery.verdict == "rejected":
            self._reject(delivery)
            return
        if delivery.verdict == "replaced":
            self.replaced += 1
        else:
            self.delivered += 1
        self._arrived[base_of(delivery.token)] = delivery  # in place of one that has lapsed
        self._post(self._hand_over)
        self.pass_on_arrived()

    def _hand_over(self) -> None:
        """Pass on what has arrived. Runs in the main loop."""
        for token in list(self._arrived):
            delivery = self._arrived.pop(token, None)
            if delivery is not None:
                guarded(self._pass_on, delivery)

    def pass_on_arrived(self) -> None:
        """Let other workers have what has arrived, if the main loop stands still.

        Raises:
            BackendError: Redis did not answer; the grants lapse, and are made again.
        """
        if not self._stands_still():
            return
        for token in list(self._arrived):
            delivery = self._arrived.pop(token, None)
            if delivery is not None and not self._passed_on(delivery):
                self._arrived.setdefault(token, delivery)

    def _passed_on(self, delivery: Delivery) -> bool:
        if delivery.verdict != "granted" or bundle_in(delivery.body) is not None:
            return False
        return self.passed_on(delivery.name, delivery.token)

    def passed_on(self, name: str, token: str) -> bool:
        """Let another worker have a grant, if it has not begun here and one has a slot for it.

        Returns:
            Whether it is gone from here.

        Raises:
            BackendError: Redis did not answer.
        """
        reply = self._store.release(name, token, Ending.OFFER, worker=self._worker)
        if reply.verdict is Verdict.RELEASED:
            self.passed += 1
        return reply.verdict is not Verdict.GRANTED

    def _fetched(self, delivery: Delivery) -> Delivery:
        return replace(delivery, body=self._store.body(delivery.name, delivery.token))

    def empty(self) -> None:
        """Give back what is still there.

        Raises:
            BackendError: Redis did not answer; the grants lapse.
        """
        while (delivery := self._store.receive(self._worker, 0.01)) is not None:
            self._return(delivery)

    def _return(self, delivery: Delivery) -> None:
        """Give a grant back that this worker does not use."""
        self._kept.give_back(delivery)
        self._store.release(delivery.name, delivery.token, Ending.AGAIN)
