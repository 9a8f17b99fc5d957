"""A worker stops consuming a queue with too many parked messages, and resumes it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from celery_singleton_lock.core.lock_view import Parked
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.events import QueueResumed, QueueStopped
from celery_singleton_lock.worker.agent.parked_limit import (
    EARLY,
    LOG_EVERY,
    OUTAGE,
    MostParked,
    ParkedLimit,
)
from support.agent_fakes import ManualClock


class Stage:
    """A limit, with what is parked and what was done."""

    def __init__(self, *most):
        self.clock = ManualClock()
        self.parked = {"q": Parked(0, 0.0), "other": Parked(0, 0.0)}
        self.consumed = ["q", "other"]
        self.deleted_by_broker = ""
        self.events, self.done, self.asked = [], [], 0
        self.overruled = set()
        self.workers = 1
        self.limit = ParkedLimit(
            self,
            realm="R",
            queues=SimpleNamespace(
                consumed=lambda: self.consumed,
                why_deleted_unconsumed=lambda _queue: self.deleted_by_broker,
            ),
            most=MostParked(*most),
            stops=SimpleNamespace(
                stop=lambda queue: self.done.append(("stop", queue)),
                resume=lambda queue: self.done.append(("resume", queue)),
                look=lambda: None,
                overruled=self.overruled,
            ),
            interval=lambda: 1.0,
            workers=lambda: self.workers,
            tell=self.events.append,
        )
        self.read = lambda: self.parked

    def look(self, **parked):
        """Look at the next round, with so much parked: ``q=(number, bytes)``."""
        for queue, (number, size) in parked.items():
            self.parked[queue] = Parked(number, 1.0, size)
        self.clock.now += 1
        self.limit.look()
        done, self.done = self.done, []
        return done


@pytest.fixture
def stage():
    return made(10, 1000)


def made(*most):
    stage = Stage(*most)
    store = SimpleNamespace(clock=stage.clock)

    def parked(realm, queues):
        assert realm == "R"
        stage.asked += 1
        return {queue: found for queue, found in stage.read().items() if queue in queues}

    store.parked = parked
    stage.limit._store = store
    return stage


def test_a_queue_is_stopped_at_the_limit_and_resumed_below_nine_tenths(stage):
    """Of its messages, or of their bytes."""
    assert stage.look(q=(9, 999)) == []
    assert stage.look(q=(10, 0)) == [("stop", "q")]
    assert [*stage.limit.stopped] == ["q"]
    assert stage.look(q=(9, 0)) == []
    assert stage.look(q=(8, 0)) == [("resume", "q")]
    assert stage.limit.stopped == {}
    assert stage.look(q=(1, 1000)) == [("stop", "q")]
    assert stage.look(q=(1, 900)) == []
    assert stage.look(q=(1, 899)) == [("resume", "q")]
    kinds = [type(event) for event in stage.events]
    assert kinds == [QueueStopped, QueueResumed] * 2
    assert stage.events[2] == QueueStopped("q", 1, 1000)
    assert stage.events[3].reason == "below"


def test_a_fast_backlog_is_stopped_at_once_and_not_at_the_next_look(stage):
    """Redis is asked near the limit only, and not for each message there."""
    stage.look(q=(3, 0))
    stage.limit.look_early({"q": Parked(6, 0.0, 10)})
    assert stage.asked == 1
    stage.parked["q"] = Parked(9, 0.0, 10)
    stage.limit.look_early({"q": Parked(1, 0.0, 10)})
    assert (stage.asked, stage.done) == (2, [])
    stage.parked["q"] = Parked(10, 0.0, 10)
    stage.limit.look_early({"q": Parked(1, 0.0, 10)})
    assert stage.asked == 2
    stage.clock.now += EARLY
    stage.limit.look_early({"q": Parked(1, 0.0, 10)})
    assert stage.done == [("stop", "q")]
    stage.clock.now += EARLY
    stage.limit.look_early({"q": Parked(1, 0.0, 10)})
    assert stage.asked == 3


def test_several_workers_are_taken_to_park_as_fast_as_this_one(stage):
    """Else each would go up to the limit by itself."""
    stage.workers = 4
    stage.look()
    stage.limit.look_early({"q": Parked(2, 0.0, 10)})
    assert stage.asked == 1
    stage.limit.look_early({"q": Parked(1, 0.0, 10)})
    assert stage.asked == 2


def test_other_queues_are_consumed_meanwhile(stage):
    """Each has its own number."""
    assert stage.look(q=(10, 0), other=(3, 0)) == [("stop", "q")]
    assert stage.look(other=(10, 0)) == [("stop", "other")]
    assert stage.look(q=(0, 0)) == [("resume", "q")]


def test_without_a_limit_redis_is_not_asked():
    """Tasks that use none of it cost nothing."""
    stage = made()
    stage.look(q=(10**6, 10**9))
    assert stage.asked == 0
    assert made(None, 5).look(q=(10**6, 4)) == []


def test_a_limit_of_one_is_resumed_when_nothing_is_parked():
    """Nine tenths of one are none."""
    stage = made(1)
    assert stage.look(q=(1, 0)) == [("stop", "q")]
    assert stage.look(q=(0, 0)) == [("resume", "q")]


def test_an_operator_goes_before_the_limit(stage):
    """Until less is parked: then the next stop is one like any other."""
    stage.look(q=(10, 0))
    stage.overruled.add("q")
    assert stage.look() == [("resume", "q")]
    assert stage.events[-1].reason == "operator"
    assert stage.look(q=(99, 0)) == []
    assert stage.look(q=(8, 0)) == []
    assert stage.look(q=(10, 0)) == [("stop", "q")]


def test_a_queue_that_an_operator_has_cancelled_is_no_longer_stopped(stage):
    """If they add it again, it is consumed."""
    stage.look(q=(10, 0))
    stage.consumed = ["other"]
    assert stage.look() == [("resume", "q")]
    assert stage.limit.stopped == {}


def test_a_queue_that_the_broker_would_delete_is_not_stopped(stage, caplog):
    """Its messages would be lost."""
    stage.deleted_by_broker = "auto_delete"
    assert stage.look(q=(10, 0)) == []
    assert "the broker deletes it without a consumer (auto_delete)" in caplog.text
    assert stage.events == []


def test_while_redis_does_not_answer_queues_are_consumed_again_after_a_time(stage):
    """Nothing can be parked then. When it answers, the limit applies again."""
    stage.look(q=(10, 0))
    stage.limit.consume_in_outage(OUTAGE - 1)
    assert stage.done == []
    stage.limit.consume_in_outage(OUTAGE)
    assert stage.done.pop() == ("resume", "q")
    assert stage.events[-1].reason == "redis"
    assert stage.look() == [("stop", "q")]


def test_an_error_of_redis_changes_nothing(stage):
    """The tick ends with it, as with any step."""
    stage.look(q=(10, 0))

    def refuse():
        raise BackendUnreachable("away")

    stage.read = refuse
    with pytest.raises(BackendUnreachable):
        stage.look()
    assert [*stage.limit.stopped] == ["q"]
    assert stage.done == []


def test_frequent_stops_are_logged_once_a_minute(stage, caplog):
    """Each one is an event."""
    caplog.set_level(logging.INFO)
    for _ in range(3):
        stage.look(q=(10, 0))
        stage.look(q=(0, 0))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert len(stage.events) == 6
    stage.clock.now += LOG_EVERY
    stage.look(q=(10, 0))
    assert caplog.records[-1].levelname == "WARNING"
    assert "singleton_lock_max_parked is 10" in caplog.text
    assert caplog.records[-1].lock_queue == "q"


def test_the_buckets_of_a_cluster_are_asked_every_few_seconds(stage):
    """There are 64."""
    stage.limit._store.keyspace = SimpleNamespace(spread=True)
    for _ in range(11):
        stage.look()
    assert stage.asked == 3
