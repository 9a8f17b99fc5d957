"""The locks of an app: options, names, stores and tracers. Each app has one object."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Final

from celery_singleton_lock.config.app_settings import is_eager, parse_settings
from celery_singleton_lock.config.call_options import HEADER, calling, check_names, current_call
from celery_singleton_lock.config.computed_options import Computer, compile_options
from celery_singleton_lock.config.limits import LONGEST_LEASE
from celery_singleton_lock.config.multi_lock_option import (
    SeveralNamer,
    compile_names,
    rates_in,
)
from celery_singleton_lock.config.settings import LockOptions, Settings
from celery_singleton_lock.config.task_options import (
    resolve_options,
    warn_of_bare_names,
    warn_of_coroutine,
)
from celery_singleton_lock.config.unknown_names import check_unknown, warn_of_others
from celery_singleton_lock.config.url_text import realm_of
from celery_singleton_lock.core.fair_option import GroupOf, compile_group
from celery_singleton_lock.core.lock_mode import ENFORCE, OFF
from celery_singleton_lock.core.lock_name_template import (
    Namer,
    Sent,
    compile_name,
)
from celery_singleton_lock.core.model import FLOW_SCHEMA, SCHEMA
from celery_singleton_lock.core.native_threads import patched_by
from celery_singleton_lock.core.priority import PriorityOf, PriorityOption, compile_priority
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.shared_attribute import SharedAttribute
from celery_singleton_lock.core.start_cost import RatesOf, compile_costs
from celery_singleton_lock.core.unique_key import KeyOf, compile_unique_key
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.events import (
    LockAdmin,
    Observers,
    celery_event,
)
from celery_singleton_lock.lock.lease_watchdog import watchdogs
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.factory import open_store
from celery_singleton_lock.store.quorum.sync import TIMEOUT
from celery_singleton_lock.store.quorum.worker_store import TaskQuorum
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.requests import NO_REPLICAS, Replicas
from celery_singleton_lock.worker.execution.batches import is_batches
from celery_singleton_lock.worker.execution.celery_outcome import (
    Run,
    escaped,
    fail,
    later_in,
    run_again,
    take_header,
    take_out,
)
from celery_singleton_lock.worker.execution.eager import EagerTracer
from celery_singleton_lock.worker.execution.interrupt import Interrupts, interrupts_of_process
from celery_singleton_lock.worker.execution.multi_lock_tracer import MultiLockTracer
from celery_singleton_lock.worker.execution.tracer import LockTracer
from celery_singleton_lock.worker.execution.undispatched import UndispatchedTracer
from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.loop_channel import announcer

if TYPE_CHECKING:
    from celery import Celery

logger: Final = logging.getLogger(__name__)

BUDGET: Final = 0.5
"""Seconds within which Redis must answer at the start and the end of a task."""

PATIENCE: Final = 2.0
"""Seconds within which Redis must answer the agent and the watchdog."""


class Extension:
    """The locks of one app. Settings are read when they are first needed.

    Args:
        app: the Celery app.

    Attributes:
        has_child_processes: whether tasks run in child processes, of which the pool reports each
            error. In threads and greenlets, an error that leaves the tracer is not reported.
        worker: process id of the app's worker, and its report; None if none runs here.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.announce: Callable[[str], None] = announcer()
        self.interrupts: Interrupts = interrupts_of_process()
        self.has_child_processes = True
        self.worker: tuple[int, Callable[[], Mapping[str, Any]]] | None = None
        self.observers: Observers = Observers()
        self._namers: dict[str, Namer | SeveralNamer] = {}
        self._costs: dict[str, RatesOf] = {}
        self._computers: dict[str, Computer] = {}
        self._groups: dict[str, GroupOf] = {}
        self._unique_keys: dict[str, KeyOf] = {}
        self._options: dict[str, LockOptions] = {}
        self._clamped: set[str] = set()
        self._store: RedisStore | TaskQuorum | None = None
        self._store_pid = 0

    # -- declarations -----------------------------------------------------------------------------

    def declare(self, task: Any) -> None:
        """Check the options of a task, as far as that is possible without the settings.

        Raises:
            ConfigurationError: an option is invalid.
        """
        declared = declared_options(task)
        check_unknown(task.name, {name for cls in type(task).__mro__ for name in vars(cls)})
        options = resolve_options(task.name, declared, None)
        # Celery wraps the body of a task with autoretry_for
        body = getattr(task, "_orig_run", task.run)
        warn_of_coroutine(task.name, body)
        warn_of_others(task)
        if options.share:
            self._groups[task.name] = compile_group(task.name, task.run, options.share)
        self._unique_keys[task.name] = compile_unique_key(task.name, task.run, options.unique_key)
        computer = compile_options(task.name, task.run, declared)
        if computer is not None:
            self._computers[task.name] = computer
        if options.has_computed_priority:
            _priority_of(task.name, task.run, options.priority)
        self._costs[task.name] = compile_costs(task.name, task.run, options.rate)
        self._namers[task.name] = _namer_of(task, declared, options.limit)
        warn_of_bare_names(task.name, body, declared)

    def declared(self) -> frozenset[str]:
        """Return the names of the tasks that take locks."""
        return frozenset(self._namers)

    def modes(self) -> dict[str, str]:
        """Return task -> its mode, as declared or by the settings.

        Raises:
            ConfigurationError: an option or a setting is invalid.
        """
        return {name: self.options(self.app.tasks[name]).mode for name in self._namers}

    def active(self) -> bool:
        """Return whether a worker of this app needs the locks' Redis: not if all modes are ``off``.

        Raises:
            ConfigurationError: an option or a setting is invalid.
        """
        return any(mode != OFF for mode in self.modes().values())

    def schema(self) -> str:
        """Return the version of the data model that the tasks need.

        Raises:
            ConfigurationError: an option or a setting is invalid.
        """
        tasks = [self.app.tasks[name] for name in self._namers]
        flow = self._computers or any(map(self._has_flow, tasks))
        return FLOW_SCHEMA if flow else SCHEMA

    def _has_flow(self, task: Any) -> bool:
        options, keys = self.options(task), declared_options(task).get("lock_keys")
        return bool(options.flow or options.unique or options.is_computed or rates_in(keys))

    def options(self, task: Any) -> LockOptions:
        """Return a task's options, with defaults from the settings.

        Raises:
            ConfigurationError: an option or a setting is invalid.
        """
        found = self._options.get(task.name)
        if found is None:
            found = resolve_options(task.name, declared_options(task), self.settings)
            self._options[task.name] = found
        return found

    def options_of_call(self, task: Any, call: Any) -> LockOptions:
        """Return a task's options with those of one call.

        Args:
            task: the task.
            call: lock options of the call, by name. A message may contain anything.

        Raises:
            ConfigurationError: an option is invalid, or contradicts those of the task.
        """
        given = check_names(task.name, call)
        if given and is_batches(task):
            msg = (
                f"task {task.name}: {', '.join(given)} is given to one call, and celery-batches "
                "runs several calls as one batch, under one lock. Declare it with the task."
            )
            raise ConfigurationError(msg)
        declared = declared_options(task)
        if "lock_key" in given:
            if declared.get("lock_keys") is not None:
                msg = (
                    f"task {task.name}: lock_key is given to one call, and the task declares "
                    "lock_keys, which has several locks. Send it with other arguments."
                )
                raise ConfigurationError(msg)
            _namer_of_call(task.name, task.run, given["lock_key"])
        own = {name: value for name, value in given.items() if name != "lock_key"}
        options = resolve_options(task.name, {**declared, **own}, self.settings, warn=False)
        if "lock_priority" in own and options.has_computed_priority:
            _priority_of(task.name, task.run, options.priority)
        return options

    def name_of(self, task: Any, args: Any, kwargs: Any, sent: Sent | None = None) -> str:
        """Return the name of the lock that a call takes; for several locks, their ``Names``.

        Raises:
            LockNameError: the name cannot be computed.
        """
        if sent is not None and sent.call and "lock_key" in sent.call:
            namer = _namer_of_call(task.name, task.run, sent.call["lock_key"])
            return namer.name(args, kwargs, sent)
        return self._namers[task.name].name(args, kwargs, sent)

    def computed(
        self, task: Any, args: Any, kwargs: Any, sent: Sent | None, options: LockOptions
    ) -> LockOptions:
        """Return the options of a call; those that depend on its arguments are computed.

        Raises:
            ConfigurationError: an option cannot be computed, or its value cannot be used.
            LockCostError: a cost cannot be computed, or is above its rate.
        """
        if options.has_computed_costs:
            rates = self._costs[task.name](args, kwargs, sent)
            options = dataclasses.replace(options, rate=rates)
        computer = self._computers.get(task.name)
        if computer is not None:
            options = computer.of(args, kwargs, sent).applied(options)
        if options.share:
            group = self._groups[task.name](args, kwargs, sent)
            options = dataclasses.replace(options, fair_by=group)
        if not options.has_computed_priority:
            return options
        start = _priority_of(task.name, task.run, options.priority)(args, kwargs, sent)
        if start.given is not None and task.name not in self._clamped:
            self._clamped.add(task.name)
            logger.warning(
                "The lock_priority of a call of %s is %r s: %g s count, the limit of a head start. "
                "Further calls of the task are not logged.",
                task.name,
                start.given,
                start.seconds,
            )
        return dataclasses.replace(options, priority=start.seconds)

    # -- unique calls -----------------------------------------------------------------------------

    def options_to_send(self, task: Any, sending: Mapping[str, Any]) -> LockOptions:
        """Return the lock options of a call that is about to be sent.

        Raises:
            ConfigurationError: an option or a setting is invalid.
        """
        call = (sending.get("headers") or {}).get(HEADER)
        return self.options(task) if call is None else self.options_of_call(task, call)

    def unique_key(
        self, task: Any, args: Any, kwargs: Any, sending: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Return the lock name and the unique key of a call that is about to be sent.

        Raises:
            LockNameError: one of the two cannot be computed.
        """
        headers = sending.get("headers") or {}
        sent = Sent(lambda: ("", headers), headers.get(HEADER))
        name = self.name_of(task, args, kwargs, sent)
        return name, self._unique_keys[task.name](args, kwargs, sent)

    # -- settings and connections -----------------------------------------------------------------

    def forget(self) -> None:
        """Read the settings again when they are next needed. For tests, which change them.

        A running worker continues with the settings with which it has started.
        """
        for made_of_them in ("settings", "realm", "tracer", "undispatched"):
            vars(self).pop(made_of_them, None)
        self._options.clear()
        self._store = None

    @cached_property
    def settings(self) -> Settings:
        """The app's settings."""
        return parse_settings(self._setting)

    def _setting(self, name: str, default: Any) -> Any:
        """Read a setting. For two settings, only the attribute includes Celery's environment."""
        if name in {"broker_url", "result_backend"}:
            return getattr(self.app.conf, name)
        return self.app.conf.get(name, default)

    @cached_property
    def realm(self) -> str:
        """A hash of the broker from which the app's messages come."""
        connection = self.app.connection_for_read()
        return realm_of(connection.alt or connection.as_uri(), connection.transport_options or {})

    def worker_report(self) -> Mapping[str, Any] | None:
        """Return the report of the app's worker; None outside of its main process."""
        pid, report = self.worker or (0, dict)
        return report() if pid == os.getpid() else None

    def store(self) -> RedisStore | TaskQuorum:
        """Return the store for the tasks of this process. A forked process gets its own."""
        if self._store is None or self._store_pid != os.getpid():
            # The timeout of a greenlet includes the time in which other greenlets run.
            patience = PATIENCE if patched_by() else BUDGET
            self._store, self._store_pid = self.new_store(patience, direct=True), os.getpid()
        return self._store

    def new_store(
        self, patience: float, *, direct: bool = False, operator: bool = False
    ) -> RedisStore | TaskQuorum:
        """Return a store with its own connections. Nothing is sent yet.

        Args:
            patience: seconds within which Redis must answer.
            direct: send single scripts without redis-py's client, which takes half the time.
            operator: respect a quarantine of other clients even if this app lacks the setting.

        Raises:
            ConfigurationError: no usable URL is configured.
        """
        if self.settings.is_quorum:
            return self._new_quorum()
        return self._new_redis(patience, direct=direct, operator=operator)

    def new_replicated_store(self, patience: float) -> RedisStore | None:
        """Return a store that waits for replicas, as :meth:`new_store` does.

        None if ``singleton_lock_replicas_wait`` is 0, or if the locks are on a quorum of servers,
        which stores no messages.
        """
        settings = self.settings
        if settings.is_quorum or not settings.replicas_wait:
            return None
        replicas = Replicas(settings.replicas_wait, settings.replicas_timeout)
        return self._new_redis(patience, replicas=replicas)

    def _new_redis(
        self,
        patience: float,
        *,
        direct: bool = False,
        operator: bool = False,
        replicas: Replicas = NO_REPLICAS,
    ) -> RedisStore:
        settings = self.settings
        return open_store(
            settings.address(),
            settings.backend_options,
            settings.prefix,
            patience=patience,
            direct=direct,
            quarantine=settings.quarantine or (None if operator else False),
            replicas=replicas,
        )

    def _new_quorum(self) -> TaskQuorum:
        """Return a store on several servers. Each server has a short timeout of its own."""
        settings, options = self.settings, self.settings.backend_options
        timeout = float(options.get("server_timeout", TIMEOUT))
        return TaskQuorum(
            [connect(address, options, patience=timeout) for address in settings.addresses()],
            Keyspace(settings.prefix),
            timeout=timeout,
            longest_lease=float(options.get("longest_lease", LONGEST_LEASE)),
        )

    # -- tasks that run where they are called ------------------------------------------------------

    @SharedAttribute
    def eager(self) -> EagerTracer:
        """Acquires and releases locks around eager tasks."""
        return EagerTracer(self.store, self.name_of, self._options_now, self.computed)

    def _options_now(self, task: Any) -> LockOptions:
        """Return a task's options with those of the current call."""
        call = current_call()
        return self.options(task) if call is None else self.options_of_call(task, call)

    def is_eager(self) -> bool:
        """Return whether eager tasks take locks (``singleton_lock_eager``).

        Raises:
            ConfigurationError: the setting is not a bool.
        """
        return is_eager(self._setting)

    def locks_eager(self, task: Any) -> bool:
        """Return whether a task that runs where it is called takes its lock.

        Raises:
            ConfigurationError: an option or a setting is invalid.
        """
        return self.is_eager() and self.options(task).mode == ENFORCE

    def close(self) -> None:
        """End the idle watchdogs of the app, which is closed."""
        for watchdog in watchdogs():
            if watchdog.store is self._store:
                watchdog.end_if_idle(for_good=True)

    # -- around the body of a task ----------------------------------------------------------------

    @SharedAttribute
    def tracer(self) -> LockTracer:
        """Acquires and releases locks around tasks."""
        again_after = self.settings.visibility_timeout
        tracer = LockTracer(
            self.store,
            self._announced,
            self.settings.done_for,
            self.name_of,
            lambda: self.interrupts,
            may_defer=lambda: self.has_child_processes,
            keeps_messages=not self.settings.is_quorum,
            again_after=again_after,
        )
        tracer.multi_lock_tracer = MultiLockTracer(tracer, self.store, self._announced, again_after)
        return tracer

    @SharedAttribute
    def undispatched(self) -> UndispatchedTracer:
        """Acquires and releases the locks of tasks whose messages passed no dispatcher."""
        return UndispatchedTracer(self.store, self.tracer.observe)

    def _announced(self, token: str) -> None:
        """Call :attr:`announce`, which a worker sets after the tracer was created."""
        self.announce(token)

    def trace(self, run: Run) -> Any:
        """Run a task that a worker has received, under its lock.

        Returns:
            What Celery's tracer returns.
        """
        try:
            outcome = self._trace_call(run)
            later = None if getattr(outcome, "info", None) is None else later_in(outcome)
            return outcome if later is None else run_again(run, later, outcome)
        except Exception as error:
            if self.has_child_processes:
                raise
            return escaped(run.task, error)

    def _trace_call(self, run: Run) -> Any:
        header, options = take_header(run.request), self.options(run.task)
        if header is not None and header.computed is not None:
            options = header.computed.applied(options)
        if header is not None and header.call is None:
            return self.tracer.trace(run, header, options)
        call = take_out(run.request, HEADER) if header is None else header.call
        try:
            options = self.options_of_call(run.task, call) if call is not None else options
            if header is not None and header.computed is not None:
                options = header.computed.applied(options)
        except Exception as error:  # noqa: BLE001  # a message may say anything
            return fail(run, error)
        with calling(call):
            return self._trace(run, header, options)

    def _trace(self, run: Run, header: LockHeader | None, options: LockOptions) -> Any:
        if header is not None:
            return self.tracer.trace(run, header, options)
        if options.mode == ENFORCE:
            return self.undispatched.trace(run, self._alone(run, options), options)
        return self.undispatched.trace_relaxed(run, self._alone(run, options), options)

    def tell(self, step: LockAdmin) -> bool:
        """Report an operator's action to observers, and as a Celery event.

        The audit in Redis already has an entry, so an error of the broker is ignored.

        Args:
            step: the event.

        Returns:
            Whether the broker took the event.
        """
        self.observers.notify(step)
        sent = celery_event(step)
        with suppress(Exception), self.app.events.default_dispatcher() as dispatcher:
            dispatcher.send(sent[0], **sent[1])  # type: ignore[index]  # LockAdmin is a Celery event
            return True
        return False

    def _alone(self, run: Run, options: LockOptions) -> Callable[[], tuple[str, LockOptions]]:
        """Return a function that returns the lock name of a run, and the options of its call."""

        def queue_and_headers() -> tuple[str, Mapping[str, Any]]:
            info = run.request.get("delivery_info") or {}
            return str(info.get("routing_key") or ""), run.context().headers or {}

        sent = Sent(queue_and_headers, current_call())

        def named() -> tuple[str, LockOptions]:
            name = self.name_of(run.task, run.args, run.kwargs, sent)
            return name, self.computed(run.task, run.args, run.kwargs, sent, options)

        return named


@functools.lru_cache(maxsize=256)
def _namer_of_call(task_name: str, run: Callable[..., Any], key: str) -> Namer:
    """Return the namer for the lock of a call with its own ``lock_key``."""
    return compile_name(task_name, run, lock_key=key)


@functools.lru_cache(maxsize=256)
def _priority_of(task_name: str, run: Callable[..., Any], priority: PriorityOption) -> PriorityOf:
    """Return the function that computes the priority of a call."""
    return compile_priority(task_name, run, priority)


def _namer_of(task: Any, declared: Mapping[str, Any], limit: int) -> Namer | SeveralNamer:
    """Return the function that computes the name, or the names, of a call's locks."""
    several = declared.get("lock_keys")
    if several is not None:
        return compile_names(task.name, task.run, several, limit)
    key, args = declared.get("lock_key"), declared.get("lock_args")
    return compile_name(task.name, task.run, lock_key=key, lock_args=args)


def declared_options(task: Any) -> dict[str, Any]:
    """Return the ``lock_…`` options that a task declares.

    A function given as ``lock_key`` is an attribute of the generated class: it is read without
    binding it as a method.
    """
    names = {name for cls in type(task).__mro__ for name in vars(cls) if name.startswith("lock_")}
    found = {name: getattr_static(task, name) for name in sorted(names)}
    return {
        name: value.__func__ if isinstance(value, staticmethod) else value
        for name, value in found.items()
    }
