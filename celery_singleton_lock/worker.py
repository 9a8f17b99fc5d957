"""Joins an app's locks to a worker: two bootsteps, and the parts that live between them."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from billiard import get_start_method
from celery import bootsteps
from celery.exceptions import ImproperlyConfigured
from celery.signals import worker_shutdown
from celery.worker import strategy
from celery.worker.strategy import hybrid_to_proto2, proto1_to_proto2
from kombu.serialization import prepare_accept_content
from kombu.utils.imports import symbol_by_name

from celery_singleton_lock import native
from celery_singleton_lock.abort import Board, Listener
from celery_singleton_lock.agent import Agent
from celery_singleton_lock.bounds import PREFIX
from celery_singleton_lock.clerk import Clerk
from celery_singleton_lock.clock import Clock, ServerClock
from celery_singleton_lock.desk import Desk, worker_id
from celery_singleton_lock.errors import BackendRefused, BackendUnreachable, SchemaMismatch
from celery_singleton_lock.extension import PATIENCE, Extension, declared_options, install
from celery_singleton_lock.herald import Herald
from celery_singleton_lock.mailbox import HEAR, PATH, Mailbox, guarded
from celery_singleton_lock.model import SCHEMA, Delivery
from celery_singleton_lock.modes import ENFORCE, Modes
from celery_singleton_lock.native import patched_by
from celery_singleton_lock.publisher import Publisher, unpack
from celery_singleton_lock.queues import Consumed, refuse_broadcast
from celery_singleton_lock.request import LockedRequest
from celery_singleton_lock.settings import check_unknown_settings
from celery_singleton_lock.stamper import Stamper
from celery_singleton_lock.store.quorum_tasks import TaskQuorum
from celery_singleton_lock.store.redis import RedisStore
from celery_singleton_lock.watchdog import Watchdog
from celery_singleton_lock.words import number_of

logger = logging.getLogger(__name__)

FLUSH: Final = 2.0
"""Most seconds that a worker's exit waits for the agent."""

ROOM: Final = 0.02
"""Seconds between two looks whether a full pool has room, where the pool cannot tell."""

POOLS: Final = {
    "celery.concurrency.prefork": "prefork",
    "celery.concurrency.thread": "threads",
    "celery.concurrency.solo": "solo",
    "celery.concurrency.gevent": "gevent",
    "celery.concurrency.eventlet": "eventlet",
}
"""Modules of the pools under which locks are kept: their names for ``--pool``."""

_GREEN: Final = ("gevent", "eventlet")


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What must be there before the pool forks, and before the first message arrives."""

    mailbox: Mailbox
    place: ServerClock
    board: Board


class Usher:
    """Sends requests to the pool of a worker without an event loop, one by one, when it has room.

    There, to send one means to wait for a slot. Celery's consumer may wait, since all that it would
    do besides is to take more. Who makes the calls of the mailbox may not: the calls behind it
    would wait as well, and at a shutdown a request that waits inside the pool can be lost.

    Args:
        pool: Celery's.
        to_pool: Celery's own way to it.
    """

    def __init__(self, pool: Any, to_pool: Callable[[Any], None]) -> None:
        """Wait for the first request."""
        self._pool = pool
        self._to_pool = to_pool
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._never = threading.Event()

    def __call__(self, request: Any) -> None:
        """Take a request. Does not wait."""
        self._waiting.put(request)

    def close(self) -> None:
        """Send what was taken, and no more."""
        self._waiting.put(None)

    def serve(self) -> None:
        """Send what was taken, until closed. Who was given back meanwhile is not sent."""
        while (request := self._waiting.get()) is not None:
            while not request.landed and not has_room(self._pool):
                self._never.wait(ROOM)
            if not request.landed:
                guarded(self._to_pool, request)


def has_room(pool: Any) -> bool:
    """Return whether a pool without an event loop takes a task without waiting."""
    inner: Any = getattr(pool, "_pool", None)
    match pool_kind(type(pool)):
        case "gevent":
            return bool(inner.free_count() > 0)
        case "eventlet":
            return bool(inner.free() > 0)
        case "prefork":
            return bool(inner._putlock._value > 0)  # noqa: SLF001  # billiard's
        case _:
            return True


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
        self._to_pool: Callable[[Any], None] = consumer.on_task_request
        self._usher = Usher(consumer.pool, self._to_pool)
        self._porter: threading.Thread | None = None
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
        self.stamper = Stamper(
            worker=worker,
            place=link.place,
            rules=extension.options,
            name_of=extension.name_of,
            modes=self.modes,
        )
        self.agent = Agent(
            extension.new_store(PATIENCE),
            worker=worker,
            realm=extension.realm,
            place=link.place,
            queues=queues,
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
            desk=self._new_desk,
        )
        self.desk = self.agent.desk
        link.mailbox.on_notice = self.desk.on_notice
        if self.kind in ("solo", *_GREEN):  # tasks run where the notice is heard
            extension.announce = partial(guarded, self.desk.on_notice)
        consumer.on_task_request = self.desk

    def _new_desk(self, clerk: Clerk) -> Desk:
        return Desk(
            stamper=self.stamper,
            rules=self.extension.options,
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
        if self.kind in _GREEN and self.extension.settings.is_quorum:
            msg = (
                f"singleton_lock_backend names several servers, and the pool is {self.kind}: the "
                "threads that ask them are not its own. Start the worker with --pool prefork, "
                "threads or solo, or use one Redis."
            )
            raise ImproperlyConfigured(msg)
        if self.kind in _GREEN and not self.extension.settings.in_memory:
            return Watchdog(store, threads=native, tell=self.mailbox.post)
        return Watchdog(store)

    def start(self) -> None:
        """Start the threads; harmless if they run.

        Without an event loop (gevent, eventlet, a transport that polls) a thread of ours makes the
        calls of the mailbox. Celery's own way would be a look after up to 2 s. Under gevent and
        eventlet it is a greenlet, as all the others: only the watchdog is not.
        """
        self.agent.start()
        if self.consumer.hub is None and self._porter is None:
            self._porter = threading.Thread(
                target=self.mailbox.serve, name="singleton-lock-mailbox", daemon=True
            )
            self._porter.start()
            threading.Thread(
                target=self._usher.serve, name="singleton-lock-usher", daemon=True
            ).start()

    def forward(self, request: Any) -> None:
        """Send a request to the pool, without an event loop, in a way that fits who asks."""
        if self._porter is None or threading.get_ident() != self._porter.ident:
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
        qos = self.consumer.qos
        if qos is not None:
            (qos.increment_eventually if change > 0 else qos.decrement_eventually)()

    def receive(self, delivery: Delivery) -> None:
        """Make a request of a parked message whose turn has come. Runs in the main loop."""
        if self.agent.inbox.retired:
            return self.agent.inbox.give_back(delivery)
        accept = prepare_accept_content(self.extension.app.conf.accept_content)
        message = unpack(delivery.body or b"", accept)
        read = read_as_celery(message, utc=self.extension.app.uses_utc_timezone())
        name = read["headers"].get("task")
        task = self.extension.app.tasks.get(name)
        if task is None or name not in self.extension.declared():
            self.consumer.on_unknown_task(None, message, KeyError(name))
            return self.agent.inbox.drop(delivery)
        if not passes(self._request_class(task)):
            return self.agent.inbox.give_back(delivery)
        return self.desk.deliver(delivery, self._request(task, message, read))

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


def open_buffers(dispatcher: Any) -> None:
    """Have a place for each group of events before a thread sends the first of one.

    Celery's dispatcher makes it then, without its mutex: in the midst of the main loop's look at
    all of them, that look raises, and ends the worker.
    """
    for group in ("task", "lock"):
        dispatcher._group_buffer[group]  # noqa: SLF001  # a defaultdict makes it


def admit(dispatcher: Any) -> None:
    """Have ``lock-…`` events sent as those of tasks are: whenever these are, and in batches."""
    if dispatcher.groups:
        dispatcher.groups.add("lock")
    if "task" in dispatcher.buffer_group:
        dispatcher.buffer_group = {*dispatcher.buffer_group, "lock"}


def read_as_celery(message: Any, *, utc: bool) -> dict[str, Any]:
    """Return what Celery's strategy gives a request of a message, whichever its protocol.

    Args:
        message: the message.
        utc: whether the app uses UTC.
    """
    payload = message.payload
    if "args" in payload:  # protocol 1, also with the headers of protocol 2
        body, headers, decoded, utc = hybrid_to_proto2(message, payload)
    elif "task" not in message.headers:
        body, headers, decoded, utc = proto1_to_proto2(message, payload)
    else:
        body, headers, decoded = message.body, message.headers, False
    return {"body": body, "headers": headers, "decoded": decoded, "utc": utc}


def passes(cls: Any) -> bool:
    """Return whether requests of a class tell their desk how they go on."""
    return issubclass(cls, LockedRequest) and all(
        getattr(getattr(cls, method), "__module__", "") == LockedRequest.__module__
        for method in ("execute_using_pool", "on_success")
    )


def request_class(task: Any, consumer: Any) -> Any:
    """Return the request class that Celery's strategy derives for a task."""
    derive: Any = strategy.create_request_cls  # by the name that Celery's strategy itself uses
    return derive(
        symbol_by_name(task.Request),
        task,
        consumer.pool,
        consumer.hostname,
        consumer.event_dispatcher,
        app=consumer.app,
    )


def pool_kind(pool: type) -> str:
    """Return the ``--pool`` that a pool's class is, or is derived from; empty if it is none."""
    return next((POOLS[cls.__module__] for cls in pool.__mro__ if cls.__module__ in POOLS), "")


class WorkerStep(bootsteps.StartStopStep):  # type: ignore[misc]  # celery is untyped
    """Checks what can be checked before the worker takes a message, and opens the mailbox."""

    requires = ("celery.worker.components:Timer",)

    def __init__(self, worker: Any, **options: Any) -> None:
        """Refuse what would not work. The mailbox is opened before the pool forks."""
        super().__init__(worker, **options)
        extension = install(worker.app)
        check_pool(worker)
        check_app(extension)
        refuse_forks(worker, extension)
        self.link = Link(Mailbox(), ServerClock(clock_of(extension)), Board())
        if "prefork" in getattr(worker.pool_cls, "__module__", str(worker.pool_cls)):
            extension.listen = Listener(self.link.board).listen
        extension.announce = self.link.mailbox.announce
        worker.singleton_lock_link = self.link
        if extension.active() and spawns(worker):
            os.environ[PATH] = self.link.mailbox.publish()

    def start(self, worker: Any) -> None:
        """Ask the lock's Redis, before any message is taken."""
        extension = install(worker.app)
        tell_of_modes(extension)
        if extension.active():
            check_backend(extension, self.link.place)


class ConsumerStep(bootsteps.StartStopStep):  # type: ignore[misc]  # celery is untyped
    """Puts the desk before the pool, and ends what a lost connection or a shutdown ends."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        """Take the place of Celery's way to the pool, before strategies keep it."""
        super().__init__(consumer, **options)
        self.crew: Crew | None = None
        extension = install(consumer.app)
        if extension.active():
            self.crew = Crew(extension, consumer, consumer.controller.singleton_lock_link)
            consumer.singleton_lock_crew = self.crew
            worker_shutdown.connect(self._on_worker_shutdown, weak=False)

    def start(self, consumer: Any) -> None:
        """Start the agent; look whether Celery still lets us in."""
        if self.crew is not None:
            check_wrap(self.crew)
            if consumer.event_dispatcher is not None:
                open_buffers(consumer.event_dispatcher)
            self.crew.stamper.broadcast = self.crew.queues.broadcast()
            self.crew.start()

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:  # noqa: ARG002  # Celery's
        """Watch the mailbox; anew after each lost connection, which resets the loop."""
        if self.crew is not None:
            hub.add_reader(self.crew.mailbox.fileno(), self.crew.mailbox.drain)
            hub.call_repeatedly(HEAR, self.crew.mailbox.hear)  # a lost connection clears it

    def stop(self, consumer: Any) -> None:
        """Give back what the pool will not run: a lost connection flushes it, a shutdown closes."""
        if self.crew is None:
            return
        self.crew.mailbox.hear()  # who has its lock is acknowledged while there is a connection
        self.crew.mailbox.hurry()  # and what happened to it is told
        closing = consumer.controller.blueprint.state in (bootsteps.CLOSE, bootsteps.TERMINATE)
        if closing:
            self.crew.agent.retire()
        self.crew.desk.abandon(unless_dispatched=closing)

    def shutdown(self, consumer: Any) -> None:
        """End the crew of a worker that runs in a thread, in a test.

        It ends by an exception, without ``worker_shutdown``, and its process goes on.
        """
        if threading.current_thread() is not threading.main_thread():
            self._on_worker_shutdown(consumer.controller)

    def info(self, consumer: Any) -> dict[str, Any]:  # noqa: ARG002  # Celery's signature
        """Return what the worker page of Flower and ``inspect stats`` show."""
        return {} if self.crew is None else {"singleton_lock": self.crew.report()}

    def _on_worker_shutdown(self, sender: Any = None, **_: Any) -> None:
        if self.crew is not None and sender in (None, self.crew.consumer.controller):
            crew, self.crew = self.crew, None
            worker_shutdown.disconnect(self._on_worker_shutdown)
            crew.shut()
            crew.mailbox.close()
            os.environ.pop(PATH, None)


def spawns(worker: Any) -> bool:
    """Return whether the pool's children are interpreters of their own, which inherit no pipe."""
    asked = getattr(worker, "pool_start_method", None) or "fork"  # Celery 5.7
    forks = asked == "fork" and get_start_method() == "fork"
    return pool_kind(worker.pool_cls) == "prefork" and not forks


def check_pool(worker: Any) -> None:
    """Refuse pools under which locks would not be kept.

    Raises:
        ImproperlyConfigured: an unknown pool, or a green one without green threads.
    """
    if not install(worker.app).active():
        return
    pool, kind = worker.pool_cls, pool_kind(worker.pool_cls)
    if not kind:
        msg = (
            f"LockedTask does not know the worker pool {pool.__module__}.{pool.__name__}, so its "
            f"locks would not be kept: start the worker with --pool {', '.join(POOLS.values())}, "
            "or derive the pool from one of these."
        )
        raise ImproperlyConfigured(msg)
    if kind in _GREEN and patched_by() != kind:
        msg = (
            f"The worker pool is {kind}, but the process' threads are not {kind}'s, so every lock "
            f"would block all tasks: start the worker with --pool {kind} on the command line, "
            "which patches before anything else is imported, instead of worker_pool."
        )
        raise ImproperlyConfigured(msg)


def check_app(extension: Extension) -> None:
    """Check settings and options together, now that both are known.

    Raises:
        ConfigurationError: one is wrong, or a task carries ``lock_…`` options without LockedTask.
    """
    app = extension.app
    check_unknown_settings(name for name in app.conf if "singleton_lock_" in str(name).lower())
    for task in app.tasks.values():
        if task.name in extension.declared():
            extension.options(task)  # raises what is wrong, now that the settings are known
            refuse_broadcast(app, task)
        else:
            refuse_unlocked(task)
    if extension.active():
        extension.settings.addresses()
    warn_of_mixed_policies(extension)


def clock_of(extension: Extension) -> Clock | None:
    """Return the clock by which locks in memory go; None for all others: the machine's."""
    in_memory = extension.active() and extension.settings.in_memory
    return extension.store().clock if in_memory else None


def refuse_forks(worker: Any, extension: Extension) -> None:
    """Refuse locks in memory where the pool has processes: each would have locks of its own.

    Raises:
        ImproperlyConfigured: it is so.
    """
    if not extension.active() or pool_kind(worker.pool_cls) != "prefork":
        return
    if extension.settings.in_memory:
        msg = (
            f"{PREFIX}backend is {extension.settings.where()}: these locks live in the memory of "
            "one process, and the processes of the pool prefork would not share them. Start the "
            "worker with --pool threads or solo (celery.contrib.testing.worker.start_worker takes "
            f"solo by itself), or set {PREFIX}backend to a Redis."
        )
        raise ImproperlyConfigured(msg)


def tell_of_modes(extension: Extension) -> None:
    """Say which tasks do not keep their locks, and what that means for messages that are parked."""
    relaxed = sorted((name, mode) for name, mode in extension.modes().items() if mode != ENFORCE)
    if relaxed:
        logger.warning(
            "celery-singleton-lock: these tasks run without their locks: %s",
            ", ".join(f"{name} ({mode})" for name, mode in relaxed),
        )
    if relaxed and not extension.active():
        logger.warning(
            "celery-singleton-lock: this worker does not ask the locks' Redis. What is parked "
            "there is kept, and does not run here: it runs in a worker whose singleton_lock_mode "
            'is "observe" or "enforce".'
        )


def warn_of_mixed_policies(extension: Extension) -> None:
    """Say which tasks share a lock such that one may be kept from its slot by those behind it."""
    sharing: dict[Any, dict[str, str]] = {}
    for name in sorted(extension.declared()):
        task = extension.app.tasks[name]
        declared = declared_options(task)
        for key in (declared.get("lock_key"), *(declared.get("lock_keys") or ())):
            if key is not None:  # any other name has the task's own before it
                sharing.setdefault(key, {}).setdefault(extension.options(task).on_conflict, name)
    for key, tasks in sharing.items():
        if {"wait", "park"} <= tasks.keys():
            logger.warning(
                'celery-singleton-lock: %s (lock_on_conflict="wait") and %s ("park") share the '
                "lock_key %r. If all slots of a worker wait for a lock that a parked task is given "
                "there, it runs only when lock_wait_timeout has ended one of them. Route one of "
                "the two to workers of its own, or give both the same policy.",
                tasks["wait"],
                tasks["park"],
                key,
            )


def refuse_unlocked(task: Any) -> None:
    """Refuse a task that carries ``lock_…`` options, which only LockedTask reads."""
    carried = sorted(name for name in vars(type(task)) if name in _OPTION_NAMES)
    if carried:
        msg = (
            f"task {task.name}: {carried[0]} is set, but the task is not a LockedTask, so no lock "
            "would be taken. Declare it with base=LockedTask, or remove the option."
        )
        raise ImproperlyConfigured(msg)


_OPTION_NAMES: Final = frozenset(
    f"lock_{name}"
    for name in (
        "key",
        "keys",
        "args",
        "lease",
        "limit",
        "on_conflict",
        "wait_timeout",
        "max_waiting",
        "on_full",
        "on_retry",
        "on_lost",
        "on_backend_error",
        "requeue_delay",
        "requeue_max",
        "mode",
    )
)


_UNTIL_IT_ANSWERS: Final = (
    "Locked tasks wait until it answers, or do what their lock_on_backend_error says; other tasks "
    "run."
)
_UNTIL_MOST_VOTE: Final = (
    "Locked tasks wait until a majority of these servers votes, or do what their "
    "lock_on_backend_error says; other tasks run."
)


def check_backend(extension: Extension, place: ServerClock) -> None:
    """Ask the lock's Redis whether it can keep locks; say what it guarantees.

    Unreachable is no reason not to start: other tasks run, and locked ones do what
    ``lock_on_backend_error`` says.

    Raises:
        BackendRefused: it forbids what every lock needs.
        SchemaMismatch: its data is of another version.
    """
    store = extension.new_store(PATIENCE)
    if isinstance(store, TaskQuorum):
        check_quorum(extension, store, place)
        return
    try:
        check_schema(store)  # first: what another version wrote is not to be touched
        store.probe()
        place.sync(store.time(), store.clock.monotonic())
        facts = store.describe()
    except BackendUnreachable as error:
        where = extension.settings.where()
        logger.warning("celery-singleton-lock: %s It is %s. %s", error, where, _UNTIL_IT_ANSWERS)
        return
    finally:
        store.hang_up()
    if extension.settings.in_memory:
        logger.warning(
            "celery-singleton-lock: locks live in the memory of this process (%s), for tests. No "
            "other process sees them, and they end with it.",
            extension.settings.address(),
        )
        return
    logger.info(
        "celery-singleton-lock: locks live in Redis %s: eviction %s, persistence %s, replicas %s",
        *(facts[fact] for fact in ("version", "eviction", "persistence", "replicas")),
    )
    if ENFORCE in extension.modes().values():
        refuse_eviction(extension, facts["eviction"])
        warn_of_few_replicas(extension, facts["replicas"])


def check_quorum(extension: Extension, store: TaskQuorum, place: ServerClock) -> None:
    """Ask several servers whether they can keep locks together.

    Raises:
        BackendRefused: one of them forbids what every lock needs, or may forget its votes.
        ConfigurationError: two of them are one.
        SchemaMismatch: the data of one is of another version.
    """
    try:
        store.check()
        for node in store.nodes:
            with suppress(BackendUnreachable):
                check_schema(node)
        place.sync(store.time(), store.clock.monotonic())
        facts = store.describe()
    except BackendUnreachable as error:
        logger.warning("celery-singleton-lock: %s %s", error, _UNTIL_MOST_VOTE)
        return
    finally:
        store.hang_up()
    logger.info(
        "celery-singleton-lock: locks live on %d servers, Redis %s, of which a majority decides",
        len(store.nodes),
        facts.get("version", "unknown"),
    )
    if ENFORCE in extension.modes().values():
        for policy in facts.get("eviction", "unknown").split(", "):
            refuse_eviction(extension, policy)


def check_schema(store: RedisStore) -> None:
    """Refuse data that another schema of this library wrote."""
    found = store.schema()
    if found != SCHEMA:
        msg = (
            f"The lock's Redis holds data of schema {found} (key {store.keyspace.schema}); this "
            f"version works with {SCHEMA}. Upgrade all workers together: let those of the other "
            "version run what is parked, stop them, and delete that key. Or give this worker a "
            "singleton_lock_prefix of its own; tasks under two prefixes do not exclude each other."
        )
        raise SchemaMismatch(msg)


def warn_of_few_replicas(extension: Extension, found: str) -> None:
    """Say at once what every parked task would say: that the replicas are not there."""
    wanted = extension.settings.replicas_wait
    if found.isdecimal() and int(found) < wanted:
        logger.warning(
            "celery-singleton-lock: singleton_lock_replicas_wait is %d, and the lock's Redis has "
            "%s. Until it has as many, messages that are parked stay unacknowledged with the "
            "broker, too. Connect replicas, or lower the setting.",
            wanted,
            number_of(int(found), "replica"),
        )


def refuse_eviction(extension: Extension, policy: str) -> None:
    """Refuse to park where Redis may throw messages away, unless the user said so."""
    if policy in ("noeviction", "unknown") or extension.settings.backend_options.get(
        "allow_eviction"
    ):
        return
    msg = (
        f"The lock's Redis evicts keys when it is full (maxmemory-policy {policy}), so a parked "
        "task could be lost and a lock taken twice. Set maxmemory-policy noeviction, use another "
        "Redis (singleton_lock_backend), or accept it: singleton_lock_backend_options = "
        '{"allow_eviction": True}.'
    )
    raise BackendRefused(msg)


def check_wrap(crew: Crew) -> None:
    """See that Celery still lets every locked message pass the desk, on its way out and back.

    Where it does not, nothing is skipped: all locked messages of this worker pass by, and the pool
    takes their locks. Then the worker takes no grants either: with its slots full of tasks that
    wait, a parked one that holds the lock would wait for a slot, and they for it.
    """
    app, by_desk = crew.extension.app, crew.consumer.on_task_request is crew.desk
    for name in sorted(crew.extension.declared()):
        task = app.tasks[name]
        if by_desk and passes(request_class(task, crew.consumer)):
            continue
        crew.desk.alone = crew.extension.declared()
        crew.agent.stand_aside()
        logger.warning(
            "celery-singleton-lock: task %s does not pass this worker's desk (%s): all locked "
            "tasks of this worker wait for their locks in pool slots, and what other workers have "
            "parked does not run here. %s",
            name,
            *_why_alone(task, by_desk=by_desk),
        )


def _why_alone(task: Any, *, by_desk: bool) -> tuple[str, str]:
    """Return why a task's messages pass by, and what to change."""
    if not by_desk:
        return (
            "another bootstep replaced consumer.on_task_request",
            "Let that step call what it found there.",
        )
    base = symbol_by_name(task.Request)
    if not issubclass(base, LockedRequest):
        return (
            f"its Request class is {base.__module__}.{base.__qualname__}",
            "Derive that class from celery_singleton_lock.request.LockedRequest.",
        )
    return (
        "this Celery makes request classes in an unknown way",
        "Use a Celery that this version supports.",
    )
