"""What users write, for a type checker: ``mypy tests/typing``, strict. It is never run.

A change that makes one of these lines an error, or one of these types another, breaks users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio
from celery import Celery
from typing_extensions import assert_type

from celery_singleton_lock import (
    AsyncLock,
    CurrentLock,
    Lock,
    LockConflict,
    LockedTask,
    LockError,
    LockLost,
    LockTimeout,
    SingletonLockError,
    async_get_or_set,
    current_lock,
    current_locks,
    get_or_set,
    locked,
    new_token,
    observe,
    reset_all,
)
from celery_singleton_lock.admin import Answer, Glance, Operator, RedisAdminStore, list_locks, why
from celery_singleton_lock.events import LeaseLost, TaskBlocked

app = Celery("shop")
client = redis.Redis()
async_client = redis.asyncio.Redis()


def a_lock() -> None:
    with Lock(client, "account:42", lease=30) as lock:
        assert_type(lock, Lock)
        assert_type(lock.fencing_token, int)
        assert_type(lock.owned(), bool)
    assert_type(Lock(client, "a").acquire(), bool)


async def an_async_lock() -> None:
    async with AsyncLock(async_client, "account:42") as lock:
        assert_type(lock, AsyncLock)
        assert_type(await lock.owned(), bool)


@locked("report:{report_id}", client, wait_timeout=10)
def report(report_id: int, *, draft: bool = False) -> str:
    return f"{report_id}{draft}"


@locked("report:{report_id}", async_client)
async def report_async(report_id: int) -> str:
    return str(report_id)


def decorated_functions_keep_their_types() -> None:
    assert_type(report(1, draft=True), str)
    report("one")  # type: ignore[arg-type]  # a wrong argument is found


async def decorated_coroutines_keep_their_types() -> None:
    assert_type(await report_async(1), str)


def in_a_task() -> None:
    assert_type(current_lock(), CurrentLock)
    assert_type(current_locks(), tuple[CurrentLock, ...])
    lock = current_lock()
    assert_type(lock.name, str)
    assert_type(lock.held, bool)
    assert_type(lock.lost, bool)
    assert_type(lock.fencing_token, int)
    lock.ensure_held()


def of_a_task(task: LockedTask) -> None:
    assert_type(task.lock, CurrentLock)
    assert_type(task.locks, tuple[CurrentLock, ...])


@observe(app, LeaseLost, TaskBlocked)
def told(event: Any) -> None: ...


def errors() -> None:
    for kind in (LockConflict, LockLost, LockTimeout):
        caught: type[LockError] = kind
        package: type[SingletonLockError] = kind
        assert caught is package


def values() -> None:
    assert_type(new_token(), str)
    assert_type(get_or_set(client, "k", lambda: b"v", expire=60), bytes)
    reset_all(client)


async def async_values() -> None:
    async def make() -> bytes:
        return b"v"

    assert_type(await async_get_or_set(async_client, "k", make, expire=60), bytes)


def operators() -> None:
    store = RedisAdminStore(client)
    assert_type(list_locks(store, order="waiting", most=20), list[Glance])
    assert_type(why(store, "id"), Answer)
    workers: Mapping[str, Mapping[str, Any]] = store.workers()
    assert_type(Operator("jane").who, str)
    assert workers
