"""Values that are passed around: how they are shown, and what belongs to what."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.lock_view import Holder, LockView, WaitsFor
from celery_singleton_lock.core.model import Reply, Reservation, Verdict, why_busy
from celery_singleton_lock.core.owner_token import base_of, new_token, number_of


@pytest.mark.parametrize(
    ("holder", "shown"),
    [
        (Holder("t.0", "settle", "3f", "worker-2", "host", 7), "settle[3f] on worker-2"),
        (Holder("t.0", "settle", "3f", "", "host", 7), "settle[3f]"),
        (Holder("t.0", "somebody", host="host", pid=7), "somebody"),
        (Holder("t.0", host="host", pid=7), "pid 7 on host"),
        (Holder("0123456789abcdef.0"), "01234567"),
    ],
)
def test_a_holder_is_shown_by_what_people_can_look_for(holder, shown):
    """Its task and worker; else its process; else the start of its token."""
    assert str(holder) == shown


def test_no_two_tokens_are_the_same_and_each_counts_its_deliveries_from_0():
    """128 random bits, as hex digits."""
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert {len(token) for token in tokens} == {34}
    assert {token[-2:] for token in tokens} == {".0"}


@pytest.mark.parametrize(
    ("token", "base", "number"),
    [
        ("a.0", "a", 0),
        ("a.12", "a", 12),
        ("a.b.3", "a.b", 3),
        ("a.b", "a.b", 0),
        ("7", "7", 0),
        ("a", "a", 0),
    ],
)
def test_a_token_stays_the_same_over_its_deliveries_up_to_the_number(token, base, number):
    """What has no number is whole."""
    assert (base_of(token), number_of(token)) == (base, number)


def test_a_reservation_is_known_by_the_attempt_for_which_it_is_kept():
    """So that whoever ends that task can end it."""
    assert Reservation("id/1/0", 5.0).token == "keep:id/1/0"


def test_the_reason_of_a_refusal_names_the_holder_or_the_pause():
    """With a command that can be pasted, whatever the lock's name holds."""
    settle = Holder("t.0", "settle", "3f")
    held = Reply(Verdict.BLOCKED, holder=settle)
    assert why_busy("account:1", held) == "lock 'account:1' is held by settle[3f]"
    assert why_busy("account:1", LockView("account:1", (settle,))).endswith("held by settle[3f]")
    assert why_busy("account:1") == "lock 'account:1' is held by another client"
    paused = why_busy("a b", held._replace(paused="jane: migration"))
    assert paused.startswith("lock 'a b' is paused (jane: migration) until")
    assert paused.endswith("locks resume 'a b')")


def test_why_a_lock_is_not_to_be_had_names_a_redis_that_grants_nothing_yet():
    """Rather than a holder that nobody finds."""
    refused = Reply(Verdict.BLOCKED, next_look=12.34, waits_for=WaitsFor.REDIS)
    assert why_busy("a", refused) == (
        "lock 'a' is in quarantine for another 12.3 s, because its Redis was replaced or "
        "restarted (singleton_lock_quarantine)"
    )
    assert why_busy("a", Reply(Verdict.BLOCKED, waits_for=WaitsFor.QUEUE)) == (
        "lock 'a' is free, and other tasks are before this one"
    )
