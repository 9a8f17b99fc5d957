"""A worker that started without Redis checks it before it uses a lock."""

from __future__ import annotations

import logging

import pytest

from celery_singleton_lock.core.model import FLOW_SCHEMA
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import (
    BackendRefused,
    BackendUnreachable,
    ConfigurationError,
    SchemaMismatch,
)
from celery_singleton_lock.worker.agent.late_check import LateCheck


class Check:
    """Raises the errors that it is given, one in each call; then it passes."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


def test_a_check_that_passes_is_not_repeated():
    verdicts, check = [], Check(BackendUnreachable("away"))
    late = LateCheck(verdicts.append)
    late()  # none was planned
    late.plan(check)
    with pytest.raises(BackendUnreachable):
        late()
    assert late.is_due
    assert verdicts == []
    late()
    late()
    assert verdicts == [False]
    assert check.calls == 2
    assert not late.is_due


@pytest.mark.parametrize("kind", [BackendRefused, ConfigurationError, SchemaMismatch])
def test_a_redis_that_must_not_be_used_is_reported_once_until_it_is_corrected(kind, caplog):
    verdicts = []
    late = LateCheck(verdicts.append)
    late.plan(Check(kind("why"), kind("why"), BackendUnreachable("away")))
    for error in (BackendRefused, BackendRefused, BackendUnreachable):
        with pytest.raises(error):
            late()
    late()
    assert verdicts == [True, True, False]
    (record,) = [each for each in caplog.records if each.levelno == logging.CRITICAL]
    assert "cannot be used for its locks. why All locked tasks wait" in record.getMessage()


def test_a_worker_stands_aside_if_a_newer_version_has_raised_the_schema(agent, store, caplog):
    """It sends no heartbeat until the schema is one that it knows."""
    store.keyspace = Keyspace()
    agent.run_once()
    store.schema_found = "99"
    agent._data_loss.look_soon()
    agent._next_beat = 0.0
    agent.run_once()
    assert agent.health.down
    assert caplog.text.count("Redis, which a newer version has changed, cannot be used") == 1
    beats = len(store.asked("worker_heartbeat"))
    for _ in range(3):
        agent._next_beat = 0.0
        agent.run_once()
    assert len(store.asked("worker_heartbeat")) == beats
    assert caplog.text.count("Redis, which a newer version has changed, cannot be used") == 1
    store.schema_found = FLOW_SCHEMA
    agent._next_beat = 0.0
    agent.run_once()
    assert not agent.health.down
    assert len(store.asked("worker_heartbeat")) == beats + 1
