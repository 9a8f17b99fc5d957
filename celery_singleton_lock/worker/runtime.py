"""The parts of one worker, and what joins them to its consumer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

from celery.exceptions import ImproperlyConfigured
from celery.worker.state import reserved_requests
from kombu.serialization import prepare_accept_content

from celery_singleton_lock.core import native_threads as native
from celery_singleton_lock.worker.execution.interrupt import Board
from celery_singleton_lock.worker.agent.loop import Agent
from celery_singleton_lock.worker.execution.batches import is_batches
from celery_singleton_lock.clerk import Clerk
from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.worker.dispatch.dispatcher import Desk, worker_id
from celery_singleton_lock.worker.event_dispatcher import admit
from celery_singleton_lock.worker.extension import PATIENCE, Extension
from celery_singleton_lock.worker.dispatch.notifier import Herald
from celery_singleton_lock.worker.loop_channel import Mailbox, guarded
from celery_singleton_lock.core.model import Delivery
from celery_singleton_lock.core.lock_mode import Modes
from celery_singleton_lock.worker.pools import GREEN, pool_kind
from celery_singleton_lock.worker.publisher import Publisher, unpack
from celery_singleton_lock.worker.consumed_queues import Consumed
from celery_singleton_lock.worker.redelivery import (
    dead_letters_of,
    has_dead_letters,
    identities,
    identity_of,
    most_returns,
)
from celery_singleton_lock.worker.request import LockedRequest
from celery_singleton_lock.worker.dispatch.header_factory import Stamper
from celery_singleton_lock.worker.agent.unreadable_messages import UNREADABLE, Unread
from celery_singleton_lock.worker.pool_feeder import Usher
from celery_singleton_lock.lock.renewals import Watchdog
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.worker.request_class import passes, read_as_celery, request_class

logger = logging.getLogger(__name__)

FLUSH: Final = 2.0
"""Most seconds that a worker's exit waits for the agent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What must be there before the pool forks, and before the first message arrives."""

    mailbox: Mailbox
    place: ServerClock
    board: Board


class Crew:
    """The parts of one worker: desk, agent, watchdog and mailbox.

    Args:
        extension: the app's locks.
        consumer: Celery's.
        link: made before the pool forked.
    """

    def __init__(self, extension: Extension, consumer: Any, link: Link) -> None:
        """Build and join the parts; nothing runs yet."""
        self.extension = extension
        self.consumer = consumer
        self.mailbox = link.mailbox
        self.board = link.board
        self.kind = pool_kind(type(consumer.pool))
        self._request_classes: dict[str, Any] = {}
        self._runnable: dict[str, bool] = {}
        self._to_pool: Callable[[Any], None] = consumer.on_task_request
        self._usher = Usher(consumer.pool, self._to_pool)
        worker = worker_id(consumer.hostname)
        self.queues = queues = Consumed(consumer)
        self.modes = Modes(extension.modes())
        self.watchdog = self._new_watchdog()
        self.herald = Herald(
            extension.observers,
            send_event=self.send_event,
            sends_events=self.sends_events,
            later=None if self.kind == "solo" else self.mailbox.later,
        )
        transport = extension.app.connection_for_read().get_transport_cls()
        self._has_dead_letters = has_dead_letters(transport)
        self.stamper = Stamper(
            worker=worker,
            place=link.place,
            rules=extension.options,
            of_call=extension.options_of_call,
            name_of=extension.name_of,
            modes=self.modes,
            identify=identity_of if identities(transport) else lambda _message: "",
            most_returns=self._most_returns,
        )
        self.agent = Agent(
            extension.new_store(PATIENCE),
            replicated=extension.new_store(PATIENCE, replicated=True)
            if extension.settings.replicas_wait
            else None,
            worker=worker,
            realm=extension.realm,
            place=link.place,
            queues=queues,
            declared=self.declared,
            rules=extension.options,
            receive=self.receive,
            post=self.mailbox.post,
            reap=self.reap,
            abort=self.abort,
            publisher=Publisher(extension.app.connection_for_write),
            watchdog=self.watchdog,
            herald=self.herald,
            modes=self.modes,
            address=extension.settings.where(),
            done_for=extension.settings.done_for,
            max_body=extension.settings.max_body_bytes,
            capacity=consumer.pool.limit or 1,
            free=self.free_slots,
            stands_still=link.mailbox.stands_still,
            desk=self._new_desk,
            threads=(link.mailbox.thread, self._usher.thread),
        )
        self.desk = self.agent.desk
        self.unread = Unread(
            consumer,
            inbox=self.agent.inbox,
            tell=self.agent.tell,
            most_returns=self._most_returns,
        )
        link.mailbox.on_notice = self.desk.on_notice
        if self.kind in ("solo", *GREEN):  # tasks run where the notice is heard
            extension.announce = partial(guarded, self.desk.on_notice)
        consumer.on_task_request = self.desk

    def _new_desk(self, clerk: Clerk) -> Desk:
        return Desk(
            stamper=self.stamper,
            rules=cache(self.extension.options),  # asked for at each step of each message
            forward=self._to_pool if self.consumer.hub is not None else self.forward,
            clerk=clerk,
            herald=self.herald,
            prefetch=self.prefetch,
            children=self.kind == "prefork",
            keeps=not self.extension.settings.is_quorum,
        )

    def _new_watchdog(self) -> Watchdog:
        """Return the watchdog; under gevent and eventlet in a thread that the system schedules.

        But not for locks in memory: those are the greenlets' own, and no other thread may wait on
        them.
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
            return Watchdog(store, threads=native, tell=self.mailbox.post)
        return Watchdog(store)

    def start(self) -> None:
        """Start the threads; harmless if they run.

        Without an event loop (gevent, eventlet, a transport that polls) a thread of ours makes the
        calls of the mailbox. Celery's own way would be a look after up to 2 s. Under gevent and
        eventlet it is a greenlet, as all the others: only the watchdog is not.
        """
        self.agent.start()
        if self.consumer.hub is None:
            self.mailbox.turn()
            self.mailbox.thread.start()
            self._usher.thread.start()

    def forward(self, request: Any) -> None:
        """Send a request to the pool, without an event loop, in a way that fits who asks."""
        if not self.mailbox.thread.is_current():
            self._to_pool(request)
        elif self.kind == "solo":
            self.consumer.call_soon(self._to_pool, request)  # one task at a time, in the main loop
        else:
            self._usher(request)

    def reap(self) -> None:
        """Have a prefork pool look for children that have ended. Runs in the main loop.

        Where there is no event loop, a thread of the pool's looks by itself.
        """
        if self.consumer.hub is None:
            return
        maintain = getattr(getattr(self.consumer.pool, "_pool", None), "maintain_pool", None)
        if maintain is not None:
            maintain()

    def abort(self, token: str) -> None:
        """Interrupt the task whose lock was lost, in a pool of processes. Runs in the main loop."""
        request = self.desk.interruptible(token)
        if request is not None and self.kind == "prefork":
            self.board.interrupt(request.worker_pid, request.stamp.token)

    def send_event(self, name: str, /, **fields: Any) -> None:
        """Send a Celery event, if this worker sends those of tasks. Runs in the main loop."""
        if self.sends_events():
            dispatcher = self.consumer.event_dispatcher
            admit(dispatcher)
            dispatcher.send(name, **fields)

    def sends_events(self) -> bool:
        """Return whether this worker sends events of tasks: ``-E``, or a monitor asked for them."""
        dispatcher = self.consumer.event_dispatcher
        return (
            dispatcher is not None
            and dispatcher.enabled
            and (not dispatcher.groups or "task" in dispatcher.groups)
        )

    def prefetch(self, change: int) -> None:
        """Tell the broker that one message more, or less, may be unacknowledged."""
        change_prefetch(self.consumer, change)

    def free_slots(self) -> int:
        """Return how many slots of the pool are free; below 0, so many tasks wait for one.

        None is free while the main loop stands still: what is granted then would wait for it.
        """
        free = (self.consumer.pool.limit or 1) - len(reserved_requests)
        return min(free, 0) if self.mailbox.stands_still() else free

    def receive(self, delivery: Delivery) -> None:
        """Make a request of a parked message whose turn has come. Runs in the main loop.

        With one that cannot be read it does what Celery's consumer does. If anything else fails,
        the message is tried again later, so that others pass, and ends as FAILURE at last.
        """
        if self.agent.inbox.retired:
            return self.agent.inbox.give_back(delivery)
        try:
            return self._receive(delivery)
        except Exception as error:  # noqa: BLE001  # of the message, of a class of the user's ...
            self.desk.undelivered(delivery)
            return self.unread.fail(delivery, error)

    def _receive(self, delivery: Delivery) -> None:
        if delivery.verdict == "granted" and self._is_for_dead_letters(delivery):
            return self.unread.reject(delivery)
        accept = prepare_accept_content(self.extension.app.conf.accept_content)
        message = unpack(delivery.body or b"", accept)
        try:
            request = self._read(delivery, message)
        except UNREADABLE as error:
            return self.unread.discard(delivery, message, error)
        return None if request is None else self.desk.deliver(delivery, request)

    def _is_for_dead_letters(self, delivery: Delivery) -> bool:
        """Return whether a message has come back too often, and its queue has dead letters."""
        if delivery.returns <= self._most_returns(delivery.queue) or not self._has_dead_letters:
            return False
        return dead_letters_of(self.queues.declared(delivery.queue))

    def _most_returns(self, queue: str) -> float:
        """Return how often a message of a queue may come back."""
        return most_returns(self.queues.declared(queue), self.extension.settings.max_returns)

    def _read(self, delivery: Delivery, message: Any) -> LockedRequest | None:
        """Return the request of a message; None if this worker has done with it."""
        read = read_as_celery(message, utc=self.extension.app.uses_utc_timezone())
        name = read["headers"].get("task")
        task = self.extension.app.tasks.get(name)
        if task is None or name not in self.extension.declared() or not self._can_run(name):
            logger.warning(
                "celery-singleton-lock: a parked task %s came here, and this worker does not lock "
                "that: it goes back to its place in line",
                printable(str(name)),
            )
            self.agent.inbox.give_back(delivery)
            return None
        return self._request(task, message, read)

    def declared(self) -> frozenset[str]:
        """Return the names of the tasks whose parked messages this worker can run."""
        return frozenset(filter(self._can_run, self.extension.declared()))

    def _can_run(self, name: str) -> bool:
        if name not in self._runnable:
            task = self.extension.app.tasks[name]
            self._runnable[name] = passes(self._request_class(task)) and not is_batches(task)
        return self._runnable[name]

    def _request(self, task: Any, message: Any, read: dict[str, Any]) -> LockedRequest:
        app, consumer = self.extension.app, self.consumer
        request: LockedRequest = self._request_class(task)(
            message,
            on_ack=lambda *_: message.ack(),
            on_reject=lambda _log, _errors, requeue: message.reject(requeue),
            app=app,
            hostname=consumer.hostname,
            eventer=consumer.event_dispatcher,
            task=task,
            connection_errors=consumer.connection_errors,
            **read,
        )
        return request

    def _request_class(self, task: Any) -> Any:
        found = self._request_classes.get(task.name)
        if found is None:
            found = request_class(task, self.consumer)
            self._request_classes[task.name] = found
        return found

    def report(self) -> dict[str, Any]:
        """Return what this worker knows of itself; asks nobody. For JSON."""
        return {
            "worker": self.agent.worker,
            "backend": self.extension.settings.where(),
            "backend_down_for": self.agent.down_for(),
            "modes": {task: self.modes.of(task) for task in self.modes.relaxed()},
            "switches": self.modes.switches(),
            **self.desk.counts(),
            "keeping": self.agent.keeping(),
            "threads": self.agent.last_rounds(),
            "renewed": self.watchdog.renewed,
            "renewals_failed": self.watchdog.failed,
            **self.agent.counts(),
        }

    def shut(self) -> None:
        """End the threads; release for tasks whose processes are gone.

        A task in a thread runs on, since Python waits for its threads. Its lease is renewed until
        then: the watchdog ends with the process.
        """
        self._usher.close()
        unfinished = self.desk.flights.unfinished()
        if self.kind == "prefork":
            self.watchdog.stop()
            for request in unfinished:
                self.agent.end(request.stamp, request.ending(), request.worker_pid)
        elif not unfinished:
            self.watchdog.stop()
        self.agent.stop(FLUSH)


def change_prefetch(consumer: Any, change: int) -> None:
    """Tell the broker that one message more, or less, may be unacknowledged.

    Never less than Celery wants. After a reconnect Celery begins with a lower count, and raises it
    from whatever it is then; what we had added counts as Celery's own from there on.

    Args:
        consumer: Celery's.
        change: +1 or -1.
    """
    qos = consumer.qos
    if qos is None:
        return
    if change > 0:
        qos.increment_eventually()
    elif qos.value > consumer.initial_prefetch_count:
        qos.decrement_eventually()
