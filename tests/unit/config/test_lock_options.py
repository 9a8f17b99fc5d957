"""What a Lock refuses at declaration, and which step follows which on the way to a lock."""

from __future__ import annotations

import asyncio
import math
import warnings

import pytest
import redis
import redis.asyncio

from celery_singleton_lock.config.limits import MAX_COUNT, MAX_LEASE, MAX_WAIT
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.core.model import Reply, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.errors import ConfigurationError, LockNameError
from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.lock.wait_for_turn import (
    AFTER_LEASE,
    HEARTBEAT,
    LIVENESS,
    STAGGER,
    LockWait,
    Step,
)

NO_NUMBERS = [math.nan, math.inf, -math.inf, True, False, "30", b"x", [30], 3 + 0j]


@pytest.fixture
def client():
    """A client that never connects: nothing is sent before acquire."""
    return redis.Redis(port=1)


@pytest.fixture
def lock(client):
    return Lock(client, "lock")


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease", [0, 0.0, -1, 0.09, MAX_LEASE + 1, 1e300, None, *NO_NUMBERS])
def test_L24_a_lease_that_redis_would_misread_is_refused(client, lease):
    """0, negative and None delete a key or mean "for ever" in Redis; here they are errors."""
    with pytest.raises(ConfigurationError, match="lease must be a number"):
        Lock(client, "lock", lease=lease)


@pytest.mark.filterwarnings(
    "ignore::celery_singleton_lock.config.option_checks.ConfigurationWarning"
)
@pytest.mark.parametrize("lease", [0.1, 1, 30.5, MAX_LEASE])
def test_a_lease_in_bounds_is_taken_as_seconds(client, lease):
    assert Lock(client, "lock", lease=lease).lease == lease


@pytest.mark.parametrize("kind", [Lock, AsyncLock])
def test_a_lease_in_milliseconds_is_warned_of_at_the_line_that_says_it(kind):
    """Once, whatever the number of locks of that line, and of any name."""
    where = redis.Redis(port=1) if kind is Lock else redis.asyncio.Redis(port=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(3):
            kind(where, f"a:{number}", lease=30_000)
        kind(where, "b", lease=300)
        kind(where, "c", lease=30_000, renew=False)  # then it must be longer than the work
    (warning,) = caught
    assert warning.category is ConfigurationWarning
    assert warning.filename == __file__
    assert str(warning.message) == (
        "lease is 30000 s: it need not exceed the run time, because it is renewed while the lock "
        "is held. A crashed process blocks the lock for this time. Use 30."
    )


def test_a_plain_with_of_an_async_lock_says_async_with():
    with (
        pytest.raises(TypeError, match=r"needs `async with`.* use a Lock\."),
        AsyncLock(redis.asyncio.Redis(port=1), "lock"),
    ):
        pytest.fail("never entered")


async def _enter(lock):
    async with lock:
        pytest.fail("never entered")


def test_an_async_with_of_a_lock_says_async_lock(lock):
    with pytest.raises(TypeError, match=r"needs `with`\. .*AsyncLock"):
        asyncio.run(_enter(lock))


@pytest.mark.parametrize("limit", ["3", "3.0", 3.0], ids=repr)
def test_a_limit_that_is_not_an_int_is_refused_as_such(client, limit):
    with pytest.raises(ConfigurationError, match=rf"not {limit!r}: use 3\.$"):
        Lock(client, "lock", limit=limit)


@pytest.mark.parametrize("limit", [0, -1, 1.0, MAX_COUNT + 1, *NO_NUMBERS])
def test_L24_a_limit_that_is_no_count_is_refused(client, limit):
    with pytest.raises(ConfigurationError, match="limit must be a whole number"):
        Lock(client, "lock", limit=limit)


@pytest.mark.parametrize("timeout", [0, 0.0, -1, MAX_WAIT + 1, *NO_NUMBERS])
def test_L24_a_timeout_that_is_no_duration_is_refused(client, lock, timeout):
    """At declaration and at each call; for ever is None, and at once is blocking=False."""
    with pytest.raises(ConfigurationError, match=r"blocking_timeout (must be|is 0)"):
        Lock(client, "lock", blocking_timeout=timeout)
    with pytest.raises(ConfigurationError, match=r"blocking_timeout (must be|is 0)"):
        lock.acquire(blocking_timeout=timeout)


@pytest.mark.parametrize("seconds", [0, -1, 0.0009, MAX_LEASE + 1, None, *NO_NUMBERS])
def test_L24_extending_by_what_is_no_duration_is_refused(lock, seconds):
    """redis-py's extend(0) deletes the key."""
    with pytest.raises(ConfigurationError, match="additional_time must be"):
        lock.extend(seconds)


@pytest.mark.parametrize("name", ["", None, 7, b"lock", "\ud800"])
def test_a_name_that_cannot_be_a_key_is_refused(client, name):
    with pytest.raises(LockNameError):
        Lock(client, name)


@pytest.mark.parametrize("option", ["blocking", "renew"])
def test_a_switch_is_a_bool(client, option):
    """blocking=5 was meant as a time-out."""
    with pytest.raises(ConfigurationError, match=f"{option} must be True or False"):
        Lock(client, "lock", **{option: 5})


@pytest.mark.parametrize("token", ["", "mine", "a" * 40, b"x", 7, "short.0", f"{'a' * 20}.x"])
def test_L14_a_token_of_ones_own_making_is_refused(lock, token):
    """Owner ids that can be shared free each other's lock."""
    with pytest.raises(ConfigurationError, match="new_token"):
        lock.acquire(token=token)


def test_what_is_neither_client_nor_store_is_refused():
    """And how a URL becomes one is said."""
    with pytest.raises(
        ConfigurationError, match=r"Redis\.from_url\(URL\) or valkey.*, not a str\.$"
    ):
        Lock("redis://localhost", "lock")
    with pytest.raises(
        ConfigurationError, match=r"RedisCluster for a Cluster, .* list of the URLs"
    ):
        Lock("redis://a;redis://b", "lock")


def test_a_name_in_the_place_of_the_client_is_seen():
    """redis-py's lock() is a method of the client; and what was given may be a password."""
    with pytest.raises(
        ConfigurationError, match=r"^'lock' is not a client\. Use Lock\(client, name\)\.$"
    ):
        Lock("lock", redis.Redis())
    with pytest.raises(
        ConfigurationError, match=r"^'\*\*\*@host' is not a client\. Use AsyncLock\("
    ):
        AsyncLock("me:secret@host", "lock")


def test_an_asyncio_client_is_refused_with_a_hint():
    says = r"not a redis\.asyncio\.Redis. For asyncio use AsyncLock\.$"
    with pytest.raises(ConfigurationError, match=says):
        Lock(redis.asyncio.Redis(), "lock")


def test_a_prefix_with_a_brace_is_refused(client):
    with pytest.raises(ConfigurationError, match="brace"):
        Lock(client, "lock", prefix="a{b}")


def test_a_prefix_beside_a_store_is_refused(lock):
    """A store has its keyspace already, and an option that nothing reads is a trap."""
    with pytest.raises(ConfigurationError, match="prefix"):
        Lock(lock._store, "lock", prefix="other")


def test_locks_of_one_client_and_prefix_share_one_watchdog(client):
    """So a Lock per `with` starts no thread of its own."""
    first, second = Lock(client, "a"), Lock(client, "b")
    assert first._watchdog is second._watchdog
    assert first._watchdog is not Lock(client, "a", prefix="other")._watchdog
    assert first._watchdog is not Lock(redis.Redis(port=1), "a")._watchdog


def test_a_lock_that_was_never_taken_is_not_held(lock):
    assert (lock.held, lock.lost, lock.fencing_token, lock.expires_in) == (False, False, 0, 0.0)
    assert repr(lock) == "<Lock 'lock', not held>"


# --- the way to a lock ----------------------------------------------------------------------------


class HandClock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def turn(clock):
    """A way to a lock, five seconds long."""
    return LockWait(clock, new_token(), blocking=True, timeout=5)


def reply(verdict, **fields):
    return Reply(Verdict(verdict), **fields)


def test_a_newcomer_that_is_granted_has_the_lock(turn):
    assert turn.answered(Step.ASK, reply("granted")) is Step.HAVE


def test_a_nonblocking_acquire_does_not_queue(clock):
    turn = LockWait(clock, new_token(), blocking=False, timeout=None)
    assert turn.liveness is None
    assert turn.answered(Step.ASK, reply("blocked")) is Step.STOP


def test_a_woken_waiter_claims(turn):
    """The list element only wakes; whether there is a grant says the store."""
    assert turn.answered(Step.ASK, reply("waiting", rank=1, next_look=30)) is Step.WAIT
    assert turn.waited(woken=True) is Step.CLAIM
    assert turn.answered(Step.CLAIM, reply("granted")) is Step.HAVE


def test_a_waiter_that_was_woken_for_nothing_waits_on(turn):
    turn.answered(Step.ASK, reply("waiting", rank=1, next_look=30))
    assert turn.answered(Step.CLAIM, reply("waiting", rank=1, next_look=30)) is Step.WAIT


def test_a_waiter_that_is_woken_often_shows_life_nevertheless(clock):
    """A claim does not keep it queued. Each release wakes the first one that waits for a rate."""
    turn, waiting = (
        LockWait(clock, new_token(), blocking=True, timeout=None),
        reply("waiting", rank=1),
    )
    turn.answered(Step.ASK, waiting)
    steps = []
    for _ in range(round(LIVENESS)):
        clock.now += 1
        steps.append(turn.waited(woken=True))
        turn.answered(steps[-1], waiting)
    assert steps == [*3 * [Step.CLAIM], Step.ASK, *3 * [Step.CLAIM], Step.ASK, *2 * [Step.CLAIM]]


def test_a_waiter_that_finds_itself_granted_claims(turn, clock):
    turn.answered(Step.ASK, reply("waiting", rank=1, next_look=1))
    clock.now += 1.1
    assert turn.waited(woken=False) is Step.ASK
    assert turn.answered(Step.ASK, reply("granted")) is Step.CLAIM


@pytest.mark.parametrize(
    ("timeout", "rank", "next_look", "pause"),
    [
        (1, 1, 30, 1),  # own deadline
        (60, 1, 2, 2 + AFTER_LEASE),  # end of a holder's lease
        (60, 3, 2, 2 + AFTER_LEASE + 2 * STAGGER),  # later by rank
        (60, 1, 30, HEARTBEAT),  # sign of life
        (None, 1, 0, HEARTBEAT),  # nobody holds it: a waiter before us has the grant
        (60, 0, -1, HEARTBEAT),
    ],
)
def test_L8_a_waiter_looks_at_the_earliest_of_deadline_lease_end_and_heartbeat(
    clock, timeout, rank, next_look, pause
):
    turn = LockWait(clock, new_token(), blocking=True, timeout=timeout)
    turn.answered(Step.ASK, reply("waiting", rank=rank, next_look=next_look))
    assert turn.pause == pytest.approx(pause)


def test_a_waiter_shows_life_before_it_counts_as_dead_and_before_a_grant_lapses():
    from celery_singleton_lock.core.model import CLAIM_LEASE  # noqa: PLC0415  # what it is compared with

    assert 2 * HEARTBEAT < LIVENESS
    assert HEARTBEAT < CLAIM_LEASE


def test_a_place_in_the_queue_outlives_the_waiters_own_deadline_by_little(turn, clock):
    """A client that is killed while it waits for a second is not in the way for ten."""
    assert turn.liveness == 6
    clock.now += 100
    assert turn.liveness == 1


def test_a_timed_out_waiter_cancels(turn, clock):
    turn.answered(Step.ASK, reply("waiting", rank=1, next_look=30))
    clock.now += 5
    assert turn.waited(woken=False) is Step.CANCEL
    assert turn.answered(Step.CANCEL, reply("released")) is Step.STOP


def test_L7_a_cancel_that_comes_after_the_grant_keeps_it(turn, clock):
    turn.answered(Step.ASK, reply("waiting", rank=1, next_look=30))
    clock.now += 5
    turn.waited(woken=False)
    assert turn.answered(Step.CANCEL, reply("granted")) is Step.CLAIM
    assert turn.answered(Step.CLAIM, reply("granted")) is Step.HAVE


def test_a_wake_up_at_the_deadline_is_still_claimed(turn, clock):
    turn.answered(Step.ASK, reply("waiting", rank=1, next_look=30))
    clock.now += 5
    assert turn.waited(woken=True) is Step.CLAIM


def test_L14_a_waiter_given_up_for_dead_queues_again_under_a_fresh_token(turn):
    token = turn.token
    turn.answered(Step.ASK, reply("waiting", rank=1, next_look=30))
    assert turn.answered(Step.CLAIM, reply("absent")) is Step.ASK
    assert turn.token != token
    assert turn.answered(Step.ASK, reply("granted")) is Step.HAVE


def test_a_waiter_given_up_for_dead_does_not_begin_again_after_its_deadline(turn, clock):
    turn.answered(Step.ASK, reply("waiting", rank=1, next_look=30))
    clock.now += 5
    assert turn.answered(Step.CLAIM, reply("absent")) is Step.STOP
    assert turn.answered(Step.CANCEL, reply("absent")) is Step.STOP


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("step", [Step.ASK, Step.CLAIM, Step.CANCEL])
def test_every_answer_has_a_next_step(turn, step, verdict):
    assert turn.answered(step, reply(verdict)) in Step
