"""Where every locked message passes in the main process: dispatched, parked, or ended.

The desk decides. What it goes by has rooms of its own: which lock a message takes (``stamper``),
who is on the way (``flights``), waits for Redis (``outage``) or goes back to the broker
(``requeues``), who is told (``herald``), and what is asked of whoever does the I/O (``clerk``).

Everything here runs in the main loop, or in a pool's callback thread; nothing does I/O on the
lock's Redis: a Redis that stalls must not stop heartbeats, or other tasks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

from celery.worker.state import revoked as revoked_tasks
from celery.worker.state import task_ready, task_reserved

from celery_singleton_lock.clerk import Clerk
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import LockError
from celery_singleton_lock.events import TaskBlocked, TaskDuplicate
from celery_singleton_lock.worker.dispatch.in_flight import Flights
from celery_singleton_lock.worker.execution.tracer import Turned, cannot_wait, options_of, reservation_for
from celery_singleton_lock.worker.dispatch.notifier import FRESH, Herald
from celery_singleton_lock.worker.partial_lock_sets import begun_again, onward, renewed
from celery_singleton_lock.core.model import CLAIM_LEASE, Delivery, Ending, Reservation
from celery_singleton_lock.worker.dispatch.wait_for_redis import Outage
from celery_singleton_lock.worker.dispatch.recently_ended import RecentEnds
from celery_singleton_lock.worker.request import LockedRequest, about
from celery_singleton_lock.worker.dispatch.requeue_policy import Requeues
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.lock_header import (
    MARKS,
    STAMP,
    UNSTAMPED,
    Stamp,
    end_in,
    loss_in,
    singles,
)
from celery_singleton_lock.worker.dispatch.header_factory import Stamper

logger = logging.getLogger(__name__)
_clock = SystemClock()

INF: Final = float("inf")


class Desk:
    """Where every locked message passes, once on its way to the pool and once on its way back.

    Args:
        stamper: makes the stamps.
        rules: task -> its options; raises what is wrong with them.
        forward: Celery's own way to the pool.
        clerk: who does the I/O.
        herald: tells what happens.
        prefetch: tells the broker that more (+1) or fewer (-1) messages may be unacknowledged.
        children: whether tasks run in processes of their own, which may die; elsewhere what Celery
            calls the pid of a task may be the number of a greenlet.
        keeps: whether the locks' Redis keeps messages; several servers together keep none.

    Attributes:
        children: as given.
        flights: who is on the way.
        ends: what has ended here lately.
        requeues: who goes back to the broker.
        alone: names of tasks whose requests do not tell how they end, by the worker's self-test:
            they pass by, and the pool takes their locks.
    """

    def __init__(  # the one place where a worker's parts meet
        self,
        *,
        stamper: Stamper,
        rules: Callable[[Any], LockOptions],
        forward: Callable[[Any], None],
        clerk: Clerk,
        herald: Herald,
        prefetch: Callable[[int], None],
        children: bool = True,
        keeps: bool = True,
    ) -> None:
        """Begin with nothing in flight."""
        self._stamper = stamper
        self._rules = rules
        self._forward = forward
        self._clerk = clerk
        self._herald = herald
        self.children: Final = children
        self._keeps_messages = keeps
        self.flights = Flights(self._wait)
        self.ends = RecentEnds(_clock)
        self._outage = Outage(prefetch)
        self.requeues = Requeues(
            stamper=stamper, rules=rules, clerk=clerk, herald=herald, prefetch=prefetch
        )
        self._ending: dict[str, LockedRequest] = {}
        self.unclaimed = 0
        self.alone: frozenset[str] = frozenset()

    # -- to the pool ------------------------------------------------------------------------------

    def __call__(self, request: Any) -> None:
        """Take a message from Celery; replaces ``consumer.on_task_request``."""
        tells = isinstance(request, LockedRequest) and (
            request.task.name not in self.alone or request.delivered
        )
        if not tells:
            return self._forward(request)
        try:
            self._take(request)
        except Exception as error:
            logger.exception("celery-singleton-lock could not handle %s", request)
            held = request.stamp._replace(error=error) if request.delivered else None
            self._send(request, held or self._stamper.unlocked(request, error))
        return None

    def _take(self, request: LockedRequest) -> None:
        if request.stamp is UNSTAMPED:
            if self._stamper.is_to_reject(request):
                return self._reject(request)
            request.desk = self
            copy_of = self._stamper.stamp(request)
            if copy_of is not None and request.stamp.name:
                return self._clerk.look_up(request, *copy_of)
        self._route(request, request.stamp)
        return None

    @staticmethod
    def _reject(request: LockedRequest) -> None:
        """Reject what was published for that: its task did so, after it had been parked."""
        task_ready(request)
        request.reject(requeue=False)

    def _route(self, request: LockedRequest, stamp: Stamp) -> None:
        options = request.options(self._rules)
        if not stamp.name or stamp.error is not None:
            return self._send(request, stamp)
        # A grant has just come from Redis, and a Redis that is full lets it be claimed.
        waits = self._outage.down and not stamp.granted
        if waits and options.on_backend_error == "retry":
            return self._hold(request)
        limit = options.limit if stamp.bundle is None else options_of(stamp, 0, options).limit
        parks = options.on_conflict == "park" and not stamp.granted and not self._outage.down
        if self.flights.board(request, limit, parks=parks):
            self._send(request, stamp)
        return None

    def _hold(self, request: LockedRequest) -> None:
        """Hold a message that has just arrived, unless a thread has just sent on all others."""
        if not self._outage.suspend(request):
            self(request)

    def _wait(self, request: LockedRequest) -> None:
        """Park a message, or hold it while Redis is down."""
        if not self._outage.suspend(request):
            self.park(request)

    def _send(self, request: LockedRequest, stamp: Stamp) -> None:
        request.stamp = stamp
        if request.landed:
            request.landed = False
        request.request_dict[STAMP] = tuple(stamp)
        if self.children:
            request.spare_decoding()
        if stamp.settle:
            request.withhold_ack()
        self._forward(request)

    def park(self, request: LockedRequest) -> None:
        """Have a message kept in Redis; it is acknowledged after that."""
        request.undecide()
        request.parking = True
        self.flights.park(request)
        task_ready(request)
        self._clerk.park(request)

    def _requeue(self, request: LockedRequest) -> None:
        """Have a message sent back to the broker, unless it has waited for long enough."""
        error = self.requeues.in_vain(request)
        if error is None:
            self.requeues.begin(request)
        else:
            self._fail(request, error)

    def _fail(self, request: LockedRequest, error: Exception) -> None:
        """End a task with an error, or as skipped, in a pool slot."""
        request.parking = False
        task_reserved(request)
        self._send(request, request.stamp._replace(error=error))

    # -- what the agent tells ---------------------------------------------------------------------

    def parked(self, request: LockedRequest, holder: str, rank: int, seen_at: float = INF) -> None:
        """The message is safe in Redis: acknowledge it.

        Args:
            request: the message.
            holder: who holds its lock.
            rank: its place in line.
            seen_at: local monotonic time at which that was asked; now, unless given.
        """
        self.flights.parked(request)
        request.acknowledge()
        request.was_blocked = True
        event = TaskBlocked(*about(request), holder=holder, rank=rank)
        self._herald.parked(request, event)
        self.blocked(request, event, seen_at)

    def blocked(self, request: LockedRequest, event: TaskBlocked, seen_at: float) -> None:
        """Send the event of it, if that comes before all that another worker tells of the message.

        For Celery's State, BLOCKED that comes after STARTED or REVOKED would be the last word.
        """
        if not self._herald.sends_events():
            return
        if _clock.monotonic() - seen_at <= FRESH:
            self._herald.send(request, event)
        else:
            self._clerk.look_again(request)

    def twinned(self, request: LockedRequest) -> None:
        """The message's like is here already, and this one is safe: acknowledge it."""
        self.flights.parked(request)
        request.acknowledge()
        self._herald.tell(request, TaskDuplicate(*about(request), verdict="twin"))

    def requeued(self, request: LockedRequest) -> None:
        """The message is with the broker again: acknowledge the one that we have."""
        self.requeues.end(request)
        request.acknowledge()

    def refused(self, request: LockedRequest, reason: str) -> None:
        """The message cannot be parked: fail the task, or skip it."""
        self.flights.parked(request)
        self._fail(request, cannot_wait(request.stamp, request.options(self._rules), reason))

    def deliver(self, delivery: Delivery, request: LockedRequest) -> None:
        """Send a parked message, whose turn has come, to the pool."""
        if delivery.token in self.flights.by_token:
            return None
        request.stamp = self._stamper.delivered(request, delivery)
        request.desk, request.was_blocked = self, True
        request.returns = delivery.returns
        if self.ends.forgotten(request.stamp.token):
            return self._end_again(request)
        again = self._from_the_start(delivery, request)
        if again is not None:
            return self._move(request, again)
        stamp = request.stamp
        request.delivered = True
        request.took = stamp.bundle is None
        self.flights.expect(request)
        self._herald.hush(request)
        if delivery.verdict == "revoked":
            revoked_tasks.add(request.id)  # another worker may have heard of it, and this one not
        if request.revoked():
            return self.on_landed(request, gone=True)
        self._watch_granted(stamp, request.options(self._rules).lease)
        task_reserved(request)
        self._herald.delivered(request, delivery)
        self(request)
        return None

    def withdraw(self, request: LockedRequest) -> None:
        """Another worker has got the message: this request does not run."""
        if not request.landed:
            request.withdrawn = True
            task_ready(request)
            self.on_landed(request, gone=False)

    def _watch_granted(self, stamp: Stamp, lease: float) -> None:
        """Have a grant renewed while it waits for its slot, and what is kept along with it."""
        self._clerk.watch(stamp, min(CLAIM_LEASE, lease), held=True)
        if stamp.bundle is not None:
            self._clerk.take_over(stamp.token)
        for kept in _kept(stamp):
            self._clerk.watch(kept, lease, held=True)

    def _end_again(self, request: LockedRequest) -> None:
        """Settle a message that has run here; Redis delivers it since it has lost its end."""
        logger.warning(
            "%s has ended here, and the locks' Redis does not know that: it does not run again",
            request,
        )
        self._clerk.end(request.stamp, Ending.FINAL, None)
        self._herald.tell(request, TaskDuplicate(*about(request), verdict="ended"))

    def undelivered(self, delivery: Delivery) -> None:
        """Forget a delivery of which no task could be made."""
        self.flights.by_token.pop(delivery.token, None)
        self._clerk.forget(delivery.token)

    def _from_the_start(self, delivery: Delivery, request: LockedRequest) -> Stamp | None:
        """Return the stamp of a delivery that must begin at the first of its locks, if it must."""
        stamp, bundle = request.stamp, request.stamp.bundle
        granted = delivery.verdict == "granted"
        if bundle is None:
            return self._with_locks_added(delivery, request) if granted else None
        if bundle.here.token == stamp.token:
            return None
        own = renewed(bundle, stamp.token)  # another had it, and may run
        request.stamp = stamp = stamp._replace(bundle=own)
        return begun_again(stamp, bundle, frees=()) if own is None and granted else None

    def _with_locks_added(self, delivery: Delivery, request: LockedRequest) -> Stamp | None:
        """Have a message take all locks that was parked before its task got several."""
        stamp = request.stamp
        bundle = self._stamper.bundle_now(request, stamp)
        if bundle is None:
            return None
        if bundle.here.name != stamp.name:
            return begun_again(stamp, bundle, frees=())
        own = bundle.granted(delivery.fencing_token)
        request.stamp = stamp._replace(bundle=own, announce=True)
        return None

    def redispatch(self, request: LockedRequest) -> None:
        """Send a copy to the pool: what it is a copy of is not known any more."""
        task_reserved(request)
        self._route(request, request.stamp)

    def dropped(self, request: LockedRequest) -> None:
        """End a copy quietly: the message itself is safe, or has ended."""
        self.flights.parked(request)
        task_ready(request)
        request.acknowledge()
        self._herald.tell(request, TaskDuplicate(*about(request), verdict="done"))

    def backend_down(self) -> None:
        """Stop dispatching locked tasks until Redis is back."""
        self._outage.down = True

    def backend_up(self) -> None:
        """Send on what was held, in the order of arrival."""
        for request in self._outage.end():
            self(request)

    def relax(self) -> None:
        """Send on what is held here for Redis, and does not keep its lock any more."""
        for request in self._outage.free(self._stamper.keeps):
            request.stamp = self._stamper.relaxed(request)
            self(request)

    # -- back from the pool -----------------------------------------------------------------------

    def on_accepted(self, request: LockedRequest) -> None:
        """The pool begins: renew the lease, which is taken any moment now, or was just before."""
        stamp = request.stamp
        if stamp.name and stamp.error is None and not request.withdrawn:
            lease = request.options(self._rules).lease
            held = (stamp.granted or request.took) and not request.landed
            if request.landed and request.delivered:  # it was given back, unless it had begun
                request.landed = False
                self.flights.expect(request)
            self._clerk.watch(stamp, lease, held=held)
            for other in _others(stamp) if stamp.bundle else ():
                self._clerk.watch(other, lease, held=request.took)
            if request.took:
                self._herald.acquired(request)

    def on_notice(self, notice: str) -> None:
        """A child took its lock, or had lost it when its task ended, or could not give it back.

        Taken, it can be lost from now on, and the message be acknowledged.
        """
        request = self.flights.by_token.get(notice)
        if request is None:
            return self._hear_of_end(notice) if notice[:1] in MARKS else None
        self._clerk.confirm(notice)
        for other in _others(request.stamp) if request.stamp.bundle else ():
            self.flights.alias(notice, other.token)
            self._clerk.confirm(other.token)
        self._herald.acquired(request)
        request.decided()
        request.took = request.told = True
        self.flights.go_on(request.stamp.name)
        return None

    def _hear_of_end(self, notice: str) -> None:
        lost, unheard = loss_in(notice), end_in(notice)
        if lost is not None:
            self._clerk.report_loss(lost, "It was noticed when the task had ended.")
        elif unheard is not None:
            stamp, ending, hold = unheard
            self._clerk.end(stamp, ending, None, hold)

    def on_ran(self, request: LockedRequest) -> None:
        """The task has run, so it had its lock: of a short one the notice of that comes later.

        Not if it may run without, while Redis is away; then only the notice tells.
        """
        if request.stamp.name and request.options(self._rules).on_backend_error != "run":
            self._herald.acquired(request)

    def on_turned(self, request: LockedRequest, turned: Turned) -> bool:
        """The task was not run. Returns False if Celery should acknowledge it as ignored."""
        stamp = request.stamp
        if turned.verdict == "skipped":
            request.forget_start()
            policy = "skip" if request.options(self._rules).on_conflict == "skip" else "full"
            self._herald.skipped(request, turned.reason, policy)
            return False
        request.parking = True
        request.undecide()
        request.is_twin = turned.verdict == "twin"
        unheard = turned.verdict == "gone" and stamp.settle and stamp.copy
        if stamp.bundle is not None and (turned.bundle or unheard or turned.verdict == "again"):
            self._move(request, onward(stamp, stamp.bundle, turned.bundle))
            return True
        requeues = self._requeues(request) and not request.delivered
        if turned.verdict in {"blocked", "twin"} and requeues:
            self.on_landed(request, gone=False)
            self._requeue(request)
            return True
        if turned.verdict == "gone":
            self.unclaimed += 1
            task_ready(request)
        elif turned.verdict == "done":
            self.dropped(request)
        elif turned.verdict == "unavailable":
            self._unanswered(request, turned.reason)
        else:
            self.park(request)
        self.on_landed(request, gone=False)  # last: it lets those go on who arrived later
        if unheard:
            self._take_anew(request)
        return True

    def _move(self, request: LockedRequest, stamp: Stamp) -> None:
        """Park a task that has several locks: at the first that is busy, or at its first again."""
        self.on_landed(request, gone=False)
        request.stamp = stamp
        request.took = request.delivered = False
        self.park(request)

    def _requeues(self, request: LockedRequest) -> bool:
        """Whether a message that cannot run goes back to the broker, and is not kept in Redis."""
        return not self._keeps_messages or request.options(self._rules).on_conflict == "requeue"

    def _unanswered(self, request: LockedRequest, reason: str) -> None:
        """Hold what found no Redis, until it is back."""
        if not self._outage.down:
            logger.warning("celery-singleton-lock: %s Locked tasks wait.", reason)
        if request.stamp.granted:  # nobody knows whether it was claimed
            request.stamp = request.stamp._replace(copy=True)
        self._outage.begin(request)
        self._clerk.backend_failed()  # later: when Redis is back, all that is held is sent on

    def _take_anew(self, request: LockedRequest) -> None:
        """Park what claimed its lock without hearing of it, until the lease was over.

        Its message was settled by the claim, so this is all that is left of it. Or it is not, since
        nothing had been claimed: then the one that is kept in Redis runs, and this is a copy of it.
        It does not go to the pool, which may be closed by now.
        """
        request.parking = request.took = request.delivered = False
        request.stamp = self._stamper.anew(request.stamp)
        logger.warning(
            "%s had been granted the lock %r, and lost it before it heard of that: it takes its "
            "place in line again",
            request,
            request.stamp.name,
        )
        self.park(request)

    def on_retried(self, request: LockedRequest, retry: BaseException) -> None:
        """The task is to be retried, and may have kept its permit for that."""
        options, stamp = request.options(self._rules), request.stamp
        if options.on_retry == "keep" and stamp.name:
            reservation = reservation_for(request.request_dict, retry, options.lease)
            self._clerk.mind(stamp.name, reservation, request.id)

    def on_revoked(self, request: LockedRequest) -> None:
        """The task does not run: a permit that was kept for it goes to the next."""
        stamp = request.stamp
        retried = request.request_dict.get("retries")
        if retried and stamp.name and request.options(self._rules).on_retry == "keep":
            token = Reservation(stamp.attempt, 0.0).token
            self._clerk.end(stamp._replace(token=token), Ending.FINAL, None)

    def on_refused(self, request: LockedRequest, error: LockError) -> None:
        """The task has ended with an error that tells why it did not get its lock."""
        self._herald.refused(request, error)

    def on_lost(self, request: LockedRequest) -> None:
        """The task has ended with LockLost, by itself or since it was interrupted."""
        self._clerk.report_loss(request.stamp, "The task has ended with LockLost.")

    def interruptible(self, token: str) -> LockedRequest | None:
        """Return the request that is to be interrupted, since its lock was lost."""
        request = self.flights.of(token)
        if request is None or not request.told:
            return None
        return request if request.options(self._rules).on_lost == "abort" else None

    def on_landed(self, request: LockedRequest, *, gone: bool) -> None:
        """A flight is over.

        Args:
            request: what was sent.
            gone: the process that ran it cannot release, so the agent must.
        """
        stamp = request.stamp
        if request.landed or stamp is UNSTAMPED:
            return
        request.landed = True
        if not stamp.name:
            return
        if request.accepted and not request.parking and request.ending() is Ending.FINAL:
            self.ends.note(stamp)
        self.flights.land(stamp)
        unclaimed = stamp.error is not None and (stamp.granted or bool(_kept(stamp)))
        if unclaimed or (gone and (request.accepted or stamp.granted)):
            dying = request.worker_pid if gone and self.children else None
            self._ending[stamp.token] = request
            self._clerk.end(stamp, _ending_of(request), dying)
        elif request.acquired_at is not None:
            self._herald.released(request)
        self._clerk.forget(stamp.token)  # behind end(), which asks when the lease ends
        for other in _others(stamp) if stamp.bundle else ():
            self._clerk.forget(other.token)
        self.flights.leave(stamp)

    # -- the worker's life ------------------------------------------------------------------------

    def abandon(self, *, unless_dispatched: bool) -> None:
        """Give back what the pool will not run: it was flushed, or is being closed.

        Args:
            unless_dispatched: leave alone what the pool has taken over already.
        """
        self.flights.drop_followers()
        for request in self.flights.in_hand():
            if request.accepted:
                continue
            if unless_dispatched and request.dispatched and not request.unsent():
                continue
            request.doubt()
            self.on_landed(request, gone=request.delivered)
        self.requeues.abandon()
        for request in self._outage.abandon():
            if request.delivered and request.stamp.settle and request.stamp.copy:
                self._save(request, closing=unless_dispatched)

    def _save(self, request: LockedRequest, *, closing: bool) -> None:
        """Keep what may have been settled by a claim of which Redis has told nothing.

        Then nobody has it any more. If that is not so, this is a copy. Redis is asked as soon as it
        answers; by a worker that shuts down the broker is.
        """
        if closing:
            self._clerk.rescue(request)
        else:
            self.park(request)

    def ended(self, token: str) -> None:
        """The clerk has released for a process that could not."""
        request = self._ending.pop(token, None)
        if request is not None:
            self._herald.released(request)

    def counts(self) -> dict[str, Any]:
        """Return how many messages are here, and where; for JSON."""
        return {
            **self.flights.counts(),
            "suspended": len(self._outage),
            "held_back": len(self.requeues),
            "unclaimed": self.unclaimed,
        }


def _ending_of(request: LockedRequest) -> Ending:
    """Return how a request that does not run is given back.

    A child may have taken it from its pipe, and not been heard of: then it keeps the lock.
    """
    ending, stamp = request.ending(), request.stamp
    unheard = request.delivered and not request.accepted and stamp.error is None
    if ending is Ending.AGAIN and unheard and stamp.granted and stamp.bundle is None:
        return Ending.RETURN
    return ending


def _others(stamp: Stamp) -> list[Stamp]:
    """Return stamps for the other locks of a delivery that has several."""
    return [each for each in singles(stamp) if each.token != stamp.token]


def _kept(stamp: Stamp) -> list[Stamp]:
    """Return stamps for the locks that a delivery has kept while it was parked."""
    return [] if stamp.bundle is None else singles(stamp)[: stamp.bundle.at]


def worker_id(hostname: str) -> str:
    """Return an id that no other worker has had, a former one of this name included."""
    return f"{hostname}#{os.urandom(3).hex()}"
