"""Settings of an app and options of a task: parsed once, cross-checked, frozen.

What each may be stands in :mod:`celery_singleton_lock.config.option_checks`. Seconds everywhere. Errors name the
task or setting, the value, and what to write instead; none shows a password.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from celery_singleton_lock.config.redis_url import (
    SCHEMES,
    SENTINEL,
    BackendAddress,
    each_address,
    parse_backend_url,
    safe_url,
    scheme_of,
)
from celery_singleton_lock.config.limits import LONGEST_LEASE, MAX_WAIT, PREFIX
from celery_singleton_lock.config.django_cache_alias import found_by_alias, is_alias
from celery_singleton_lock.config.option_checks import OPTIONS, ConfigurationWarning, Place, eager
from celery_singleton_lock.config.credentials import PROVIDER, provider_of
from celery_singleton_lock.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, slots=True)
class LockOptions:
    """Options of one task, resolved against the app's settings.

    Args:
        lease: seconds for which the lock is owned without being renewed.
        limit: permits of the lock.
        on_conflict: what a blocked task does: ``park``, ``skip``, ``fail``, ``wait`` (in its pool
            slot) or ``requeue`` (through the broker).
        wait_timeout: longest wait in seconds; None for ever.
        max_waiting: most that may wait for the lock; 0 for nobody, None for no bound.
        on_full: what a task does for which there is no room to wait: ``fail``, ``skip`` or
            ``replace`` (the oldest of its like).
        on_retry: what becomes of the lock when the task is retried: ``release`` or ``keep``.
        on_lost: what happens when the lock is lost: ``report`` or ``abort``.
        on_backend_error: what a task does while Redis is unreachable: ``retry``, ``fail`` or
            ``run`` (unlocked).
        requeue_delay: seconds for which a requeued task is held back the first time; doubles.
        requeue_max: most seconds for which it is held back.
        hold_for: seconds for which the lock stays taken after a success, from the start of the
            run; None: it is given back at the end.
        mode: ``enforce``, ``observe`` (run without the lock, write down what would have blocked)
            or ``off`` (run without).
    """

    lease: float = 30.0
    limit: int = 1
    on_conflict: str = "park"
    wait_timeout: float | None = None
    max_waiting: int | None = None
    on_full: str = "fail"
    on_retry: str = "release"
    on_lost: str = "report"
    on_backend_error: str = "retry"
    requeue_delay: float = 1.0
    requeue_max: float = 60.0
    hold_for: float | None = None
    mode: str = "enforce"


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What an app says about its locks: ``singleton_lock_…``.

    The options that a task may override are described at :class:`LockOptions`.

    Args:
        backend: URL of the locks' Redis, with its credentials; None if none was found; several if
            a majority of servers decides.
        backend_source: the setting from which the URL came; or why there is none.
        backend_options: further keyword arguments for the Redis client.
        prefix: first part of every key.
        lease: default of ``lock_lease``, seconds.
        on_conflict: default of ``lock_on_conflict``.
        wait_timeout: default of ``lock_wait_timeout``, seconds.
        max_waiting: default of ``lock_max_waiting``.
        on_full: default of ``lock_on_full``.
        on_retry: default of ``lock_on_retry``.
        on_lost: default of ``lock_on_lost``.
        on_backend_error: default of ``lock_on_backend_error``.
        requeue_delay: default of ``lock_requeue_delay``, seconds.
        requeue_max: default of ``lock_requeue_max``, seconds.
        hold_for: default of ``lock_hold_for``, seconds.
        eager: whether ``apply()`` and ``task_always_eager`` take locks; see :func:`is_eager`.
        mode: default of ``lock_mode``.
        done_for: seconds for which the end of a task is remembered, so that later copies of it end
            quietly: the broker's visibility time-out.
        max_body_bytes: most bytes of a message that is parked; a longer one does what
            ``lock_on_full`` says.
        max_returns: how often a parked message may come back before it does not run any more; None
            for no bound.
        quarantine: whether no lock is granted for one longest lease after the run id of the locks'
            Redis has changed: it was promoted, or restarted, and may have lost the last grants.
        replicas_wait: how many replicas must have a parked message before it is acknowledged to
            the broker; 0: none.
        replicas_timeout: seconds for which that is waited for; then it stays with the broker, and
            is asked again.
        metrics_port: port on which a worker serves metrics for Prometheus; None: it does not.
        metrics_address: address on which it does.
        metrics_by_lock: whether metrics of tasks have the lock's name as a label: only where there
            are few locks, since each has series of its own.
    """

    backend: str | tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    backend_source: str = ""
    backend_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    prefix: str = "csl"
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
    hold_for: float | None = None
    eager: bool = False
    mode: str = "enforce"
    done_for: float = 3600.0
    max_body_bytes: int = 16 * 2**20
    max_returns: int | None = 20
    quarantine: bool = False
    replicas_wait: int = 0
    replicas_timeout: float = 0.5
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    metrics_by_lock: bool = False

    @property
    def is_quorum(self) -> bool:
        """Whether the locks live on several servers, of which a majority decides."""
        return isinstance(self.backend, tuple)

    @property
    def in_memory(self) -> bool:
        """Whether the locks live in the memory of one process, for tests.

        Raises:
            ConfigurationError: as of :meth:`address`.
        """
        return not self.is_quorum and self.address().in_memory

    def addresses(self) -> tuple[BackendAddress, ...]:
        """Return where the locks live: one address, or those of a quorum.

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
        """Return where the locks live, for people; without passwords.

        Raises:
            ConfigurationError: as of :meth:`address`.
        """
        return ", ".join(map(str, self.addresses()))

    def named(self) -> str:
        """Return a sentence on where the locks live and which setting says so; no passwords.

        Raises:
            ConfigurationError: as of :meth:`address`.
        """
        if self.is_quorum:
            return f"They are named in {self.backend_source}."
        return f"It is {self.where()}, from {self.backend_source}."

    def address(self) -> BackendAddress:
        """Return where the locks live. Ask only when there is a lock: an app without needs none.

        Raises:
            ConfigurationError: no Redis was found, or its URL cannot be used for locks.
        """
        if self.backend is None:
            msg = (
                f"There are locked tasks, and no Redis for their locks: {self.backend_source}. "
                f'Set {PREFIX}backend, for example to "redis://localhost:6379/0"; in tests, '
                'without a Redis, to "memory://".'
            )
            raise ConfigurationError(msg)
        if isinstance(self.backend, tuple):
            msg = (
                f"{self.backend_source} names {len(self.backend)} servers, and this looks into one "
                "Redis: give one of their URLs (celery-singleton-lock --backend URL). What the "
                "majority says, only locks know."
            )
            raise ConfigurationError(msg)
        address = parse_backend_url(self.backend, self.backend_source)
        if address.sentinels and not self.backend_options.get("master_name"):
            place = _SENTINEL_OPTIONS.get(self.backend_source, f"{PREFIX}backend_options")
            msg = (
                f"{self.backend_source} is {address!s}: Sentinel must be asked for a master by "
                f'name. Set {place} = {{"master_name": "mymaster"}}, with your master\'s name.'
                f"{self._slip(place)}"
            )
            raise ConfigurationError(msg)
        self._check_provider(address)
        return address

    def _slip(self, place: str) -> str:
        """Return a sentence on an option that was perhaps meant to name the master."""
        name = "master_name"
        close = difflib.get_close_matches(name, self.backend_options.keys() - {name}, n=1)
        return f" {place} has {close[0]!r}: did you mean {name!r}?" if close else ""

    def _check_provider(self, address: BackendAddress) -> None:
        """Refuse a credential provider that redis-py could only fail on when it connects."""
        options = f"{PREFIX}backend_options"
        given = self.backend_options.get(PROVIDER)
        if given is not None and (address.username or address.password):
            msg = (
                f"{self.backend_source} is {address!s}: it has a user or password, and {options} "
                f"has a {PROVIDER}, which gives both. Leave one out."
            )
            raise ConfigurationError(msg)
        if given is not None:
            provider_of(given, options)
        elif address.provider:
            provider_of(address.provider, self.backend_source)


def parse_settings(get: Callable[[str, Any], Any]) -> Settings:
    """Read and check the settings of an app.

    Args:
        get: ``(name, default) -> value``, such as ``app.conf.get``. It is also asked for Celery's
            ``broker_url`` and ``result_backend`` (environment variables included, if they are to
            count), for their TLS options and for their transport options.

    Returns:
        The settings. A missing backend is no error yet, see :meth:`Settings.address`.

    Raises:
        ConfigurationError: a setting has a value that it cannot have.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        check = OPTIONS.get(field.name)
        if check is None:
            continue
        value = get(PREFIX + field.name, _NOT_GIVEN)
        if value is not _NOT_GIVEN:
            values[field.name] = check(Place(PREFIX + field.name), value)
    url, source, found = _find_backend(get, values.get("backend"))
    _tell_of_idle_options(url, values.get("backend_options", {}))
    return Settings(
        **{
            **values,
            "backend": url,
            "backend_source": source,
            "backend_options": MappingProxyType({**found, **values.get("backend_options", {})}),
            "done_for": _visibility_timeout(get("broker_transport_options", None)),
        }
    )


def is_eager(get: Callable[[str, Any], Any]) -> bool:
    """Return whether eager tasks take locks now: tests turn that on and off, as they do eagerness.

    Args:
        get: ``(name, default) -> value``, such as ``app.conf.get``.

    Raises:
        ConfigurationError: the setting is no bool.
    """
    name = f"{PREFIX}eager"
    return eager(Place(name), get(name, False))


def resolve_options(
    task_name: str,
    attributes: Mapping[str, Any],
    settings: Settings | None,
    *,
    warn: bool = True,
) -> LockOptions:
    """Check the ``lock_…`` options of a task, and fill up from the settings.

    Args:
        task_name: name of the task, for errors.
        attributes: the options that the task declares, under their names (``lock_lease``). One
            that is absent comes from the settings; None is a value (``lock_wait_timeout=None``
            waits for ever, whatever the settings say). Other attributes are ignored, see
            :func:`check_unknown`.
        settings: the app's; None if they are not known yet: then it is not checked whether
            options that may come from there go together.
        warn: whether to warn of options that can never matter, and of a long lease. That is done
            only if the settings are known: until then each may matter, and it is done once.

    Raises:
        ConfigurationError: an option has a value that it cannot have, or that does not go with
            another one.
    """
    values: dict[str, Any] = {}
    defaults = settings or Settings()
    warns = warn and settings is not None
    for field in dataclasses.fields(LockOptions):
        option = f"lock_{field.name}"
        if option in attributes:
            place = Place(option, task_name, warns)
            values[field.name] = OPTIONS[field.name](place, attributes[option])
        elif field.name != "limit":
            values[field.name] = getattr(defaults, field.name)
    options = LockOptions(**values)
    _check_together(task_name, attributes, options, final=settings is not None)
    if attributes.get("lock_keys") is not None:
        _check_for_several(task_name, attributes, options, settings)
    if settings is not None and settings.is_quorum:
        _check_for_quorum(task_name, options, settings)
    if warns:
        _warn_of_idle(task_name, attributes, options)
    return options


def _check_together(
    task_name: str, attributes: Mapping[str, Any], options: LockOptions, *, final: bool
) -> None:
    """Refuse options that contradict each other."""
    none_declared = attributes.get("lock_wait_timeout", "") is None
    if options.on_conflict == "wait" and options.wait_timeout is None and (final or none_declared):
        Place("lock_on_conflict", task_name).refuse(
            "wait",
            "a task that waits occupies a pool slot, so it needs a deadline. Add "
            'lock_wait_timeout=60, or use "park", which waits without a slot',
        )
    if options.on_full == "replace" and options.max_waiting == 0:
        Place("lock_max_waiting", task_name).refuse(
            0, 'lock_on_full="replace" needs one that waits and can be replaced. Use 1'
        )
    if options.on_full == "replace" and options.on_conflict == "wait":
        Place("lock_on_full", task_name).refuse(
            "replace", 'it replaces parked messages. With lock_on_conflict="wait" use "skip"'
        )
    if options.requeue_delay > options.requeue_max:
        Place("lock_requeue_delay", task_name).refuse(
            options.requeue_delay,
            f"it is longer than lock_requeue_max ({options.requeue_max:g}), which bounds it",
        )


def _check_for_several(
    task_name: str, attributes: Mapping[str, Any], options: LockOptions, settings: Settings | None
) -> None:
    """Refuse what does not go with several locks of one task."""
    given = "lock_keys is given too, and each is the whole answer. Keep lock_keys, and "
    remedies = {
        "lock_key": "put this into it",
        "lock_args": "leave lock_args out: each of lock_keys is a template of the arguments",
    }
    for other, remedy in remedies.items():
        if attributes.get(other) is not None:
            Place(other, task_name).refuse(attributes[other], given + remedy)
    _check_limits(task_name, attributes)
    if options.on_full == "replace":
        Place("lock_on_full", task_name).refuse(
            "replace",
            "with lock_keys another task may have the same first lock, and different others. Use "
            '"skip" or "fail"',
        )
    if options.on_retry == "keep":
        Place("lock_on_retry", task_name).refuse(
            "keep",
            "with lock_keys the next attempt may take other locks, and would have kept ones out of "
            'their order. Use "release"',
        )
    if settings is not None and settings.is_quorum:
        Place("lock_keys", task_name).refuse(
            attributes["lock_keys"],
            "with several servers in singleton_lock_backend a task has one lock. Use one Redis, "
            "or lock_key",
        )


def _check_limits(task_name: str, attributes: Mapping[str, Any]) -> None:
    """Refuse a limit that counts for none of several locks."""
    keys = attributes["lock_keys"]
    limits = list(keys.values()) if isinstance(keys, Mapping) else [None]
    if limits and None not in limits and attributes.get("lock_limit") is not None:
        Place("lock_limit", task_name).refuse(
            attributes["lock_limit"],
            "each of lock_keys has a limit of its own, so this counts for none. Leave it out, or "
            "give None in lock_keys to the locks that are to have it",
        )


def _check_for_quorum(task_name: str, options: LockOptions, settings: Settings) -> None:
    """Refuse what several servers together cannot keep."""
    several = "with several servers in singleton_lock_backend "
    longest = settings.backend_options.get("longest_lease", LONGEST_LEASE)
    if options.on_conflict == "park":
        Place("lock_on_conflict", task_name).refuse(
            "park",
            f"{several}no message is kept in them, for one of them alone would have it. Use "
            '"requeue", which leaves it with the broker (singleton_lock_on_conflict for all tasks)',
        )
    if options.limit != 1:
        Place("lock_limit", task_name).refuse(
            options.limit, f"{several}a lock has one permit. Leave it out, or use one Redis"
        )
    if options.on_retry == "keep":
        Place("lock_on_retry", task_name).refuse(
            "keep", f'{several}no permit is kept for a retry. Use "release"'
        )
    if options.hold_for is not None:
        Place("lock_hold_for", task_name).refuse(
            options.hold_for,
            f"{several}no permit is kept after a task. Leave it out (singleton_lock_hold_for for "
            "all tasks), or use one Redis",
        )
    if options.mode == "observe":
        Place("lock_mode", task_name).refuse(
            "observe",
            f'{several}there is no report of it. Use "enforce" or "off" (singleton_lock_mode for '
            "all tasks), or one Redis",
        )
    if options.lease > longest:
        Place("lock_lease", task_name).refuse(
            options.lease,
            f"a server that was restarted votes again after {longest:g} s. Use a shorter lease, "
            "which is renewed, or set longest_lease in singleton_lock_backend_options, in all "
            "workers alike",
        )


def _warn_of_idle(task_name: str, attributes: Mapping[str, Any], options: LockOptions) -> None:
    """Warn of options that the task declares and that can never matter to it."""
    idle: dict[str, str] = {}
    if options.on_conflict in {"skip", "fail"}:
        reason = f'with lock_on_conflict="{options.on_conflict}" it never waits{_LEAVE_OUT}'
        idle = dict.fromkeys(("lock_wait_timeout", "lock_max_waiting", "lock_on_full"), reason)
    elif options.on_conflict == "requeue":
        reason = f'with lock_on_conflict="requeue" it does not stand in a queue{_LEAVE_OUT}'
        idle = dict.fromkeys(("lock_max_waiting", "lock_on_full"), reason)
    elif options.max_waiting is None:
        most = 1 if options.on_full == "replace" else 100
        reason = f"without lock_max_waiting its queue is never full. Add lock_max_waiting={most}"
        idle = {"lock_on_full": reason}
    if options.on_conflict != "requeue":
        reason = 'it goes with lock_on_conflict="requeue". Add that, or leave this out'
        idle |= dict.fromkeys(("lock_requeue_delay", "lock_requeue_max"), reason)
    for option, reason in idle.items():
        if attributes.get(option) is not None:
            value = attributes[option]
            msg = f"task {task_name}: {option} is {value!r}, and has no effect: {reason}."
            warnings.warn(msg, ConfigurationWarning, stacklevel=4)


_LEAVE_OUT: Final = ". Leave one of the two out"


# --- unknown names --------------------------------------------------------------------------------

TASK_OPTIONS: Final = (
    "lock_key",
    "lock_keys",
    "lock_args",
    *(f"lock_{field.name}" for field in dataclasses.fields(LockOptions)),
)
"""Names of all options of a task."""

_SYNONYMS: Final = {
    "expiry": "lease",
    "expire": "lease",
    "expires": "lease",
    "ttl": "lease",
    "timeout": "lease",
    "name": "key",
    "concurrency": "limit",
    "max_concurrency": "limit",
    "permits": "limit",
    "url": "backend",
    "backend_url": "backend",
}
"""What other libraries call it (``lock_expiry`` and ``…backend_url`` are celery-singleton's)."""


def check_unknown(task_name: str, attributes: Iterable[str]) -> None:
    """Refuse ``lock_…`` attributes of a task that are no option: a typo would lock nothing.

    Args:
        task_name: name of the task.
        attributes: names of its attributes; those that do not begin with ``lock_`` are ignored.

    Raises:
        ConfigurationError: there is one; the message says which was perhaps meant.
    """
    for name in attributes:
        if name.startswith("lock_") and name not in TASK_OPTIONS:
            hint = _nearest(name, "lock_", TASK_OPTIONS)
            if name.removeprefix("lock_") in OPTIONS:
                hint = f"It is a setting, for all tasks: singleton_{name}."
            msg = f"task {task_name}: there is no option {name!r}. {hint}"
            raise ConfigurationError(msg)


def check_unknown_settings(names: Iterable[str]) -> None:
    """Refuse ``singleton_lock_…`` settings that do not exist.

    celery-singleton's ``singleton_lock_expiry`` is known, and left alone.

    Args:
        names: names of all settings, also with Django's namespace (``CELERY_SINGLETON_LOCK_…``).

    Raises:
        ConfigurationError: there is one; the message says which was perhaps meant.
    """
    known = [PREFIX + option for option in OPTIONS if option != "limit"]
    for name in names:
        plain = name.lower().removeprefix("celery_")
        if plain.startswith(PREFIX) and plain not in {*known, f"{PREFIX}expiry"}:
            hint = _nearest(plain, PREFIX, known)
            if name.isupper():  # as in Django's settings
                hint = spelled_as(name, hint)
            msg = f"There is no setting {name!r}. {hint}"
            raise ConfigurationError(msg)


def spelled_as(name: str, text: str) -> str:
    """Return a text of which the settings are written as this one: with namespace, in capitals."""
    namespace = name.partition(PREFIX.upper())[0]
    return re.sub(rf"\b{PREFIX}\w+", lambda setting: namespace + setting[0].upper(), text)


def _nearest(name: str, prefix: str, known: Iterable[str]) -> str:
    """Say which name was perhaps meant."""
    options = [option.removeprefix(prefix) for option in known]
    option = name.removeprefix(prefix)
    meant = _SYNONYMS.get(option)
    close = [meant] if meant in options else difflib.get_close_matches(option, options, n=1)
    if close:
        return f"Did you mean {prefix}{close[0]}?"
    return f"There are: {', '.join(prefix + option for option in options)}."


# --- what Celery's own settings say ---------------------------------------------------------------

_NOT_GIVEN: Final = object()
"""What a getter returns for a setting that is not there: None is a value."""

_KOMBU_DEFAULT: Final = 3600.0
"""Seconds of kombu's visibility time-out."""

_SENTINEL_OPTIONS: Final = {
    "broker_url": "broker_transport_options",
    "result_backend": "result_backend_transport_options",
}
"""Where Celery keeps ``master_name`` and its like, beside the URL."""

_SENTINEL_NAMES: Final = ("master_name", "min_other_sentinels", "sentinel_kwargs")
"""What is taken from there."""


def _find_backend(
    get: Callable[[str, Any], Any], explicit: str | tuple[str, ...] | None
) -> tuple[str | tuple[str, ...] | None, str, dict[str, Any]]:
    """Return URL, where it was found (or why it was not), and options that belong to it."""
    if isinstance(explicit, str) and is_alias(explicit):
        return found_by_alias(explicit, f"{PREFIX}backend")
    if explicit is not None:
        return explicit, f"{PREFIX}backend", {}
    candidates = {"broker_url": "broker_use_ssl", "result_backend": "redis_backend_use_ssl"}
    seen: list[str] = []
    for setting, tls_setting in candidates.items():
        given = get(setting, None)
        url = _one_authority(given)
        if url is not None:
            tls = get(tls_setting, None)
            if scheme_of(url) == SENTINEL:
                return url, setting, _sentinel_options(get, setting, tls)
            if not isinstance(tls, Mapping):
                return url, setting, {}
            return re.sub("^redis://", "rediss://", url), setting, dict(tls)
        seen.append(f"{setting} is {safe_url(given)!r}" if given else f"{setting} is not set")
    return None, " and ".join(seen), {}


def _one_authority(url: Any) -> str | None:
    """Return the URL if it leads to one Redis: several Sentinels do, several servers do not."""
    if isinstance(url, (list, tuple)) and all(isinstance(each, str) for each in url):
        url = ";".join(url)
    if not isinstance(url, str):
        return None
    schemes = [scheme_of(each) for each in each_address(url)]
    one = len(schemes) == 1 or set(schemes) == {SENTINEL}
    return url if one and schemes[0] in SCHEMES else None


def _sentinel_options(get: Callable[[str, Any], Any], setting: str, tls: Any) -> dict[str, Any]:
    """Return what Celery's own options say about a Sentinel URL, as backend options of ours."""
    given = get(_SENTINEL_OPTIONS[setting], None)
    options = given if isinstance(given, Mapping) else {}
    found = {name: options[name] for name in _SENTINEL_NAMES if name in options}
    return {**found, "ssl": True, **tls} if isinstance(tls, Mapping) else found


def _tell_of_idle_options(url: str | tuple[str, ...] | None, options: Mapping[str, Any]) -> None:
    """Say of options for Sentinels that the URL names none: they may be meant to guard a master."""
    if url is None or (isinstance(url, str) and scheme_of(url) == SENTINEL):
        return
    idle = [name for name in _SENTINEL_NAMES if name in options]
    if idle:
        msg = (
            f"{PREFIX}backend_options has {idle[0]!r}, which has no effect: it is for Sentinels, "
            "and the URL of the locks is not sentinel://…."
        )
        warnings.warn(msg, ConfigurationWarning, stacklevel=3)


def _visibility_timeout(transport_options: Any) -> float:
    """Return after how many seconds the broker redelivers; kombu's default if nothing is said."""
    if isinstance(transport_options, Mapping):
        value = transport_options.get("visibility_timeout")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(min(value, MAX_WAIT)) if value > 0 else _KOMBU_DEFAULT
    return _KOMBU_DEFAULT
