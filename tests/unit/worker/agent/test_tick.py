"""The periodic steps of the agent: what is logged when Redis fails."""

from __future__ import annotations

import logging

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import BackendRefused, BackendUnreachable
from celery_singleton_lock.events import Observers
from celery_singleton_lock.worker.agent.tick import Tick
from celery_singleton_lock.worker.redis_health import RedisHealth


def test_a_redis_that_refuses_each_call_is_logged_once(caplog):
    """Its password was changed. It does not count as down, and a tick comes each second."""
    failures = []

    def step():
        if failures:
            raise failures[0]

    health = RedisHealth(
        SystemClock(),
        address="redis://h",
        observers=Observers(),
        on_loss=lambda: None,
        on_return=lambda: None,
    )
    tick = Tick([step], health)

    def told(error, ticks=3):
        failures[:] = [error] if error else []
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(ticks):
                tick()
        return [record.getMessage() for record in caplog.records]

    (line,) = told(BackendRefused("refused (NOAUTH)."))
    assert line == "celery-singleton-lock: Redis at redis://h: refused (NOAUTH). Locked tasks wait."
    assert health.errors == 3
    assert len(told(BackendRefused("refused (NOPERM)."))) == 1, "the cause has changed"
    assert told(None) == ["celery-singleton-lock: Redis at redis://h accepts calls again."]
    assert len(told(BackendRefused("refused (NOPERM)."))) == 1, "it has answered meanwhile"
    (line,) = told(BackendUnreachable("no answer."))
    assert "no answer" in line
    (line,) = told(None)
    assert "answers again" in line
