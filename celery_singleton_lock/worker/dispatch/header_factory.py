"""Creates the lock header of each message that arrives from the broker or from Redis."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from celery.app.task import Context

from celery_singleton_lock.config.call_options import HEADER
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import ServerClock, SystemClock
from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.core.lock_mode import ENFORCE, OFF, Modes
from celery_singleton_lock.core.lock_name_template import ArgumentsDoNotBind, Sent
from celery_singleton_lock.core.lock_set import KEPT, LockSet, Names, read
from celery_singleton_lock.core.owner_token import new_token, token_for, token_on
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.core.preempt import Age, aged
from celery_singleton_lock.core.unique import HEADER as UNIQUE
from celery_singleton_lock.core.unique import unpacked
from celery_singleton_lock.errors import (
    ConfigurationError,
    MaxReturnsExceeded,
)
from celery_singleton_lock.worker.lock_header import (
    AFTER,
    COPY,
    FIRST,
    MOVED,
    REQUEUED,
    UNANSWERED,
    LockHeader,
    attempt_of,
    task_id_of,
)
from celery_singleton_lock.worker.lock_set_header import with_lock_set
from celery_singleton_lock.worker.message_stage import Arrival, UnansweredClaim
from celery_singleton_lock.worker.not_started import (
    NotStarted,
    above_rate,
    too_costly,
    waited_in_vain,
)
from celery_singleton_lock.worker.redelivery import REJECT, history_of, rejection_of
from celery_singleton_lock.worker.request import LockedRequest

logger: Final = logging.getLogger(__name__)
_clock = SystemClock()


def queue_in(request: LockedRequest) -> str:
    """Return the routing key of a message, which usually is the name of its queue."""
    return str(request.delivery_info.get("routing_key") or "")


class HeaderFactory:
    """Creates the lock headers of one worker's messages.

    Args:
        worker: id of this worker.
        place: the clock that gives each arriving message its place.
        rules: task -> its options; raises ConfigurationError if they are invalid.
        of_call: task, options of a call -> its options for that call; raises likewise.
        name_of: task, args, kwargs, and queue and headers of the message -> lock name.
        computed: likewise, and the options of the call -> options without templates.
        modes: which tasks take their locks now.
        identify: message -> a text that is the same for each delivery of it; empty if the broker
            marks redelivered messages.
        most_returns: queue -> how often a message of the queue may be returned.
        keeps_messages: whether messages can be parked: not with a quorum of servers.
    """

    broadcast: frozenset[str] = frozenset()
    """Exchanges that send each message to every worker. Set once the queues are known."""

    queue_of: Callable[[LockedRequest], str] = staticmethod(queue_in)
    """Returns the queue from which a message came. Set once the queues are known."""

    def __init__(
        self,
        *,
        worker: str,
        place: ServerClock,
        rules: Callable[[Any], LockOptions],
        of_call: Callable[[Any, Any], LockOptions],
        name_of: Callable[[Any, Any, Any, Sent], str],
        computed: Callable[[Any, Any, Any, Sent, LockOptions], LockOptions],
        modes: Modes,
        identify: Callable[[Any], str] = lambda _message: "",
        most_returns: Callable[[str], float] = lambda _queue: math.inf,
        keeps_messages: bool = True,
    ) -> None:
        self._identify = identify
        self._most_returns = most_returns
        self._keeps_messages = keeps_messages
        self._of_call = of_call
        self._worker = worker
        self._place = place
        self._rules = rules
        self._name_of = name_of
        self._computed = computed
        self._modes = modes

    # -- from the broker --------------------------------------------------------------------------

    def add_header(self, request: LockedRequest) -> Any:
        """Set the lock header of a message, and remove this package's message headers from it.

        Returns:
            Lock name and token of the parked original, if this is a copy; else None.
        """
        copy_of, requeued, first, moved, claim, call, unique, after = taken_from(
            request, COPY, REQUEUED, FIRST, MOVED, UNANSWERED, HEADER, UNIQUE, AFTER
        )
        request.unique = unpacked(unique)
        wrong = self._call_of(request, call)
        if copy_of is not None or requeued is not None:
            requeues, first_place = requeued or (0, 0)
            request.arrival = Arrival(
                copy_of is not None,
                requeues,
                first_place=first_place,
                claim=_claim_in(request, claim) if self._keeps_messages else None,
            )
        if wrong is not None:
            header = request.lock_header = self.unlocked(request, wrong)
        elif self.takes_lock(request):
            copy = request.arrival.copy or requeued is not None
            header = self._locked(request, copy=copy, before=_before(request, moved))
            if requeued is None or first == header.attempt:
                header = header._replace(first_place=self._first_place(request, header))
            request.lock_header = header
        else:
            header = request.lock_header = self.relaxed(request)
        if request.call:
            header = request.lock_header = header._replace(call=request.call)
        if after:
            header = request.lock_header = header._replace(after=str(after))
        if header.copy or moved is not None:
            request.was_blocked = True  # another worker may have reported it as blocked
        return copy_of

    def _first_place(self, request: LockedRequest, header: LockHeader) -> int:
        """Return the time of a message's first delivery; 0 if this may not be the first one.

        Args:
            request: of a message that was not requeued, or was delivered first before that.
            header: its lock header.
        """
        arrival, message = request.arrival, request.message
        known = (
            not (arrival.copy or header.moved)
            and arrival.claim is None
            and (arrival.requeues > 0 or not message.delivery_info.get("redelivered"))
            and not self._identify(message)  # such a broker does not mark redeliveries
            and not history_of(message.headers)
        )
        if not known:
            return 0
        waited = _clock.monotonic() - request.received_at  # for its ETA, or for Celery's rate_limit
        return arrival.first_place or header.place - round(waited * 1_000_000)

    @staticmethod
    def is_to_reject(request: LockedRequest) -> bool:
        """Return whether a message was published to be rejected, and was not rejected yet."""
        (rejection,) = taken_from(request, REJECT)
        return rejection is not None and rejection == rejection_of(request.message.headers)

    def _call_of(self, request: LockedRequest, call: Any) -> Exception | None:
        """Set the lock options of a call. Return the error if they are invalid, else None."""
        if call is None:
            return None
        try:
            request.own_options = self._of_call(request.task, call)
        except Exception as error:  # noqa: BLE001  # the child fails the task with it
            return error
        request.call = call
        return None

    def _locked(self, request: LockedRequest, *, copy: bool, before: _Before | None) -> LockHeader:
        if self.broadcast and request.delivery_info.get("exchange") in self.broadcast:
            return self.unlocked(request, broadcast_refused(request))
        try:
            settles = _settles(request, before)
            name, options = self._name(request), self._options(request, settles=settles)
        except ArgumentsDoNotBind:
            return self.unlocked(request, None)  # the call itself fails, and needs no lock
        except Exception as error:  # noqa: BLE001  # the child fails the task with it
            return self.unlocked(request, error)
        task = request.task
        claim = request.arrival.claim
        token = token_for(self._identify(request.message)) if claim is None else claim.token
        if before is not None and isinstance(name, Names):
            copy = True  # with several locks, the first lock recognises copies by their attempt
        elif before is not None:
            token = token_on(before.base)
        header = LockHeader(
            name,
            token,
            attempt_of(request.request_dict),
            task.name,
            self._worker,
            place=_place_before(request, before, options) or self._place.next_place(),
            created_at=request.received_at,
            moved=before is not None,
            copy=copy or bool(request.delivery_info.get("redelivered")),
            acks_early=not task.acks_late,
            announce=True,
            flow=aged(options.flow, _age(request, copy=copy)),
            computed=options.computed,
        )
        if not isinstance(name, Names):
            return header
        return with_lock_set(header, name, frees=() if claim is None else claim.others)

    def _name(self, request: LockedRequest) -> str:
        return self._name_of(request.task, request.args, request.kwargs, self._sent(request))

    def _options(self, request: LockedRequest, *, settles: bool = False) -> LockOptions:
        """Return the options of a message; those that depend on its arguments are computed.

        ``settles``: whether it is a first delivery, to which ``lock_debounce`` applies.
        """
        options, sent = request.options(self._rules), self._sent(request)
        own = self._computed(request.task, request.args, request.kwargs, sent, options)
        if own.debounce is not None and not settles:
            own = dataclasses.replace(own, debounce=None)
        if own.unique is not None or request.unique is not None:
            own = dataclasses.replace(own, unique=request.unique)
        if own is not options:
            request.own_options = own
        return own

    def _sent(self, request: LockedRequest) -> Sent:
        def queue_and_headers() -> tuple[str, Mapping[str, Any]]:
            return self.queue_of(request), Context(request.request_dict).headers or {}

        return Sent(queue_and_headers, request.call)

    def _flow_again(self, request: LockedRequest) -> str:
        """Return the flow options of a message that was parked; it need not be parked again."""
        with suppress(Exception):
            return aged(self._options(request).flow, _age(request))
        return ""

    def takes_lock(self, request: LockedRequest) -> bool:
        """Return whether a request takes its lock.

        A copy of a parked message always does: it must not run at the same time as the message.
        """
        return request.arrival.copy or self._modes.of(request.task.name) == ENFORCE

    def relaxed(self, request: LockedRequest) -> LockHeader:
        """Return the header of a task that runs without its lock."""
        header = self.unlocked(request, None)
        if self._modes.of(request.task.name) == OFF:
            return header
        try:
            name = self._name(request)
            options = self._options(request, settles=_settles(request, None))
            observed = header._replace(
                observed=str(name), flow=options.flow, computed=options.computed
            )
            return with_lock_set(observed, name) if isinstance(name, Names) else observed
        except ArgumentsDoNotBind:
            return header
        except Exception as error:  # noqa: BLE001  # in mode enforce, the task would fail with it
            logger.warning(
                "%s is not observed, since it would fail in mode enforce: %s", request, error
            )
            return header

    def unlocked(self, request: LockedRequest, error: Exception | None) -> LockHeader:
        """Return the header of a task that fails with ``error``, or runs without a lock."""
        attempt = attempt_of(request.request_dict)
        return LockHeader("", new_token(), attempt, request.task.name, self._worker, error=error)

    # -- from Redis -------------------------------------------------------------------------------

    def delivered(self, request: LockedRequest, delivery: Delivery) -> LockHeader:
        """Return the header of a parked message that is delivered, with its lock set."""
        header, call, unique = taken_from(request, KEPT, HEADER, UNIQUE)
        request.unique = unpacked(unique)
        wrong = self._call_of(request, call)
        lock_set = None if header is None else read(header).granted(delivery.fencing_token)
        return LockHeader(
            name=delivery.name,
            token=delivery.token,
            attempt=attempt_of(request.request_dict),
            task=request.task.name,
            worker=self._worker,
            place=self._place_before(delivery.waited),
            created_at=_clock.monotonic() - delivery.waited,
            granted=True,
            acks_early=not request.task.acks_late,
            announce=lock_set is not None
            or request.options(self._rules).on_lost == "abort"
            or request.options(self._rules).preempts,
            error=_verdict(delivery, request.options(self._rules))
            or self._returned(delivery)
            or wrong,
            lock_set=lock_set,
            call=request.call,
            flow=self._flow_again(request),
            computed=request.options(self._rules).computed,  # _flow_again() has set it
        )

    def _returned(self, delivery: Delivery) -> Exception | None:
        """Return the error of a message that was returned too often, else None."""
        if delivery.returns <= self._most_returns(delivery.queue):
            return None
        msg = (
            f"The task was started under the lock {delivery.name!r} and came back "
            f"{delivery.returns} times: it was requeued, or its worker was lost "
            "(singleton_lock_max_returns or x-delivery-limit). It does not run again."
        )
        return MaxReturnsExceeded(msg, delivery.name)

    def lock_set_now(self, request: LockedRequest, header: LockHeader) -> LockSet | None:
        """Return the lock set of a task that had one lock when it was parked, else None."""
        try:
            name = self._name(request)
        except Exception:  # noqa: BLE001  # the message keeps the one lock for which it was parked
            return None
        if not isinstance(name, Names):
            return None
        return with_lock_set(header, name).lock_set

    def _place_before(self, seconds: float) -> int:
        """Return the place of a message that arrived this many seconds ago."""
        return max(0, self._place.next_place() - round(seconds * 1e6))

    def age(self, request: LockedRequest) -> float:
        """Return the seconds since a requeued message first arrived; 0 if it was not requeued."""
        if not request.first_place:
            return 0.0
        return (self._place.next_place() - request.first_place) / 1e6


def _verdict(delivery: Delivery, options: LockOptions) -> Exception | None:
    """Return the exception with which a delivered task ends; None if it runs or is revoked."""
    if delivery.verdict in {"granted", "revoked"}:
        return None
    if delivery.verdict == "following":
        return NotStarted(Outcome.FOLLOW, delivery.by)
    if delivery.verdict == "replaced":
        return _replaced(delivery, options)
    if delivery.verdict == "above_rate":
        return above_rate(delivery.name, options)
    if delivery.verdict == "too_costly":
        return too_costly(delivery.name, delivery.excess)
    return waited_in_vain(delivery.name, f"{delivery.waited:.1f}")


def _replaced(delivery: Delivery, options: LockOptions) -> NotStarted:
    """Return the exception with which a task ends that a later one has replaced."""
    by, where = task_id_of(delivery.by), f"lock {delivery.name!r}"
    if delivery.settled:
        reason = f"task {by} came before it had settled at the {where}"
        return NotStarted(Outcome.SKIP_DEBOUNCED, f"{reason} (lock_debounce)")
    if options.preempts:
        reason = f"task {by} is newer and replaces it at the {where}"
        return NotStarted(Outcome.SKIP_PREEMPTED, f'{reason} (lock_on_conflict="preempt")')
    return NotStarted(Outcome.SKIP_FULL, f"task {by} took its place in the queue of {where}")


class _Before(NamedTuple):
    """The place and the base of the token of a message, before it was sent to the broker."""

    place: int
    base: str


def _before(request: LockedRequest, moved: Any) -> _Before | None:
    if moved is None:
        return None
    attempt, place, base = moved  # with several locks, the nesting may differ
    own = attempt_of(request.request_dict)
    same = attempt.rpartition("/")[0] == own.rpartition("/")[0]
    return _Before(int(place), str(base)) if same else None


def _settles(request: LockedRequest, before: _Before | None) -> bool:
    """Return whether this is a new call: no retry, and no message that has been parked before."""
    came_before = before is not None or request.arrival.copy or request.arrival.requeues > 0
    is_retry = bool(request.request_dict.get("retries"))
    return not (came_before or is_retry or request.arrival.claim is not None)


def _age(request: LockedRequest, *, copy: bool = False) -> Age:
    """Return what is known about the age of a call, for ``lock_on_conflict="preempt"``."""
    if request.request_dict.get("retries"):
        return Age.RETRY
    again = copy or request.arrival.copy or request.delivery_info.get("redelivered")
    return Age.COPY if again else Age.NEW


def _place_before(request: LockedRequest, before: _Before | None, options: LockOptions) -> int:
    """Return the arrival of a message that was sent to the broker, to give it its old place.

    0 for any other message. The scripts subtract the head start from the arrival.
    """
    if before is not None:
        return max(1, before.place + options.head_start)
    return 0 if request.arrival.claim is None else request.first_place


def _claim_in(request: LockedRequest, header: Any) -> UnansweredClaim | None:
    """Return the claim in the header ``UNANSWERED`` of this message; None if there is none.

    A retry of a task that runs without a lock copies the header, as with ``MOVED``.
    """
    claim = None if header is None else UnansweredClaim(*header)
    own = claim is not None and claim.attempt == attempt_of(request.request_dict)
    return claim if own else None


def taken_from(request: LockedRequest, *headers: str) -> list[Any]:
    """Remove this package's headers from a request; return their values, or None.

    For a message of protocol 1 without ``args``, Celery leaves them in ``headers``.
    """
    said = request.request_dict
    left = said.get("headers")
    if isinstance(left, dict):
        return [said.pop(header, left.pop(header, None)) for header in headers]
    return [said.pop(header, None) for header in headers]


def broadcast_refused(request: LockedRequest) -> ConfigurationError:
    """Return the error of a locked task that came through a broadcast queue."""
    msg = (
        f"{request.task.name} is a LockedTask and came through a Broadcast queue "
        f"({request.delivery_info['exchange']}): each worker has a copy, and one lock cannot serve "
        "them. Send it to a usual queue, or declare it without LockedTask."
    )
    return ConfigurationError(msg)
