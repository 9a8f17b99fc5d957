"""What an app knows of its locks; the one place where a process' parts are built and joined."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Final, TypeVar

import celery_singleton_lock.worker.celery_hook  # noqa: F401  # for what it does
from celery_singleton_lock.config.redis_url import realm_of
from celery_singleton_lock.worker.execution.batches import is_batches
from celery_singleton_lock.config.limits import LONGEST_LEASE
from celery_singleton_lock.config.call_options import HEADER, calling, check_names, current_call
from celery_singleton_lock.worker.execution.eager import EagerGate
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.events import (
    BackendDown,
    BackendUp,
    Event,
    Listener,
    LockAdmin,
    Observers,
    TaskEvent,
    celery_event,
)
from celery_singleton_lock.worker.execution.tracer import Gate, Run, fail, take_out, take_stamp
from celery_singleton_lock.worker.execution.multi_lock_tracer import Gathering
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.worker.loop_channel import announcer
from celery_singleton_lock.core.lock_mode import ENFORCE, OFF
from celery_singleton_lock.core.lock_name_template import Namer, Sent, compile_name
from celery_singleton_lock.core.native_threads import patched_by
from celery_singleton_lock.config.settings import (
    LockOptions,
    Settings,
    check_unknown,
    is_eager,
    parse_settings,
    resolve_options,
)
from celery_singleton_lock.config.multi_lock_option import SeveralNamer, compile_names
from celery_singleton_lock.worker.lock_header import Stamp
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.factory import open_store
from celery_singleton_lock.store.quorum.sync import TIMEOUT
from celery_singleton_lock.store.quorum.worker_store import TaskQuorum
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.message_operations import NO_REPLICAS, Replicas
from celery_singleton_lock.lock.renewals import living

if TYPE_CHECKING:
    from celery import Celery

BUDGET: Final = 0.5
"""Seconds within which Redis must answer a task that begins or ends."""

PATIENCE: Final = 2.0
"""Seconds that the agent and the watchdog give Redis."""

_ATTRIBUTE: Final = "_celery_singleton_lock"
_COMMANDS: Final = "celery.worker.control"
_STEPS: Final = {
    "worker": "celery_singleton_lock.worker.bootsteps:WorkerStep",
    "consumer": "celery_singleton_lock.worker.bootsteps:ConsumerStep",
}
_METRICS: Final = "celery_singleton_lock.metrics:MetricsStep"


class Extension:
    """The locks of one app.

    Args:
        app: the Celery app.
    """

    def __init__(self, app: Celery) -> None:
        """Know no task yet; settings are read when they are first needed."""
        self.app = app
        self.announce: Callable[[str], None] = announcer()
        self.listen: Callable[[], None] = _deaf
        self.observers = Observers()
        self._namers: dict[str, Namer | SeveralNamer] = {}
        self._options: dict[str, LockOptions] = {}
        self._store: RedisStore | TaskQuorum | None = None
        self._store_pid = 0

    # -- declarations -----------------------------------------------------------------------------

    def declare(self, task: Any) -> None:
        """Check what a task declares, as far as that needs no settings.

        Raises:
            ConfigurationError: it is wrong.
        """
        declared = declared_options(task)
        check_unknown(task.name, declared)
        limit = resolve_options(task.name, declared, None).limit
        if declared.get("lock_keys") is not None:
            several = compile_names(task.name, task.run, declared["lock_keys"], limit)
            self._namers[task.name] = several
            return
        self._namers[task.name] = compile_name(
            task.name,
            task.run,
            lock_key=declared.get("lock_key"),
            lock_args=declared.get("lock_args"),
        )

    def declared(self) -> frozenset[str]:
        """Return the names of the tasks that take locks."""
        return frozenset(self._namers)

    def modes(self) -> dict[str, str]:
        """Return the mode that each task declares, or that the settings say.

        Raises:
            ConfigurationError: an option, or a setting, is wrong.
        """
        return {name: self.options(self.app.tasks[name]).mode for name in self._namers}

    def active(self) -> bool:
        """Return whether a worker of this app needs the locks' Redis: not if all is ``off``.

        Raises:
            ConfigurationError: an option, or a setting, is wrong.
        """
        return any(mode != OFF for mode in self.modes().values())

    def options(self, task: Any) -> LockOptions:
        """Return a task's options, filled up from the settings.

        Raises:
            ConfigurationError: an option, or a setting, is wrong.
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
            call: lock options of the call, by name, checked here: a message may say anything.

        Raises:
            ConfigurationError: one is wrong, or does not go with those of the task.
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
        return resolve_options(task.name, {**declared, **own}, self.settings, warn=False)

    def name_of(self, task: Any, args: Any, kwargs: Any, sent: Sent | None = None) -> str:
        """Return the name of the lock that a call takes; of several locks their ``Names``.

        Raises:
            LockNameError: none can be made.
        """
        if sent is not None and sent.call and "lock_key" in sent.call:
            namer = _namer_of_call(task.name, task.run, sent.call["lock_key"])
            return namer.name(args, kwargs, sent)
        return self._namers[task.name].name(args, kwargs, sent)

    # -- settings and connections -----------------------------------------------------------------

    def forget(self) -> None:
        """Read the settings anew when they are next needed: for tests, which change them.

        A worker that runs keeps those with which it has started.
        """
        for made_of_them in ("settings", "realm", "gate"):
            vars(self).pop(made_of_them, None)
        self._options.clear()
        self._store = None

    @cached_property
    def settings(self) -> Settings:
        """The app's settings."""
        return parse_settings(self._setting)

    def _setting(self, name: str, default: Any) -> Any:
        """Read a setting; these two also hear environment variables, as attributes only."""
        if name in {"broker_url", "result_backend"}:
            return getattr(self.app.conf, name)
        return self.app.conf.get(name, default)

    @cached_property
    def realm(self) -> str:
        """Which broker the app's messages come from, as a hash."""
        connection = self.app.connection_for_read()
        name = str(connection.transport_options.get("master_name", ""))
        return realm_of(connection.alt or connection.as_uri(), name)

    def store(self) -> RedisStore | TaskQuorum:
        """Return this process' store, for the executing context; a fork gets its own."""
        if self._store is None or self._store_pid != os.getpid():
            # A greenlet's time-out also counts while others compute, and its slot costs little.
            patience = PATIENCE if patched_by() else BUDGET
            self._store, self._store_pid = self.new_store(patience, direct=True), os.getpid()
        return self._store

    def new_store(
        self, patience: float, *, direct: bool = False, replicated: bool = False
    ) -> RedisStore | TaskQuorum:
        """Return a store with connections of its own. Nothing is sent yet.

        Args:
            patience: seconds within which Redis must answer.
            direct: run single scripts past redis-py's client: cheaper by half around a short task.
            replicated: wait for replicas, as the settings say.

        Raises:
            ConfigurationError: there is no usable URL.
        """
        settings = self.settings
        if settings.is_quorum:
            return self._new_quorum()
        return open_store(
            settings.address(),
            settings.backend_options,
            settings.prefix,
            patience=patience,
            direct=direct,
            quarantine=settings.quarantine,
            replicas=Replicas(settings.replicas_wait, settings.replicas_timeout)
            if replicated
            else NO_REPLICAS,
        )

    def _new_quorum(self) -> TaskQuorum:
        """Return a store on several servers. Each has its own time-out, which is a short one."""
        settings, options = self.settings, self.settings.backend_options
        timeout = float(options.get("server_timeout", TIMEOUT))
        return TaskQuorum(
            [connect(address, options, patience=timeout) for address in settings.addresses()],
            Keyspace(settings.prefix),
            timeout=timeout,
            longest_lease=float(options.get("longest_lease", LONGEST_LEASE)),
        )

    # -- tasks that run where they are called ------------------------------------------------------

    @property
    def eager(self) -> EagerGate:
        """What takes and gives back locks around eager tasks; one for all threads."""
        made: EagerGate | None = self.__dict__.get("eager")
        return made or self.__dict__.setdefault(
            "eager", EagerGate(self.store, self.name_of, self._options_now)
        )

    def _options_now(self, task: Any) -> LockOptions:
        """Return a task's options with those of the call that runs here."""
        call = current_call()
        return self.options(task) if call is None else self.options_of_call(task, call)

    def is_eager(self) -> bool:
        """Return whether eager tasks take locks (``singleton_lock_eager``).

        Raises:
            ConfigurationError: the setting is no bool.
        """
        return is_eager(self._setting)

    def locks_eager(self, task: Any) -> bool:
        """Return whether a task that runs where it is called takes its lock.

        Raises:
            ConfigurationError: an option, or a setting, is wrong.
        """
        return self.is_eager() and self.options(task).mode == ENFORCE

    def close(self) -> None:
        """End the threads that renew leases, where there is none to renew: the app is closed."""
        for watchdog in living():
            if watchdog.store is self._store:
                watchdog.end_if_idle(for_good=True)

    # -- the executing context --------------------------------------------------------------------

    @property
    def gate(self) -> Gate:
        """What takes and gives back locks around tasks; one for all threads."""
        made: Gate | None = self.__dict__.get("gate")
        return made or self.__dict__.setdefault("gate", self._new_gate())

    def _new_gate(self) -> Gate:
        done_for = self.settings.done_for
        gate = Gate(self.store, self._announced, done_for, self.name_of, self._listen)
        gate.gathering = Gathering(gate, self.store, self._announced, done_for)
        return gate

    def _listen(self) -> None:
        """Have this process hear of lost locks; likewise."""
        self.listen()

    def _announced(self, token: str) -> None:
        """Tell whoever listens by now; a worker joins after the gate may have been made."""
        self.announce(token)

    def trace(self, run: Run) -> Any:
        """Run a task that a worker has received, under its lock.

        Returns:
            What Celery's tracer returns.
        """
        stamp, options = take_stamp(run.request), self.options(run.task)
        if stamp is not None and stamp.call is None:
            return self.gate.trace(run, stamp, options)
        call = take_out(run.request, HEADER) if stamp is None else stamp.call
        try:
            options = self.options_of_call(run.task, call) if call is not None else options
        except Exception as error:  # noqa: BLE001  # a message may say anything
            return fail(run, error)
        with calling(call):
            return self._trace(run, stamp, options)

    def _trace(self, run: Run, stamp: Stamp | None, options: LockOptions) -> Any:
        if stamp is not None:
            return self.gate.trace(run, stamp, options)
        if options.mode == ENFORCE:
            return self.gate.trace_alone(run, self._alone(run), options)
        return self.gate.trace_relaxed(run, self._alone(run), options)

    def tell(self, step: LockAdmin) -> None:
        """Tell observers, and whoever listens to Celery's events, what an operator did.

        The audit in Redis has it already: a broker that is away does not undo it.

        Args:
            step: what, to which lock, by whom.
        """
        self.observers.notify(step)
        sent = celery_event(step)
        with suppress(Exception), self.app.events.default_dispatcher() as dispatcher:
            dispatcher.send(sent[0], **sent[1])  # type: ignore[index]  # it is one

    def _alone(self, run: Run) -> Callable[[], str]:
        def said() -> tuple[str, Mapping[str, Any]]:
            info = run.request.get("delivery_info") or {}
            return str(info.get("routing_key") or ""), run.context().headers or {}

        sent = Sent(said, current_call())
        return lambda: self.name_of(run.task, run.args, run.kwargs, sent)


@functools.lru_cache(maxsize=256)
def _namer_of_call(task_name: str, run: Callable[..., Any], key: str) -> Namer:
    """Return what names the lock of a call that has a key of its own."""
    return compile_name(task_name, run, lock_key=key)


def declared_options(task: Any) -> dict[str, Any]:
    """Return the ``lock_…`` options that a task declares.

    A plain function given as ``lock_key`` is a method of the generated class, so the attributes are
    read without binding them.
    """
    names = {name for cls in type(task).__mro__ for name in vars(cls) if name.startswith("lock_")}
    found = {name: getattr_static(task, name) for name in sorted(names)}
    return {
        name: value.__func__ if isinstance(value, staticmethod) else value
        for name, value in found.items()
    }


def install(app: Celery) -> Extension:
    """Return the app's extension; the first call makes it, and joins it to the app's workers."""
    found: Extension | None = getattr(app, _ATTRIBUTE, None)
    if found is None:
        found = Extension(app)
        setattr(app, _ATTRIBUTE, found)
        for blueprint, step in _STEPS.items():
            app.steps[blueprint].add(step)
        app.steps["consumer"].add(_METRICS)
        _close_with(app, found)
        if _COMMANDS in sys.modules:  # in `celery inspect`; a worker comes to it by its step
            importlib.import_module("celery_singleton_lock.worker.remote_control")
    return found


def _close_with(app: Celery, extension: Extension) -> None:
    """Close the extension when the app is closed; Celery has no signal for that."""
    close = app.close

    def closing() -> None:
        extension.close()
        close()

    app.close = closing


_Call = TypeVar("_Call", bound=Callable[[Any], object])


def observe(app: Celery, *kinds: type[Event]) -> Callable[[_Call], _Call]:
    """Have a function called with each event of some types: ``@observe(app, LeaseLost)``.

    It is called in the main process of each worker that runs tasks of the app, in the thread in
    which it happens, which waits for it meanwhile: be quick, and hand what takes longer to a queue.
    What it raises is logged, and changes nothing else.

    Args:
        app: the Celery app.
        kinds: types from :mod:`celery_singleton_lock.events`; none for all events.

    Returns:
        A decorator, which returns the function as it is.

    Raises:
        TypeError: one of ``kinds`` is no type of events.
    """
    given: tuple[Any, ...] = kinds  # may be anything, whatever the annotation says
    for kind in given:
        if not isinstance(kind, type) or not issubclass(kind, _EVENTS):
            msg = f"observe() got {kind!r}: give types from celery_singleton_lock.events."
            raise TypeError(msg)

    def register(call: _Call) -> _Call:
        install(app).observers.add(Listener(call, kinds or _EVENTS))
        return call

    return register


_EVENTS: Final = (TaskEvent, BackendDown, BackendUp, LockAdmin)


def _deaf() -> None:
    """Stand in where tasks cannot be interrupted."""
