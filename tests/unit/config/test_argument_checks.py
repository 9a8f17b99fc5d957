"""Arguments of a lock at their bounds: what is allowed is taken as it is."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import redis
import redis.asyncio

from celery_singleton_lock import AsyncLock, Lock, get_or_set
from celery_singleton_lock.config.argument_checks import checked_limit, checked_seconds
from celery_singleton_lock.config.limits import MAX_COUNT
from celery_singleton_lock.errors import ConfigurationError


@pytest.mark.parametrize("value", [0.5, 1, 5, 5.0])
def test_the_least_and_the_most_are_allowed(value):
    assert checked_seconds("lease", value, 0.5, 5) == value


@pytest.mark.parametrize("value", [0.49, 5.01, True, "1", None, float("nan")])
def test_what_is_beyond_or_no_number_is_not(value):
    with pytest.raises(ConfigurationError, match=r"^lease must be a number of seconds"):
        checked_seconds("lease", value, 0.5, 5)


@pytest.mark.parametrize(
    ("value", "use"),
    [
        ("5 minutes", "use 300"),
        ("1.5h", "use 5400"),
        ("90 sec", "use 90"),
        (timedelta(seconds=2), r"use its \.total_seconds\(\), 2"),
    ],
)
def test_a_duration_that_is_no_number_is_told_as_seconds(value, use):
    with pytest.raises(ConfigurationError, match=rf"not .*: {use}\.$"):
        checked_seconds("lease", value, 0.5, 5)


@pytest.mark.parametrize("value", ["soon", "5 ms", "5 months", ""])
def test_a_text_that_is_no_duration_is_not_guessed_at(value):
    with pytest.raises(ConfigurationError, match=rf"not '{value}'\.$"):
        checked_seconds("lease", value, 0.5, 5)


def test_a_limit_is_from_one_to_the_most_that_redis_counts():
    assert [checked_limit(value) for value in (1, MAX_COUNT)] == [1, MAX_COUNT]
    for value in (0, MAX_COUNT + 1, 1.0, True):
        with pytest.raises(ConfigurationError, match=r"^limit must be a whole number"):
            checked_limit(value)


@pytest.mark.parametrize("lock", [Lock, AsyncLock])
@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("timeout", ": lease=… is how long the lock is held without a renewal, blocking_timeout"),
        ("sleep", ": this lock does not poll"),
        ("auto_renewal", r": renew=… is whether the lease is renewed\.$"),
        ("leas", r"\. Did you mean 'lease'\?$"),
        ("colour", r"\.$"),
    ],
)
def test_an_option_of_another_packages_lock_is_refused_with_its_name_here(lock, option, remedy):
    """Before the client is looked at: it may be anything yet."""
    with pytest.raises(
        ConfigurationError, match=f"^{lock.__name__} has no option '{option}'{remedy}"
    ):
        lock(None, "account:42", **{option: 10})


async def told(_name, _token):
    """Hear of a lost lock."""


class AsyncListener:
    """Can be called, and returns a coroutine."""

    async def __call__(self, _name, _token):
        """Hear of a lost lock."""


LOCKS = [(Lock, redis.Redis), (AsyncLock, redis.asyncio.Redis)]


@pytest.mark.parametrize(("kind", "client"), LOCKS)
@pytest.mark.parametrize(
    "on_lost", [told, partial(told), AsyncListener(), AsyncListener().__call__]
)
def test_an_async_on_lost_is_refused_since_it_would_never_run(kind, client, on_lost):
    with pytest.raises(ConfigurationError, match=r"^on_lost must be a plain function"):
        kind(client(), "lock", on_lost=on_lost)


@pytest.mark.parametrize(("kind", "client"), LOCKS)
def test_an_on_lost_that_cannot_be_called_is_refused(kind, client):
    with pytest.raises(ConfigurationError, match=r"on_lost must be a function .*, not 'report'"):
        kind(client(), "lock", on_lost="report")


@pytest.mark.parametrize(("kind", "client"), LOCKS)
def test_a_pipeline_is_refused_since_it_sends_nothing_at_once(kind, client):
    """It inherits from the client, and a lock on it would be queued, not taken."""
    with pytest.raises(ConfigurationError, match=r"Lock needs a .*Pipeline"):
        kind(client().pipeline(), "lock")


def test_get_or_set_refuses_a_pipeline():
    with pytest.raises(ConfigurationError, match=r"needs a redis\.Redis client, not .*Pipeline"):
        get_or_set(redis.Redis().pipeline(), "key", lambda: 1, expire=1)


def test_a_quorum_refuses_a_pipeline():
    servers = [redis.Redis(port=n) for n in (1, 2, 3)]
    with pytest.raises(ConfigurationError, match=r"^Server 3 of the quorum is a .*Pipeline"):
        Lock([*servers[:2], servers[2].pipeline()], "lock")


def test_a_quorum_names_the_option_of_a_url_that_redis_py_does_not_take():
    """Otherwise each call says that the server does not vote."""
    urls = ["redis://a", "redis://b:1/0?socket_timeuot=1", "redis://c"]
    says = r"^Server 2 .*has 'socket_timeuot', which redis-py does not take.*'socket_timeout'"
    with pytest.raises(ConfigurationError, match=says):
        Lock(urls, "lock")
