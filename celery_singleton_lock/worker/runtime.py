"""Creates the parts of one worker, and connects them to its consumer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from math import inf
from typing import Any, Final

from celery.exceptions import ImproperlyConfigured
from celery.signals import task_rejected, task_revoked, task_unknown
from celery.worker.state import requests, reserved_requests

from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.clock import ServerClock, SystemClock
from celery_singleton_lock.core.installed_version import installed_version
from celery_singleton_lock.core.lock_mode import Modes
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.core.unique import HEADER as UNIQUE
from celery_singleton_lock.core.unique import UniqueCall, unpacked
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.worker.agent.loop import Agent
from celery_singleton_lock.worker.agent.parked_limit import MostParked
from celery_singleton_lock.worker.agent.unreadable_messages import UNREADABLE, UnreadableMessages
from celery_singleton_lock.worker.agent_commands import EndUnique
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.consumed_queues import Consumed
from celery_singleton_lock.worker.dispatch.dispatcher import Dispatcher, worker_id
from celery_singleton_lock.worker.dispatch.header_factory import HeaderFactory
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.dispatch.preemption import Preemption
from celery_singleton_lock.worker.dispatch.task_leases import TaskLeases
from celery_singleton_lock.worker.event_dispatcher import enable_lock_events
from celery_singleton_lock.worker.execution.interrupt import LostTokens
from celery_singleton_lock.worker.extension import PATIENCE, Extension
from celery_singleton_lock.worker.granted_first import granted_first
from celery_singleton_lock.worker.loop_channel import LoopChannel, guarded
from celery_singleton_lock.worker.message_stage import NOT_IN_POOL, Stage
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets
from celery_singleton_lock.worker.pool_feeder import PoolFeeder
from celery_singleton_lock.worker.pools import GREEN, pool_kind, slots_of
from celery_singleton_lock.worker.publisher import Publisher
from celery_singleton_lock.worker.queue_stops import QueueStops
from celery_singleton_lock.worker.redelivery import (
    dead_letters_of,
    has_dead_letters,
    identifies_by_id,
    identity_of,
    most_returns,
)
from celery_singleton_lock.worker.request import LockedRequest
from celery_singleton_lock.worker.request_reader import RequestReader
from celery_singleton_lock.worker.turn_at_broker import TurnAtBroker

FINISH_PARKING: Final = 0.5
"""Seconds for which a worker that stops waits until Redis has what is being parked."""

FLUSH: Final = 2.0
"""Most seconds for which a worker that exits waits for the agent."""

_clock = SystemClock()


@dataclasses.dataclass(slots=True)
class Link:
    """The parts of a worker that exist before its pool forks, and the late check of Redis.

    Attributes:
        late_check: checks the locks' Redis, if that did not answer at the start; see
            :meth:`Agent.check_first`.
    """

    loop_channel: LoopChannel
    place: ServerClock
    lost_tokens: LostTokens
    late_check: Callable[[], None] | None = None


class Runtime:
    """The parts of one worker: dispatcher, agent, watchdog and loop channel.

    Args:
        extension: the app's locks.
        consumer: Celery's consumer.
        link: the parts that were created before the pool forked.

    Attributes:
        metrics_port: the port on which this worker serves its metrics; None: it serves none.
    """

    def __init__(self, extension: Extension, consumer: Any, link: Link) -> None:
        self.metrics_port: int | None = None
        self.extension = extension
        self.consumer = consumer
        self.loop_channel: LoopChannel = link.loop_channel
        self.lost_tokens: LostTokens = link.lost_tokens
        self.kind: str = pool_kind(type(consumer.pool))
        self._reader = RequestReader(extension, consumer)
        self._to_pool = granted_first(consumer.controller, consumer.on_task_request)
        self._pool_feeder = PoolFeeder(consumer.pool, self._to_pool, self._not_sent)
        worker = worker_id(consumer.hostname)
        queues = Consumed(consumer)
        self.queues: Consumed = queues
        self.modes: Modes = Modes(extension.modes())
        self.watchdog: Watchdog = self._new_watchdog()
        self.notifier: Notifier = Notifier(
            extension.observers,
            send_event=self.send_event,
            sends_events=self.sends_events,
            later=None if self.kind == "solo" else self.loop_channel.later,
        )
        transport = extension.app.connection_for_read().get_transport_cls()
        self._has_dead_letters = has_dead_letters(transport)
        self.header_factory: HeaderFactory = HeaderFactory(
            worker=worker,
            place=link.place,
            rules=extension.options,
            of_call=extension.options_of_call,
            name_of=extension.name_of,
            computed=extension.computed,
            modes=self.modes,
            identify=identity_of if identifies_by_id(transport) else lambda _message: "",
            most_returns=self._most_returns,
            keeps_messages=not extension.settings.is_quorum,
        )
        store = extension.new_store(PATIENCE)
        self.commands: AgentQueue = AgentQueue(store.clock)
        self._partial_lock_sets = PartialLockSets(
            store, self.watchdog, worker, lambda *parked: admin_of(store).locate_token(*parked)
        )
        self.dispatcher: Dispatcher = self._new_dispatcher()
        self.preemption: Preemption = Preemption(
            rules=extension.options,
            in_flight=self.dispatcher.in_flight,
            lost_tokens=self.lost_tokens,
            notifier=self.notifier,
            children=self.kind == "prefork",
            post=self.loop_channel.post,
            later=self.loop_channel.later,
            after=self._after,
            terminate=self._terminate,
        )
        self.watchdog.on_preempted = self.preemption.end_task
        self.queue_stops: QueueStops = QueueStops(consumer, self.loop_channel.post)
        self.agent: Agent = Agent(
            store,
            replicated=extension.new_replicated_store(PATIENCE),
            worker=worker,
            realm=extension.realm,
            place=link.place,
            queues=queues,
            declared=self._reader.declared,
            rules=extension.options,
            receive=self.receive,
            post=self.loop_channel.post,
            reap=self.reap,
            abort=self.abort,
            preempt=self.preemption.end_task,
            end_unique=self._end_unique,
            publisher=Publisher(extension.app.connection_for_write),
            watchdog=self.watchdog,
            partial_lock_sets=self._partial_lock_sets,
            notifier=self.notifier,
            modes=self.modes,
            address=extension.settings.where(),
            done_for=extension.settings.done_for,
            again_after=extension.settings.visibility_timeout,
            max_body=extension.settings.max_body_bytes,
            schema=extension.schema(),
            capacity=consumer.pool.limit or 1,
            free=self.free_slots,
            stands_still=link.loop_channel.stands_still,
            commands=self.commands,
            dispatcher=self.dispatcher,
            threads=(link.loop_channel.thread, self._pool_feeder.thread),
            queue_stops=self.queue_stops,
            registered=extension.app.tasks,
            most_parked=MostParked(
                extension.settings.max_parked, extension.settings.max_parked_bytes
            ),
        )
        self.unread: UnreadableMessages = UnreadableMessages(
            consumer,
            inbox=self.agent.inbox,
            tell=self.agent.tell,
            most_returns=self._most_returns,
        )
        link.loop_channel.on_notice = self.dispatcher.pool_callbacks.on_notice
        extension.has_child_processes = self.kind == "prefork"
        if self.kind in ("solo", *GREEN):  # tasks run in the process of the dispatcher
            extension.announce = partial(guarded, self.dispatcher.pool_callbacks.on_notice)
        if self.kind in GREEN:
            LockedRequest.turn_at_broker = TurnAtBroker(self.kind)
        consumer.on_task_request = self.dispatcher
        self._on_decode_error = consumer.on_decode_error
        consumer.on_decode_error = self._undecodable
        task_revoked.connect(self._revoked_at_arrival)  # weak references
        task_unknown.connect(self._discarded)
        task_rejected.connect(self._discarded)

    def _revoked_at_arrival(self, request: Any = None, **_: Any) -> None:
        """End the entry of a unique call that Celery drops before the dispatcher has seen it."""
        unique = _unique_in(vars(request))
        if unique is not None:
            self.commands.put(EndUnique(unique, request.id, int(request.retries or 0)))

    def _undecodable(self, message: Any, error: Exception) -> None:
        """Handle a message that cannot be decoded as Celery does, which sends no signal."""
        self._on_decode_error(message, error)
        self._discarded(message)

    def _discarded(self, message: Any = None, **_: Any) -> None:
        """End the entry of a unique call whose task is unknown here, or that cannot be read."""
        headers = getattr(message, "headers", None)
        if not isinstance(headers, dict):
            return
        unique, retries = unpacked(headers.get(UNIQUE)), headers.get("retries")
        if unique is not None:
            retries = retries if isinstance(retries, int) else 0
            self.commands.put(EndUnique(unique, str(headers.get("id")), retries))

    def _end_unique(self, task_ids: Iterable[str]) -> None:
        """End the entries of revoked unique calls that wait here for their time, Redis, or a slot.

        Celery drops their messages only when that wait is over.
        """
        for request in self._waiting(frozenset(task_ids)):
            unique = request.unique or _unique_in(request.request_dict)
            if unique is not None and request.stage in NOT_IN_POOL:
                retries = int(request.request_dict.get("retries") or 0)
                self.commands.put(EndUnique(unique, request.id, retries))

    def _waiting(self, task_ids: frozenset[str]) -> list[LockedRequest]:
        """Return the requests of these tasks that wait here, wherever Celery has them.

        Before Celery 5.7 its timer has those with an ETA. Those above its ``rate_limit`` are in the
        bucket of their task.
        """
        entries = [each.entry for each in list(self.consumer.timer.schedule.queue)]
        waiting = [(getattr(entry, "args", None) or (None,))[0] for entry in entries]
        for bucket in filter(None, list(self.consumer.task_buckets.values())):
            waiting += [item[0] for item in list(bucket.contents)]
        waiting += map(requests.get, task_ids)
        found = {id(each): each for each in waiting if isinstance(each, LockedRequest)}
        return [each for each in found.values() if each.id in task_ids]

    def _new_dispatcher(self) -> Dispatcher:
        return Dispatcher(
            header_factory=self.header_factory,
            rules=cache(self.extension.options),  # read at each step of each message
            forward=self._forward(),
            commands=self.commands,
            leases=TaskLeases(self.watchdog, self._partial_lock_sets, self._lease_lost),
            backend_failed=self._backend_failed,
            publish_at_exit=self._publish_at_exit,
            notifier=self.notifier,
            prefetch=self.prefetch,
            after_pool=self._after_pool(),
            children=self.kind == "prefork",
        )

    def _after_pool(self) -> Callable[[Callable[[], None]], None] | None:
        """Return a function that makes a call after the pool has its next task; None: no loop."""
        if self.kind != "prefork" or self.consumer.hub is None:
            return None

        def after_pool(call: Callable[[], None]) -> None:
            if self.free_slots() < 0:  # the ended task is counted, except if it acknowledges late
                self.loop_channel.after_pool(call)
            else:
                call()

        return after_pool

    def _lease_lost(self, name: str, token: str) -> None:
        if self.extension.tracer.has_left(token):  # in a thread, greenlet, or this process
            return
        self.agent.lost_leases.noticed(name, token)

    def _backend_failed(self) -> None:
        self.agent.health.task_not_answered()

    def _publish_at_exit(self, request: LockedRequest) -> None:
        self.agent.republisher.publish_at_exit(request)

    def _new_watchdog(self) -> Watchdog:
        """Return the watchdog; under gevent and eventlet it runs in a native thread.

        That thread does not end when it is idle: gevent ties a connection to the thread that
        created it, so a new thread could neither use nor close it.

        The watchdog of locks in memory runs in a greenlet, since no other thread may wait for them.
        """
        store = self.extension.new_store(PATIENCE)
        if self.kind in GREEN and self.extension.settings.is_quorum:
            msg = (
                f"singleton_lock_backend names several servers, and the pool is {self.kind}: the "
                "threads that ask them are not its own. Start the worker with --pool prefork, "
                "threads or solo, or use one Redis."
            )
            raise ImproperlyConfigured(msg)
        if self.kind in GREEN and not self.extension.settings.in_memory:
            return Watchdog(store, threads=native_threads, tell=self.loop_channel.post, linger=inf)
        return Watchdog(store)

    def start(self) -> None:
        """Start the threads. Has no effect if they run.

        Without an event loop (gevent, eventlet, a transport that polls) a thread makes the calls of
        the loop channel, since Celery would make them up to 2 s later. Under gevent and eventlet,
        all threads except the watchdog's are greenlets.
        """
        self.agent.start()
        if self.consumer.hub is None:
            self.loop_channel.resume()
            self.loop_channel.thread.start()
            self._pool_feeder.thread.start()

    def _forward(self) -> Callable[[Any], None]:
        """Return the function with which the dispatcher sends a request to the pool."""
        if self.consumer.hub is None:
            return self.forward
        return self.forward_to_solo if self.kind == "solo" else self._to_pool

    def forward_to_solo(self, request: Any) -> None:
        """Send a request to a solo pool, which runs the task at once.

        Granted and held ones come in numbers. Each gets a call of its own, so the main loop looks
        at its other events in between.
        """
        locked = isinstance(request, LockedRequest)
        if locked and self.dispatcher.in_flight.has(request.lock_header.token):
            self.loop_channel.post(self._run_in_loop, request)
        else:
            self._to_pool(request)

    def _run_in_loop(self, request: LockedRequest) -> None:
        """Run a task of a solo worker, unless its message was returned, or the worker stops."""
        if request.stage is Stage.DISPATCHED and not self.agent.inbox.retired:
            self._pool_feeder.send(request)

    def forward(self, request: Any) -> None:
        """Send a request to the pool of a worker without an event loop."""
        if not self.loop_channel.thread.is_current():
            self._to_pool(request)
        elif self.kind == "solo":
            # one task at a time, in the main loop
            self.consumer.call_soon(self._pool_feeder.send, request)
        else:
            self._pool_feeder(request)

    def _not_sent(self, request: LockedRequest) -> None:
        self.dispatcher.not_sent(request)

    def reap(self) -> None:
        """Let a prefork pool check for children that have ended. Runs in the main loop.

        Without an event loop, a thread of the pool does so.
        """
        if self.consumer.hub is None:
            return
        maintain = getattr(getattr(self.consumer.pool, "_pool", None), "maintain_pool", None)
        if maintain is not None:
            maintain()

    def abort(self, token: str) -> None:
        """Interrupt the task whose lock was lost, in a prefork pool. Runs in the main loop."""
        request = self.dispatcher.pool_callbacks.interruptible(token)
        if request is None or self.kind != "prefork":
            return
        if request.worker_pid is None:  # the pool has not reported yet which process runs it
            self.loop_channel.later(partial(self.abort, token))
        else:
            self.lost_tokens.interrupt(request.worker_pid, request.lock_header.token)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call in the main loop after a number of seconds."""
        self.consumer.timer.call_after(seconds, self.loop_channel.post, (call,))

    def _terminate(self, pid: int, signum: int) -> None:
        """Kill a child process of the pool, which has started by now. Runs in the main loop."""
        self.consumer.pool.terminate_job(pid, signum)

    def send_event(self, name: str, /, **fields: Any) -> None:
        """Send a Celery event, if this worker sends task events. Runs in the main loop."""
        if self.sends_events():
            dispatcher = self.consumer.event_dispatcher
            enable_lock_events(dispatcher)
            dispatcher.send(name, **fields)

    def sends_events(self) -> bool:
        """Return whether this worker sends task events: ``-E``, or ``control enable_events``."""
        dispatcher = self.consumer.event_dispatcher
        return (
            dispatcher is not None
            and dispatcher.enabled
            and (not dispatcher.groups or "task" in dispatcher.groups)
        )

    def prefetch(self, change: int) -> None:
        """Raise (+1) or lower (-1) the worker's prefetch count."""
        change_prefetch(self.consumer, change)

    def free_slots(self) -> int:
        """Return the number of free pool slots; -3: no slot is free, and three tasks wait for one.

        While the main loop makes no posted calls, the number is at most 0, since a granted message
        would wait for the main loop.
        """
        free = slots_of(self.consumer.pool) - len(reserved_requests)
        return min(free, 0) if self.loop_channel.stands_still() else free

    def receive(self, delivery: Delivery) -> None:
        """Create a request for a delivery, and dispatch it. Runs in the main loop.

        An unreadable message is handled as Celery's consumer does. After any other error the
        message is delivered again after a delay; after too many tries it ends as FAILURE.
        """
        if self.agent.inbox.retired:
            return self.agent.inbox.give_back(delivery)
        if delivery.token in self.dispatcher.in_flight.by_token:
            return None  # its message waits here for a slot; a second request would be dropped
        try:
            request = self._receive(delivery)
        except Exception as error:  # noqa: BLE001  # a message or a user's class may raise anything
            self.dispatcher.deliveries.undelivered(delivery)
            return self.unread.fail(delivery, error)
        if request is not None:
            self._tell_autoscaler(request)
        return None

    def _receive(self, delivery: Delivery) -> LockedRequest | None:
        if delivery.verdict == "granted" and self._is_for_dead_letters(delivery):
            self.unread.reject(delivery)
            return None
        message = self._reader.unpack(delivery.body)
        try:
            request = self._reader.request(message)
        except UNREADABLE as error:
            self.unread.discard(delivery, message, error)
            return None
        if request is None:
            self.agent.inbox.give_back(delivery)
        else:
            self.dispatcher.deliveries.deliver(delivery, request)
        return request

    def _tell_autoscaler(self, request: LockedRequest) -> None:
        """Make the calls that Celery makes for a message of the broker.

        Without them its autoscaler looks every 30 seconds only.
        """
        for call in self.consumer.on_task_message:
            call(request)

    def _is_for_dead_letters(self, delivery: Delivery) -> bool:
        """Return whether a message was returned too often, and its queue has dead letters."""
        if delivery.returns <= self._most_returns(delivery.queue) or not self._has_dead_letters:
            return False
        return dead_letters_of(self.queues.declared(delivery.queue))

    def _most_returns(self, queue: str) -> float:
        """Return how often a message of a queue may be returned."""
        return most_returns(self.queues.declared(queue), self.extension.settings.max_returns)

    def report(self) -> dict[str, Any]:
        """Return the state of this worker, for JSON. Sends nothing."""
        return {
            "worker": self.agent.worker,
            "version": installed_version(),
            "metrics_port": self.metrics_port,
            "backend": self.extension.settings.where(),
            "backend_down_for": self.agent.health.down_for(),
            "modes": {task: self.modes.of(task) for task in self.modes.relaxed()},
            "switches": self.modes.switches(),
            "stopped_queues": dict(stopped := self.agent.parked_limit.stopped),
            "queues_stopped": len(stopped),
            **self.dispatcher.counts(),
            "keeping": len(self._partial_lock_sets),
            "preempted": self.preemption.preempted,
            "killed": self.preemption.killed,
            "threads": self.agent.last_rounds(),
            "renewed": self.watchdog.renewed,
            "renewals_failed": self.watchdog.failed,
            **self.agent.counts(),
        }

    def finish_parking(self) -> None:
        """Acknowledge the messages that are being parked, while there is a connection.

        Otherwise the broker delivers them again although Redis has them. A worker that locks drops
        such a copy. One that does not, as after a rollback, runs both.
        """
        in_flight, until = self.dispatcher.in_flight, _clock.monotonic() + FINISH_PARKING
        pause = threading.Event().wait
        in_flight.drop_followers()
        while in_flight.parking() and _clock.monotonic() < until:
            if self.consumer.hub is not None:  # otherwise a thread makes the calls
                self.loop_channel.drain()
            pause(0.002)

    def shut(self) -> None:
        """End the threads; release the locks of tasks whose processes have ended.

        A task in a thread continues, since Python waits for its threads. Its lease is renewed until
        then: the watchdog ends with the process.
        """
        self._pool_feeder.close()
        self.dispatcher.publish_at_exit()
        unfinished = self.dispatcher.in_flight.unfinished()
        if self.kind == "prefork":
            self.watchdog.stop()
            release = self.dispatcher.pool_exit.release
            for request in unfinished:
                release(request.lock_header, request.ending(), request.worker_pid)
        elif not unfinished:
            self.watchdog.stop()
        self.agent.stop(FLUSH)


def change_prefetch(consumer: Any, change: int) -> None:
    """Raise or lower the worker's prefetch count, but not below Celery's initial one.

    After a reconnect, Celery starts with a lower count and raises it step by step. Earlier raises
    then count as part of Celery's own. A raise that ``worker_eta_task_limit`` prevented is not
    undone later. Otherwise the worker would receive nothing while it keeps tasks with an ETA.

    Args:
        consumer: Celery's consumer.
        change: +1 or -1.
    """
    qos = consumer.qos
    if qos is None:
        return
    with _prefetch_mutex:
        prevented = getattr(qos, _PREVENTED, 0)
        if change > 0:
            is_raised = qos.value < qos.increment_eventually()
            setattr(qos, _PREVENTED, prevented + (not is_raised))
        elif prevented:
            setattr(qos, _PREVENTED, prevented - 1)
        elif qos.value > consumer.initial_prefetch_count:
            qos.decrement_eventually()


_PREVENTED: Final = "singleton_lock_prevented"
"""Attribute of a connection's prefetch count: number of raises that it has prevented."""

_prefetch_mutex: Final = threading.RLock()  # reentrant for a cold shutdown; see RecentEnds


def _unique_in(fields: Mapping[str, Any]) -> UniqueCall | None:
    """Return the unique call in the fields of a request; None if it is not unique."""
    left = fields.get("headers")  # Celery leaves those of a message without arguments there
    return unpacked(fields.get(UNIQUE) or (left.get(UNIQUE) if isinstance(left, dict) else None))
