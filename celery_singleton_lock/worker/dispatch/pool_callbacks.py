"""Handles what a request, or a process of the pool, reports about a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery.worker.state import task_ready

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.conflict_policy import SKIPPED, Outcome, assert_never, unexpected
from celery_singleton_lock.core.model import CLAIM_LEASE, Ending, Reservation
from celery_singleton_lock.errors import LockError
from celery_singleton_lock.worker.agent_commands import (
    EndUnique,
    NoteNextStart,
    Release,
    TrackReservation,
    loss_of,
)
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.blocked_messages import BlockedMessages
from celery_singleton_lock.worker.dispatch.held_messages import HeldMessages
from celery_singleton_lock.worker.dispatch.in_flight import InFlight
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.dispatch.pool_exit import PoolExit
from celery_singleton_lock.worker.dispatch.task_leases import TaskLeases, other_parts
from celery_singleton_lock.worker.execution.celery_outcome import reservation_for
from celery_singleton_lock.worker.lock_header import (
    MARKS,
    LockHeader,
    close_in,
    end_in,
    loss_in,
    next_start_in,
)
from celery_singleton_lock.worker.lock_set_header import at_first_lock, onward, unanswered
from celery_singleton_lock.worker.message_stage import UNACCEPTED, Stage
from celery_singleton_lock.worker.not_started import NotStarted
from celery_singleton_lock.worker.preempted import LockPreempted
from celery_singleton_lock.worker.request import LockedRequest

_SKIPPED_BY: Final = {
    Outcome.SKIP: "skip",
    Outcome.SKIP_FULL: "full",
    Outcome.SKIP_DEBOUNCED: "debounce",
    Outcome.SKIP_PREEMPTED: "preempt",
    Outcome.SKIP_FOLLOWING: "follow",
}
"""Outcome of a skipped task -> the policy in its event."""


class PoolCallbacks:
    """The calls that requests and processes of the pool make, in the main loop or a pool's thread.

    Args:
        rules: task -> its options; raises ConfigurationError if they are invalid.
        in_flight: the messages that are in flight.
        held: holds messages that Redis did not answer, or whose lock it refuses.
        blocked: parks and requeues messages.
        pool_exit: stops tracking a task that leaves the pool.
        leases: renews the leases of the tasks in the pool.
        commands: the queue of the agent.
        notifier: sends events.
        clock: source of monotonic seconds.

    Attributes:
        unclaimed: number of messages that did not run here, since another worker had them.
    """

    def __init__(
        self,
        *,
        rules: Callable[[Any], LockOptions],
        in_flight: InFlight,
        held: HeldMessages,
        blocked: BlockedMessages,
        pool_exit: PoolExit,
        leases: TaskLeases,
        commands: AgentQueue,
        notifier: Notifier,
        clock: Clock,
    ) -> None:
        self._rules = rules
        self._in_flight = in_flight
        self._held = held
        self._blocked = blocked
        self._pool_exit = pool_exit
        self._leases = leases
        self._commands = commands
        self._notifier = notifier
        self._clock = clock
        self.unclaimed: int = 0

    # -- while it runs ----------------------------------------------------------------------------

    def on_accepted(self, request: LockedRequest) -> None:
        """Start to renew the lease: the pool acquires the lock now, or has just done so."""
        header, was = request.lock_header, request.move_from(UNACCEPTED, Stage.ACCEPTED)
        if not header.name:
            self._end_unique(request)
        if not header.name or request.stage is Stage.WITHDRAWN:
            return
        if header.error is not None:
            if header.granted:  # renewed, so that no other worker ends it at the same time
                self._leases.renew(header, CLAIM_LEASE, held=False)
            return
        given_back = was is Stage.GIVEN_BACK  # its grant was returned, unless the task had begun
        if given_back:
            self._in_flight.add(request)
        holds_lock = request.holds_lock
        held = (header.granted or holds_lock) and not given_back
        lease = request.options(self._rules).lease
        self._leases.renew_accepted(header, lease, held=held, others_held=holds_lock)
        if holds_lock:
            self._notifier.acquired(request)

    def on_not_begun(self, request: LockedRequest) -> None:
        """End a task that a thread or greenlet does not run, since its acceptance has failed.

        If a task is to be terminated, Celery tries to kill its thread when the pool accepts it, and
        no thread can be killed. A child process runs the task although its acceptance has failed.
        """
        if self._pool_exit.children:
            return
        try:
            if request.revoked():
                request.decided()
                self.on_revoked(request)
        finally:
            self._pool_exit.end(request, gone=True)

    def on_notice(self, notice: str) -> None:
        """Handle a notice of a pool child.

        It says that the child acquired a lock, that the lock was lost when the task ended, or that
        the child could not release it. When the child has acquired the lock, the message is
        acknowledged. From then on a failed renewal means that the lock is lost.
        """
        request = self._in_flight.by_token.get(notice)
        if request is None:
            return self._on_notice_of_end(notice) if notice[:1] in MARKS else None
        for other in other_parts(request.lock_header):
            self._in_flight.add_part(notice, other.token)
        self._leases.confirm(request.lock_header)
        self._notifier.acquired(request)
        request.announced()
        self._in_flight.decided(request.lock_header.name)
        return None

    def _on_notice_of_end(self, notice: str) -> None:
        lost, end = loss_in(notice), end_in(notice)
        if lost is not None:
            self._commands.put(loss_of(lost, "It was noticed when the task had ended."))
        elif end is not None:
            header, ending, kept = end
            self._commands.put(Release(header, ending, kept=kept))
        elif (next_start := next_start_in(notice)) is not None:
            self._commands.put(NoteNextStart(*next_start))
        elif (closed := close_in(notice)) is not None:
            self._notifier.closed_by_running(closed)

    def interruptible(self, token: str) -> LockedRequest | None:
        """Return the running request of a lost lock, if ``lock_on_lost`` is ``abort``."""
        request = self._in_flight.of(token)
        if request is None or request.stage is not Stage.RUNNING:
            return None
        return request if request.options(self._rules).on_lost == "abort" else None

    # -- when it ends -----------------------------------------------------------------------------

    def on_ran(self, request: LockedRequest) -> None:
        """Report that the task has had its lock, as it has run.

        The notice of a short task may arrive later. If the task may run without its lock
        (``lock_on_backend_error="run"``), only the notice proves that it had the lock.
        """
        error = request.lock_header.error
        if isinstance(error, NotStarted):
            return self._notifier.followed(request, error.reason)
        if request.lock_header.name and request.options(self._rules).on_backend_error != "run":
            self._notifier.acquired(request)
        return None

    def on_retried(self, request: LockedRequest, retry: BaseException) -> None:
        """Track the reservation for the next attempt of a task, if it has one."""
        options, header = request.options(self._rules), request.lock_header
        if options.on_retry == "keep" and header.name:
            reservation = reservation_for(request.request_dict, retry, options.lease)
            until = self._clock.monotonic() + reservation.seconds
            self._commands.put(TrackReservation(header.name, reservation.token, request.id, until))

    def on_revoked(self, request: LockedRequest) -> None:
        """Release the reservation of a task that was revoked before its next attempt."""
        self._end_unique(request)
        header = request.lock_header
        retried = request.request_dict.get("retries")
        if retried and header.name and request.options(self._rules).on_retry == "keep":
            token = Reservation(header.attempt, 0.0).token
            self._commands.put(Release(header._replace(token=token), Ending.FINAL))

    def on_refused(self, request: LockedRequest, error: LockError) -> None:
        """Report a task that has ended with an error since it did not get its lock."""
        self._end_unique(request)
        self._notifier.refused(request, error)

    def on_lost(self, request: LockedRequest) -> None:
        """Report a task that has ended with LockLost."""
        self._commands.put(loss_of(request.lock_header, "The task has ended with LockLost."))

    def on_preempted(self, request: LockedRequest, error: LockPreempted) -> None:
        """Report a task that has ended as REVOKED, since a newer call replaces it."""
        self._notifier.ended_for_newer(request, error.message)

    def on_interrupted(self, request: LockedRequest) -> None:
        """Release the locks of a task that has ended in a process that may still hold them.

        A soft time limit may be raised between the reply of Redis and the body, or after the body.
        Then the process does not know that it holds a lock. After an error that is no Exception it
        leaves the release to the worker. A second release has no effect.
        """
        if request.lock_header.name:
            self._commands.put(Release(request.lock_header, request.ending()))

    def on_ended(self, request: LockedRequest, *, gone: bool) -> None:
        """Stop tracking a task that has ended.

        Args:
            request: of the task.
            gone: whether its process has died, so that the agent must release its locks.
        """
        if request.ending() is Ending.FINAL:
            self._end_unique(request)  # the loss, or the missing lock, has not ended the entry
        self._pool_exit.end(request, gone=gone)

    # -- when it did not run ----------------------------------------------------------------------

    def on_not_started(self, request: LockedRequest, not_started: NotStarted) -> bool:
        """Handle a task that was not run. Return False if Celery is to acknowledge its message."""
        outcome = not_started.outcome
        if request.move(Stage.BLOCKED) is Stage.WITHDRAWN:
            return self._got_elsewhere(request)
        if outcome in SKIPPED:
            self._end_unique(request)
            self._notifier.skipped(request, not_started, _SKIPPED_BY[outcome])
            if outcome is Outcome.SKIP_DEBOUNCED:
                self._notifier.debounced(request)
            return False
        request.undecide()
        header = _header_left(request, outcome)
        if outcome in {Outcome.LATER, Outcome.FOLLOW}:
            self._run_later(request, not_started)
            return True
        again = outcome is Outcome.AGAIN
        if header.lock_set is not None and (not_started.lock_set or again):
            elsewhere = onward(header, header.lock_set, not_started.lock_set)
            self._blocked.park_elsewhere(request, elsewhere)
            return True
        self._pool_exit.left(request, began=True, gone=False)
        if outcome in {Outcome.REQUEUE, Outcome.REQUEUE_TWIN}:
            self._in_flight.leave(header)
            is_twin = outcome is Outcome.REQUEUE_TWIN
            self._blocked.requeue(request, not_started.waits_for, is_twin=is_twin)
            return True
        self._keep(request, not_started)
        self._in_flight.leave(header)  # last: followers must be parked behind this message
        if outcome is Outcome.GONE:
            request.move(Stage.ENDED)
        return True

    def _end_unique(self, request: LockedRequest) -> None:
        """End the entry of a unique call that has no lock, whose release would end the entry."""
        if request.unique is not None:
            retries = int(request.request_dict.get("retries") or 0)
            self._commands.put(EndUnique(request.unique, request.id, retries))

    def _queue_follower(self, request: LockedRequest) -> None:
        """Return a duplicate whose first task has no result: it runs, or follows another one."""
        self._notifier.runs_itself(request)
        self._pool_exit.left(request, began=True, gone=False, ending=Ending.LATER)
        self._in_flight.leave(request.lock_header)
        request.move(Stage.ENDED)
        task_ready(request)

    def _run_later(self, request: LockedRequest, not_started: NotStarted) -> None:
        """Let the message of a task that has run wait in Redis until its lock is open again."""
        header = request.lock_header
        if not_started.outcome is Outcome.FOLLOW:
            return self._queue_follower(request)
        self.on_ran(request)
        self._notifier.closed(request, not_started)
        self._pool_exit.left(request, began=True, gone=False)
        # If Redis has the message, the release has queued it again.
        if header.granted and not header.acks_early and not not_started.lost:
            request.move(Stage.ENDED)
            task_ready(request)
        else:
            request.runs_later, request.lock_header = True, at_first_lock(header)
            self._blocked.park(request)
        self._in_flight.leave(header)
        return None

    def _got_elsewhere(self, request: LockedRequest) -> bool:
        """End a request here, since another worker has its message, whatever Redis answered."""
        self.unclaimed += 1
        request.move(Stage.ENDED)
        return True

    def _keep(self, request: LockedRequest, not_started: NotStarted) -> None:
        """Park, hold or acknowledge the message of a task that was not run."""
        match not_started.outcome:
            case Outcome.PARK | Outcome.TWIN | Outcome.AGAIN:
                if request.lock_header.granted:  # Redis has lost its message; it may have run
                    request.lock_header = unanswered(request.lock_header)
                self._blocked.park(request)
            case Outcome.GONE:
                self.unclaimed += 1
                task_ready(request)
            case Outcome.DONE:
                self._blocked.dropped(request)
            case Outcome.UNAVAILABLE | Outcome.REFUSED:
                self._unanswered(request, not_started)
            case (
                Outcome.RUN
                | Outcome.RUN_UNLOCKED
                | Outcome.WAIT
                | Outcome.REQUEUE
                | Outcome.REQUEUE_TWIN
                | Outcome.SKIP
                | Outcome.SKIP_FULL
                | Outcome.SKIP_DEBOUNCED
                | Outcome.SKIP_PREEMPTED
                | Outcome.SKIP_FOLLOWING
                | Outcome.FOLLOW
                | Outcome.FAIL
                | Outcome.FAIL_FULL
                | Outcome.FAIL_TIMEOUT
                | Outcome.FAIL_COST
                | Outcome.FAIL_BACKEND
                | Outcome.LATER
            ):
                raise unexpected(not_started.outcome)
            case _:
                assert_never(not_started.outcome)

    def _unanswered(self, request: LockedRequest, not_started: NotStarted) -> None:
        """Hold the message of a task if Redis did not answer it, or refused its lock."""
        header, refused = request.lock_header, not_started.outcome is Outcome.REFUSED
        if refused and header.granted and header.lock_set is not None:
            # If it were held here, its grant would expire, and Redis would grant again. So Redis
            # delays it.
            request.move(Stage.ENDED)
            task_ready(request)
            name, reason = not_started.lock, not_started.reason
            delay = self._held.refused_stored(request, reason, name)
            again = Reservation(name, delay, self._clock.monotonic())
            return self._commands.put(Release(header, Ending.REFUSED, kept=again))
        if header.granted:  # it is not known whether the claim reached Redis
            request.lock_header = unanswered(header)
        if refused:
            return self._held.hold_refused(request, not_started.reason, not_started.lock)
        return self._held.hold_unanswered(request, not_started.reason)


def _header_left(request: LockedRequest, outcome: Outcome) -> LockHeader:
    """Return the lock header of a task that was not run.

    If another process ends the task, that one releases its locks, so none is released here.
    """
    if outcome is Outcome.DONE and request.lock_header.error is not None:
        request.lock_header = request.lock_header._replace(error=None)
    return request.lock_header
