"""The packages that take part, and how each declares the one task that all scenes use.

That is all a package may have of its own: arguments, body, settings and scenes are the same for
all, and so is the time-out of the lock. What is not said here is as the package has it by default.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NoReturn

import redis
from celery import Celery

Body = Callable[..., Any]

STARTS, PERIOD = 10, 3
"""The rate of the scenes: starts in a number of seconds."""


def _head_start(key: str, *_: Any, **__: Any) -> float:
    return 600 if key == "urgent" else 0


FLOW: Final[Mapping[str, Mapping[str, Any]]] = {
    "rate": {"lock_key": "work:{key}", "lock_limit": None, "lock_rate": f"{STARTS}/{PERIOD}s"},
    "closed": {"lock_key": "work:{key}"},
    "priority": {"lock_key": "api", "lock_limit": 2, "lock_priority": _head_start},
    "fair": {"lock_key": "api", "lock_limit": 2, "lock_fair_by": "{key}"},
    "debounce": {"lock_debounce": 2},
    "follow": {"lock_unique": "until_done", "lock_on_duplicate": "follow"},
    "unique": {"lock_unique": "until_done"},
    "preempt": {"lock_on_conflict": "preempt"},
}
"""Options of this package, by what starts the tasks."""

WITH_MANY: Final = frozenset({"rate", "closed", "priority", "fair"})
"""Those of them that want many tasks of a key queued, or running."""

CELERY_RATE: Final = {"rate_limit": f"{60 * STARTS / PERIOD:g}/m"}
"""What packages without a rate use: Celery's own, which each worker keeps for itself."""


def _retry(task: Any, seconds: float) -> NoReturn:
    raise task.retry(countdown=seconds, max_retries=None)


@dataclass(frozen=True)
class Wanted:
    """The task that a scene wants.

    Args:
        seconds: time-out of its lock.
        by_key: one lock for each value of its argument ``key``; else what the package does by
            default.
        options: of Celery's own, for the task.
        flow: what starts its tasks, a key of ``FLOW``. If it is one of ``WITH_MANY``, the other
            packages use all arguments for their lock, so that many tasks of a key are queued, and
            may run at once.
    """

    seconds: float = 10.0
    by_key: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    flow: str = ""


@dataclass(frozen=True)
class Package:
    """A column of the page.

    Args:
        name: as the page shows it.
        distribution: its name on PyPI.
        declare: registers the task; gets the app, the URL of the locks, the body, what is wanted.
        usage: how it is declared, for the page.
        expires: its lock's time-out by default.
        later: ends an attempt in a task that has to wait for some seconds.
    """

    name: str
    distribution: str
    declare: Callable[[Celery, str, Body, Wanted], None]
    usage: str
    expires: str
    later: Callable[[Any, float], NoReturn] = _retry

    def version(self) -> str:
        """Return its version; empty if it is not installed."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""


TASK: Final = "work"


def _singleton(app: Celery, locks: str, body: Body, wanted: Wanted) -> None:
    from celery_singleton import Singleton  # noqa: PLC0415  # optional, as the other two

    app.conf.singleton_backend_url = locks
    by_key = {"unique_on": ["key"]} if _by_key(wanted) else {}
    app.task(
        name=TASK,
        bind=True,
        base=Singleton,
        lock_expiry=int(wanted.seconds),
        **by_key,
        **_options(wanted),
    )(body)


def _once(app: Celery, locks: str, body: Body, wanted: Wanted) -> None:
    from celery_once import QueueOnce  # noqa: PLC0415

    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": locks}}
    once: dict[str, Any] = {"timeout": int(wanted.seconds)}
    if _by_key(wanted):
        once["keys"] = ["key"]
    app.task(name=TASK, bind=True, base=QueueOnce, once=once, **_options(wanted))(body)


def _heimdall(app: Celery, locks: str, body: Body, wanted: Wanted) -> None:
    from celery_heimdall import HeimdallTask  # noqa: PLC0415

    class OnLocks(HeimdallTask):
        abstract = True

        def setup_redis(self) -> redis.Redis:
            return redis.Redis.from_url(locks)

    heimdall: dict[str, Any] = {"unique": True, "unique_timeout": int(wanted.seconds)}
    if wanted.flow == "rate":
        heimdall = {"times": STARTS, "per": PERIOD}
    if wanted.flow == "rate" or _by_key(wanted):
        heimdall["key"] = lambda args, _kwargs: f"work:{args[0]}"
    app.task(name=TASK, bind=True, base=OnLocks, heimdall=heimdall, **wanted.options)(body)


def _in_the_body(app: Celery, locks: str, body: Body, wanted: Wanted) -> None:
    @cache
    def client() -> redis.Redis:  # first called in a pool child, so each has its own
        return redis.Redis.from_url(locks)

    def locked(self: Any, key: str, n: int = 0, hold: Any = 0, end: str = "return") -> Any:
        name = f"work:{key}:{n}" if wanted.flow in WITH_MANY else f"work:{key}"
        with client().lock(name, timeout=wanted.seconds):
            return body(self, key, n, hold, end)

    app.task(name=TASK, bind=True, **_options(wanted))(locked)


def _ours(app: Celery, locks: str, body: Body, wanted: Wanted) -> None:
    from celery_singleton_lock import LockedTask  # noqa: PLC0415  # its worker part is for its own

    app.conf.singleton_lock_backend = locks
    by_key = {"lock_key": "work:{key}"} if _by_key(wanted) else {}
    app.task(
        name=TASK,
        bind=True,
        base=LockedTask,
        lock_lease=wanted.seconds,
        **by_key,
        **FLOW.get(wanted.flow, {}),
        **wanted.options,
    )(body)


def _retry_later(_task: Any, seconds: float) -> NoReturn:
    from celery_singleton_lock import RetryLater  # noqa: PLC0415

    raise RetryLater(seconds, why="429")


def _by_key(wanted: Wanted) -> bool:
    return wanted.by_key and wanted.flow not in WITH_MANY


def _options(wanted: Wanted) -> dict[str, Any]:
    return {**wanted.options, **(CELERY_RATE if wanted.flow == "rate" else {})}


PACKAGES: Final = {
    "celery-singleton": Package(
        "celery-singleton",
        "celery-singleton",
        _singleton,
        '`base=Singleton, unique_on=["key"], lock_expiry=…`',
        "never",
    ),
    "celery-once": Package(
        "celery-once",
        "celery-once",
        _once,
        '`base=QueueOnce, once={"keys": ["key"], "timeout": …}`',
        "after 3,600 s",
    ),
    "celery-heimdall": Package(
        "celery-heimdall",
        "celery-heimdall",
        _heimdall,
        '`base=HeimdallTask, heimdall={"unique": True, "key": …, "unique_timeout": …}`',
        "after 3,600 s",
    ),
    "redis-py": Package(
        "redis-py `lock` in the body",
        "redis",
        _in_the_body,
        "`with client.lock(key, timeout=…):` around the body",
        "never",
    ),
    "ours": Package(
        "celery-singleton-lock",
        "celery-singleton-lock",
        _ours,
        '`base=LockedTask, lock_key="work:{key}", lock_lease=…`',
        "30 s after the last renewal",
        _retry_later,
    ),
}
