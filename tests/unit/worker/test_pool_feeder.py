"""The thread that sends tasks to a pool in a worker without an event loop."""

from __future__ import annotations

from types import SimpleNamespace

from celery_singleton_lock.worker.message_stage import Stage
from celery_singleton_lock.worker.pool_feeder import PoolFeeder
from support.dispatcher_fakes import fail_always


def test_a_request_that_cannot_be_sent_is_reported_and_stops_no_later_one():
    reported, waiting = [], SimpleNamespace(stage=Stage.DISPATCHED)
    feeder = PoolFeeder(object(), fail_always, reported.append)
    for _ in range(2):
        feeder(waiting)
        assert feeder._send_next()
    assert reported == [waiting] * 2
