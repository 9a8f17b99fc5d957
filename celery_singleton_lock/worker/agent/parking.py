"""Stores the messages of blocked tasks in Redis, in batches, and reports each to the main loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_view import Parked, WaitsFor, reason_in
from celery_singleton_lock.core.model import Claim, Owner, Reply, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.unique import UniqueCall
from celery_singleton_lock.errors import BackendError, LockUnusable
from celery_singleton_lock.events import TaskBlocked
from celery_singleton_lock.store.base import ReplicaStore, Store
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.worker.agent.data_loss import DataLoss
from celery_singleton_lock.worker.agent.rate_timers import RateTimers
from celery_singleton_lock.worker.agent.replica_wait import ParkedAnswer, ReplicaWait
from celery_singleton_lock.worker.agent.revoke_parked import RevokeParked
from celery_singleton_lock.worker.agent_commands import CheckBlocked, LeavePreviousQueue, Park
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.worker.consumed_queues import Queues
from celery_singleton_lock.worker.dispatch.blocked_messages import BlockedMessages
from celery_singleton_lock.worker.execution.task_lock import claim_of
from celery_singleton_lock.worker.lock_header import LockHeader, doubted, options_of, singles
from celery_singleton_lock.worker.lock_set_header import time_left
from celery_singleton_lock.worker.message_codec import pack
from celery_singleton_lock.worker.not_started import too_costly
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets
from celery_singleton_lock.worker.request import LockedRequest, about

logger: Final = logging.getLogger(__name__)

_KEPT: Final = frozenset({Verdict.WAITING, Verdict.TWIN})
"""Replies after which the message may be acknowledged to the broker."""


class Parking:
    """Parks messages, and reports each result to the main loop.

    Args:
        store: the agent's store.
        worker: id of this worker.
        realm: hash of the broker's URL.
        queues: the queues that the worker consumes.
        rules: task -> its options.
        partial_lock_sets: renews the locks that parked messages hold.
        commands: the queue of the agent.
        revokes: ends a parked message whose task was revoked before.
        data_loss: tracks each message that is parked.
        replicated: a store that waits for replicas, with its own connections; None if
            ``singleton_lock_replicas_wait`` is 0.
        blocked: called in the main loop with each result.
        post: runs a call in the main loop.
        again_after: seconds after which the broker delivers a message again.
        max_body: most bytes of a message that is parked.
        timers: sweep locks at the times at which their rates allow the next start.

    Attributes:
        parked: number of messages that were parked.
        errors: number of refusals by Redis. Each refused message is tried again.
    """

    def __init__(
        self,
        store: Store,
        *,
        worker: str,
        realm: str,
        queues: Queues,
        rules: Callable[[Any], LockOptions],
        partial_lock_sets: PartialLockSets,
        commands: AgentQueue,
        revokes: RevokeParked,
        data_loss: DataLoss,
        replicated: ReplicaStore | None,
        blocked: BlockedMessages,
        post: Callable[..., None],
        again_after: float,
        max_body: int,
        timers: RateTimers,
    ) -> None:
        self.parked: int = 0
        self.errors: int = 0
        self._store = store
        self._worker = worker
        self._realm = realm
        self._queues = queues
        self._rules = rules
        self._partial_lock_sets = partial_lock_sets
        self._commands = commands
        self._revokes = revokes
        self._data_loss = data_loss
        self._blocked = blocked
        self._post = post
        self._again_after = again_after
        self._max_body = max_body
        self._timers = timers
        self._clock: Clock = store.clock
        self._replica_wait: ReplicaWait | None = None
        if replicated is not None:
            self._replica_wait = ReplicaWait(
                replicated, commands=commands, confirmed=self._handle_reply
            )

    @property
    def threads(self) -> list[BackgroundThread]:
        """The threads that wait for replicas."""
        return [] if self._replica_wait is None else [self._replica_wait.thread]

    def close(self, timeout: float) -> None:
        """End the threads that wait for replicas."""
        if self._replica_wait is not None:
            self._replica_wait.close(timeout)

    def park(self, parks: list[Park]) -> Mapping[str, Parked]:
        """Park the messages of several commands in one call.

        Returns:
            What was parked of each queue.

        Raises:
            BackendError: Redis did not answer. All commands must be repeated.
        """
        packed = [(park, self._arguments(park)) for park in parks]
        fitting = [
            (park, arguments) for park, arguments in packed if self._fits(park, arguments[2])
        ]
        for park, _ in fitting:
            self._partial_lock_sets.free(park.request.lock_header)
        asked_at = self._clock.monotonic()
        replies = self._store.park_many([arguments for _, arguments in fitting])
        sums: dict[str, Parked] = {}
        for (park, arguments), reply in zip(fitting, replies, strict=True):
            if isinstance(reply, LockUnusable) and park.request.lock_header.lock_set is None:
                self.errors += 1
                self._post(self._blocked.hold_refused, park.request, str(reply))
                continue
            if isinstance(reply, BackendError):
                if not self._commands.tries(park):
                    place = (
                        "is in this worker only, until Redis stores it"
                        if park.request.is_here_only
                        else "stays with the broker"
                    )
                    logger.warning("%s %s: %s", park.request, place, reply)
                self.errors += 1
                self._commands.try_again(park, reply)
                continue
            if reply.verdict is Verdict.WAITING:
                queue, before = arguments[2].queue, sums.get(arguments[2].queue, Parked(0, 0.0))
                size = before.size + len(arguments[2].body)
                sums[queue] = Parked(before.waiting + 1, 0.0, size)
            answer = ParkedAnswer(park, arguments, reply, asked_at)
            if self._replica_wait is not None and reply.verdict in _KEPT:
                self._replica_wait.ask(answer)
            else:
                self._handle_reply(answer)
        return sums

    def _handle_reply(self, answer: ParkedAnswer) -> None:
        """Report the reply for a message to the main loop; track the message if it is parked."""
        request, reply = answer.park.request, answer.reply
        self._report(request, reply, answer.asked_at)
        self._timers.note(answer.lock, reply)
        if reply.verdict is Verdict.WAITING:
            header = request.lock_header
            attempt = header.attempt if header.lock_set is not None else ""
            self._data_loss.track(answer.message._replace(attempt=attempt))
        if request.lock_header.lock_set is not None and reply.verdict in _KEPT | {Verdict.DONE}:
            self.leave_previous_queue(LeavePreviousQueue(request))

    def leave_previous_queue(self, command: LeavePreviousQueue) -> None:
        """Remove a message of a task with several locks from its previous queue."""
        request, sets = command.request, self._partial_lock_sets
        try:
            sets.leave_previous_queue(request.lock_header, request.options(self._rules).lease)
        except BackendError as error:
            self._commands.try_again(command, error)

    def _fits(self, park: Park, message: MessageToPark) -> bool:
        size, request = len(message.body), park.request
        was_parked = request.arrival.delivered or request.is_unanswered
        fits = size <= self._max_body or was_parked
        if not fits:
            reason = f"its message has {size} bytes (singleton_lock_max_body_bytes)"
            self._post(self._blocked.refused, park.request, reason)
        return fits

    def _arguments(self, park: Park) -> tuple[Owner, Claim, MessageToPark]:
        request = park.request
        header = doubted(request.lock_header, self._clock.monotonic(), self._again_after)
        options, ours = request.options(self._rules), {}
        deadline = options.wait_timeout
        admitted = header.granted or request.is_unanswered or request.runs_later
        if admitted:  # the lock has accepted it before, so lock_max_waiting does not count
            options = replace(options, max_waiting=None)
        if header.lock_set is not None:
            ours = header.lock_set.header()
            deadline = time_left(header, deadline, self._clock.monotonic())
            options = options_of(header, header.lock_set.at, options)
            if header.lock_set.left and not header.lock_set.at:  # its queue has accepted it before
                options = replace(options, max_waiting=None)
            header = singles(header)[header.lock_set.at]
        if request.runs_later:
            deadline = self._rest_of_wait(header, options.wait_timeout)
            settled = options.debounce is not None or options.follows
            unique = options.unique
            if isinstance(unique, UniqueCall):  # it follows nobody any more
                unique = unique._replace(follows="")
            # It has started before.
            options = replace(options, debounce=None, unique=unique, on_rate="park")
            if settled:
                header = header._replace(flow=options.flow)
        message = MessageToPark(
            body=pack(request.message, ours),
            realm=self._realm,
            queue=self._queues.queue_of(request),
            deadline=deadline,
            returns=request.arrival.returns,
        )
        owner = Owner(header.token, header.attempt, header.task, self._worker)
        claim = claim_of(header, options)
        if request.is_unanswered:
            claim = claim._replace(unanswered=True)
        return owner, claim, message

    def _rest_of_wait(self, header: LockHeader, timeout: float | None) -> float | None:
        """Return what is left of ``lock_wait_timeout`` for a task that ran, since its arrival."""
        if timeout is None or not header.place:
            return timeout
        return max(0.001, timeout - (self._store.time() - header.place / 1e6))

    def _report(self, request: LockedRequest, reply: Reply, asked_at: float) -> None:
        if reply.verdict is Verdict.FULL:
            full = "as many wait as lock_max_waiting allows"
            self._post(self._blocked.refused, request, full, reason_in(reply))
        elif reply.verdict is Verdict.TOO_COSTLY:
            error = too_costly(request.lock_header.name, reply.excess)
            self._post(self._blocked.never_starts, request, error)
        elif reply.verdict is Verdict.DONE:
            self._post(self._blocked.dropped, request)
        else:
            self.parked += 1
            self._revokes.parked(request.id)
            if reply.verdict is Verdict.TWIN:
                self._post(self._blocked.twinned, request)
            else:
                waits_for = reason_in(reply)
                # Granted at once: the holder of the reply may be the message itself.
                is_blocked = reply.rank or waits_for
                holder = str(reply.holder or "") if is_blocked else ""
                parked = self._blocked.parked
                self._post(parked, request, holder, reply.rank, waits_for, asked_at)

    def check_blocked(self, command: CheckBlocked) -> None:
        """Report to the main loop that a message is blocked, if it still is.

        Raises:
            BackendError: Redis did not answer.
        """
        request, header = command.request, command.request.lock_header
        admin = admin_of(self._store)  # type: ignore[arg-type]  # a worker's is one of those
        asked_at = self._clock.monotonic()
        standing = admin.locate_token(header.name, header.token)
        if standing.waiting is None or standing.waiting.state not in {"parked", "adrift"}:
            return
        view = admin.inspect(header.name, waiters=0)
        reason = reason_in(view)
        if standing.waiting.state == "adrift" and not reason:
            reason = WaitsFor.WORKER.value
        holder = "".join(str(each) for each in view.holders[:1])
        event = TaskBlocked(*about(request), holder=holder, rank=standing.rank, waits_for=reason)
        self._post(self._blocked.tell_blocked, request, event, asked_at)
