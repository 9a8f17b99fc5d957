"""The packages that take part, and how each declares the one task that all scenes use.

That is all a package may have of its own: arguments, body, settings and scenes are the same for
all, and so is the time-out of the lock. What is not said here is as the package has it by default.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import redis
from celery import Celery

Body = Callable[..., Any]


@dataclass(frozen=True)
class Wanted:
    """The task that a scene wants.

    Args:
        seconds: time-out of its lock.
        by_key: one lock for each value of its argument ``key``; else what the package does by
            default.
        options: of Celery's own, for the task.
    """

    seconds: float = 10.0
    by_key: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Package:
    """A column of the page.

    Args:
        name: as the page shows it.
        distribution: its name on PyPI.
        declare: registers the task; gets the app, the URL of the locks, the body, what is wanted.
        usage: how it is declared, for the page.
        expires: its lock's time-out by default.
    """

    name: str
    distribution: str
    declare: Callable[[Celery, str, Body, Wanted], None]
    usage: str
    expires: str

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
    by_key = {"unique_on": ["key"]} if wanted.by_key else {}
    app.task(
        name=TASK,
        bind=True,
        base=Singleton,
        lock_expiry=int(wanted.seconds),
        **by_key,
        **wanted.options,
    )(body)


def _once(app: Celery, locks: str, body: Body, wanted: Wanted) -> None:
    from celery_once import QueueOnce  # noqa: PLC0415

    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": locks}}
    once: dict[str, Any] = {"timeout": int(wanted.seconds)}
    if wanted.by_key:
        once["keys"] = ["key"]
    app.task(name=TASK, bind=True, base=QueueOnce, once=once, **wanted.options)(body)


def _heimdall(app: Celery, locks: str, body: Body, wanted: Wanted) -> None:
    from celery_heimdall import HeimdallTask  # noqa: PLC0415

    class OnLocks(HeimdallTask):
        abstract = True

        def setup_redis(self) -> redis.Redis:
            return redis.Redis.from_url(locks)

    heimdall: dict[str, Any] = {"unique": True, "unique_timeout": int(wanted.seconds)}
    if wanted.by_key:
        heimdall["key"] = lambda args, _kwargs: f"work:{args[0]}"
    app.task(name=TASK, bind=True, base=OnLocks, heimdall=heimdall, **wanted.options)(body)


def _in_the_body(app: Celery, locks: str, body: Body, wanted: Wanted) -> None:
    @cache
    def client() -> redis.Redis:  # first called in a pool child, so each has its own
        return redis.Redis.from_url(locks)

    def locked(self: Any, key: str, n: int = 0, hold: Any = 0, end: str = "return") -> Any:
        with client().lock(f"work:{key}", timeout=wanted.seconds):
            return body(self, key, n, hold, end)

    app.task(name=TASK, bind=True, **wanted.options)(locked)


def _ours(app: Celery, locks: str, body: Body, wanted: Wanted) -> None:
    from celery_singleton_lock import LockedTask  # noqa: PLC0415  # its worker part is for its own

    app.conf.singleton_lock_backend = locks
    by_key = {"lock_key": "work:{key}"} if wanted.by_key else {}
    app.task(
        name=TASK,
        bind=True,
        base=LockedTask,
        lock_lease=wanted.seconds,
        **by_key,
        **wanted.options,
    )(body)


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
    ),
}
