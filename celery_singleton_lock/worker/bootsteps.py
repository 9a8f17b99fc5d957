"""Joins an app's locks to a worker: two bootsteps."""

from __future__ import annotations

import os
import threading
from typing import Any

from celery import bootsteps
from celery.signals import worker_shutdown

from celery_singleton_lock.worker.execution import batches
from celery_singleton_lock.worker.execution.interrupt import Board, Listener
from celery_singleton_lock.worker.startup_checks_redis import check_backend
from celery_singleton_lock.core.clock import Clock, ServerClock
from celery_singleton_lock.worker.runtime import Crew, Link
from celery_singleton_lock.worker.event_dispatcher import open_buffers
from celery_singleton_lock.worker.extension import Extension, install
from celery_singleton_lock.worker.loop_channel import PATH, Mailbox
from celery_singleton_lock.worker.pools import spawns
from celery_singleton_lock.worker.startup_checks_app import (
    check_app,
    check_pool,
    check_wrap,
    refuse_forks,
    tell_of_modes,
)
from celery_singleton_lock.worker.startup_errors import logged_in_one_line, told_in_one_line


class WorkerStep(bootsteps.StartStopStep):  # type: ignore[misc]  # celery is untyped
    """Checks what can be checked before the worker takes a message, and opens the mailbox."""

    requires = ("celery.worker.components:Timer",)

    def __init__(self, worker: Any, **options: Any) -> None:
        """Refuse what would not work. The mailbox is opened before the pool forks."""
        super().__init__(worker, **options)
        extension = install(worker.app)
        with told_in_one_line():
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
            with logged_in_one_line():
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
            with told_in_one_line():
                self.crew = Crew(extension, consumer, consumer.controller.singleton_lock_link)
            consumer.singleton_lock_crew = self.crew
            worker_shutdown.connect(self._on_worker_shutdown, weak=False)

    def start(self, consumer: Any) -> None:
        """Start the agent; look whether Celery still lets us in."""
        if self.crew is not None:
            check_wrap(self.crew)
            batches.join(self.crew)
            if consumer.event_dispatcher is not None:
                open_buffers(consumer.event_dispatcher)
            self.crew.stamper.broadcast = self.crew.queues.broadcast()
            self.crew.stamper.queue_of = self.crew.queues.queue_of
            self.crew.start()

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:  # noqa: ARG002  # Celery's
        """Watch the mailbox; anew after each lost connection, which resets the loop."""
        if self.crew is not None:
            self.crew.mailbox.attach(hub)

    def stop(self, consumer: Any) -> None:
        """Give back what the pool will not run: a lost connection flushes it, a shutdown closes."""
        if self.crew is None:
            return
        self.crew.mailbox.hear()  # who has its lock is acknowledged while there is a connection
        self.crew.mailbox.hurry()  # and what happened to it is told
        self.crew.mailbox.detach()
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


def clock_of(extension: Extension) -> Clock | None:
    """Return the clock by which locks in memory go; None for all others: the machine's."""
    in_memory = extension.active() and extension.settings.in_memory
    return extension.store().clock if in_memory else None
