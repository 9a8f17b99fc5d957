"""The texts of a Lock, its errors, and which clients it refuses."""

from __future__ import annotations

import asyncio
import os
import platform
import re
from contextlib import closing

import pytest
import redis
import redis.asyncio

from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.errors import (
    BackendUnreachable,
    ConfigurationError,
    LockLost,
    LockNotOwned,
    LockReentered,
    LockTimeout,
)
from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.lock.get_or_set import async_get_or_set, get_or_set
from celery_singleton_lock.lock.reset import async_reset_all, reset_all
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.lock.wait_for_turn import in_thread
from celery_singleton_lock.store.redis.counted import POOL_WANTS
from support.waiting import eventually

pytestmark = pytest.mark.contract


@pytest.fixture
def lock(redis_client):
    lock = Lock(redis_client, "account:42", renew=False)
    yield lock
    lock._watchdog.stop()


def sentence(kind, call, *args):
    """Return the error text of a refused call. Each names the lock."""
    with pytest.raises(kind) as caught:
        call(*args)
    assert caught.value.name == "account:42"
    return str(caught.value)


def test_a_lock_shows_whether_it_is_held(lock, redis_client):
    """In this object; another client may hold the lock."""
    assert repr(lock) == "<Lock 'account:42', not held>"
    lock.acquire()
    assert repr(lock) == "<Lock 'account:42', held>"
    redis_client.flushall()
    with pytest.raises(LockLost):
        lock.ensure_held()
    assert repr(lock) == "<Lock 'account:42', lost>"


@pytest.mark.parametrize(
    ("what", "args"), [("release", ()), ("extend", (1.0,)), ("ensure_held", ())]
)
def test_a_caller_without_the_lock_gets_an_error_that_names_the_operation(
    lock, redis_client, what, args
):
    """With the possible causes, but not an expired lease, which it never had."""
    not_held = (
        f"Cannot {what} lock 'account:42': this thread (or process) does not hold it: it was not "
        f"acquired, or was released"
    )
    assert sentence(LockNotOwned, getattr(lock, what), *args) == (
        f"{not_held}, or another thread has acquired it: each holds it for itself. To share it "
        f"use thread_local=False."
    )
    shared = Lock(redis_client, "account:42", thread_local=False)
    assert sentence(LockNotOwned, getattr(shared, what), *args) == f"{not_held}."


@pytest.mark.parametrize(("what", "args"), [("release", ()), ("extend", (1.0,))])
def test_the_error_after_a_forced_release_says_that_the_lease_had_not_expired(
    lock, redis_client, what, args
):
    """So renewing it more often would not help."""
    lock.acquire()
    redis_client.flushall()
    assert re.fullmatch(
        rf"Cannot {what} lock 'account:42': this thread \(or process\) does not hold it any "
        r"more\. Its lease had (30\.0|[12]\d\.\d) s left, so an operator has released or "
        r"reset it, or its Redis has lost data\.",
        sentence(LockNotOwned, getattr(lock, what), *args),
    )


STILL = (
    "it was not renewed, since Redis did not answer or this process was paused; "
    "or an operator has released or reset it, or its Redis has lost data."
)


@pytest.mark.parametrize(
    ("renew", "why"), [(False, "with renew=False call extend(), or leave that out."), (True, STILL)]
)
def test_the_error_after_an_expired_lease_gives_the_known_cause(redis_client, renew, why):
    """The advice to renew is given only if it is not renewed."""
    lock = Lock(redis_client, "account:42", lease=0.1, renew=renew)
    lock.acquire()
    lock._watchdog.stop()
    redis_client.flushall()
    eventually(lambda: not lock.held)
    for what in ("extend", "release"):
        args = (1.0,) if what == "extend" else ()
        assert sentence(LockNotOwned, getattr(lock, what), *args) == (
            f"Cannot {what} lock 'account:42': this thread (or process) does not hold it any more. "
            f"Its lease has ended: {why}"
        )


def test_extending_a_lock_after_an_unanswered_release_is_refused(lock, redis_client):
    """The release got no answer, and may have been done."""
    with lock:
        lock._hold.leaving = True
        with pytest.raises(
            LockNotOwned, match="does not hold it: a release was sent, and got no answer"
        ):
            lock.extend(1.0)


def test_the_error_after_a_loss_says_to_stop(lock, redis_client):
    """It is another error: it was held once."""
    lock.acquire()
    redis_client.flushall()
    assert sentence(LockLost, lock.ensure_held) == (
        "Lock 'account:42' was lost: its lease ended, or it was reset. Stop writing."
    )


def test_a_second_acquire_says_that_it_would_wait_for_itself(lock):
    """Whether it would wait or not."""
    lock.acquire()
    assert sentence(LockReentered, lock.acquire) == (
        "This thread (or process) already holds lock 'account:42' with this object, and would wait "
        "for itself."
    )


@pytest.mark.parametrize(
    ("options", "waited"),
    [
        ({"blocking_timeout": 0.05}, " after a wait of 0.05 s"),
        ({"blocking": False}, ""),
    ],
)
def test_the_error_after_a_wait_has_its_duration(lock, redis_client, options, waited):
    """A ``with`` statement must raise. Without a wait the error names the holder."""
    lock.acquire()
    other = Lock(redis_client, "account:42", **options)
    said = sentence(LockTimeout, other.__enter__)
    assert re.fullmatch(
        rf"Lock 'account:42' is busy{waited}\. It is held by "
        rf"pid {os.getpid()} on {re.escape(platform.node())}, whose lease has \d+\.\d s left\.",
        said,
    )


def test_the_holder_is_an_attribute_of_the_error_too(lock, redis_client):
    """Without a holder, or without a reply of Redis, no holder is named."""
    lock.acquire()
    other = Lock(redis_client, "account:42", blocking=False)
    with pytest.raises(LockTimeout) as caught:
        other.__enter__()
    assert caught.value.holder == str(lock.owner()) == f"pid {os.getpid()} on {platform.node()}"
    assert 0 < caught.value.expires_in <= 30
    redis_client.flushall()
    nobody = carry_out(other._refusal(), in_thread(other._store))
    assert (nobody.holder, nobody.expires_in) == ("", 0.0)
    busy = "Lock 'account:42' is busy."
    assert str(nobody) == (
        f"{busy} Nobody holds it now: it has just been released, or its Redis was restarted and "
        f"grants nothing for a while (quarantine, quorum)."
    )
    unheard = carry_out(other._refusal(), silent)
    assert (str(unheard), unheard.name, unheard.holder) == (busy, "account:42", "")


def silent(wish):
    raise BackendUnreachable


@pytest.mark.parametrize("ask", ["ensure_held", "reacquire"])
def test_a_loss_that_was_noticed_ends_the_renewal(redis_client, ask):
    """The watchdog would ask for it again and again."""
    lock = Lock(redis_client, "account:42", renew=True)
    lock.acquire()
    assert len(lock._watchdog.watching()) == 1
    redis_client.flushall()
    with pytest.raises((LockLost, LockNotOwned)):
        getattr(lock, ask)()
    assert lock._watchdog.watching() == ()
    lock._watchdog.stop()


@pytest.mark.parametrize("wrong", ["redis://localhost", ["redis://a", "redis://b"], 7])
def test_what_is_no_client_is_refused_by_name_and_nothing_is_asked(wrong):
    """Functions that take a client, in threads; a Lock also takes a list."""
    calls = {
        "reset_all": lambda: reset_all(wrong),
        "get_or_set": lambda: get_or_set(wrong, "key", dict, expire=1),
        "async_reset_all": lambda: asyncio.run(async_reset_all(wrong)),
        "async_get_or_set": lambda: asyncio.run(async_get_or_set(wrong, "key", dict, expire=1)),
    }
    for name, call in calls.items():
        kind = r"redis\.asyncio\.Redis" if name.startswith("async") else r"redis\.Redis"
        given = type(wrong).__name__
        with pytest.raises(
            ConfigurationError, match=rf"^{name} needs a {kind} client, not {given}\.$"
        ):
            call()


def test_a_client_of_the_wrong_kind_is_named_with_its_module(redis_client, redis_url):
    """Both classes have the same name, in two modules."""
    other = redis.asyncio.Redis.from_url(redis_url)
    with pytest.raises(ConfigurationError, match=r"not redis\.asyncio\.Redis\.$"):
        reset_all(other)
    with pytest.raises(ConfigurationError, match=r"not redis\.Redis\.$"):
        asyncio.run(async_reset_all(redis_client))
    with pytest.raises(ConfigurationError, match=r"not a redis\.asyncio\.Redis\. For asyncio use"):
        Lock(other, "a")


@pytest.mark.parametrize("kind", [redis.ConnectionPool, redis.BlockingConnectionPool])
def test_the_error_says_that_all_connections_of_the_client_are_in_use(redis_url, kind):
    """Formerly the error said that Redis did not answer. redis-py 8 has 100 connections at most."""
    more = {"timeout": 0.01} if kind is redis.BlockingConnectionPool else {}
    with closing(kind.from_url(redis_url, max_connections=1, **more)) as pool:
        taken = pool.get_connection(*POOL_WANTS)
        with pytest.raises(BackendUnreachable, match=r"nothing was sent\. Raise max_connections"):
            Lock(redis.Redis(connection_pool=pool), "account:42").acquire()
        pool.release(taken)


def test_the_error_in_a_task_says_that_all_connections_of_the_client_are_in_use(redis_url):
    async def work():
        pool = redis.asyncio.ConnectionPool.from_url(redis_url, max_connections=1)
        taken = await pool.get_connection(*POOL_WANTS)
        with pytest.raises(BackendUnreachable, match=r"nothing was sent\. Raise max_connections"):
            await AsyncLock(redis.asyncio.Redis(connection_pool=pool), "account:42").acquire()
        await pool.release(taken)
        await pool.disconnect()

    asyncio.run(work())


def test_a_lock_that_is_used_as_a_decorator_names_the_decorator(lock):
    with pytest.raises(TypeError, match=r"^A Lock is not a decorator\. Use @locked\(name"):
        lock(print)
    other = AsyncLock(redis.asyncio.Redis(), "account:42")
    with pytest.raises(TypeError, match=r"^An AsyncLock is not a decorator\. Use @locked\(name"):
        other(print)
