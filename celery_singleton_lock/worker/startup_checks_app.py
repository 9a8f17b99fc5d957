"""What a worker checks before it takes a message, of its pool, its tasks and its settings."""

from __future__ import annotations

import logging
from typing import Any

from celery.app.task import Task
from celery.exceptions import ImproperlyConfigured

from celery_singleton_lock.worker.execution.batches import is_batches, refuse_unsupported
from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.worker.runtime import Crew
from celery_singleton_lock.worker.extension import Extension, declared_options, install
from celery_singleton_lock.core.lock_mode import ENFORCE, OFF
from celery_singleton_lock.core.native_threads import patched_by
from celery_singleton_lock.worker.pools import GREEN, POOLS, pool_kind
from celery_singleton_lock.worker.consumed_queues import refuse_broadcast
from celery_singleton_lock.config.settings import check_unknown_settings
from celery_singleton_lock.worker.unlocked_tasks import refuse_unlocked
from celery_singleton_lock.worker.request_class import passes, request_class, why_alone

logger = logging.getLogger(__name__)


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
    if kind in GREEN and patched_by() != kind:
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
            options = extension.options(task)  # raises what is wrong: the settings are known now
            if is_batches(task):
                refuse_unsupported(task.name, declared_options(task), options)
            elif options.mode != OFF:
                refuse_own_strategy(task)
            refuse_broadcast(app, task)
    refuse_unlocked(app)
    if extension.active():
        extension.settings.addresses()
    warn_of_mixed_policies(extension)


def refuse_own_strategy(task: Any) -> None:
    """Refuse a task whose messages go to the pool in a way of their own, past its lock.

    Raises:
        ImproperlyConfigured: it is one, and not a task of celery-batches as it comes.
    """
    if task.Strategy != Task.Strategy:
        owner = next(cls for cls in type(task).__mro__ if "Strategy" in vars(cls))
        msg = (
            f"task {task.name}: {owner.__module__}.{owner.__qualname__} has a Strategy of its own, "
            "which sends messages to the pool in its own way, so no lock would be taken. Declare "
            "the task without LockedTask and take a Lock in its body, or leave that Strategy out."
        )
        raise ImproperlyConfigured(msg)


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
            *why_alone(task, by_desk=by_desk),
        )
