"""What a Lock says of itself, and to whom it is refused."""

from __future__ import annotations

import asyncio
import os
import platform
import re

import pytest
import redis.asyncio

from celery_singleton_lock.lock.get_or_set import async_get_or_set, get_or_set
from celery_singleton_lock.errors import (
    BackendUnreachable,
    ConfigurationError,
    LockLost,
    LockNotOwned,
    LockReentered,
    LockTimeout,
)
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.lock.reset import async_reset_all, reset_all
from celery_singleton_lock.lock.wait_for_turn import in_thread
from support.waiting import eventually

pytestmark = pytest.mark.contract


@pytest.fixture
def lock(redis_client):
    lock = Lock(redis_client, "account:42", renew=False)
    yield lock
    lock._watchdog.stop()


def sentence(kind, call, *args):
    """What is said when a call is refused; each such error names the lock."""
    with pytest.raises(kind) as caught:
        call(*args)
    assert caught.value.name == "account:42"
    return str(caught.value)


def test_a_lock_shows_whether_it_is_held(lock, redis_client):
    """Here; whoever else may hold it."""
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
def test_who_holds_nothing_is_told_what_it_cannot_do(lock, redis_client, what, args):
    """And why that may be: nothing of leases, which it never had."""
    not_held = (
        f"Cannot {what} lock 'account:42': this thread (or process) does not hold it: it was not "
        "acquired, or is released already"
    )
    assert sentence(LockNotOwned, getattr(lock, what), *args) == (
        f"{not_held}, or another thread has acquired it: each holds for itself, unless the lock "
        "has thread_local=False."
    )
    shared = Lock(redis_client, "account:42", thread_local=False)
    assert sentence(LockNotOwned, getattr(shared, what), *args) == f"{not_held}."


@pytest.mark.parametrize(("what", "args"), [("release", ()), ("extend", (1.0,))])
def test_whose_lock_was_taken_away_is_told_that_its_lease_had_not_ended(
    lock, redis_client, what, args
):
    """So renewing it more often would not help."""
    lock.acquire()
    redis_client.flushall()
    assert re.fullmatch(
        rf"Cannot {what} lock 'account:42': this thread \(or process\) does not hold it any "
        r"more\. Its lease had (30\.0|29\.\d) s left, so an operator has released or "
        r"reset it, or its Redis has lost data\.",
        sentence(LockNotOwned, getattr(lock, what), *args),
    )


STILL = (
    "it could not be renewed for as long, since Redis did not answer or this process stood still; "
    "or an operator has released or reset it, or its Redis has lost data."
)


@pytest.mark.parametrize(
    ("renew", "why"), [(False, "renew=False, so extend() it, or leave that out."), (True, STILL)]
)
def test_whose_lease_has_ended_is_told_why_as_far_as_can_be_told(redis_client, renew, why):
    """To renew it is advised to who does not."""
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


def test_who_extends_what_may_be_released_is_told_so(lock, redis_client):
    """The release got no answer, and may have been done."""
    with lock:
        lock._hold.leaving = True
        with pytest.raises(LockNotOwned, match="any more: a release was sent, and not answered"):
            lock.extend(1.0)


def test_who_lost_the_lock_is_told_to_stop(lock, redis_client):
    """It is another error: it was held once."""
    lock.acquire()
    redis_client.flushall()
    assert sentence(LockLost, lock.ensure_held) == (
        "Lock 'account:42' was lost: its lease ended, or it was reset. Stop writing."
    )


def test_who_asks_again_is_told_that_it_would_wait_for_itself(lock):
    """Whether it would wait or not."""
    lock.acquire()
    assert sentence(LockReentered, lock.acquire) == (
        "Lock 'account:42' is held already by who asks, and would be waited for in vain."
    )


@pytest.mark.parametrize(
    ("options", "waited"),
    [
        ({"blocking_timeout": 0.05}, ", and was waited for 0.05 s in vain"),
        ({"blocking": False}, ""),
    ],
)
def test_who_waited_in_vain_is_told_for_how_long(lock, redis_client, options, waited):
    """A with statement has no other way to say no. Who did not wait is told who holds it."""
    lock.acquire()
    other = Lock(redis_client, "account:42", **options)
    said = sentence(LockTimeout, other.__enter__)
    assert re.fullmatch(
        rf"Lock 'account:42' is busy{waited}\. It is held by "
        rf"pid {os.getpid()} on {re.escape(platform.node())}, whose lease has \d+\.\d s left\.",
        said,
    )


def test_whom_one_waited_for_is_told_to_programs_too(lock, redis_client):
    """And nothing is made up when the holder has gone, or Redis does not say."""
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
        f"{busy} Nobody holds it now: it has just been given back, or its Redis grants nothing "
        "for a while after a restart (quarantine, quorum)."
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


def test_a_client_of_the_other_world_is_named_in_full(redis_client, redis_url):
    """They have one name, in two modules."""
    other = redis.asyncio.Redis.from_url(redis_url)
    with pytest.raises(ConfigurationError, match=r"not redis\.asyncio\.Redis\.$"):
        reset_all(other)
    with pytest.raises(ConfigurationError, match=r"not redis\.Redis\.$"):
        asyncio.run(async_reset_all(redis_client))
    with pytest.raises(ConfigurationError, match=r"not a redis\.asyncio\.Redis; asyncio has"):
        Lock(other, "a")
