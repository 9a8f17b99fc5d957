"""Message -> parked body -> message again, or the broker."""

from __future__ import annotations

import threading

import pytest
from kombu import Connection, Consumer, Producer, Queue
from kombu.exceptions import ContentDisallowed
from kombu.message import Message

from celery_singleton_lock.worker.publisher import Outbox, Publisher, pack, unpack
from celery_singleton_lock.worker.lock_header import MOVED, STAMP
from support.waiting import eventually


def message(**changes) -> Message:
    fields = {
        "body": b"[[1], {}, {}]",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {"id": "x", "task": "t", "x-tenant": "acme"},
        "properties": {"priority": 6, "correlation_id": "x", "reply_to": "r", "delivery_mode": 2},
        "delivery_info": {"exchange": "e", "routing_key": "k"},
    }
    made = Message(**{**fields, **changes})
    made.headers = {**fields, **changes}["headers"]
    return made


@pytest.mark.parametrize(
    "body", [b"[[1], {}]", "[[2], {}]", b"\x80\n\x00\xff", b"", "\u00e9"], ids=repr
)
def test_the_raw_body_comes_back_as_it_was(body):
    """Bytes stay bytes and text stays text, newlines and all."""
    again = unpack(pack(message(body=body)))
    assert again.body == body
    assert type(again.body) is type(body)


def test_headers_properties_route_and_type_come_back():
    """Whatever the next worker needs to run it like the first."""
    original = message()
    again = unpack(pack(original))
    assert again.headers == original.headers
    assert again.properties == original.properties
    assert again.delivery_info == {"exchange": "e", "routing_key": "k"}
    assert (again.content_type, again.content_encoding) == ("application/json", "utf-8")


@pytest.mark.parametrize("name", [STAMP, MOVED, "redelivered"])
def test_what_belongs_to_one_delivery_is_left_out(name):
    """Our own marks do not come back; a task that is parked sees what it had seen otherwise."""
    assert name not in unpack(pack(message(headers={"id": "x", name: "stale"}))).headers


def test_the_properties_that_a_transport_adds_are_kept_as_a_task_can_see_them():
    """The route of ``delivery_info`` too, but not what else is in it, which need not be JSON."""
    route = {"exchange": "e", "routing_key": "k"}
    added = {"delivery_tag": "t", "body_encoding": "base64", "delivery_info": route}
    with_object = {**added, "delivery_info": {**route, "receipt": object()}}
    assert unpack(pack(message(properties=with_object))).properties == added


def test_what_a_parked_message_is_told_stays_with_it():
    """It has no channel: acknowledging and rejecting are notes."""
    again = unpack(pack(message()))
    assert not again.acknowledged
    again.ack()
    assert again.acknowledged
    for requeue in (True, False):
        again = unpack(pack(message()))
        again.reject(requeue)
        assert again.acknowledged


def test_a_refused_content_type_stays_refused():
    """Parking is no way round ``accept_content``."""
    again = unpack(
        pack(message(content_type="application/x-python-serialize")), {"application/json"}
    )
    with pytest.raises(ContentDisallowed):
        again.decode()


def test_garbage_is_an_error():
    """Bytes that are no packed message are refused."""
    with pytest.raises((ValueError, KeyError)):
        unpack(b"not json\nbody")


@pytest.fixture
def broker():
    with Connection("memory://publisher") as connection:
        yield connection


def received(connection, queue):
    found = []
    with Consumer(connection, [queue], on_message=found.append, accept=["json", "pickle"]):
        connection.drain_events(timeout=20)
    return found[0]


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_message_sent_back_is_as_it_came_and_says_where_it_stood_in_line(broker, compression):
    """Body, headers, priority and compression arrive as from the first sender."""
    queue = Queue("q", routing_key="q")(broker.default_channel)
    queue.declare()
    Producer(broker.default_channel).publish(
        {"a": 1}, routing_key="q", serializer="json", compression=compression,
        headers={"id": "x"}, priority=6, correlation_id="x",
    )  # fmt: skip
    first = received(broker, queue)
    first.ack()
    publisher = Publisher(lambda: Connection("memory://publisher"))
    publisher.send_back(pack(first), "q", "x/0/0", 12)
    second = received(broker, queue)
    second.ack()
    assert second.payload == {"a": 1}
    assert second.headers[MOVED] == ["x/0/0", 12]
    assert second.headers["id"] == "x"
    assert second.headers.get("compression") == first.headers.get("compression")
    assert second.properties["priority"] == 6
    assert second.properties["correlation_id"] == "x"
    assert second.properties["delivery_tag"] != first.properties["delivery_tag"]
    assert second.properties["delivery_info"] == {"exchange": "", "routing_key": "q"}
    publisher.close()
    publisher.close()


def test_a_message_sent_back_carries_what_amqp_calls_properties(broker):
    """What py-amqp adds to them is not passed twice; a time to live stays what it was."""
    queue = Queue("amqp", routing_key="amqp")(broker.default_channel)
    queue.declare()
    properties = {
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "application_headers": {"id": "x"},
        "expiration": "60500",
        "delivery_mode": 1,
        "message_id": "m",
        "user_id": "another",
    }
    died = {"id": "x", "x-death": [{"count": 1}], "x-first-death-queue": "celery_delayed_0"}
    kept = pack(message(properties=properties, headers=died))
    publisher = Publisher(lambda: Connection("memory://publisher"))
    publisher.send_back(kept, "amqp", "x/0/0", 12)
    copy = received(broker, queue)
    copy.ack()
    assert copy.properties["expiration"] == "60500"
    assert copy.properties["delivery_mode"] == 1
    assert copy.properties["message_id"] == "m"
    assert "user_id" not in copy.properties
    assert copy.headers == {"id": "x", MOVED: ["x/0/0", 12]}
    assert unpack(kept).headers == died
    assert unpack(kept).properties["application_headers"] == died
    publisher.close()


class Broken:
    """A connection that is refused."""

    def get_transport_cls(self):
        return object

    def channel(self):
        raise ConnectionRefusedError

    def release(self):
        pass


def test_after_an_error_the_next_message_opens_a_new_connection():
    """A broker that went away is asked again, not given up."""
    opened = []

    def connect():
        opened.append(Broken())
        return opened[-1]

    publisher = Publisher(connect)
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            publisher.send_back(pack(message()), "q", "x/0/0", 12)
    assert len(opened) == 2


def test_a_connection_that_died_while_idle_is_replaced_at_once(broker):
    """The message that finds it dead is sent all the same."""
    queue = Queue("idle", routing_key="idle")(broker.default_channel)
    queue.declare()
    publisher = Publisher(lambda: Connection("memory://publisher"))
    publisher.send_back(pack(message()), "idle", "x/0/0", 12)
    publisher._channel = Broken()
    publisher.send_back(pack(message()), "idle", "x/0/0", 12)
    for _ in range(2):
        received(broker, queue).ack()
    publisher.close()


def test_a_broker_that_does_not_answer_keeps_nobody_waiting():
    """The outbox takes a message at once, and says so when it holds too many."""
    stuck, sent = threading.Event(), []

    class Stuck:
        def publish(self, *copy):
            stuck.wait(10)

        def close(self):
            sent.append("closed")

    outbox, refused = Outbox(Stuck()), []

    def told(error):
        (sent if error is None else refused).append(error)

    for _ in range(Outbox.MOST + 10):
        outbox.put(lambda publisher: publisher.publish(), told)
    assert sent == []
    assert 9 <= len(refused) <= 10  # one may be in the thread's hands
    outbox.close(0)
    stuck.set()
    eventually(lambda: len(sent) >= Outbox.MOST)
    outbox.close(5)
    assert sent.pop() == "closed"
