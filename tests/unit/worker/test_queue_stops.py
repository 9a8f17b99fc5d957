"""Single queues of a worker are stopped and resumed at a real consumer of kombu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery
from kombu import Queue

from celery_singleton_lock.worker.consumed_queues import Consumed
from celery_singleton_lock.worker.queue_stops import QueueStops


@pytest.fixture
def consumer():
    """Celery's consumer of two queues, on a broker in memory."""
    with Celery("stops", broker="memory://", set_as_current=False) as app:
        app.amqp.queues.select(["one", "two"])
        with app.connection_for_read() as connection:
            consumer = SimpleNamespace(app=app, hub=object(), task_consumer=None)
            consumer.connect = lambda: reconnected(consumer, connection)
            consumer.connect()
            consumer.task_consumer.consume()
            yield consumer


def reconnected(consumer, connection):
    """Give it a new consumer of all selected queues, as Celery does at each connection."""
    consumer.task_consumer = consumer.app.amqp.TaskConsumer(connection.channel())


def consumed(consumer):
    return sorted(n for n in ("one", "two") if consumer.task_consumer.consuming_from(n))


@pytest.fixture
def stops(consumer):
    return QueueStops(consumer, lambda call, *args: call(*args))


def test_a_stopped_queue_is_not_consumed_and_its_parked_messages_still_come(stops, consumer):
    """The heartbeat still names it, so that grants of its messages reach this worker."""
    stops.stop("one")
    assert consumed(consumer) == ["two"]
    assert sorted(Consumed(consumer).consumed()) == ["one", "two"]
    stops.resume("one")
    assert consumed(consumer) == ["one", "two"]


def test_a_new_connection_does_not_consume_a_stopped_queue(stops, consumer):
    """It is cancelled before Celery's loop begins."""
    stops.stop("one")
    consumer.connect()
    stops.apply()
    consumer.task_consumer.consume()
    assert consumed(consumer) == ["two"]
    stops.resume("one")
    assert consumed(consumer) == ["one", "two"]
    assert stops.overruled == set()


def test_a_queue_added_by_an_operator_is_left_to_them(stops, consumer):
    """Celery's add_consumer consumes it. A stop is not repeated, it is reported."""
    stops.stop("one")
    add_consumer(consumer, "one")
    stops.look()
    assert consumed(consumer) == ["one", "two"]
    assert stops.overruled == {"one"}
    stops.resume("one")
    assert consumed(consumer) == ["one", "two"]
    stops.stop("one")
    assert consumed(consumer) == ["two"]


def add_consumer(consumer, name):
    """Do what Celery's command does."""
    queue = consumer.app.amqp.queues.select_add(consumer.app.amqp.queues[name])
    if not consumer.task_consumer.consuming_from(name):
        consumer.task_consumer.add_queue(queue)
        consumer.task_consumer.consume()


def test_a_message_that_is_on_its_way_at_the_stop_is_received(stops, consumer):
    """Else kombu returns it to the end of the queue, behind the whole backlog."""
    received = []
    consumer.task_consumer.on_message = received.append
    stops.stop("one")
    connection = consumer.task_consumer.channel.connection
    message = consumer.task_consumer.channel.prepare_message("body")
    message["properties"].update(delivery_info={}, delivery_tag="tag")
    connection._deliver(message, "one")
    assert [each.delivery_tag for each in received] == ["tag"]
    stops.resume("one")
    assert consumed(consumer) == ["one", "two"]


def test_another_queue_added_by_an_operator_does_not_resume_a_stopped_one(stops, consumer):
    """Celery then consumes all queues of its list."""
    stops.stop("one")
    add_consumer(consumer, "three")
    stops.look()
    assert consumed(consumer) == ["two"]
    assert stops.overruled == set()


def test_a_queue_that_an_operator_cancelled_meanwhile_is_not_resumed(stops, consumer):
    """Celery's cancel_consumer has deselected it."""
    stops.stop("one")
    consumer.app.amqp.queues.deselect("one")
    consumer.task_consumer.cancel_by_queue("one")
    stops.resume("one")
    assert consumed(consumer) == ["two"]


def test_without_an_event_loop_the_thread_that_consumes_makes_the_calls(consumer):
    """No other thread may use the connection."""
    later = []
    consumer.hub, consumer.call_soon = None, lambda call, *args: later.append((call, args))
    stops = QueueStops(consumer, lambda call, *args: call(*args))
    stops.stop("one")
    assert consumed(consumer) == ["one", "two"]
    for call, args in later:
        call(*args)
    assert consumed(consumer) == ["two"]


def test_without_a_connection_nothing_is_done_until_the_next_one(stops, consumer):
    """The new connection is told before any message."""
    consumer.task_consumer = None
    stops.stop("one")
    stops.stop("two")
    stops.resume("two")
    consumer.connect()
    stops.apply()
    consumer.task_consumer.consume()
    assert consumed(consumer) == ["two"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"auto_delete": True}, "auto_delete"),
        ({"expires": 60}, "expires"),
        ({"queue_arguments": {"x-expires": 60000}}, "expires"),
    ],
)
def test_queues_that_the_broker_deletes_without_a_consumer_are_known(consumer, options, reason):
    """They are never stopped."""
    consumer.app.amqp.queues.select_add(Queue("special", **options))
    assert Consumed(consumer).why_deleted_unconsumed("special") == reason
    assert Consumed(consumer).why_deleted_unconsumed("unknown") == ""
