"""The two bootsteps that add an app's locks to a worker."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from celery import bootsteps
from celery.signals import worker_shutdown

from celery_singleton_lock.core.clock import Clock, ServerClock
from celery_singleton_lock.worker.event_dispatcher import open_buffers
from celery_singleton_lock.worker.execution import batches, interrupt
from celery_singleton_lock.worker.execution.interrupt import Interrupts, LostTokens
from celery_singleton_lock.worker.extension import Extension
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.loop_channel import PATH, LoopChannel
from celery_singleton_lock.worker.pools import spawns
from celery_singleton_lock.worker.runtime import Link, Runtime
from celery_singleton_lock.worker.startup_checks_app import (
    check_app,
    check_messages_pass_dispatcher,
    check_pool,
    refuse_forks,
    tell_of_modes,
)
from celery_singleton_lock.worker.startup_checks_redis import check_answering, check_backend
from celery_singleton_lock.worker.startup_errors import logged_in_one_line, told_in_one_line


class WorkerStep(bootsteps.StartStopStep):  # type: ignore[misc]  # celery is untyped
    """Checks the app before the worker takes a message, and creates the loop channel."""

    requires: tuple[str, ...] = ("celery.worker.components:Timer",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        extension = install(worker.app)
        with told_in_one_line():
            check_pool(worker)
            check_app(extension)
            refuse_forks(worker, extension)
        # before the pool forks: its children inherit the pipes
        self.link: Link = Link(LoopChannel(), ServerClock(clock_of(extension)), LostTokens())
        forks = "prefork" in getattr(worker.pool_cls, "__module__", str(worker.pool_cls))
        extension.interrupts = Interrupts(self.link.lost_tokens, signals=forks)
        extension.announce = self.link.loop_channel.announce
        worker.singleton_lock_link = self.link
        if extension.active() and spawns(worker):
            os.environ[PATH] = channel = self.link.loop_channel.publish()
            os.environ[interrupt.PATH] = self.link.lost_tokens.publish(channel)

    def start(self, worker: Any) -> None:
        """Check the locks' Redis, before any message is taken."""
        extension = install(worker.app)
        tell_of_modes(extension)
        if extension.active():
            with logged_in_one_line():
                answered = check_backend(extension, self.link.place)
            if not answered:
                self.link.late_check = partial(check_answering, extension, self.link.place)


class ConsumerStep(bootsteps.StartStopStep):  # type: ignore[misc]  # celery is untyped
    """Puts the dispatcher before the pool; handles a lost connection and the shutdown."""

    requires: tuple[str, ...] = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        # created here, since Celery's strategies read consumer.on_task_request only once
        self.runtime: Runtime | None = None
        extension = install(consumer.app)
        if extension.active():
            with told_in_one_line():
                self.runtime = Runtime(extension, consumer, consumer.controller.singleton_lock_link)
            consumer.singleton_lock_runtime = self.runtime
            extension.worker = os.getpid(), self.runtime.report
            worker_shutdown.connect(self._on_worker_shutdown, weak=False)

    def start(self, consumer: Any) -> None:
        """Check that messages pass the dispatcher, and start the agent."""
        if self.runtime is not None:
            check_messages_pass_dispatcher(self.runtime)
            batches.lock_batches(self.runtime)
            if consumer.event_dispatcher is not None:
                open_buffers(consumer.event_dispatcher)
            self.runtime.header_factory.broadcast = self.runtime.queues.broadcast()
            self.runtime.header_factory.queue_of = self.runtime.queues.queue_of
            self.runtime.queue_stops.apply()  # before Celery's loop consumes again
            link = consumer.controller.singleton_lock_link
            if link.late_check is not None:
                self.runtime.agent.check_first(link.late_check)
                link.late_check = None
            self.runtime.start()

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:  # noqa: ARG002  # Celery's
        """Read the loop channel. Celery calls this again after a lost connection."""
        if self.runtime is not None:
            self.runtime.loop_channel.attach(hub)

    def stop(self, consumer: Any) -> None:
        """Return to the broker the messages that the pool will not run.

        A lost connection flushes the pool; a shutdown closes it.
        """
        if self.runtime is None:
            return
        # acknowledges the tasks that have their locks, while there is a connection
        self.runtime.loop_channel.handle_notices()
        self.runtime.loop_channel.hurry()  # sends their delayed events
        closing = consumer.controller.blueprint.state in (bootsteps.CLOSE, bootsteps.TERMINATE)
        if closing:
            self.runtime.agent.retire()
            self.runtime.finish_parking()
        self.runtime.loop_channel.detach()
        self.runtime.dispatcher.abandon(unless_dispatched=closing)

    def shutdown(self, consumer: Any) -> None:
        """End the runtime, since Celery sends no ``worker_shutdown`` in a cold shutdown.

        Nor does it if the worker runs in a thread, as in a test, where the process continues.
        """
        self._on_worker_shutdown(consumer.controller)

    def info(self, consumer: Any) -> dict[str, Any]:  # noqa: ARG002  # Celery's signature
        """Return the values for ``inspect stats`` and for Flower's page of the worker."""
        return {} if self.runtime is None else {"singleton_lock": self.runtime.report()}

    def _on_worker_shutdown(self, sender: Any = None, **_: Any) -> None:
        if self.runtime is not None and sender in (None, self.runtime.consumer.controller):
            runtime, self.runtime = self.runtime, None
            worker_shutdown.disconnect(self._on_worker_shutdown)
            runtime.loop_channel.handle_notices()  # of processes that could not release their locks
            runtime.shut()
            runtime.extension.worker = None
            runtime.loop_channel.close()
            for path in (PATH, interrupt.PATH):
                os.environ.pop(path, None)


def clock_of(extension: Extension) -> Clock | None:
    """Return the clock of locks in memory; None for other stores, which use the system clock."""
    in_memory = extension.active() and extension.settings.in_memory
    return extension.store().clock if in_memory else None
