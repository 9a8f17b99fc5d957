"""From which queue a message came, as far as the broker tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast

from celery_singleton_lock.worker.consumed_queues import Consumed, binding_matches, refuse_broadcast

TOPIC, DIRECT = Exchange("t", type="topic"), Exchange("d", type="direct")
QUEUES = (
    Queue("one", DIRECT, routing_key="two"),  # crosswise: the key of one is the other's name
    Queue("two", DIRECT, routing_key="one"),
    Queue("logs", TOPIC, routing_key="log.#"),
    Queue("both", bindings=[binding(DIRECT, "b"), binding(TOPIC, "*.b")]),
    Broadcast("everybody"),
)


def nothing():
    pass


@pytest.fixture
def app():
    with Celery("queues", set_as_current=False, broker="memory://") as app:
        app.conf.task_queues = QUEUES
        yield app


@pytest.fixture
def consumer(app):
    return SimpleNamespace(app=app, task_consumer=SimpleNamespace(_active_tags={}))


def message(**info):
    return SimpleNamespace(message=SimpleNamespace(delivery_info=info))


@pytest.mark.parametrize(
    ("exchange", "key", "queue"),
    [
        ("d", "two", "one"),
        ("d", "one", "two"),
        ("t", "log", "logs"),
        ("t", "log.a.b", "logs"),
        ("d", "b", "both"),
        ("t", "a.b", "both"),
        ("", "two", "two"),
        (None, "logs", "logs"),
        ("gone", "both", "both"),
        ("gone", "gone", "one"),
    ],
)
def test_the_exchange_and_the_routing_key_lead_to_the_queue(consumer, exchange, key, queue):
    """Where there is no consumer tag: by the bindings; past them, a key is a queue's name."""
    found = Consumed(consumer).queue_of(message(exchange=exchange, routing_key=key))
    assert found == queue


@pytest.mark.parametrize("exchange", ["", "d"])
def test_a_message_of_a_queue_that_was_cancelled_meanwhile_stays_one_of_that_queue(
    app, consumer, exchange
):
    """`celery control cancel_consumer`: what was prefetched is parked, or requeued, later."""
    key, queue = ("one", "one") if not exchange else ("two", "one")
    app.amqp.queues.deselect("one")
    consumed = Consumed(consumer)
    assert "one" not in consumed.consumed()
    assert consumed.queue_of(message(exchange=exchange, routing_key=key)) == queue


def test_the_consumer_tag_knows_better(consumer):
    """AMQP names the consumer, which has one queue; also after its connection was lost."""
    consumed = Consumed(consumer)
    consumer.task_consumer._active_tags = {"both": "None1"}
    consumed.consumed()
    consumer.task_consumer = None
    late = message(consumer_tag="None1", exchange="celery_delayed_delivery", routing_key="0.1.x")
    assert consumed.queue_of(late) == "both"


@pytest.mark.parametrize(
    ("pattern", "key", "passes"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a-b", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("#", "", True),
        ("#", "a.b", True),
        ("a.#", "a", True),
        ("a.#", "ab", False),
        ("#.b", "b", True),
        ("#.b", "a.c.b", True),
        ("a.#.b", "a.b", True),
        ("a.#.b", "a.x.y.b", True),
        ("a.#.b", "a.x.y", False),
    ],
)
def test_topic_patterns(pattern, key, passes):
    """``*`` stands for one word, ``#`` for any number."""
    assert binding_matches(pattern, "topic", key) is passes


@pytest.mark.filterwarnings("ignore:(?s).*'queue' task attribute")
@pytest.mark.parametrize("by", ["route", "option", "router"])
def test_a_locked_task_that_is_routed_to_a_broadcast_queue_is_refused(app, by):
    """By task_routes, by the task's own option, or by a function; the error names the queue."""

    def router(name, *_args, **_kwargs):
        return {"queue": "everybody"} if by == "router" else None

    app.conf.task_routes = ({"t": {"queue": "everybody"}} if by == "route" else {}, router)
    option = {"queue": "everybody"} if by == "option" else {}
    task = app.task(name="t", shared=False, **option)(nothing)
    with pytest.raises(ImproperlyConfigured, match="Broadcast queue 'everybody'"):
        refuse_broadcast(app, task)


def test_any_other_route_is_fine(app):
    """So is a router that wants to see a real call, and a route to a queue that is not declared."""

    def router(name, args, *_args, **_kwargs):
        return {"queue": args[0]}

    free = app.task(name="free", shared=False)(nothing)
    for routes in ({}, {"free": {"queue": "one"}}, {"free": {"queue": "new"}}, (router,)):
        app.conf.task_routes = routes
        app.amqp.flush_routes()
        refuse_broadcast(app, free)
    assert "new" not in app.amqp.queues
    assert Consumed(SimpleNamespace(app=app)).broadcast() == {"everybody"}
