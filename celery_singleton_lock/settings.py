"""Settings of an app and options of a task: parsed once, cross-checked, frozen.

One table, :data:`_OPTIONS`, holds each option's default and what it may be. Seconds everywhere.
Errors name the task or setting, the value, and what to write instead; none shows a password.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn, cast
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from celery_singleton_lock.errors import ConfigurationError

MIN_LEASE: Final = 1.0
"""Seconds. A third of it must be enough to notice, ask, and ask again."""

LONG_LEASE: Final = 300.0
"""Seconds above which a lease earns a warning."""

MAX_LEASE: Final = 7 * 86_400.0
"""Seconds. A crash would hold the lock for as long."""

MAX_WAIT: Final = 366 * 86_400.0
"""Seconds. Longer is for ever, and that is written None."""

LONGEST_DELAY: Final = 900.0
"""Seconds. A requeued message is unacknowledged for as long, and brokers bound that."""

MAX_COUNT: Final = 2**31 - 1
"""Most permits, waiters and bytes that can be asked for."""

PREFIX: Final = "singleton_lock_"
"""How the names of settings begin."""


class ConfigurationWarning(UserWarning):
    """An option or setting works, but does not do what its author probably expects."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What an app says about its locks: ``singleton_lock_…``.

    The options that a task may override are described at :class:`LockOptions`.

    Args:
        backend: URL of the locks' Redis, with its credentials; None if none was found.
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
        eager: whether ``apply()`` and ``task_always_eager`` take locks; see :func:`is_eager`.
        mode: ``enforce``.
        done_for: seconds for which the end of a task is remembered, so that later copies of it end
            quietly: the broker's visibility time-out.
        max_body_bytes: most bytes of a message that is parked; a longer one does what
            ``lock_on_full`` says.
    """

    backend: str | None = dataclasses.field(default=None, repr=False)
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
    eager: bool = False
    mode: str = "enforce"
    done_for: float = 3600.0
    max_body_bytes: int = 16 * 2**20

    def address(self) -> BackendAddress:
        """Return where the locks live. Ask only when there is a lock: an app without needs none.

        Raises:
            ConfigurationError: no Redis was found, or its URL cannot be used for locks.
        """
        if self.backend is None:
            msg = (
                f"There are locked tasks, and no Redis for their locks: {self.backend_source}. "
                f'Set {PREFIX}backend, for example to "redis://localhost:6379/0".'
            )
            raise ConfigurationError(msg)
        address = parse_backend_url(self.backend, self.backend_source)
        if address.sentinels and not self.backend_options.get("master_name"):
            place = _SENTINEL_OPTIONS.get(self.backend_source, f"{PREFIX}backend_options")
            msg = (
                f"{self.backend_source} is {address!s}: Sentinel must be asked for a master by "
                f'name. Set {place} = {{"master_name": "mymaster"}}, with your master\'s name.'
            )
            raise ConfigurationError(msg)
        return address


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
        check = _OPTIONS.get(field.name)
        if check is None:
            continue
        value = get(PREFIX + field.name, _NOT_GIVEN)
        if value is not _NOT_GIVEN:
            values[field.name] = check(_Place(PREFIX + field.name), value)
    url, source, found = _find_backend(get, values.get("backend"))
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
    return _eager(_Place(name), get(name, False))


def resolve_options(
    task_name: str, attributes: Mapping[str, Any], settings: Settings | None
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

    Raises:
        ConfigurationError: an option has a value that it cannot have, or that does not go with
            another one.
    """
    values: dict[str, Any] = {}
    defaults = settings or Settings()
    for field in dataclasses.fields(LockOptions):
        option = f"lock_{field.name}"
        if option in attributes:
            values[field.name] = _OPTIONS[field.name](_Place(option, task_name), attributes[option])
        elif field.name != "limit":
            values[field.name] = getattr(defaults, field.name)
    options = LockOptions(**values)
    _check_together(task_name, attributes, options, final=settings is not None)
    _warn_of_idle(task_name, attributes, options)
    return options


def _check_together(
    task_name: str, attributes: Mapping[str, Any], options: LockOptions, *, final: bool
) -> None:
    """Refuse options that contradict each other."""
    none_declared = attributes.get("lock_wait_timeout", "") is None
    if options.on_conflict == "wait" and options.wait_timeout is None and (final or none_declared):
        _Place("lock_on_conflict", task_name).refuse(
            "wait",
            "a task that waits occupies a pool slot, so it needs a deadline. Add "
            'lock_wait_timeout=60, or use "park", which waits without a slot',
        )
    if options.on_full == "replace" and options.max_waiting == 0:
        _Place("lock_max_waiting", task_name).refuse(
            0, 'lock_on_full="replace" needs one that waits and can be replaced. Use 1'
        )
    if options.on_full == "replace" and options.on_conflict == "wait":
        _Place("lock_on_full", task_name).refuse(
            "replace", 'it replaces parked messages. With lock_on_conflict="wait" use "skip"'
        )
    if options.requeue_delay > options.requeue_max:
        _Place("lock_requeue_delay", task_name).refuse(
            options.requeue_delay,
            f"it is longer than lock_requeue_max ({options.requeue_max:g}), which bounds it",
        )


def _warn_of_idle(task_name: str, attributes: Mapping[str, Any], options: LockOptions) -> None:
    """Warn of options that the task declares and that can never matter to it."""
    idle: dict[str, str] = {}
    if options.on_conflict in {"skip", "fail"}:
        reason = f'with lock_on_conflict="{options.on_conflict}" it never waits'
        idle = dict.fromkeys(("lock_wait_timeout", "lock_max_waiting", "lock_on_full"), reason)
    elif options.on_conflict == "requeue":
        reason = 'with lock_on_conflict="requeue" it does not stand in the queue of the lock'
        idle = dict.fromkeys(("lock_max_waiting", "lock_on_full"), reason)
    elif options.max_waiting is None:
        idle = {"lock_on_full": "without lock_max_waiting its queue is never full"}
    if options.on_conflict != "requeue":
        reason = 'it goes with lock_on_conflict="requeue"'
        idle |= dict.fromkeys(("lock_requeue_delay", "lock_requeue_max"), reason)
    for option, reason in idle.items():
        if attributes.get(option) is not None:
            msg = f"task {task_name}: {option} has no effect: {reason}. Leave one of them out."
            warnings.warn(msg, ConfigurationWarning, stacklevel=4)


# --- unknown names --------------------------------------------------------------------------------

_TASK_OPTIONS: Final = (
    "lock_key",
    "lock_args",
    *(f"lock_{field.name}" for field in dataclasses.fields(LockOptions)),
)

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
        if name.startswith("lock_") and name not in _TASK_OPTIONS:
            hint = _nearest(name, "lock_", _TASK_OPTIONS)
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
    known = [PREFIX + option for option in _OPTIONS if option != "limit"]
    for name in names:
        plain = name.lower().removeprefix("celery_")
        if plain.startswith(PREFIX) and plain not in {*known, f"{PREFIX}expiry"}:
            msg = f"There is no setting {name!r}. {_nearest(plain, PREFIX, known)}"
            raise ConfigurationError(msg)


def _nearest(name: str, prefix: str, known: Iterable[str]) -> str:
    """Say which name was perhaps meant."""
    options = [option.removeprefix(prefix) for option in known]
    option = name.removeprefix(prefix)
    meant = _SYNONYMS.get(option)
    close = [meant] if meant in options else difflib.get_close_matches(option, options, n=1)
    if close:
        return f"Did you mean {prefix}{close[0]}?"
    return f"There are: {', '.join(prefix + option for option in options)}."


# --- values ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a value was written: what an error names first."""

    option: str
    task: str = ""

    def __str__(self) -> str:
        return f"task {self.task}: {self.option}" if self.task else self.option

    def refuse(self, value: object, remedy: str) -> NoReturn:
        """Raise the error that names place, value and remedy."""
        msg = f"{self} is {value!r}: {remedy}" + ("" if remedy.endswith("?") else ".")
        raise ConfigurationError(msg)


_Check = Callable[[_Place, Any], Any]

_NOT_GIVEN: Final = object()

_KOMBU_DEFAULT: Final = 3600.0
"""Seconds of kombu's visibility time-out."""


def _lease(place: _Place, value: Any) -> float:
    """Check a lease."""
    seconds = _seconds(place, value, MAX_LEASE, "it is renewed while the task runs, so use 30")
    if seconds < MIN_LEASE:
        remedy = (
            f"below {MIN_LEASE:g} s the watchdog cannot serve it: it renews after a third of the "
            "lease, and must have time to try again before the end. Use 30; a lock is released "
            "when its task ends, not when its lease does"
        )
        place.refuse(value, remedy)
    if seconds > LONG_LEASE:
        msg = (
            f"{place} is {value!r} s: it need not exceed the task's run time, because it is "
            "renewed while the task runs; all that it sets is for how long a crashed worker "
            "blocks the lock. Use 30."
        )
        warnings.warn(msg, ConfigurationWarning, stacklevel=4)
    return seconds


def _wait(place: _Place, value: Any) -> float | None:
    """Check a longest wait."""
    return None if value is None else _seconds(place, value, MAX_WAIT, "None waits for ever")


def _delay(place: _Place, value: Any) -> float:
    """Check for how long a requeued task is held back."""
    return _seconds(place, value, LONGEST_DELAY, "the broker may redeliver what is held for long")


def _seconds(place: _Place, value: Any, most: float, hint: str) -> float:
    """Check a duration: a number, and one that Redis and its scripts can count in."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        place.refuse(value, f"it must be a number of seconds, not {type(value).__name__}")
    if not 0 < value <= most:  # false for NaN too
        place.refuse(value, f"it must be above 0, and at most {most:.0f} seconds; {hint}")
    return float(value)


def _count(least: int, hint: str) -> _Check:
    """Check a whole number."""

    def check(place: _Place, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            place.refuse(value, f"it must be a whole number, not {type(value).__name__}")
        if not least <= value <= MAX_COUNT:
            place.refuse(value, f"it must be from {least} to {MAX_COUNT}; {hint}")
        return int(value)

    return check


def _max_waiting(place: _Place, value: Any) -> int | None:
    """Check the bound of a queue."""
    check = _count(0, "0 lets nobody wait, None is no bound")
    return None if value is None else cast("int", check(place, value))


def _choice(*now: str, **later: str) -> _Check:
    """Check a policy.

    Args:
        now: what there is.
        later: what comes in a later version, and what to use until then.
    """

    def check(place: _Place, value: Any) -> str:
        if not isinstance(value, str) or value not in {*now, *later}:
            choices = " or ".join(f'"{name}"' for name in now)
            close = difflib.get_close_matches(str(value), now, n=1)
            hint = f'. Did you mean "{close[0]}"?' if close else ""
            place.refuse(value, f"it must be {choices}{hint}")
        if value in later:
            place.refuse(value, f"that comes in a later version. For now, {later[value]}")
        return value

    return check


def _eager(place: _Place, value: Any) -> bool:
    """Check whether eager tasks take locks."""
    if not isinstance(value, bool):
        place.refuse(value, "it must be True or False")
    return value


def _prefix(place: _Place, value: Any) -> str:
    """Check the start of all keys."""
    if not isinstance(value, str) or not value or "{" in value or "}" in value:
        place.refuse(value, 'it must be text, not empty, and without braces, such as "csl"')
    return value


def _backend_options(place: _Place, value: Any) -> dict[str, Any]:
    """Check the arguments for the Redis client; their values may be secrets."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        kind = type(value).__name__
        msg = f"{place} is a {kind}: it must be a dict of arguments for redis.Redis."
        raise ConfigurationError(msg)
    return dict(value)


def _backend(place: _Place, value: Any) -> str | None:
    """Check the URL of the locks' Redis."""
    if value is None:
        return None
    if not isinstance(value, str):
        msg = f"{place} is a {type(value).__name__}: it must be a URL."
        raise ConfigurationError(msg)
    parse_backend_url(value, place.option)
    return value


_OPTIONS: Final[Mapping[str, _Check]] = {
    "backend": _backend,
    "backend_options": _backend_options,
    "prefix": _prefix,
    "lease": _lease,
    "limit": _count(1, "1 is one task at a time"),
    "on_conflict": _choice("park", "skip", "fail", "wait", "requeue"),
    "wait_timeout": _wait,
    "max_waiting": _max_waiting,
    "on_full": _choice("fail", "skip", "replace"),
    "on_retry": _choice("release", "keep"),
    "on_lost": _choice("report", "abort"),
    "on_backend_error": _choice("retry", "fail", "run"),
    "requeue_delay": _delay,
    "requeue_max": _delay,
    "eager": _eager,
    "mode": _choice(
        "enforce",
        observe='use "enforce"',
        off="leave the lock options out of the tasks",
    ),
    "max_body_bytes": _count(1, "the default is 16 MiB"),
}
"""Option -> its check. A task has those of :class:`LockOptions`, the settings all but ``limit``."""


def _visibility_timeout(transport_options: Any) -> float:
    """Return after how many seconds the broker redelivers; kombu's default if nothing is said."""
    if isinstance(transport_options, Mapping):
        value = transport_options.get("visibility_timeout")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(min(value, MAX_WAIT)) if value > 0 else _KOMBU_DEFAULT
    return _KOMBU_DEFAULT


# --- where the locks live -------------------------------------------------------------------------

_SCHEMES: Final = {
    "redis": "redis",
    "rediss": "rediss",
    "unix": "unix",
    "redis+socket": "unix",  # as Celery writes it
    "socket": "unix",
    "sentinel": "sentinel",
}

_LATER: Final = frozenset({"redis+cluster", "rediss+cluster"})

SENTINEL: Final = "sentinel"
"""Scheme of URLs that name Sentinels, which know the master."""

_SENTINEL_OPTIONS: Final = {
    "broker_url": "broker_transport_options",
    "result_backend": "result_backend_transport_options",
}
"""Where Celery keeps ``master_name`` and its like, beside the URL."""

_SENTINEL_NAMES: Final = ("master_name", "min_other_sentinels", "sentinel_kwargs")
"""What is taken from there."""

_URL_OPTIONS: Final = frozenset(
    {
        "client_name",
        "health_check_interval",
        "max_connections",
        "protocol",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_keepalive",
        "socket_timeout",
    }
)
"""What may stand behind the ``?``, besides ``ssl_…``, ``db`` and credentials."""


_HOST: Final = re.compile(r"[\w.\-:]*")


@dataclasses.dataclass(frozen=True, slots=True)
class BackendAddress:
    """Where the locks live; shown without credentials.

    Args:
        scheme: ``redis``, ``rediss`` (TLS), ``unix`` or ``sentinel``.
        host: machine; empty for ``unix``; the first Sentinel's for ``sentinel``.
        port: TCP port; 0 for ``unix``.
        path: path of the socket; empty unless ``unix``.
        db: number of the database.
        username: ACL user; empty for Redis' default user.
        password: may be empty.
        options: what stood behind the ``?``, as text.
        sentinels: host and port of each Sentinel; user, password and database are the master's.
    """

    scheme: str = "redis"
    host: str = "localhost"
    port: int = 6379
    path: str = ""
    db: int = 0
    username: str = dataclasses.field(default="", repr=False)
    password: str = dataclasses.field(default="", repr=False)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()

    @property
    def url(self) -> str:
        """The URL in redis-py's spelling, or in kombu's for Sentinels. Holds the credentials."""
        user = quote(self.username, safe="")
        secret = f":{quote(self.password, safe='')}" if self.password else ""
        login = f"{user}{secret}@" if user or secret else ""
        if self.scheme == "unix":
            query = urlencode({"db": str(self.db), **self.options})
            return f"unix://{login}{quote(self.path)}?{query}"
        query = f"?{urlencode(self.options)}" if self.options else ""
        return ";".join(
            f"{self.scheme}://{login}{f'[{host}]' if ':' in host else host}:{port}/{self.db}{query}"
            for host, port in self.sentinels or ((self.host, self.port),)
        )

    def __str__(self) -> str:
        return safe_url(self.url)


def parse_backend_url(url: str, source: str = f"{PREFIX}backend") -> BackendAddress:
    """Take the URL of the locks' Redis apart, and refuse what would be misread.

    Args:
        url: ``redis://[user][:password]@host[:port][/db]``, ``rediss://…`` for TLS,
            ``unix://[user][:password]@/path/of/socket[?db=0]``; Celery's ``redis+socket://`` is
            understood. ``sentinel://[user][:password]@host[:port][/db]``, of which there may be
            several, separated by ``;``.
        source: the setting from which it came, for errors.

    Raises:
        ConfigurationError: another scheme, several addresses, or a part that is not valid.
    """
    wrong = _WrongUrl(source, safe_url(url))
    scheme = _backend_scheme(url, wrong)
    if scheme == SENTINEL:
        return _joined([_one_address(each, scheme, wrong) for each in _addresses(url)], wrong)
    return _one_address(url, scheme, wrong)


def _joined(found: list[BackendAddress], wrong: _WrongUrl) -> BackendAddress:
    """Return one address for all Sentinels; what only some say about the master counts for all."""
    said: dict[str, Any] = {}
    for name in ("db", "username", "password", "options"):
        values = [value for each in found if (value := getattr(each, name))]
        if any(value != values[0] for value in values):
            wrong.refuse(f"its addresses differ in {name}, and that is the one master's")
        if values:
            said[name] = values[0]
    sentinels = tuple((each.host, each.port) for each in found)
    return dataclasses.replace(found[0], **said, sentinels=sentinels)


def _one_address(url: str, scheme: str, wrong: _WrongUrl) -> BackendAddress:
    """Take one address apart."""
    parts, host, port = _parts(url, wrong)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    username = options.pop("username", unquote(parts.username or ""))
    password = options.pop("password", unquote(parts.password or ""))
    path = unquote(parts.path)
    database = options.pop("virtual_host", "")
    database = options.pop("db", database)
    if scheme == "unix" and (host or not path.strip("/")):
        wrong.refuse("a socket has a path and no host: unix:///run/redis.sock, with three slashes")
    for name in options:
        if name not in _URL_OPTIONS and not name.startswith("ssl_"):
            remedy = f"its option {name!r} is not known here. Use {PREFIX}backend_options"
            wrong.refuse(f"{remedy}, with {PREFIX}backend")
    known = MappingProxyType({name: _option(name, value) for name, value in options.items()})
    if scheme == "unix":
        db = _database(database, wrong)
        return BackendAddress(scheme, "", 0, path, db, username, password, known)
    db = _database(database or path, wrong)
    host = host or "localhost"
    return BackendAddress(scheme, host, port, "", db, username, password, known)


@dataclasses.dataclass(frozen=True, slots=True)
class _WrongUrl:
    """Which URL is wrong, as it may be shown."""

    source: str
    shown: str

    def refuse(self, remedy: str) -> NoReturn:
        """Raise the error. Without the cause: urllib's messages quote the password."""
        msg = f"{self.source} is {self.shown!r}: {remedy}."
        raise ConfigurationError(msg) from None


def _backend_scheme(url: str, wrong: _WrongUrl) -> str:
    """Return ``redis``, ``rediss``, ``unix`` or ``sentinel``."""
    scheme = _scheme_of(url)
    if scheme in _LATER:
        wrong.refuse(f"{scheme}:// comes with a later version. For now, use redis:// or rediss://")
    if scheme not in _SCHEMES:
        wrong.refuse("locks live in Redis: use redis://, rediss:// (TLS), unix:// or sentinel://")
    addresses = _addresses(url)
    if scheme == SENTINEL and {_scheme_of(each) for each in addresses} != {SENTINEL}:
        wrong.refuse("write each of its addresses as sentinel://host:port")
    if scheme != SENTINEL and len(addresses) > 1:
        wrong.refuse("a lock has one authority, and these are several. Name one Redis")
    return _SCHEMES[scheme]


def _parts(url: str, wrong: _WrongUrl) -> tuple[SplitResult, str, int]:
    """Return the parts of a URL, its host and its port."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[SENTINEL if _scheme_of(url) == SENTINEL else "redis"]
        host = unquote(parts.hostname or "")
    except ValueError:
        again = " and begin each address with sentinel://" if _scheme_of(url) == SENTINEL else ""
        wrong.refuse(f"it cannot be read. Percent-encode special characters of the password{again}")
    if parts.fragment or not _HOST.fullmatch(host):
        wrong.refuse("it cannot be read. Percent-encode special characters of the password")
    return parts, host, port


def _database(text: str, wrong: _WrongUrl) -> int:
    """Return the number of a database; redis-py would take what it cannot read for 0."""
    number = text.strip("/") or "0"
    if not (number.isascii() and number.isdecimal() and len(number) <= len(str(MAX_COUNT))):
        wrong.refuse("the database is not a number, as the 0 in redis://localhost:6379/0")
    return int(number)


def _option(name: str, value: str) -> str:
    """Return a URL option in redis-py's spelling."""
    return value.removeprefix("CERT_").lower() if name == "ssl_cert_reqs" else value


def _find_backend(
    get: Callable[[str, Any], Any], explicit: str | None
) -> tuple[str | None, str, dict[str, Any]]:
    """Return URL, where it was found (or why it was not), and options that belong to it."""
    if explicit is not None:
        return explicit, f"{PREFIX}backend", {}
    candidates = {"broker_url": "broker_use_ssl", "result_backend": "redis_backend_use_ssl"}
    seen: list[str] = []
    for setting, tls_setting in candidates.items():
        given = get(setting, None)
        url = _one_authority(given)
        if url is not None:
            tls = get(tls_setting, None)
            if _scheme_of(url) == SENTINEL:
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
    schemes = [_scheme_of(each) for each in _addresses(url)]
    one = len(schemes) == 1 or set(schemes) == {SENTINEL}
    return url if one and schemes[0] in _SCHEMES else None


def _sentinel_options(get: Callable[[str, Any], Any], setting: str, tls: Any) -> dict[str, Any]:
    """Return what Celery's own options say about a Sentinel URL, as backend options of ours."""
    given = get(_SENTINEL_OPTIONS[setting], None)
    options = given if isinstance(given, Mapping) else {}
    found = {name: options[name] for name in _SENTINEL_NAMES if name in options}
    return {**found, "ssl": True, **tls} if isinstance(tls, Mapping) else found


# --- URLs, leniently ------------------------------------------------------------------------------

_SCHEME: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://")
_BETWEEN: Final = re.compile(rf"([,;]\s*)(?={_SCHEME.pattern.replace('(', '(?:', 1)})")
_PLAIN: Final = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[\w.\-]*)(:\d*)?([/?#].*)?", re.DOTALL)
_QUERY: Final = re.compile(r"\?(?=[\w.\-]+=)")
_SECRET: Final = re.compile(r"(?i)([?&;][^=&;]*(?:pass|secret|token|cred|user|key)[^=&;]*=)[^&;]*")

_ALIASES: Final = {"pyamqp": "amqp", "librabbitmq": "amqp", "amqps": "amqp", "rediss": "redis"}
_PORTS: Final = {
    "redis": 6379,
    "rediss": 6379,
    "sentinel": 26379,
    "amqp": 5672,
    "pyamqp": 5672,
    "amqps": 5671,
}


def safe_url(url: object) -> str:
    """Return a URL, or a list of them, as it may be shown: without user, password and tokens.

    Whatever stands before the last ``@`` of an address is taken for credentials, so that a password
    with unescaped special characters stays hidden too. Never raises.

    Args:
        url: text, a list of it, or anything.
    """
    if isinstance(url, (list, tuple)):
        return ",".join(safe_url(item) for item in url)
    if not isinstance(url, str):
        return "" if url is None else f"<{type(url).__name__}>"
    addresses_and_marks = _BETWEEN.split(url)
    addresses_and_marks[::2] = [_safe_address(address) for address in addresses_and_marks[::2]]
    return "".join(addresses_and_marks)


def _safe_address(address: str) -> str:
    """Return one address without credentials."""
    match = _SCHEME.match(address)
    start = match.group() if match else ""
    login, _, place = address[len(start) :].rpartition("@")
    if login:
        start += "***@"
    elif not _PLAIN.fullmatch(place):  # half of a password that holds a comma
        place = "***"
    return start + _SECRET.sub(r"\1***", place)


def realm_of(broker_url: str | Iterable[str] | None, master_name: str = "") -> str:
    """Return a short hash of the broker, the same for all who use it under whatever credentials.

    Args:
        broker_url: Celery's ``broker_url``: one, several in one text, or a list.
        master_name: which master the Sentinels are asked for; empty for other brokers.

    Returns:
        12 hex digits. Order, credentials, TLS, default ports and aliases make no difference.
    """
    if isinstance(broker_url, str) or broker_url is None:
        broker_url = [broker_url or "amqp://"]
    bare = {_bare_address(address) for url in broker_url for address in _addresses(url)}
    said = " ".join([*sorted(bare), *filter(None, [master_name])])
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _bare_address(address: str) -> str:
    """Return scheme, host, port and database (or virtual host) of one broker."""
    scheme = _scheme_of(address)
    rest, _, query = _QUERY.sub("\0", address.partition("://")[2], count=1).partition("\0")
    host, _, path = rest.rpartition("@")[2].partition("/")
    if host and not re.search(r":\d+$", host):
        host = f"{host}:{_PORTS.get(scheme, '')}"
    options = dict(parse_qsl(query))
    path = unquote(path).strip("/")
    database = options.get("virtual_host", options.get("db", ""))
    name = _ALIASES.get(scheme, scheme)
    if name in {"redis", SENTINEL}:
        path, database = database or path or "0", ""
        host = host or f"localhost:{_PORTS[name]}"
    return f"{name}://{host.lower()}/{path} {database}"


def _scheme_of(url: str) -> str:
    """Return the scheme in small letters; empty if there is none."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""


def _addresses(url: str) -> list[str]:
    """Return the addresses in a broker's fail-over list."""
    return _BETWEEN.split(url)[::2]
