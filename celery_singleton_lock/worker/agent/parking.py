"""How messages get into Redis: in batches, in order, and with what they keep meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.worker.agent.data_loss import DataLoss
from celery_singleton_lock.worker.dispatch.dispatcher import Desk
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.events import TaskBlocked
from celery_singleton_lock.worker.execution.tracer import claim_of, options_of
from celery_singleton_lock.worker.partial_lock_sets import Kept, time_left
from celery_singleton_lock.core.model import Claim, Owner, Parcel, ParkedMessage, Reply, Verdict
from celery_singleton_lock.worker.agent_commands import Errand, Park, Settle
from celery_singleton_lock.worker.publisher import pack
from celery_singleton_lock.worker.consumed_queues import Queues
from celery_singleton_lock.worker.agent.replica_wait import ParkedAnswer, ReplicaWait
from celery_singleton_lock.worker.request import LockedRequest, about
from celery_singleton_lock.worker.agent.revoke_parked import Revokes
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.lock_header import doubted, singles
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.worker.agent_queue import Tray

logger = logging.getLogger(__name__)

_KEPT: Final = frozenset({Verdict.WAITING, Verdict.TWIN})
"""Answers after which the broker may forget the message."""


class Parker:
    """Parks what the desk hands over, and has the desk told what became of each message.

    Args:
        store: the agent's.
        worker: id of this worker.
        realm: hash of the broker.
        queues: what the worker consumes.
        rules: task -> its options.
        kept: what parked messages keep meanwhile.
        orders: the agent's.
        revokes: looks at each message that is parked.
        loss: tracks each message that is parked.
        replicated: waits for replicas, with connections of its own; None if none are waited for.
        desk: whom to tell.
        post: runs a call in the main loop.
        done_for: seconds for which later copies of an ended attempt end quietly.
        max_body: most bytes of a message that is parked.

    Attributes:
        parked: how many messages were parked.
        errors: how many could not be, for now.
    """

    def __init__(
        self,
        store: Store,
        *,
        worker: str,
        realm: str,
        queues: Queues,
        rules: Callable[[Any], LockOptions],
        kept: Kept,
        orders: Tray,
        revokes: Revokes,
        loss: DataLoss,
        replicated: Store | None,
        desk: Desk,
        post: Callable[..., None],
        done_for: float,
        max_body: int,
    ) -> None:
        """Have parked nothing yet."""
        self.parked = 0
        self.errors = 0
        self._store = store
        self._worker = worker
        self._realm = realm
        self._queues = queues
        self._rules = rules
        self._kept = kept
        self._orders = orders
        self._revokes = revokes
        self._loss = loss
        self._desk = desk
        self._post = post
        self._done_for = done_for
        self._max_body = max_body
        self._clock: Clock = store.clock
        self._replica_wait: ReplicaWait | None = None
        if replicated is not None:
            self._replica_wait = ReplicaWait(
                replicated, orders=orders, confirmed=self._keep_account
            )

    @property
    def threads(self) -> list[BackgroundThread]:
        """The threads that park along with the agent's."""
        return [] if self._replica_wait is None else [self._replica_wait.thread]

    def close(self, timeout: float) -> None:
        """End these threads."""
        if self._replica_wait is not None:
            self._replica_wait.close(timeout)

    def order(self, request: LockedRequest) -> None:
        """Have a message parked. Does not wait."""
        if request.stamp.bundle is not None:
            self._kept.begin(request.stamp, request.options(self._rules))
        self._orders.put(Park(request))

    def park(self, parks: list[Park]) -> None:
        """Carry out a run of orders in one call.

        Raises:
            BackendError: Redis did not answer; ask again.
        """
        packed = [(park, self._parcel(park)) for park in parks]
        fitting = [(park, parcel) for park, parcel in packed if self._fits(park, parcel[2])]
        for park, _ in fitting:
            self._kept.free(park.request.stamp)
        asked_at = self._clock.monotonic()
        replies = self._store.park_many([parcel for _, parcel in fitting])
        for (park, parcel), reply in zip(fitting, replies, strict=True):
            if isinstance(reply, BackendError):
                logger.warning("%s stays with the broker: %s", park.request, reply)
                self.errors += 1
                self._orders.try_again(park, reply)
                continue
            answer = ParkedAnswer(park, parcel, reply, asked_at)
            if self._replica_wait is not None and reply.verdict in _KEPT:
                self._replica_wait.ask(answer)
            else:
                self._keep_account(answer)

    def _keep_account(self, answer: ParkedAnswer) -> None:
        """Have the desk told of a message that is safe, or is not to be parked."""
        request, reply = answer.park.request, answer.reply
        self._parked(request, reply, answer.asked_at)
        if reply.verdict is Verdict.WAITING:
            token, task = answer.parcel[0].token, answer.parcel[0].task
            self._loss.track(ParkedMessage(answer.lock, token, task, request.id))
        if request.stamp.bundle is not None and reply.verdict is not Verdict.FULL:
            self.settle(Settle(request))

    def settle(self, order: Settle) -> None:
        """Drop the message where it was kept before; see :meth:`Kept.settle`."""
        request = order.request
        try:
            self._kept.settle(request.stamp, request.options(self._rules).lease)
        except BackendError as error:
            self._orders.try_again(order, error)

    def _fits(self, park: Park, parcel: Parcel) -> bool:
        size = len(parcel.body)
        if size > self._max_body:
            reason = f"its message has {size} bytes (singleton_lock_max_body_bytes)"
            self._post(self._desk.refused, park.request, reason)
        return size <= self._max_body

    def _parcel(self, park: Park) -> tuple[Owner, Claim, Parcel]:
        request = park.request
        stamp = doubted(request.stamp, self._clock.monotonic(), self._done_for)
        options, ours = request.options(self._rules), {}
        deadline = options.wait_timeout
        if stamp.bundle is not None:
            ours = stamp.bundle.header()
            deadline = time_left(stamp, deadline, self._clock.monotonic())
            options = options_of(stamp, stamp.bundle.at, options)
            if stamp.bundle.left and not stamp.bundle.at:  # it had found room before
                options = replace(options, max_waiting=None)
            stamp = singles(stamp)[stamp.bundle.at]
        parcel = Parcel(
            body=pack(request.message, ours),
            realm=self._realm,
            queue=self._queues.queue_of(request),
            deadline=deadline,
            returns=request.returns,
        )
        owner = Owner(stamp.token, stamp.attempt, stamp.task, self._worker)
        return owner, claim_of(stamp, options), parcel

    def _parked(self, request: LockedRequest, reply: Reply, asked_at: float) -> None:
        if reply.verdict is Verdict.FULL:
            self._post(self._desk.refused, request, "as many wait as lock_max_waiting allows")
        elif reply.verdict is Verdict.DONE:
            self._post(self._desk.dropped, request)
        else:
            self.parked += 1
            self._revokes.parked(request.id)
            if reply.verdict is Verdict.TWIN:
                self._post(self._desk.twinned, request)
            else:
                holder = str(reply.holder or "")
                self._post(self._desk.parked, request, holder, reply.rank, asked_at)

    def look_again(self, request: LockedRequest) -> None:
        """Tell the desk that a message is blocked, if it still is; see :meth:`Desk.blocked`."""
        self._orders.put(Errand(partial(self._look_again, request)))

    def _look_again(self, request: LockedRequest) -> None:
        stamp = request.stamp
        admin = admin_of(self._store)  # type: ignore[arg-type]  # a worker's is one of those
        asked_at = self._clock.monotonic()
        standing = admin.look(stamp.name, stamp.token)
        if standing.waiting is None or standing.waiting.state not in {"parked", "adrift"}:
            return
        holders = [str(each) for each in admin.inspect(stamp.name, waiters=0).holders]
        event = TaskBlocked(*about(request), holder="".join(holders[:1]), rank=standing.rank)
        self._post(self._desk.blocked, request, event, asked_at)
