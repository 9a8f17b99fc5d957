"""How a worker reads the grants in its inbox in Redis."""

from __future__ import annotations

import pytest

from celery_singleton_lock.store.redis.blocking import AT_ONCE, TOGETHER, InboxReader
from support.agent_fakes import ManualClock

FAR = 0.08
"""Seconds to Redis and back."""


class Inbox:
    """An inbox; each call takes a while."""

    def __init__(self, clock):
        self.clock = clock
        self.grants = []
        self.takes = FAR
        self.calls = []

    def pop_one(self):
        self.calls.append("one")
        self.clock.now += self.takes
        return self.grants.pop(0) if self.grants else None

    def pop_many(self, most):
        self.calls.append("many")
        self.clock.now += self.takes
        found, self.grants = self.grants[:most], self.grants[most:]
        return found or None


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def inbox(clock):
    return Inbox(clock)


@pytest.fixture
def read(clock, inbox):
    reader = InboxReader(clock)
    return lambda: reader.read(inbox.pop_one, inbox.pop_many)


def test_many_grants_are_read_before_they_are_void_although_redis_is_far(clock, inbox, read):
    """One for each round trip, most were void, and each was granted again behind the others."""
    inbox.grants = [str(n) for n in range(3 * TOGETHER)]
    began = clock.now
    assert [read() for _ in range(3 * TOGETHER)] == [str(n) for n in range(3 * TOGETHER)]
    assert clock.now - began < 5.0
    assert read() is None


def test_a_worker_with_few_grants_sends_no_further_command(inbox, read):
    inbox.takes = AT_ONCE
    inbox.grants = ["a", "b"]
    assert [read(), read(), read()] == ["a", "b", None]
    assert inbox.calls == ["one"] * 3


def test_a_worker_waits_again_once_its_inbox_is_empty(inbox, read):
    inbox.grants = ["a", "b"]
    assert [read(), read(), read(), read()] == ["a", "b", None, None]
    assert inbox.calls == ["one", "many", "many", "one", "one"]
