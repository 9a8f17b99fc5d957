"""The grants that come to a worker: taken, or given back once it takes no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.kept import Kept, own_bundle
from celery_singleton_lock.model import Delivery, Ending
from celery_singleton_lock.orders import End, Leave
from celery_singleton_lock.stamp import Stamp
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.tray import RETRY, Tray

WAIT: Final = 1.0
"""Seconds for which one look into the inbox waits."""


class Inbox:
    """Takes what other workers, or this one, push into the worker's list of grants.

    Args:
        store: the agent's.
        worker: id of this worker.
        kept: what parked messages keep meanwhile.
        orders: the agent's.
        pass_on: has the main loop make a request of a delivery.

    Attributes:
        delivered: how many grants were passed on.
        replaced: how many others, of tasks that were replaced in line.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        kept: Kept,
        orders: Tray,
        pass_on: Callable[[Delivery], None],
    ) -> None:
        """Take grants from now on."""
        self.delivered = 0
        self.replaced = 0
        self._store = store
        self._worker = worker
        self._kept = kept
        self._orders = orders
        self._pass_on = pass_on
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
        if delivery.verdict == "replaced":
            self.replaced += 1
        else:
            self.delivered += 1
        self._pass_on(delivery)

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
