"""Arguments of a lock at their bounds: what is allowed is taken as it is."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_singleton_lock import AsyncLock, Lock
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
        ("timeout", ": how long the lock is held without a renewal is lease=…, how long to wait"),
        ("sleep", ": nobody polls"),
        ("auto_renewal", r": whether the lease is renewed is renew=…\.$"),
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
