"""The thread of a worker's main process that does the I/O: it parks, delivers, releases and sweeps.

The main loop puts commands into a queue and does not wait. This thread carries them out in batches,
and calls the dispatcher through the loop channel. A second thread waits for grants in the worker's
inbox. It passes them to the main loop itself, or puts them into the same queue.

:meth:`Agent.run_once` is one round. The other modules of this package do the work, one subject
each. :meth:`Agent._carry_out` shows which module carries out which command.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.core.conflict_policy import assert_never
from celery_singleton_lock.core.lock_mode import Modes
from celery_singleton_lock.core.lock_view import Parked
from celery_singleton_lock.core.model import SCHEMA, SCHEMAS
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.events import Event
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.store.base import ReplicaStore, Store
from celery_singleton_lock.store.error_mapping import wrong_schema
from celery_singleton_lock.worker.agent.command_runner import CommandRunner
from celery_singleton_lock.worker.agent.data_loss import DataLoss
from celery_singleton_lock.worker.agent.grant_inbox import GrantInbox
from celery_singleton_lock.worker.agent.late_check import SILENT, LateCheck
from celery_singleton_lock.worker.agent.lost_leases import LostLeases
from celery_singleton_lock.worker.agent.mode_switches import ModeSwitches
from celery_singleton_lock.worker.agent.parked_limit import MostParked, ParkedLimit
from celery_singleton_lock.worker.agent.parking import Parking
from celery_singleton_lock.worker.agent.rate_timers import RateTimers
from celery_singleton_lock.worker.agent.release_after_process_death import ReleaseAfterProcessDeath
from celery_singleton_lock.worker.agent.republish import Republisher
from celery_singleton_lock.worker.agent.revoke_parked import RevokeParked
from celery_singleton_lock.worker.agent.running_tasks import RunningTasks
from celery_singleton_lock.worker.agent.slot_offers import SlotOffers
from celery_singleton_lock.worker.agent.sweeper import Sweeper
from celery_singleton_lock.worker.agent.tick import Tick
from celery_singleton_lock.worker.agent.worker_heartbeat import Heartbeat
from celery_singleton_lock.worker.agent_commands import (
    Call,
    CheckBlocked,
    Command,
    DeliverRevoked,
    EndUnique,
    LeaveFleet,
    LeavePreviousQueue,
    LookUp,
    NoteNextStart,
    Park,
    RecordPublished,
    Release,
    ReportLoss,
    Requeue,
    RetryRefused,
    SweepLock,
    SwitchMode,
    TrackReservation,
)
from celery_singleton_lock.worker.agent_queue import RETRY, AgentQueue
from celery_singleton_lock.worker.background_thread import BackgroundThread, ThreadGroup
from celery_singleton_lock.worker.consumed_queues import Queues
from celery_singleton_lock.worker.dispatch.dispatcher import Dispatcher
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets
from celery_singleton_lock.worker.publisher import Publisher
from celery_singleton_lock.worker.queue_stops import QueueStops
from celery_singleton_lock.worker.redis_health import RedisHealth, for_each

logger: Final = logging.getLogger(__name__)

BEAT: Final = 1.0
"""Average seconds between two ticks. Each interval differs by up to a fifth."""

SWEEP_ON: Final = 0.03
"""Seconds between two sweeps of a tick, while more locks are due than the pool has room for."""

LOOK: Final = 0.2
"""Seconds between two checks for child processes that have died."""

BEGIN_AGAIN: Final = 0.5
"""Seconds for which a stopping worker parks messages of partial lock sets at their first lock."""


class Agent:
    """Does the I/O of a worker's dispatcher.

    Args:
        store: a store with its own connections.
        replicated: a store that waits for replicas, with its own connections; None if
            ``singleton_lock_replicas_wait`` is 0.
        worker: id of this worker.
        realm: hash of the broker's URL.
        place: the clock that gives arriving messages their place. It is synchronised here.
        queues: the queues that the worker consumes.
        declared: returns the names of the tasks whose parked messages the worker can run.
        rules: task -> its options.
        receive: creates a request for a delivery and dispatches it; runs in the main loop.
        post: runs a call in the main loop.
        reap: lets the pool check for children that have ended; runs in the main loop.
        abort: interrupts the task that holds a token, if its options and the pool allow that; runs
            in the main loop.
        preempt: ends the task with a token, because of a newer attempt.
        end_unique: ends the unique calls of revoked task ids that wait in this worker.
        publisher: sends messages to the broker.
        watchdog: renews the leases of tasks that run here, or are about to.
        partial_lock_sets: renews the locks that parked messages hold.
        notifier: reports events.
        modes: which tasks take their locks now.
        address: address of the locks' Redis, without credentials.
        done_for: seconds for which an ended attempt is remembered, so that its copies are dropped.
        again_after: seconds after which the broker delivers a message again.
        max_body: most bytes of a message that is parked.
        capacity: number of tasks that the worker's pool runs at once.
        free: returns the number of free pool slots; -3: no slot is free, and three tasks wait for
            one.
        stands_still: returns whether the main loop makes no posted calls at present.
        commands: the queue of commands.
        dispatcher: called in the main loop with the results.
        threads: further background threads of the worker, which the agent restarts if they die.
        schema: version of the data model that the tasks of this worker need.
        queue_stops: stops the consumption of single queues.
        registered: names of the tasks of the app.
        most_parked: how much may be parked of one queue.

    Attributes:
        store: the argument.
        worker: the argument.
        inbox: receives the grants of this worker.
        health: shows whether Redis answers.
        lost_leases: reports lost locks.
        republisher: sends messages to the broker.
        mode_switches: switches modes of tasks.
        parked_limit: stops the consumption of a queue with too many parked messages.
    """

    def __init__(  # connects all parts that do I/O
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
        preempt: Callable[[str, str], None],
        end_unique: Callable[[Iterable[str]], None],
        publisher: Publisher,
        watchdog: Watchdog,
        partial_lock_sets: PartialLockSets,
        notifier: Notifier,
        modes: Modes,
        address: str,
        done_for: float,
        again_after: float,
        max_body: int,
        capacity: int,
        free: Callable[[], int],
        stands_still: Callable[[], bool],
        commands: AgentQueue,
        dispatcher: Dispatcher,
        threads: Sequence[BackgroundThread] = (),
        replicated: ReplicaStore | None = None,
        schema: str = SCHEMA,
        queue_stops: QueueStops,
        registered: Container[str],
        most_parked: MostParked = MostParked(),  # noqa: B008  # a frozen value
    ) -> None:
        self.store = store
        self._schema = schema
        self.worker = worker
        self._dispatcher = dispatcher
        self._commands = commands
        self._partial_lock_sets = partial_lock_sets
        self._watchdog = watchdog
        self._notifier = notifier
        self._modes = modes
        self._post = post
        self._reap = reap
        self._stands_still = stands_still
        self._clock = store.clock
        self.health: RedisHealth = RedisHealth(
            store.clock,
            address=address,
            observers=notifier.observers,
            on_loss=self._redis_lost,
            on_return=self._redis_returned,
        )
        self.mode_switches: ModeSwitches = ModeSwitches(
            store, modes, queue=commands, on_change=self._modes_changed
        )
        self.republisher: Republisher = Republisher(
            publisher,
            queues=queues,
            commands=commands,
            dispatcher=dispatcher,
            post=post,
            watchdog=watchdog,
            registered=registered,
            declared=declared,
        )
        self.inbox: GrantInbox = GrantInbox(
            store,
            worker,
            partial_lock_sets=partial_lock_sets,
            commands=commands,
            dispatch=receive,
            post=post,
            stands_still=stands_still,
            reject=self.republisher.reject,
            preempt=preempt,
            is_here=lambda token: dispatcher.in_flight.of(token) is not None,
            doubt=dispatcher.pool_exit.ends.doubt,
        )
        self._releases = ReleaseAfterProcessDeath(
            store,
            partial_lock_sets=partial_lock_sets,
            commands=commands,
            taker=self.inbox.taker,
            done_for=done_for,
            again_after=again_after,
            released=partial(post, dispatcher.pool_exit.released),
        )
        self._revokes = RevokeParked(
            store,
            realm=realm,
            commands=commands,
            taker=self.inbox.taker,
            granted=dispatcher.in_flight.granted,
            end_unique=end_unique,
            withdraw=partial(post, dispatcher.deliveries.withdraw_revoked),
        )
        self._data_loss = DataLoss(
            store,
            worker,
            ends=dispatcher.pool_exit.ends,
            in_hand=lambda: [
                *self.inbox.arrived(),
                *(each.lock_header for each in dispatcher.in_flight.in_hand()),
            ],
            commands=commands,
            tell=self.tell,
            schema=schema,
            newer=self._newer_schema,
        )
        self._timers = RateTimers(commands, store.clock)
        dispatcher.waits_for_rate = self._timers.is_set
        self._parking = Parking(
            store,
            worker=worker,
            realm=realm,
            queues=queues,
            rules=rules,
            partial_lock_sets=partial_lock_sets,
            commands=commands,
            revokes=self._revokes,
            data_loss=self._data_loss,
            replicated=replicated,
            blocked=dispatcher.blocked,
            post=post,
            again_after=again_after,
            max_body=max_body,
            timers=self._timers,
        )
        self._sweeper = Sweeper(
            store,
            worker=worker,
            realm=realm,
            inbox=self.inbox,
            in_flight=dispatcher.in_flight,
            republisher=self.republisher,
            partial_lock_sets=partial_lock_sets,
            modes=modes,
            capacity=capacity,
            timers=self._timers,
            workers=lambda: self._heartbeat.workers,
        )
        self.lost_leases: LostLeases = LostLeases(
            store.clock,
            commands=commands,
            in_flight=dispatcher.in_flight,
            abort=partial(post, abort),
            tell=self.tell,
            in_turn=post if dispatcher.children else _at_once,
        )
        self._heartbeat = Heartbeat(
            store,
            worker=worker,
            realm=realm,
            place=place,
            queues=queues,
            declared=declared,
            free=free,
            inbox=self.inbox,
            mode_switches=self.mode_switches,
            stopped=lambda: self.parked_limit.stopped,
        )
        self.parked_limit: ParkedLimit = ParkedLimit(
            store,
            realm=realm,
            queues=queues,
            most=most_parked,
            stops=queue_stops,
            interval=self._heartbeat.interval,
            workers=lambda: self._heartbeat.workers,
            tell=self.tell,
        )
        offers = SlotOffers(
            store.clock, inbox=self.inbox, dispatcher=dispatcher, watchdog=watchdog, post=post
        )
        self._running = RunningTasks(
            store,
            worker,
            in_flight=lambda: [
                request.lock_header for request in list(dispatcher.in_flight.by_token.values())
            ],
        )
        self._late_check = LateCheck(dispatcher.refuse_redis)
        self._ask_redis = Tick(
            (
                self._late_check,
                self._heartbeat.sync,
                self._heartbeat.beat,
                self._look_at_parked,
                self._revokes.free,
                self._sweep,
                self._sweeper.relax,
                offers.offer,
                self._tell_of_neglected,
                partial_lock_sets.look,
                self._revokes.check,
                self._probe,
                self._data_loss.look,
                self._running.update,
            ),
            self.health,
        )
        self._runner = CommandRunner(commands, self._carry_out, self.health)
        self._next_beat = 0.0
        self._next_sweep = math.inf
        self._next_look = 0.0
        self._stopped = threading.Event()
        self._agent_thread = BackgroundThread(
            "singleton-lock-agent", self._round, at_end=self._shut_down
        )
        self._inbox_thread = BackgroundThread("singleton-lock-inbox", self._receive)
        self._threads = ThreadGroup(
            self._agent_thread,
            self._inbox_thread,
            self.republisher.thread,
            *self._parking.threads,
            *threads,
        )

    def counts(self) -> dict[str, int]:
        """Return the agent's counters since the worker started; ``inspect stats`` shows them."""
        return {
            "parked": self._parking.parked,
            "delivered": self.inbox.delivered,
            "swept": self._sweeper.swept,
            "published": self.republisher.published,
            "requeued": self.republisher.requeued,
            "rejected": self.republisher.rejected,
            "replaced": self.inbox.replaced,
            "passed_on": self.inbox.passed,
            "released_for_dead": self._releases.done,
            "backend_errors": self.health.errors + self._parking.errors,
            "lost": self.lost_leases.lost,
            "let_run": self._sweeper.let_run,
            "parked_lost": self._data_loss.lost,
            "parked_untracked": self._data_loss.untracked,
        }

    def tell(self, event: Event) -> None:
        """Report an event to observers, and as a Celery event. Call it in the agent's thread."""
        self._notifier.observers.notify(event)
        self._post(self._notifier.announce, event)

    # -- threads ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both threads. Has no effect if they run."""
        self._agent_thread.start()
        self._inbox_thread.start()

    def last_rounds(self) -> dict[str, float | None]:
        """Return the seconds since the last round of each thread of this worker, by its name.

        None: the thread waits for work, or has ended. A number that grows: the thread hangs, or has
        died.
        """
        return {**self._threads.last_rounds(), "csl-watchdog": self._watchdog.last_round()}

    def check_first(self, check: Callable[[], None], which: str = SILENT) -> None:
        """Do not use Redis before it has passed a check, such as the check that the start missed.

        Args:
            check: see :meth:`LateCheck.plan`.
            which: likewise.
        """
        self._late_check.plan(check, which)
        self.health.not_answered()

    def _newer_schema(self) -> None:
        """Stop using Redis: a newer version has changed the data model.

        Raises:
            BackendRefused: always, to end this tick; then Redis counts as down.
        """
        self.check_first(self._check_schema, "Redis, which a newer version has changed,")
        self._late_check()

    def _check_schema(self) -> None:
        found = self.store.schema(self._schema)
        if found not in SCHEMAS:
            raise wrong_schema(found, self.store.keyspace.schema)  # type: ignore[attr-defined]

    def take_no_grants(self) -> None:
        """Take no grants for the life of this worker, and report locks that no worker sweeps."""
        self._sweeper.start_reports()
        self.retire()

    def retire(self) -> None:
        """Take no more grants: the worker is shutting down, or cannot run them."""
        self.inbox.retire()

    def stop(self, timeout: float) -> None:
        """Carry out the remaining commands within ``timeout`` seconds, and end its threads."""
        self.retire()
        self._stopped.set()
        self._commands.wake()
        if self._agent_thread.was_started():
            self._agent_thread.start()  # if it has died, to carry out the remaining commands
        for thread in (self._agent_thread, self._inbox_thread):
            thread.join(timeout / 2)
        self.republisher.close(timeout)
        self._parking.close(timeout / 2)

    def _round(self) -> bool:
        if self._stopped.is_set():
            return False
        self.run_once(self._pause())
        return True

    def _receive(self) -> bool:
        """Wait for a grant. Restart the agent's thread if it has died; it restarts the others."""
        self._agent_thread.start()
        return self.inbox.receive()

    def _look_after_threads(self) -> None:
        self._threads.look_after()
        self._watchdog.look_after()

    def _pause(self) -> float:
        look = min(self._next_beat, self._next_sweep, self._commands.next_at())
        return max(0.0, min(LOOK, look - self._clock.monotonic()))

    def _shut_down(self) -> None:
        """Carry out the remaining commands, leave the fleet, and return the grants in the inbox."""
        try:
            while self.run_once():
                pass
            if self._late_check.is_due:  # this worker has written nothing
                return
            for_each(
                (
                    self._heartbeat.leave,
                    self._running.clear,
                    self._data_loss.finish,
                    self._begin_all_again,
                ),
                lambda step: step(),
            )
        except BackendError as error:
            logger.warning(
                "celery-singleton-lock: this worker could not tell Redis that it stops. Leases "
                "and grants that it has, if any, end by themselves: %s",
                error,
            )
        finally:
            self._partial_lock_sets.close()

    def _begin_all_again(self) -> None:
        self._partial_lock_sets.begin_all_again(self._clock.monotonic() + BEGIN_AGAIN)

    # -- one round --------------------------------------------------------------------------------

    def run_once(self, pause: float = 0.0) -> int:
        """Carry out the commands of the queue, then a tick if it is due.

        Args:
            pause: most seconds to wait for a command.

        Returns:
            The number of commands that were taken from the queue.
        """
        commands = self._commands.take(pause)
        self._runner.run(self.inbox.with_bodies(commands))
        self._look_after_children()
        now = self._clock.monotonic()
        if now >= self._next_beat:
            self._tick()
        elif now >= self._next_sweep:
            self._sweep_on()
        return len(commands)

    def _carry_out(self, batch: list[Command]) -> None:  # noqa: C901, PLR0912  # one case per type
        """Carry out commands to park in one call, or one other command."""
        match batch[0]:
            case Park():
                parked = self._parking.park([each for each in batch if isinstance(each, Park)])
                self._look_at_parked_early(parked)
            case Delivery() as delivery:
                self.inbox.deliver(delivery)
            case Release() as command:
                self._releases.carry_out(command)
            case LeavePreviousQueue() as command:
                self._parking.leave_previous_queue(command)
            case CheckBlocked() as command:
                self._parking.check_blocked(command)
            case LookUp() as command:
                self._look_up(command)
            case Requeue() as command:
                self.republisher.requeue(command)
            case RetryRefused() as command:
                self._post(self._dispatcher.try_again, command.name)
            case EndUnique() as command:
                unique, task_id = command.unique, command.task_id
                self.store.withdraw(unique.lock, unique.key, task_id, command.retries, ended=True)
                self._data_loss.note_unique_end(command)
            case TrackReservation() as command:
                self._revokes.track(command)
            case ReportLoss() as command:
                self.lost_leases.report(command)
            case NoteNextStart() as command:
                self._timers.set(command.name, command.seconds)
            case SweepLock() as command:
                self._sweeper.sweep_at_timer(command)
            case RecordPublished() as command:
                self._sweeper.record(command)
            case DeliverRevoked() as command:
                self._revokes.deliver(command)
            case SwitchMode() as command:
                self.mode_switches.carry_out(command)
            case LeaveFleet():
                self._heartbeat.leave()
            case Call() as command:
                command.call()
            case never:
                assert_never(never)

    def _look_at_parked_early(self, parked: Mapping[str, Parked]) -> None:
        """Check without raising: the messages are parked, so the command must not be repeated."""
        with suppress(BackendError):
            self.parked_limit.look_early(parked)

    def _look_up(self, command: LookUp) -> None:
        self._sweeper.sweep_locks([command.name])
        if self.store.body(command.name, command.token) is not None:
            self._post(self._dispatcher.blocked.dropped, command.request)
        else:
            self._post(self._dispatcher.redispatch, command.request)

    def _look_after_children(self) -> None:
        """Let the pool check for children that have died.

        A child's sentinel closes before the child can be reaped. If Celery checks in between, its
        next check is only after 5 s. Until then the child's lock stays held, and a message that was
        written to the dying child stays in its pipe.
        """
        now = self._clock.monotonic()
        if now >= self._next_look and self._dispatcher.in_flight.busy():
            self._next_look = now + LOOK
            self._post_unless_still(self._reap)

    def _post_unless_still(self, call: Callable[[], None]) -> None:
        """Post a periodic call. In an outage of the broker, thousands of them would pile up."""
        if not self._stands_still():
            self._post(call)

    # -- tick -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._next_beat = self._clock.monotonic() + BEAT * random.uniform(0.8, 1.2)  # noqa: S311
        self._look_after_threads()
        self._post_unless_still(self._dispatcher.make_room)
        self._ask_redis()
        self._plan_sweep()
        self.parked_limit.consume_in_outage(self.health.down_for())
        if self.health.down and self._modes.relaxed():
            self._post(self._dispatcher.relax)

    def _look_at_parked(self) -> None:
        if not self.inbox.retired:
            self.parked_limit.look()

    def _sweep(self) -> None:
        """Sweep, unless other workers do so often enough: each sweeps every few seconds."""
        if not self._heartbeat.idle:
            self._sweeper.sweep()

    def _sweep_on(self) -> None:
        """Sweep further locks between two ticks. The next tick notices if Redis does not answer."""
        self._next_sweep = math.inf
        with suppress(BackendError):
            self._sweeper.sweep_on()
            self._plan_sweep()

    def _plan_sweep(self) -> None:
        """Sweep again soon if more locks are due than the pool had room for."""
        behind = self._sweeper.behind and not (self.inbox.retired or self.health.down)
        self._next_sweep = self._clock.monotonic() + SWEEP_ON if behind else math.inf

    def _tell_of_neglected(self) -> None:
        if not self._stopped.is_set():
            self._sweeper.report_unswept_locks()

    def _probe(self) -> None:
        """Acquire a lock while Redis counts as down: a full Redis refuses only writes."""
        if self.health.down:
            self.store.probe()

    def _redis_lost(self) -> None:
        """Stop dispatching locked tasks, and check soon whether Redis answers again."""
        self._dispatcher.pool_exit.ends.doubt()
        self._next_beat = min(self._next_beat, self._clock.monotonic() + RETRY)
        self._post(self._dispatcher.backend_down)

    def _redis_returned(self) -> None:
        """Resume dispatching, and check whether Redis has lost data."""
        self._data_loss.look_soon()
        self._post(self._dispatcher.backend_up)

    def _modes_changed(self) -> None:
        self._sweeper.modes_changed()
        self._post(self._dispatcher.relax)


def _at_once(call: Callable[..., None], *args: Any) -> None:
    call(*args)
