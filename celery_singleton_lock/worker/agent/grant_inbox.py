"""Receives a worker's grants, and returns them when the worker takes no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.lock_set import lock_set_in
from celery_singleton_lock.core.model import Ending, Verdict
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent_commands import Command, LeaveFleet, Release
from celery_singleton_lock.worker.agent_queue import RETRY, AgentQueue
from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.lock_set_header import own_lock_set
from celery_singleton_lock.worker.loop_channel import guarded
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets
from celery_singleton_lock.worker.redis_health import for_each

WAIT: Final = 1.0
"""Seconds for which one read of the inbox waits."""

TOGETHER: Final = 20
"""Most long messages that are read together."""


class GrantInbox:
    """Takes the grants that scripts push into the worker's list in Redis.

    Args:
        store: the agent's store.
        worker: id of this worker.
        partial_lock_sets: renews the locks that parked messages hold.
        commands: the queue of the agent.
        dispatch: creates a request for a delivery and dispatches it; runs in the main loop.
        post: runs a call in the main loop.
        stands_still: returns whether the main loop makes no posted calls at present.
        reject: lets the broker dead-letter a message that its task has rejected, then calls the
            given function to drop it.
        preempt: ends the task with a token, because of a newer attempt.
        is_here: returns whether a request with a token is in the pool, or on its way there.
        doubt: notes that Redis may have lost the ends up to now.

    Attributes:
        delivered: number of grants that were passed to the main loop.
        replaced: number of deliveries of tasks that were replaced in their queue.
        passed: number of grants that went to other workers with a free slot.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        partial_lock_sets: PartialLockSets,
        commands: AgentQueue,
        dispatch: Callable[[Delivery], None],
        post: Callable[..., None],
        stands_still: Callable[[], bool],
        reject: Callable[[Delivery, Callable[[Delivery], None]], None],
        preempt: Callable[[str, str], None],
        is_here: Callable[[str], bool],
        doubt: Callable[[], None],
    ) -> None:
        self.delivered: int = 0
        self.replaced: int = 0
        self.passed: int = 0
        self._store = store
        self._worker = worker
        self._partial_lock_sets = partial_lock_sets
        self._commands = commands
        self._dispatch = dispatch
        self._post = post
        self._stands_still = stands_still
        self._arrived: dict[str, Delivery] = {}
        self._reject = reject
        self._preempt = preempt
        self._is_here = is_here
        self._doubt = doubt
        self._interrupted = False
        self._retired = threading.Event()

    # -- receiving --------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Wait for a grant, and pass it on. One round of a thread.

        Returns:
            False once the worker takes no more grants.
        """
        if self._retired.is_set():
            return False
        try:
            delivery = self._store.receive(self._worker, WAIT)
        except BackendError:
            self._interrupted = True
            self._retired.wait(RETRY)
            return True
        if self._interrupted:  # this grant may come from a server that has lost the last ends
            self._interrupted = False
            self._doubt()
        if delivery is not None and not self._delivered_at_once(delivery):
            self._commands.put(delivery)
            if self._retired.is_set():  # others may have been read with it
                self._commands.put(LeaveFleet())
        return True

    def _delivered_at_once(self, delivery: Delivery) -> bool:
        """Pass a grant to the main loop without the agent, which saves a switch of threads.

        Not while the agent works: it may have parked this message without having reported that. The
        main loop must get that report before the grant.

        Returns:
            False if the agent must deliver it.
        """
        is_plain = delivery.verdict == "granted" and delivery.body is not None
        if not (is_plain and self._commands.is_idle) or self._retired.is_set():
            return False
        if self._stands_still():
            return False
        self._arrive(delivery)
        return True

    @property
    def retired(self) -> bool:
        """Whether the worker takes no more grants."""
        return self._retired.is_set()

    def retire(self) -> None:
        """Take no more grants, and let the agent leave the fleet. Does not wait."""
        if not self._retired.is_set():
            self._retired.set()
            self._commands.put(LeaveFleet())

    def taker(self) -> str:
        """Return this worker's id, for scripts that grant to it; empty if it takes no grants."""
        return "" if self._retired.is_set() else self._worker

    def arriving(self) -> int:
        """Return the number of deliveries that wait for the main loop."""
        return len(self._arrived)

    def arrived(self) -> list[LockHeader]:
        """Return lock headers for the deliveries that wait for the main loop."""
        return [self._header_of(delivery) for delivery in list(self._arrived.values())]

    # -- in the main loop -------------------------------------------------------------------------

    def drop(self, delivery: Delivery) -> None:
        """Drop a message that this worker cannot run, and of whose task it has reported the end."""
        self._commands.put(Release(self._header_of(delivery), Ending.FINAL))

    def give_back(self, delivery: Delivery) -> None:
        """Return a message to its place in the queue: another worker can run it."""
        self._commands.put(Release(self._header_of(delivery), Ending.AGAIN))

    def put_off(self, delivery: Delivery) -> None:
        """Return a message that could not be read: it is delivered again after a delay."""
        self._commands.put(Release(self._header_of(delivery), Ending.UNREAD))

    def reject(self, delivery: Delivery) -> None:
        """End a message that was returned too often: the broker dead-letters it."""
        self._commands.put(Release(self._header_of(delivery), Ending.REJECT))

    def _header_of(self, delivery: Delivery) -> LockHeader:
        """Return a lock header for a delivery that does not run here."""
        lock_set = own_lock_set(delivery)
        attempt = "//" if lock_set else ""
        header = LockHeader(delivery.name, delivery.token, attempt, "", self._worker, granted=True)
        return header._replace(lock_set=lock_set)

    # -- in the agent's thread --------------------------------------------------------------------

    def with_bodies(self, commands: list[Command]) -> list[Command]:
        """Return commands with the messages of grants that came without theirs, if Redis answers.

        Long ones come without. If :meth:`deliver` read many of them one by one, the leases of the
        last would end before.
        """
        missing = [
            each
            for each in commands
            if isinstance(each, Delivery) and each.body is None and each.verdict != "preempted"
        ]
        if len(missing) < 2 or self._retired.is_set():  # noqa: PLR2004  # one is read by itself
            return commands
        found: dict[int, Delivery] = {}
        with suppress(BackendError):
            for start in range(0, len(missing), TOGETHER):
                some = missing[start : start + TOGETHER]
                bodies = self._store.bodies_of([(each.name, each.token) for each in some])
                for each, body in zip(some, bodies, strict=True):
                    found[id(each)] = replace(each, body=body)
        return [found.get(id(each), each) for each in commands]

    def deliver(self, delivery: Delivery) -> None:
        """Pass a grant with its message to the main loop.

        Raises:
            BackendError: Redis did not answer. The lease expires, and Redis grants again.
        """
        if self._retired.is_set() or delivery.verdict == "preempted":
            self._return(delivery)
            return
        if delivery.body is None:
            delivery = self._fetched(delivery)
            if delivery.body is None:
                return
        if delivery.verdict == "rejected":
            self._reject(delivery, self.drop)
            return
        self._arrive(delivery)
        self.offer_arrived()

    def _arrive(self, delivery: Delivery) -> None:
        base = base_of(delivery.token)
        replaced = self._arrived.pop(base, None)  # its grant has expired, or a revoke has ended it
        self._arrived[base] = delivery
        if replaced is not None and replaced.token != delivery.token:
            self._post(self._give_up, replaced)
        self._post(self._receive_arrived)

    def _give_up(self, delivery: Delivery) -> None:
        """Release the other locks of a grant that nobody uses. Runs in the main loop."""
        if own_lock_set(delivery) is not None and not self._is_here(delivery.token):
            self._partial_lock_sets.drop(delivery.token)
            self.give_back(delivery)

    def _receive_arrived(self) -> None:
        """Receive the grants that have arrived. Runs in the main loop."""
        for token in list(self._arrived):
            delivery = self._arrived.pop(token, None)
            if delivery is None:
                continue
            if delivery.verdict == "replaced":
                self.replaced += 1
            else:
                self.delivered += 1
            guarded(self._dispatch, delivery)

    def offer_arrived(self) -> None:
        """Offer the grants that have arrived to other workers, if the main loop makes no calls.

        Raises:
            BackendError: Redis did not answer. The leases expire, and Redis grants again.
        """
        if not self._stands_still():
            return
        for token in list(self._arrived):
            delivery = self._arrived.pop(token, None)
            if delivery is not None and not self._offered(delivery):
                self._arrived.setdefault(token, delivery)

    def _offered(self, delivery: Delivery) -> bool:
        if delivery.verdict != "granted" or lock_set_in(delivery.body) is not None:
            return False
        return self.offered(delivery.name, delivery.token)

    def offered(self, name: str, token: str) -> bool:
        """Offer a grant that has not begun here to a worker with a free slot.

        Returns:
            Whether another worker has it now.

        Raises:
            BackendError: Redis did not answer.
        """
        reply = self._store.release(name, token, Ending.OFFER, worker=self._worker)
        if reply.verdict is Verdict.RELEASED:
            self.passed += 1
        return reply.verdict is not Verdict.GRANTED and not reply.lost

    def _fetched(self, delivery: Delivery) -> Delivery:
        return replace(delivery, body=self._store.body(delivery.name, delivery.token))

    def empty(self) -> None:
        """Return the grants that are still in the inbox, or wait for the main loop.

        Raises:
            BackendError: Redis did not answer. The leases of the grants expire.
        """
        waiting = [self._arrived.pop(token, None) for token in list(self._arrived)]
        for_each(filter(None, waiting), self._return)
        for_each(iter(lambda: self._store.receive(self._worker, 0.01), None), self._return)

    def _return(self, delivery: Delivery) -> None:
        """Return a grant that this worker does not use. A notice of a preemption is not a grant."""
        if delivery.verdict == "preempted":
            self._preempt(delivery.token, delivery.by)
            return
        self._partial_lock_sets.give_back(delivery)
        self._store.release(delivery.name, delivery.token, Ending.AGAIN)
