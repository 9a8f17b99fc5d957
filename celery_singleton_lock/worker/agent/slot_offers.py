"""Offers granted messages that wait for a pool slot to workers with a free slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.worker.agent.grant_inbox import GrantInbox
from celery_singleton_lock.worker.dispatch.dispatcher import Dispatcher
from celery_singleton_lock.worker.redis_health import for_each
from celery_singleton_lock.worker.request import LockedRequest

SLOT_WAIT: Final = 2.0
"""Seconds that a granted message waits for a slot before it is offered to other workers."""


class SlotOffers:
    """Offers granted messages to other workers.

    Args:
        clock: source of monotonic seconds.
        inbox: offers a grant to other workers.
        dispatcher: tracks the messages that are in flight.
        watchdog: renews their leases.
        post: runs a call in the main loop.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        inbox: GrantInbox,
        dispatcher: Dispatcher,
        watchdog: Watchdog,
        post: Callable[..., None],
    ) -> None:
        self._clock = clock
        self._inbox = inbox
        self._dispatcher = dispatcher
        self._watchdog = watchdog
        self._post = post

    def offer(self) -> None:
        """Offer the messages that have waited for :data:`SLOT_WAIT` seconds.

        If no worker takes a message of a task, its other messages are not offered in this round.

        Raises:
            BackendError: Redis did not answer.
        """
        self._inbox.offer_arrived()
        refused: set[str] = set()

        def offer(request: LockedRequest) -> None:
            if request.task.name not in refused and not self._offered(request):
                refused.add(request.task.name)

        for_each(
            self._dispatcher.in_flight.waiting_since(self._clock.monotonic() - SLOT_WAIT), offer
        )

    def _offered(self, request: LockedRequest) -> bool:
        token = request.lock_header.token
        offered = self._inbox.offered(request.lock_header.name, token)
        if offered:
            self._watchdog.forget(token, patience=0)
            self._post(self._dispatcher.deliveries.withdraw, request)
        return offered
