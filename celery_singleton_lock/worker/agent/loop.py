"""The thread of a worker's main process that parks, delivers and sweeps.

The main loop puts orders into a queue and never waits; this thread does their I/O, in order and in
batches, and answers through the mailbox. A second, tiny thread waits for grants in the worker's
inbox and puts them into the same queue.

The agent has the round, and what is done in each. What concerns one subject has a room of its own:
orders that wait (``tray``), messages into Redis (``parker``, ``kept``), out of it (``inbox``), and
through the broker (``courier``), locks of dead processes (``releases``) and of everybody
(``sweeper``), revoked tasks (``revokes``), lost locks (``losses``), whether Redis answers
(``contact``).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

from celery_singleton_lock.worker.background_thread import BackgroundThread, ThreadGroup
from celery_singleton_lock.clerk import Clerk
from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.worker.redis_health import Contact
from celery_singleton_lock.worker.agent.republish import Courier
from celery_singleton_lock.worker.agent.data_loss import DataLoss
from celery_singleton_lock.worker.dispatch.dispatcher import Desk
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.events import Event
from celery_singleton_lock.worker.dispatch.notifier import Herald
from celery_singleton_lock.worker.agent.grant_inbox import Inbox
from celery_singleton_lock.worker.partial_lock_sets import Kept
from celery_singleton_lock.worker.agent.lost_leases import Losses
from celery_singleton_lock.core.model import ALIVE, Delivery, Ending, Reservation
from celery_singleton_lock.core.lock_mode import MODES, Modes
from celery_singleton_lock.worker.agent_commands import (
    End,
    Errand,
    Leave,
    Left,
    LookUp,
    Lost,
    Order,
    Park,
    Requeue,
    Revoke,
    Settle,
    Switch,
    alike,
)
from celery_singleton_lock.worker.agent.parking import Parker
from celery_singleton_lock.worker.publisher import Publisher
from celery_singleton_lock.worker.consumed_queues import Queues
from celery_singleton_lock.worker.agent.release_after_process_death import Releases
from celery_singleton_lock.worker.request import LockedRequest
from celery_singleton_lock.worker.agent.revoke_parked import Revokes
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.lock_header import Stamp
from celery_singleton_lock.store.operator.base import Standing
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.worker.agent.sweeper import Sweeper
from celery_singleton_lock.worker.agent_queue import RETRY, Tray
from celery_singleton_lock.lock.renewals import Watchdog
from celery_singleton_lock.message_text import printable

logger = logging.getLogger(__name__)

BEAT: Final = 1.0
"""Seconds between two signs of life, and about as many between two sweeps."""

LOOK: Final = 0.2
"""Seconds between two looks whether a child that runs a locked task has died."""

SLOT_WAIT: Final = 2.0
"""Seconds for which a grant waits for a slot here before another worker may have it."""

SYNC: Final = 30.0
"""Seconds between two measurements of the server's clock."""

HAND_OVER: Final = 0.5
"""Seconds in which a worker that ends hands over what its parked messages keep."""


class Agent:
    """Does the I/O of a worker's desk.

    Args:
        store: the agent's own, with its own connections.
        replicated: waits for replicas, likewise; None if none are waited for.
        worker: id of this worker.
        realm: hash of the broker.
        place: the clock that gives arriving messages their place; kept in step here.
        queues: what the worker consumes.
        declared: returns the names of the tasks whose parked messages the worker can run.
        rules: task -> its options.
        receive: turns a delivery into a request and hands it to the desk; runs in the main loop.
        post: runs a call in the main loop.
        reap: lets the pool look for children that have ended; runs in the main loop.
        abort: interrupts the task that holds a token, if it wants that and the pool can; runs in
            the main loop.
        publisher: sends messages to the broker.
        watchdog: renews the leases of what this worker runs, or is about to.
        herald: tells what happens.
        modes: which tasks keep their locks now.
        address: of the lock's Redis, without credentials.
        done_for: seconds for which later copies of an ended attempt end quietly.
        max_body: most bytes of a message that is parked.
        capacity: tasks that the worker's pool runs at once.
        free: returns how many slots of the pool are free; below 0, so many tasks wait for one.
        stands_still: tells whether the main loop makes no calls at present.
        desk: makes the desk, given its clerk: each needs the other.
        threads: further background threads of the worker, to be looked after.

    Attributes:
        desk: whom to tell.
        inbox: the grants that come to this worker.
    """

    def __init__(  # the one place where a worker's I/O meets
        self,
        store: Store,
        *,
        worker: str,
        realm: str,
        place: ServerClock,
        queues: Queues,
        declared: Callable[[], Collection[str]],
        rules: Callable[[Any], LockOptions],
        receive: Callable[[Delivery], None],
        post: Callable[..., None],
        reap: Callable[[], None],
        abort: Callable[[str], None],
        publisher: Publisher,
        watchdog: Watchdog,
        herald: Herald,
        modes: Modes,
        address: str,
        done_for: float,
        max_body: int,
        capacity: int,
        free: Callable[[], int],
        stands_still: Callable[[], bool],
        desk: Callable[[Clerk], Desk],
        threads: Sequence[BackgroundThread] = (),
        replicated: Store | None = None,
    ) -> None:
        """Prepare; :meth:`start` starts the threads."""
        self.store = store
        self.worker = worker
        self.realm = realm
        self.desk = desk(self)
        self._place = place
        self._queues = queues
        self._declared = declared
        self._post = post
        self._reap = reap
        self._watchdog = watchdog
        self._herald = herald
        self._modes = modes
        self._clock = store.clock
        self._contact = Contact(
            store.clock,
            address=address,
            observers=herald.observers,
            on_loss=self._look_soon,
            on_return=self._come_back,
        )
        self._orders = Tray(store.clock)
        self._kept = Kept(store, watchdog, worker, self._standing)
        self.inbox = Inbox(
            store,
            worker,
            kept=self._kept,
            orders=self._orders,
            pass_on=receive,
            post=post,
            stands_still=stands_still,
            reject=self._reject,
        )
        self._releases = Releases(
            store,
            kept=self._kept,
            orders=self._orders,
            taker=self.inbox.taker,
            done_for=done_for,
            lease_end=watchdog.valid_until,
            told=partial(post, self.desk.ended),
        )
        self._revokes = Revokes(store, realm=realm, orders=self._orders, taker=self.inbox.taker)
        self._loss = DataLoss(
            store,
            worker,
            ends=self.desk.ends,
            in_hand=lambda: [*self.desk.flights.by_token],
            orders=self._orders,
            tell=self.tell,
        )
        self._parker = Parker(
            store,
            worker=worker,
            realm=realm,
            queues=queues,
            rules=rules,
            kept=self._kept,
            orders=self._orders,
            revokes=self._revokes,
            loss=self._loss,
            replicated=replicated,
            desk=self.desk,
            post=post,
            done_for=done_for,
            max_body=max_body,
        )
        self._courier = Courier(
            publisher,
            queues=queues,
            orders=self._orders,
            desk=self.desk,
            post=post,
            watchdog=watchdog,
            settle=self.inbox.drop,
        )
        self._sweeper = Sweeper(
            store,
            worker=worker,
            realm=realm,
            inbox=self.inbox,
            flights=self.desk.flights,
            courier=self._courier,
            kept=self._kept,
            modes=modes,
            capacity=capacity,
        )
        self._losses = Losses(
            store.clock,
            orders=self._orders,
            flights=self.desk.flights,
            abort=partial(post, abort),
            tell=self.tell,
            in_turn=post if self.desk.children else _at_once,
        )
        self._free = free
        self._next_beat = 0.0
        self._next_sync = 0.0
        self._next_look = 0.0
        self._stopped = threading.Event()
        self._agent_thread = BackgroundThread(
            "singleton-lock-agent", self._round, at_end=self._farewell
        )
        self._inbox_thread = BackgroundThread("singleton-lock-inbox", self._receive)
        self._threads = ThreadGroup(
            self._agent_thread,
            self._inbox_thread,
            self._courier.thread,
            *self._parker.threads,
            *threads,
        )

    # -- orders of the desk: never wait -----------------------------------------------------------

    def park(self, request: LockedRequest) -> None:
        """Keep a message in Redis, then tell the desk."""
        self._parker.order(request)

    def end(self, stamp: Stamp, ending: Ending, pid: int | None, hold: float = 0.0) -> None:
        """Release for a process that cannot, once ``pid`` is gone."""
        self._releases.order(stamp, ending, pid, hold)

    def requeue(self, request: LockedRequest, delay: float) -> None:
        """Send a message back to the broker after ``delay`` seconds, then tell the desk."""
        self._orders.put_off(Requeue(request), delay)

    def rescue(self, request: LockedRequest) -> None:
        """Send a message to the broker at once: this worker ends, and Redis does not answer."""
        self._courier.rescue(request)

    def mind(self, name: str, reservation: Reservation, task_id: str) -> None:
        """End a reservation when its task is revoked."""
        self._revokes.mind(name, reservation, task_id)

    def report_loss(self, stamp: Stamp, ended: str) -> None:
        """Report that the lock of a task was lost, unless that was done."""
        self._losses.ended(stamp, ended)

    def look_up(self, request: LockedRequest, name: str, token: str) -> None:
        """See what became of the message that this one is a copy of."""
        self._orders.put(LookUp(request, name, token))

    def switch(self, task: str, mode: str | None) -> None:
        """Switch the mode of a task, or of all (``*``): here at once, then for the fleet."""
        self._tell_of_modes(self._modes.order(task, mode))
        self._orders.put(Switch(task, mode))

    def run_errand(self, call: Callable[[], None]) -> None:
        """Make a call that waits for Redis; once, whatever comes of it."""
        self._orders.put(Errand(call))

    def watch(self, stamp: Stamp, lease: float, *, held: bool) -> None:
        """Renew a lease from now on."""
        self._watchdog.watch_later(
            stamp.name, stamp.token, lease, held=held, on_lost=self._losses.noticed
        )

    def take_over(self, token: str) -> None:
        """Leave to the desk what a message keeps that has come back here."""
        self._kept.taken_over(token)

    def confirm(self, token: str) -> None:
        """Note that its lock was taken: if the store does not know it, it was lost."""
        self._watchdog.confirm(token, 0.0)  # valid for no longer than was known before

    def forget(self, token: str) -> None:
        """Renew it no more."""
        self._watchdog.forget(token, patience=0)

    def look_again(self, request: LockedRequest) -> None:
        """Tell the desk that a message is blocked, if it still is; see :meth:`Desk.blocked`."""
        self._parker.look_again(request)

    def backend_failed(self) -> None:
        """Stop what needs Redis until it answers again."""
        self._contact.lost()

    def keeping(self) -> int:
        """Return how many messages that this worker has parked keep other locks meanwhile."""
        return len(self._kept)

    def down_for(self) -> float:
        """Return the seconds for which Redis has not answered; 0 if it does."""
        return self._contact.down_for()

    def counts(self) -> dict[str, int]:
        """Return what the agent has done since the worker started; shown by ``inspect stats``."""
        return {
            "parked": self._parker.parked,
            "delivered": self.inbox.delivered,
            "swept": self._sweeper.swept,
            "published": self._courier.published,
            "requeued": self._courier.requeued,
            "rejected": self._courier.rejected,
            "replaced": self.inbox.replaced,
            "passed_on": self.inbox.passed,
            "released_for_dead": self._releases.done,
            "backend_errors": self._contact.errors + self._parker.errors,
            "lost": self._losses.lost,
            "let_run": self._sweeper.let_run,
            "parked_lost": self._loss.lost,
            "parked_untracked": self._loss.untracked,
        }

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both threads; harmless if they run."""
        self._agent_thread.start()
        self._inbox_thread.start()

    def last_rounds(self) -> dict[str, float | None]:
        """Return for each thread of this worker the seconds since its last round.

        None stands for a thread that waits for work, or has ended. A number that grows means that
        a thread hangs, or that it has died.
        """
        return {**self._threads.last_rounds(), "csl-watchdog": self._watchdog.last_round()}

    def stand_aside(self) -> None:
        """Take no grants in this worker's life, and tell of messages that nobody runs."""
        self._sweeper.stand_aside()
        self.retire()

    def retire(self) -> None:
        """Take no more grants: the worker is shutting down, or cannot run them."""
        self.inbox.retire()

    def stop(self, timeout: float) -> None:
        """Carry out the orders that are left, within ``timeout`` seconds, and end both threads."""
        self.retire()
        self._stopped.set()
        self._orders.wake()
        for thread in (self._agent_thread, self._inbox_thread):
            thread.join(timeout / 2)
        self._courier.close(timeout)
        self._parker.close(timeout / 2)

    def _round(self) -> bool:
        if self._stopped.is_set():
            return False
        self.run_once(self._pause())
        return True

    def _receive(self) -> bool:
        """Wait for a grant; look after the agent's own thread, which looks after all others."""
        self._agent_thread.start()
        return self.inbox.receive()

    def _look_after_threads(self) -> None:
        self._threads.look_after()
        self._watchdog.look_after()

    def _pause(self) -> float:
        look = min(self._next_beat, self._orders.next_at())
        return max(0.0, min(LOOK, look - self._clock.monotonic()))

    # -- one round --------------------------------------------------------------------------------

    def run_once(self, pause: float = 0.0) -> int:
        """Carry out what has been ordered, and beat and sweep if it is time.

        Args:
            pause: most seconds to wait for an order.

        Returns:
            How many orders were carried out.
        """
        orders = self._orders.take(pause)
        for batch in alike(orders):
            try:
                self._carry_out(batch)
            except BackendError as error:
                self._failed(batch, error)
            except (Exception, SystemExit):  # the other batches have been taken as well
                logger.exception("celery-singleton-lock: the agent failed at %r", batch)
        self._look_after_children()
        if self._clock.monotonic() >= self._next_beat:
            self._tick()
        return len(orders)

    def _failed(self, batch: list[Order], error: BackendError) -> None:
        logger.warning("celery-singleton-lock: %s Trying again.", error)
        self._contact.failed(error)
        for order in batch:
            if not isinstance(order, Delivery):  # that lapses, and is granted again
                self._orders.try_again(order, error)

    def _carry_out(self, batch: list[Any]) -> None:
        """Carry out a run of like orders: together where one round trip does, else one by one."""
        match batch[0]:
            case Park():
                self._parker.park(batch)
            case _:
                for order in batch:
                    self._carry_out_one(order)

    def _carry_out_one(self, order: Any) -> None:
        steps: dict[type[Any], Callable[[Any], None]] = {
            Requeue: self._courier.requeue,
            Left: self._sweeper.left,
            Settle: self._parker.settle,
            End: self._releases.carry_out,
            LookUp: self._look_up,
            Delivery: self.inbox.deliver,
            Lost: self._losses.report,
            Revoke: self._revokes.end,
            Switch: self._switch,
            Errand: lambda order: order.call(),
            Leave: lambda _order: self._leave(),
        }
        steps[type(order)](order)

    def _reject(self, delivery: Delivery) -> None:
        self._courier.reject(delivery)

    def _look_up(self, order: LookUp) -> None:
        self._sweeper.kick([order.name])
        if self.store.body(order.name, order.token) is not None:
            self._post(self.desk.dropped, order.request)
        else:
            self._post(self.desk.redispatch, order.request)

    # -- what comes by itself ---------------------------------------------------------------------

    def _tick(self) -> None:
        self._next_beat = self._clock.monotonic() + BEAT * random.uniform(0.8, 1.2)  # noqa: S311
        self._look_after_threads()
        try:
            self._ask_redis()
        except BackendError as error:
            if not self._contact.down:
                logger.warning(
                    "celery-singleton-lock: %s It is %s. Locked tasks wait.",
                    error,
                    self._contact.address,
                )
            self._contact.failed(error)
        except Exception:
            logger.exception("celery-singleton-lock: the agent's round failed")
        else:
            self._contact.regained()
        if self._contact.down and self._modes.relaxed():
            self._post(self.desk.relax)

    def _ask_redis(self) -> None:
        self._sync()
        if not self.inbox.retired:
            self._beat()
        self._revokes.free()
        self._sweeper.sweep()
        self._sweeper.relax()
        self._pass_on()
        if not self._stopped.is_set():
            self._sweeper.tell_of_neglected()
        self._kept.look()
        self._revokes.hear()
        if self._contact.down:
            self.store.probe()  # a Redis that is full answers all of the above
        self._loss.look()

    def _beat(self) -> None:
        queues, free, tasks = self._queues.consumed(), self._free(), self._declared()
        switches = self.store.beat(self.worker, self.realm, queues, ALIVE, free, tasks=tasks)
        self._hear_of_modes(switches)

    def _pass_on(self) -> None:
        """Let other workers have grants that wait here, if they have a slot for them.

        Of the messages of one task the first tells whether it is worth asking for the next.
        """
        self.inbox.pass_on_arrived()
        settled: set[str] = set()
        for request in self.desk.flights.waiting_since(self._clock.monotonic() - SLOT_WAIT):
            if request.task.name in settled:
                continue
            if self.inbox.passed_on(request.stamp.name, request.stamp.token):
                self.forget(request.stamp.token)
                self._post(self.desk.withdraw, request)
            else:
                settled.add(request.task.name)

    def _look_after_children(self) -> None:
        """Have the pool look again: a child's sentinel closes before the child can be reaped.

        If Celery looks in between, it looks again after 5 s only. For as long the child's lock is
        kept, and a message that was written to the dying child waits in its pipe.
        """
        now = self._clock.monotonic()
        if now >= self._next_look and self.desk.flights.busy():
            self._next_look = now + LOOK
            self._post(self._reap)

    def _standing(self, name: str, token: str) -> Standing:
        """Return where a message stands."""
        return admin_of(self.store).look(name, token)  # type: ignore[arg-type]  # one of those

    def _sync(self) -> None:
        now = self._clock.monotonic()
        if now < self._next_sync:
            return
        self._place.sync(self.store.time(), self._clock.monotonic())
        self._next_sync = now + SYNC

    # -- modes ------------------------------------------------------------------------------------

    def _hear_of_modes(self, switches: Mapping[str, str]) -> None:
        self._tell_of_modes(self._modes.hear(switches))

    def _tell_of_modes(self, changed: list[str]) -> None:
        for mode in MODES:
            tasks = [task for task in changed if self._modes.of(task) == mode]
            if tasks:
                logger.warning(
                    "celery-singleton-lock: the mode is %s now, of %s",
                    mode,
                    ", ".join(map(printable, tasks)),
                    extra={"lock_event": "mode", "lock_mode": mode},
                )
        if changed:
            self._sweeper.modes_changed()
            self._post(self.desk.relax)

    def _switch(self, order: Switch) -> None:
        """Tell the fleet, unless another order came meanwhile: this one may have had to wait."""
        if self._modes.is_ordered(order.task, order.mode):
            self.store.switch(order.task, order.mode)
            self._modes.settle(order.task, order.mode)

    def tell(self, event: Event) -> None:
        """Tell observers, and whoever listens to Celery's events; in the agent's thread."""
        self._herald.observers.notify(event)
        self._post(self._herald.announce, event)

    def _look_soon(self) -> None:
        """Stop what needs Redis, and see soon whether it is back."""
        self.desk.ends.doubt()
        self._next_beat = min(self._next_beat, self._clock.monotonic() + RETRY)
        self._post(self.desk.backend_down)

    def _come_back(self) -> None:
        """Go on with what needs Redis, and see whether it has lost data meanwhile."""
        self._loss.look_soon()
        self._post(self.desk.backend_up)

    # -- the end ----------------------------------------------------------------------------------

    def _farewell(self) -> None:
        """Carry out the rest, tell the fleet, give back what is still in the inbox."""
        try:
            while self.run_once():
                pass
            self._leave()
            self._loss.finish()
            self._kept.hand_over(self._clock.monotonic() + HAND_OVER)
        except BackendError as error:
            logger.warning("celery-singleton-lock: leases are left to end: %s", error)
        finally:
            self._kept.close()

    def _leave(self) -> None:
        self.store.leave(self.worker, self.realm, self._queues.consumed())
        self.inbox.empty()


def _at_once(call: Callable[..., None], *args: Any) -> None:
    call(*args)
