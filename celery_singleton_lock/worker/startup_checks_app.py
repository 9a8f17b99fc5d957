"""Checks the pool, the tasks and the settings of a worker before it takes a message."""

from __future__ import annotations

import logging
from typing import Any, Final

from celery.app.task import Task
from celery.exceptions import ImproperlyConfigured

from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.option_checks import Place
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.config.unknown_names import check_unknown_settings
from celery_singleton_lock.core.lock_mode import ENFORCE, OFF
from celery_singleton_lock.core.native_threads import patched_by
from celery_singleton_lock.worker.consumed_queues import refuse_broadcast
from celery_singleton_lock.worker.execution.batches import is_batches, refuse_unsupported
from celery_singleton_lock.worker.execution.follow import check_results
from celery_singleton_lock.worker.extension import Extension, declared_options
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.pools import GREEN, POOLS, pool_kind
from celery_singleton_lock.worker.request_class import passes, request_class, why_alone
from celery_singleton_lock.worker.runtime import Runtime
from celery_singleton_lock.worker.unlocked_tasks import refuse_unlocked

logger: Final = logging.getLogger(__name__)

WAITS, PARKS = "wait", "park"


def check_pool(worker: Any) -> None:
    """Refuse pools that are not supported.

    Raises:
        ImproperlyConfigured: an unknown pool, or gevent or eventlet without its patches.
    """
    if not install(worker.app).active():
        return
    pool, kind = worker.pool_cls, pool_kind(worker.pool_cls)
    if not kind:
        msg = (
            f"LockedTask does not support the worker pool {pool.__module__}.{pool.__name__}, so no "
            f"lock would be taken: start the worker with --pool {', '.join(POOLS.values())}, "
            "or derive the pool from one of these."
        )
        raise ImproperlyConfigured(msg)
    if kind in GREEN and patched_by() != kind:
        msg = (
            f"The worker pool is {kind}, but this process is not patched by {kind}, so every lock "
            f"would block all tasks: start the worker with --pool {kind} on the command line, "
            "which patches before anything else is imported, instead of worker_pool."
        )
        raise ImproperlyConfigured(msg)


def check_app(extension: Extension) -> None:
    """Check the settings and the options of all tasks together.

    Raises:
        ConfigurationError: a setting or an option is invalid.
        ImproperlyConfigured: a task has ``lock_…`` options without LockedTask, is routed to a
            broadcast queue, or would not pass the dispatcher.
    """
    app = extension.app
    locked = extension.declared()  # else lock_mode, for example, may be the app's own
    names = (name for name in app.conf if locked or PREFIX in str(name).lower())
    check_unknown_settings(names, app.namespace)
    for task in app.tasks.values():
        if task.name in extension.declared():
            options = extension.options(task)  # raises ConfigurationError
            if is_batches(task):
                refuse_unsupported(task.name, declared_options(task), options)
            elif options.mode != OFF:
                refuse_own_strategy(task)
            refuse_broadcast(app, task)
            check_results(task, options)
    refuse_unlocked(app)
    if extension.active():
        extension.settings.addresses()
        refuse_parked_limit(extension.settings)
    check_mixed_policies(extension)


def refuse_parked_limit(settings: Settings) -> None:
    """Refuse a limit of parked messages where none are parked.

    Raises:
        ConfigurationError: the locks are on a quorum, and a limit is set.
    """
    for name in ("max_parked", "max_parked_bytes"):
        value = getattr(settings, name)
        if settings.is_quorum and value is not None:
            Place(f"{PREFIX}{name}").refuse(
                value,
                "with several servers in singleton_lock_backend no message is parked, so there is "
                "nothing to limit. Leave it out, or use one Redis",
            )


def refuse_own_strategy(task: Any) -> None:
    """Refuse a task whose own strategy sends messages to the pool without a lock.

    Raises:
        ImproperlyConfigured: it has a strategy other than Celery's.
    """
    if task.Strategy != Task.Strategy:
        owner = next(cls for cls in type(task).__mro__ if "Strategy" in vars(cls))
        msg = (
            f"task {task.name}: {owner.__module__}.{owner.__qualname__} has a Strategy of its own, "
            "which sends messages to the pool by itself, so no lock would be taken. Declare the "
            "task without LockedTask and use a Lock in its body, or remove that Strategy."
        )
        raise ImproperlyConfigured(msg)


def refuse_forks(worker: Any, extension: Extension) -> None:
    """Refuse locks in memory with a pool of processes: each process would have its own locks.

    Raises:
        ImproperlyConfigured: the settings combine the two.
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
    """Log which tasks run without their locks, and that parked messages may stay parked."""
    relaxed = sorted((name, mode) for name, mode in extension.modes().items() if mode != ENFORCE)
    if relaxed:
        logger.warning(
            "celery-singleton-lock: these tasks run without their locks: %s",
            ", ".join(f"{name} ({mode})" for name, mode in relaxed),
        )
    if relaxed and not extension.active():
        logger.warning(
            "celery-singleton-lock: this worker does not use the locks' Redis. Parked tasks stay "
            "parked: they run in a worker whose singleton_lock_mode "
            'is "observe" or "enforce".'
        )


def check_mixed_policies(extension: Extension) -> None:
    """Check tasks that share a lock: tasks that wait in all slots delay a parked task.

    Raises:
        ImproperlyConfigured: the parked task might never run, since batches wait without a timeout.
    """
    for key, tasks in _by_shared_key(extension).items():
        if not {WAITS, PARKS} <= tasks.keys():
            continue
        waits, parks = tasks[WAITS], tasks[PARKS][0]
        for name in waits:
            _refuse_endless_batch(extension, name, parks, key)
        logger.warning(
            'celery-singleton-lock: %s (%s) and %s ("park") share the lock_key %r. If all slots of '
            "a worker wait for a lock that a parked task is granted there, it runs only when "
            "lock_wait_timeout has ended one of them. Route one of the two to workers of its own, "
            "or give both the same policy.",
            waits[0],
            "a batch waits in its slot"
            if is_batches(extension.app.tasks[waits[0]])
            else 'lock_on_conflict="wait"',
            parks,
            key,
        )


def _by_shared_key(extension: Extension) -> dict[Any, dict[str, list[str]]]:
    """Return lock_key -> policy -> names of the tasks with that key and policy."""
    sharing: dict[Any, dict[str, list[str]]] = {}
    for name in sorted(extension.declared()):
        task = extension.app.tasks[name]
        declared = declared_options(task)
        for key in (declared.get("lock_key"), *(declared.get("lock_keys") or ())):
            if key is not None:  # without a key, the lock name begins with the task's name
                policy = _way_to_wait(extension, task)
                sharing.setdefault(key, {}).setdefault(policy, []).append(name)
    return sharing


def _way_to_wait(extension: Extension, task: Any) -> str:
    """Return the policy of a task; a batch cannot be parked, so it waits."""
    options = extension.options(task)
    policy = PARKS if options.preempts else options.on_conflict
    return WAITS if policy == PARKS and is_batches(task) else policy


def _refuse_endless_batch(extension: Extension, name: str, parks: str, key: Any) -> None:
    task = extension.app.tasks[name]
    if is_batches(task) and extension.options(task).wait_timeout is None:
        msg = (
            f"task {name} is a task of celery-batches without lock_wait_timeout, and shares the "
            f"lock_key {key!r} with {parks}, which is parked: a batch waits for its lock in a pool "
            "slot, so batches could occupy all slots while a parked task has the lock, for ever. "
            "Declare a lock_wait_timeout for the batch, or give it a lock_key of its own."
        )
        raise ImproperlyConfigured(msg)


def check_messages_pass_dispatcher(runtime: Runtime) -> None:
    """Check that every locked message passes the dispatcher, to the pool and back.

    If those of one task do not, all locked messages of this worker bypass the dispatcher, and the
    pool acquires their locks. The worker then takes no grants. Otherwise there could be a deadlock:
    tasks in all slots wait for a lock that is granted to a parked task, which waits for a slot.
    """
    app, by_dispatcher = (
        runtime.extension.app,
        runtime.consumer.on_task_request is runtime.dispatcher,
    )
    for name in sorted(runtime.extension.declared()):
        task = app.tasks[name]
        if by_dispatcher and passes(request_class(task, runtime.consumer)):
            continue
        runtime.dispatcher.alone = runtime.extension.declared()
        runtime.agent.take_no_grants()
        logger.warning(
            "celery-singleton-lock: task %s does not pass this worker's dispatcher (%s): all "
            "locked tasks of this worker wait for their locks in pool slots, and parked tasks "
            "do not run here. %s",
            name,
            *why_alone(task, by_dispatcher=by_dispatcher),
        )
    if runtime.dispatcher.alone:
        tell_of_idle_debounce(runtime.extension)
        tell_of_idle_preempt(runtime.extension)
        tell_of_idle_follow(runtime.extension)


def tell_of_idle_preempt(extension: Extension) -> None:
    """Log the tasks with ``preempt`` that preempt no other, since the pool acquires their locks."""
    declared = sorted(extension.declared())
    idle = [n for n in declared if extension.options(extension.app.tasks[n]).preempts]
    if idle:
        logger.warning(
            'celery-singleton-lock: lock_on_conflict="preempt" waits here as "wait" does, and no '
            "running task is interrupted: %s",
            ", ".join(idle),
        )


def tell_of_idle_follow(extension: Extension) -> None:
    """Log the tasks whose duplicates run themselves, since the pool acquires their locks."""
    declared = sorted(extension.declared())
    idle = [
        n for n in declared if extension.options(extension.app.tasks[n]).on_duplicate == "follow"
    ]
    if idle:
        logger.warning(
            'celery-singleton-lock: lock_on_duplicate="follow" has no effect here, so each '
            "duplicate runs itself when it has the lock: %s",
            ", ".join(idle),
        )


def tell_of_idle_debounce(extension: Extension) -> None:
    """Log which tasks do not settle, since the pool acquires their locks."""
    declared = sorted(extension.declared())
    idle = [n for n in declared if extension.options(extension.app.tasks[n]).debounce is not None]
    if idle:
        logger.warning(
            "celery-singleton-lock: lock_debounce has no effect here, so each call runs: %s",
            ", ".join(idle),
        )
