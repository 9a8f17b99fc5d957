"""What a message is stamped with when it arrives: from the broker, or out of Redis."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery.app.task import Context

from celery_singleton_lock.core.lock_set import KEPT, Bundle, Names, read
from celery_singleton_lock.config.call_options import HEADER
from celery_singleton_lock.core.clock import ServerClock, SystemClock
from celery_singleton_lock.errors import (
    ConfigurationError,
    LockWaitTimeout,
    MaxReturnsExceeded,
)
from celery_singleton_lock.worker.execution.tracer import Turned
from celery_singleton_lock.worker.partial_lock_sets import bundled
from celery_singleton_lock.core.model import Delivery, new_token, token_for
from celery_singleton_lock.core.lock_mode import ENFORCE, OFF, Modes
from celery_singleton_lock.core.lock_name_template import ArgumentsDoNotBind, Sent
from celery_singleton_lock.worker.redelivery import REJECT, history_of
from celery_singleton_lock.worker.request import LockedRequest
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.lock_header import COPY, MOVED, REQUEUED, Stamp, attempt_of, task_id_of

logger = logging.getLogger(__name__)
_clock = SystemClock()

INF: Final = float("inf")


def queue_in(request: LockedRequest) -> str:
    """Return the queue of a message as its routing key tells it."""
    return str(request.delivery_info.get("routing_key") or "")


class Stamper:
    """Makes the stamps of one worker's messages: which lock each takes, and since when it is here.

    Args:
        worker: id of this worker.
        place: gives each arriving message its place in line.
        rules: task -> its options; raises what is wrong with them.
        of_call: task, options of a call -> its options for that call; likewise.
        name_of: task, args, kwargs, what else its message says -> lock name.
        modes: which tasks keep their locks now.
        identify: message -> what is the same for each delivery of it; empty where the broker marks
            a message that it delivers again.
        most_returns: queue -> how often a message of it may come back.
    """

    broadcast: frozenset[str] = frozenset()
    """Exchanges from which each worker gets a copy; set once the worker's queues are known."""

    queue_of: Callable[[LockedRequest], str] = staticmethod(queue_in)
    """Returns from which queue a message came; set likewise."""

    def __init__(
        self,
        *,
        worker: str,
        place: ServerClock,
        rules: Callable[[Any], LockOptions],
        of_call: Callable[[Any, Any], LockOptions],
        name_of: Callable[[Any, Any, Any, Sent], str],
        modes: Modes,
        identify: Callable[[Any], str] = lambda _message: "",
        most_returns: Callable[[str], float] = lambda _queue: INF,
    ) -> None:
        """Keep all of them."""
        self._identify = identify
        self._most_returns = most_returns
        self._of_call = of_call
        self._worker = worker
        self._place = place
        self._rules = rules
        self._name_of = name_of
        self._modes = modes

    # -- from the broker --------------------------------------------------------------------------

    def stamp(self, request: LockedRequest) -> Any:
        """Stamp a message, and take out of it what else we have written into its headers.

        Returns:
            Of which parked message this is a copy: its lock's name, and its token. None if of none.
        """
        copy_of, requeued, moved, call = taken_from(request, COPY, REQUEUED, MOVED, HEADER)
        wrong = self._call_of(request, call)
        if copy_of is not None:
            request.is_copy = True
        if wrong is not None:
            stamp = request.stamp = self.unlocked(request, wrong)
        elif self.keeps(request):
            place = _place_before(request, moved)
            copy = request.is_copy or requeued is not None or place is not None
            stamp = request.stamp = self._locked(request, copy=copy, place=place)
        else:
            stamp = request.stamp = self.relaxed(request)
        if request.call:
            stamp = request.stamp = stamp._replace(call=request.call)
        request.first_place = stamp.place
        if requeued is not None:
            request.requeues, request.first_place = requeued
        if stamp.copy:
            request.was_blocked = True  # it may have been, elsewhere
        return copy_of

    @staticmethod
    def is_to_reject(request: LockedRequest) -> bool:
        """Return whether a message was published to be rejected, and has not been since."""
        (history,) = taken_from(request, REJECT)
        return history is not None and history == history_of(request.request_dict)

    def _call_of(self, request: LockedRequest, call: Any) -> Exception | None:
        """Note the lock options of a call; return what is wrong with them."""
        if call is None:
            return None
        try:
            request.own_options = self._of_call(request.task, call)
        except Exception as error:  # noqa: BLE001  # the child fails the task with it
            return error
        request.call = call
        return None

    def _locked(self, request: LockedRequest, *, copy: bool, place: int | None) -> Stamp:
        if self.broadcast and request.delivery_info.get("exchange") in self.broadcast:
            return self.unlocked(request, broadcast_refused(request))
        try:
            name = self._name(request)
        except ArgumentsDoNotBind:
            return self.unlocked(request, None)  # the call itself fails, and needs no lock
        except Exception as error:  # noqa: BLE001  # the child fails the task with it
            return self.unlocked(request, error)
        task = request.task
        stamp = Stamp(
            name,
            token_for(self._identify(request.message)),
            attempt_of(request.request_dict),
            task.name,
            self._worker,
            place=self._place.stamp() if place is None else place,
            stamped_at=request.received_at,
            copy=copy or bool(request.delivery_info.get("redelivered")),
            settle=not task.acks_late,
            announce=True,
        )
        return bundled(stamp, name) if isinstance(name, Names) else stamp

    def _name(self, request: LockedRequest) -> str:
        def said() -> tuple[str, Mapping[str, Any]]:
            return self.queue_of(request), Context(request.request_dict).headers or {}

        return self._name_of(request.task, request.args, request.kwargs, Sent(said, request.call))

    def keeps(self, request: LockedRequest) -> bool:
        """Return whether a request's lock is kept.

        A copy of a parked message always takes its way: it must not run beside the message.
        """
        return request.is_copy or self._modes.of(request.task.name) == ENFORCE

    def relaxed(self, request: LockedRequest) -> Stamp:
        """Return the stamp of a task that runs without its lock."""
        stamp = self.unlocked(request, None)
        if self._modes.of(request.task.name) == OFF:
            return stamp
        try:
            name = self._name(request)
            observed = stamp._replace(observed=str(name))
            return bundled(observed, name) if isinstance(name, Names) else observed
        except ArgumentsDoNotBind:
            return stamp
        except Exception as error:  # noqa: BLE001  # with its lock the task would fail
            logger.warning("%s is not observed, it has no lock: %s", request, error)
            return stamp

    def unlocked(self, request: LockedRequest, error: Exception | None) -> Stamp:
        """Return the stamp of a task that fails with an error, or runs and asks for no lock."""
        attempt = attempt_of(request.request_dict)
        return Stamp("", new_token(), attempt, request.task.name, self._worker, error=error)

    # -- out of Redis, and back into it -----------------------------------------------------------

    def delivered(self, request: LockedRequest, delivery: Delivery) -> Stamp:
        """Return the stamp of a parked message whose turn has come, with what it has kept."""
        header, call = taken_from(request, KEPT, HEADER)
        wrong = self._call_of(request, call)
        bundle = None if header is None else read(header).granted(delivery.fencing_token)
        return Stamp(
            name=delivery.name,
            token=delivery.token,
            attempt=attempt_of(request.request_dict),
            task=request.task.name,
            worker=self._worker,
            stamped_at=_clock.monotonic() - delivery.waited,
            granted=True,
            settle=not request.task.acks_late,
            announce=bundle is not None or request.options(self._rules).on_lost == "abort",
            error=_verdict(delivery) or self._returned(delivery) or wrong,
            bundle=bundle,
            call=request.call,
        )

    def _returned(self, delivery: Delivery) -> Exception | None:
        """Return with what a message ends that has come back too often."""
        if delivery.returns <= self._most_returns(delivery.queue):
            return None
        msg = (
            f"The task was started under the lock {delivery.name!r} and came back "
            f"{delivery.returns} times: it was requeued, or its worker was lost "
            "(singleton_lock_max_returns). It does not run again."
        )
        return MaxReturnsExceeded(msg, delivery.name)

    def bundle_now(self, request: LockedRequest, stamp: Stamp) -> Bundle | None:
        """Return the locks of a task that was parked with one, and takes several by now."""
        try:
            name = self._name(request)
        except Exception:  # noqa: BLE001  # it has the lock that it had when it was sent
            return None
        if not isinstance(name, Names):
            return None
        waited = _clock.monotonic() - stamp.stamped_at
        place = max(0, self._place.stamp() - round(waited * 1e6))
        return bundled(stamp._replace(place=place), name).bundle

    def anew(self, stamp: Stamp) -> Stamp:
        """Return the stamp with which a message takes the place in line that it had before."""
        waited = _clock.monotonic() - stamp.stamped_at
        return stamp._replace(
            token=new_token(),
            place=max(0, self._place.stamp() - round(waited * 1e6)),
            granted=False,
            announce=True,
        )

    def age(self, request: LockedRequest) -> float:
        """Return the seconds since a message arrived first: it may have been requeued since."""
        if not request.first_place:
            return 0.0
        return (self._place.stamp() - request.first_place) / 1e6


def _verdict(delivery: Delivery) -> Exception | None:
    """Return how a delivered task is to end, if not by running, or by Celery's own way."""
    if delivery.verdict in {"granted", "revoked"}:
        return None
    if delivery.verdict == "replaced":
        by = task_id_of(delivery.by)
        return Turned("skipped", f"task {by} took its place in the queue of lock {delivery.name!r}")
    return waited_in_vain(delivery.name, delivery.waited)


def waited_in_vain(name: str, waited: float) -> LockWaitTimeout:
    """Return with what a task ends that has waited for so many seconds, and may no longer."""
    sentence = f"Waited {waited:.1f} s for the lock {name!r} (lock_wait_timeout)."
    return LockWaitTimeout(sentence, name)


def _place_before(request: LockedRequest, moved: Any) -> int | None:
    """Return the place that a message had in line before it was sent to the broker."""
    if moved is None:
        return None
    attempt, place = moved  # of several locks each may have another nesting
    own = attempt_of(request.request_dict)
    return int(place) if attempt.rpartition("/")[0] == own.rpartition("/")[0] else None


def taken_from(request: LockedRequest, *headers: str) -> list[Any]:
    """Take headers of ours out of a request; None for each that the message has not.

    Of a message of protocol 1 without ``args`` Celery leaves the headers where they are.
    """
    said = request.request_dict
    left = said.get("headers")
    if isinstance(left, dict):
        return [said.pop(header, left.pop(header, None)) for header in headers]
    return [said.pop(header, None) for header in headers]


def broadcast_refused(request: LockedRequest) -> ConfigurationError:
    """Return why a locked task that came by broadcast fails."""
    msg = (
        f"{request.task.name} is a LockedTask and came through a Broadcast queue "
        f"({request.delivery_info['exchange']}): each worker has a copy, and one lock cannot serve "
        "them. Send it to a usual queue, or declare it without LockedTask."
    )
    return ConfigurationError(msg)
