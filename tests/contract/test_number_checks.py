"""Numbers that would make a script fail half-way are refused before a command is sent."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.store.redis.sync import RedisStore

pytestmark = pytest.mark.contract

WEIRD = (float("nan"), float("inf"), 0.5, -1)


@pytest.fixture
def store(lock_client):
    store = RedisStore(lock_client)
    yield store
    store.close()


def refused(call, sentence):
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert str(caught.value) == sentence


@pytest.mark.parametrize("number", WEIRD, ids=repr)
@pytest.mark.parametrize(
    ("what", "bounds"),
    [("place", ", 0 or more"), ("max_waiting", ", 0 or more"), ("limit", ", from 1 to 2147483647")],
)
def test_what_is_counted_is_a_whole_number(store, what, bounds, number):
    """The error says which, and in what range."""
    claim = Claim("a", **{what: number})
    sentence = f"{what} is {number!r}: give a whole number{bounds}."
    refused(lambda: store.acquire(Owner(new_token()), claim), sentence)
    refused(lambda: store.park(Owner(new_token()), claim, MessageToPark(b"b", "R", "q")), sentence)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1, None, "1", 366 * 86_400 + 1])
def test_what_lasts_is_a_number_of_seconds(store, number):
    """A lease lasts a millisecond at least; a wait may be over at once."""
    lease = f"lease is {number!r}: give seconds, from 0.001 to 31622400."
    refused(lambda: store.acquire(Owner(new_token()), Claim("a", lease=number)), lease)
    refused(lambda: store.claim(Owner(new_token()), "a", number), lease)
    refused(lambda: store.extend([("a", "t.0", number)]), lease)
    done = f"done_for is {number!r}: give seconds, from 0 to 31622400."
    refused(lambda: store.release("a", "t.0", Ending.FINAL, done_for=number), done)
    if number is not None:
        wait = f"wait is {number!r}: give seconds, from 0 to 31622400."
        refused(lambda: store.acquire(Owner(new_token()), Claim("a"), wait=number), wait)


def test_the_least_and_the_most_are_taken(store):
    """A limit of no waiters; an old place in the queue; a lease of a year."""
    store.acquire(Owner(new_token()), Claim("a", lease=366 * 86_400, limit=1.0, place=0))
    full = store.acquire(Owner(new_token()), Claim("a", max_waiting=0, place=1.0), wait=5.0)
    assert full.verdict is Verdict.FULL
    assert store.acquire(Owner(new_token()), Claim("b", lease=0.001)).verdict is Verdict.GRANTED


def test_the_same_number_is_checked_each_time(store):
    """Equal but different arguments are not confused: 1, 1.0 and True are one key in Python."""
    for number in (1, 1.0, True):
        reply = store.acquire(Owner(new_token()), Claim(f"a:{number!r}", limit=number))
        assert reply.verdict is Verdict.GRANTED
