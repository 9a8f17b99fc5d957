"""Settings of an app and options of a task, as frozen values.

Durations are in seconds. Errors name the setting, the value, and what to write instead; none shows
a password.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Final

from celery_singleton_lock.config.credentials import PROVIDER, provider_of
from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.redis_url import BackendAddress, parse_backend_url
from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.fair_option import ByOption, LimitOption, Share, WeightOption
from celery_singleton_lock.core.model import DONE_FOR
from celery_singleton_lock.core.priority import PriorityOption, is_computed_priority, microseconds
from celery_singleton_lock.core.rate import Rate, packed
from celery_singleton_lock.core.settle import Settle
from celery_singleton_lock.core.unique import UniqueCall
from celery_singleton_lock.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, slots=True)
class SharedOptions:
    """Options that a task may declare, and for which the app has a default.

    Args:
        lease: seconds for which the lock is held without a renewal.
        on_conflict: what a blocked task does: ``park``, ``preempt`` (park, and end the older calls
            of the task), ``skip``, ``fail``, ``wait`` (in its pool slot) or ``requeue`` (through
            the broker).
        wait_timeout: longest wait in seconds; None for no limit.
        max_waiting: how many tasks may wait for the lock; None for no limit.
        on_full: what a task does if ``max_waiting`` tasks wait: ``fail``, ``skip`` or ``replace``
            (the oldest of them).
        on_retry: whether a retry releases the lock (``release``) or reserves it (``keep``).
        on_lost: what happens if the lock is lost: ``report`` or ``abort``.
        on_backend_error: what a task does if Redis does not answer: ``retry``, ``fail`` or ``run``
            (without the lock).
        requeue_delay: delay of the first requeue in seconds; it doubles each time.
        requeue_max: longest delay of a requeue in seconds.
        preempt_grace: seconds for which a preempted task may clean up; then its child process is
            killed.
        preempt_max: how many calls of a task may be preempted in a row; the next one runs to its
            end.
        hold_for: seconds, from the start of a run, for which the lock stays held after a success;
            None: it is released at the end.
        unique_max: seconds for which ``lock_unique`` counts a call whose message the broker has,
            from its ETA on, unless its ``expires`` says when it ends.
        mode: ``enforce``, ``observe`` (run without the lock, and record what it would have
            blocked) or ``off`` (run without the lock).
    """

    lease: float = 30.0
    on_conflict: str = "park"
    wait_timeout: float | None = None
    max_waiting: int | None = None
    on_full: str = "fail"
    on_retry: str = "release"
    on_lost: str = "report"
    on_backend_error: str = "retry"
    requeue_delay: float = 1.0
    requeue_max: float = 60.0
    preempt_grace: float = 10.0
    preempt_max: int = 5
    hold_for: float | None = None
    unique_max: float = 3600.0
    mode: str = "enforce"


@dataclasses.dataclass(frozen=True, slots=True)
class LockOptions(SharedOptions):
    """Options of one task, with the app's defaults applied; see :class:`SharedOptions`.

    Args:
        limit: permits of the lock.
        rate: how many tasks may start in a period; empty for no rate.
        on_rate: what a task does above the rate: ``park``, ``skip`` or ``fail``.
        priority: seconds of head start in the queue, as a number, a template or a callable.
        fair_by: a template, name or callable for the group of a task; groups share the lock fairly.
            Of a call, its :class:`~celery_singleton_lock.core.fair_group.Group`.
        fair_limit: permits that a group may hold at once.
        fair_weight: share of the starts, relative to the other groups.
        debounce: seconds without a further call of the lock after which the newest call queues;
            None: each call queues at once.
        debounce_max: seconds after the first call of a burst at which its newest one queues at the
            latest; None for no limit.
        debounce_first: ``wait``, or ``run``: the first call after a quiet period does not wait.
        unique: how long no second call is sent that is like one that was sent: ``until_started``,
            ``until_done`` or a number of seconds; None: each is sent. Of a call, its
            :class:`~celery_singleton_lock.core.unique.UniqueCall`.
        unique_key: a template or a callable; two calls of one lock are alike if it gives the same
            value for both. None: all calls of one lock are alike.
        on_duplicate: what ``apply_async`` does with such a call: ``existing`` returns the result of
            the first one, ``raise`` raises DuplicateTask, ``follow`` sends it, to end with the
            result of the first one.
    """

    limit: int = 1
    rate: tuple[Rate, ...] = ()
    on_rate: str = "park"
    priority: PriorityOption = 0.0
    fair_by: ByOption | Group | None = None
    fair_limit: LimitOption | None = None
    fair_weight: WeightOption = 1.0
    debounce: float | None = None
    debounce_max: float | None = None
    debounce_first: str = "wait"
    unique: str | float | UniqueCall | None = None
    unique_key: Any = None
    on_duplicate: str = "existing"

    @property
    def parks(self) -> bool:
        """Whether a task that must wait is parked, whatever it waits for."""
        return self.on_conflict in {"park", "preempt"} and self.on_rate == "park"

    @property
    def preempts(self) -> bool:
        """Whether a call ends the older ones of its task."""
        return self.on_conflict == "preempt"

    @property
    def follows(self) -> bool:
        """Whether this call is a duplicate that ends with the result of the first one."""
        return isinstance(self.unique, UniqueCall) and bool(self.unique.follows)

    @property
    def computed(self) -> Any:
        """The options that were computed from the arguments of a call; None if none was."""
        return None

    @property
    def declared_limit(self) -> int:
        """Permits that the task declares as a number."""
        return self.limit

    @property
    def flow(self) -> str:
        """The flow options of its claims, see :class:`~celery_singleton_lock.core.model.Claim`.

        With a computed priority, cost or group they depend on the arguments of a call.
        """
        return flow_of(self)

    @property
    def head_start(self) -> int:
        """Microseconds of head start; 0 if the priority depends on the arguments of a call."""
        return microseconds(self.priority) if isinstance(self.priority, (int, float)) else 0

    @property
    def has_computed_priority(self) -> bool:
        """Whether the priority depends on the arguments of a call."""
        return is_computed_priority(self.priority)

    @property
    def settle(self) -> Settle | None:
        """How its messages settle before they queue; None if they do not."""
        if self.debounce is None:
            return None
        return Settle(self.debounce, self.debounce_max, self.debounce_first == "run")

    @property
    def group(self) -> Group | None:
        """The group, if it is known without the arguments of a call."""
        share = self.share
        return share.fixed if share else self.fair_by if isinstance(self.fair_by, Group) else None

    @property
    def share(self) -> Share | None:
        """How the tasks are divided into groups, as declared."""
        if self.fair_by is None or isinstance(self.fair_by, Group):
            return None
        return Share(self.fair_by, self.fair_limit, self.fair_weight)

    @property
    def is_computed(self) -> bool:
        """Whether an option depends on the arguments of a call."""
        return self.has_computed_priority or self.has_computed_costs or self.has_computed_group

    @property
    def has_computed_group(self) -> bool:
        """Whether the group depends on the arguments of a call."""
        return self.share is not None and self.share.fixed is None

    @property
    def has_computed_costs(self) -> bool:
        """Whether the cost of a start depends on the arguments of the call."""
        return any(rate.is_computed for rate in self.rate)


def flow_of(options: LockOptions) -> str:
    """Return the flow options of claims with these options, without computed limits and rates."""
    unique = options.unique if isinstance(options.unique, UniqueCall) else None
    own = (options.rate, options.priority, options.group, options.settle, unique, options.preempts)
    if not any(own):
        return ""
    return packed(
        options.rate,
        options.head_start,
        group=options.group,
        settle=options.settle,
        unique=unique,
        preempt=options.preempt_max if options.preempts else None,
    )


TASK_ONLY: Final = frozenset(
    {
        *("limit", "rate", "on_rate", "priority", "fair_by", "fair_limit", "fair_weight"),
        *("debounce", "debounce_max", "debounce_first"),
        *("unique", "unique_key", "on_duplicate"),
    }
)
"""Options without a setting: they belong to one lock."""

TASK_OPTIONS: Final = (
    "lock_key",
    "lock_keys",
    "lock_args",
    *(f"lock_{field.name}" for field in dataclasses.fields(LockOptions)),
)
"""Names of all options of a task."""

SENTINEL_OPTIONS: Final = {
    "broker_url": "broker_transport_options",
    "result_backend": "result_backend_transport_options",
}
"""Setting of a Sentinel URL -> Celery's setting that holds ``master_name``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings(SharedOptions):
    """The settings of an app, ``singleton_lock_…``; see also :class:`SharedOptions`.

    Args:
        backend: URL of the locks' Redis, with its credentials; None if none was found; several for
            a quorum.
        backend_source: the setting that has the URL; or why there is none.
        backend_options: further keyword arguments for the Redis client.
        prefix: first part of every key.
        eager: whether ``apply()`` and ``task_always_eager`` take locks.
        visibility_timeout: seconds after which the broker delivers a message again that was not
            acknowledged.
        done_for: seconds for which the end of a task is remembered, so that its copies are
            dropped: the visibility time-out, and the time by which the broker may be late.
        max_body_bytes: size of the longest message that is parked; for a longer one ``on_full``
            applies.
        max_parked: number of parked messages of one queue at which workers stop consuming it; None
            for no limit.
        max_parked_bytes: likewise, the bytes of these messages.
        max_returns: how often a parked message may return before it is ended; None for no limit.
        quarantine: whether no lock is granted for one longest lease after the run id of the locks'
            Redis has changed, because the new server may have lost the last grants.
        replicas_wait: number of replicas that must have a parked message before it is
            acknowledged.
        replicas_timeout: longest wait for these replicas in seconds; then the message stays with
            the broker, and the worker asks again.
        metrics_port: port on which a worker serves metrics for Prometheus; None: none.
        metrics_address: address on which it serves them.
        metrics_by_lock: whether metrics have the lock's name as a label; each lock adds series.
    """

    backend: str | tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    backend_source: str = ""
    backend_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    prefix: str = "csl"
    eager: bool = False
    visibility_timeout: float = 3600.0
    done_for: float = DONE_FOR
    max_body_bytes: int = 16 * 2**20
    max_parked: int | None = None
    max_parked_bytes: int | None = None
    max_returns: int | None = 20
    quarantine: bool = False
    replicas_wait: int = 0
    replicas_timeout: float = 0.5
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    metrics_by_lock: bool = False

    @property
    def is_quorum(self) -> bool:
        """Whether the locks are on a quorum of several servers."""
        return isinstance(self.backend, tuple)

    @property
    def in_memory(self) -> bool:
        """Whether the locks are in the memory of one process, for tests.

        Raises:
            ConfigurationError: as of :meth:`address`.
        """
        return not self.is_quorum and self.address().in_memory

    def addresses(self) -> tuple[BackendAddress, ...]:
        """Return the address of the locks' Redis, or the addresses of a quorum.

        Raises:
            ConfigurationError: as of :meth:`address`.
        """
        if isinstance(self.backend, tuple):
            found = tuple(parse_backend_url(url, self.backend_source) for url in self.backend)
            for address in found:
                self._check_provider(address)
            return found
        return (self.address(),)

    def where(self) -> str:
        """Return the address or addresses as text, without passwords.

        Raises:
            ConfigurationError: as of :meth:`address`.
        """
        return ", ".join(map(str, self.addresses()))

    def named(self) -> str:
        """Return a sentence with the address and its setting, without passwords.

        Raises:
            ConfigurationError: as of :meth:`address`.
        """
        if self.is_quorum:
            return f"They are named in {self.backend_source}."
        return f"It is {self.where()}, from {self.backend_source}."

    def address(self) -> BackendAddress:
        """Return the address of the locks' Redis. An app without locks needs none.

        Raises:
            ConfigurationError: no Redis is configured, or its URL cannot be used for locks.
        """
        if self.backend is None:
            msg = (
                f"There are locked tasks, and no Redis for their locks: {self.backend_source}. "
                f'Set {PREFIX}backend, for example to "redis://localhost:6379/0"; in tests '
                'without a Redis, to "memory://".'
            )
            raise ConfigurationError(msg)
        if isinstance(self.backend, tuple):
            msg = (
                f"{self.backend_source} names {len(self.backend)} servers, and this command reads "
                "one Redis. Give one of their URLs: celery-singleton-lock --backend URL."
            )
            raise ConfigurationError(msg)
        address = parse_backend_url(self.backend, self.backend_source)
        if address.sentinels and not self.backend_options.get("master_name"):
            place = SENTINEL_OPTIONS.get(self.backend_source, f"{PREFIX}backend_options")
            msg = (
                f"{self.backend_source} is {address!s}: Sentinel needs the name of a master. "
                f'Set {place} = {{"master_name": "mymaster"}}, with your master\'s name.'
                f"{self._similar_option(place)}"
            )
            raise ConfigurationError(msg)
        self._check_provider(address)
        return address

    def _similar_option(self, place: str) -> str:
        """Return a question with an option that is similar to ``master_name``, or ""."""
        name = "master_name"
        close = difflib.get_close_matches(name, self.backend_options.keys() - {name}, n=1)
        return f" {place} has {close[0]!r}: did you mean {name!r}?" if close else ""

    def _check_provider(self, address: BackendAddress) -> None:
        """Refuse a credential provider that would fail when redis-py connects."""
        options = f"{PREFIX}backend_options"
        given = self.backend_options.get(PROVIDER)
        if given is not None and (address.username or address.password):
            msg = (
                f"{self.backend_source} is {address!s}: it has a user or password, and {options} "
                f"has a {PROVIDER}, which provides both. Leave one out."
            )
            raise ConfigurationError(msg)
        if given is not None:
            provider_of(given, options)
        elif address.provider:
            provider_of(address.provider, self.backend_source)
