"""What is published: messages as they came, to their queues, and errors of the broker."""

from __future__ import annotations

import threading

import pytest
from kombu import Connection, Consumer, Producer, Queue

from celery_singleton_lock.worker.lock_header import MOVED, REQUEUED, UNANSWERED
from celery_singleton_lock.worker.message_codec import pack, unpack
from celery_singleton_lock.worker.message_stage import UnansweredClaim
from celery_singleton_lock.worker.publisher import Outbox, Publisher
from support.broker_message import message
from support.waiting import eventually


@pytest.fixture
def broker():
    with Connection("memory://publisher") as connection:
        yield connection


def received(connection, queue):
    found = []
    with Consumer(connection, [queue], on_message=found.append, accept=["json", "pickle"]):
        connection.drain_events(timeout=60)
    return found[0]


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_republished_message_is_unchanged_and_has_its_place_in_the_queue(broker, compression):
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
    publisher.send_back(pack(first), "q", "x/0/0", 12, "t.1")
    second = received(broker, queue)
    second.ack()
    assert second.payload == {"a": 1}
    assert second.headers[MOVED] == ["x/0/0", 12, "t"]
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
    publisher.send_back(kept, "amqp", "x/0/0", 12, "t.1")
    copy = received(broker, queue)
    copy.ack()
    assert copy.properties["expiration"] == "60500"
    assert copy.properties["delivery_mode"] == 1
    assert copy.properties["message_id"] == "m"
    assert "user_id" not in copy.properties
    assert copy.headers == {"id": "x", MOVED: ["x/0/0", 12, "t"]}
    assert unpack(kept).headers == died
    assert unpack(kept).properties["application_headers"] == died
    publisher.close()


def test_a_requeued_message_names_its_unanswered_claim_but_keeps_no_earlier_one(broker):
    queue = Queue("claims", routing_key="claims")(broker.default_channel)
    queue.declare()
    publisher = Publisher(lambda: Connection("memory://publisher"))
    claim = UnansweredClaim("x/0/0", "t.1", [("b", "u.0")])
    publisher.requeue(pack(message(headers={"id": "x"})), "claims", 2, 12, claim)
    first = received(broker, queue)
    first.ack()
    assert first.headers[REQUEUED] == [2, 12]
    assert UnansweredClaim(*first.headers[UNANSWERED]) == claim
    publisher.requeue(pack(first), "claims", 3, 12)
    second = received(broker, queue)
    second.ack()
    assert second.headers == {"id": "x", REQUEUED: [3, 12]}
    publisher.close()


class Broken:
    """A connection that is refused."""

    def get_transport_cls(self):
        return object

    def channel(self):
        raise ConnectionRefusedError

    def collect(self):
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
            publisher.send_back(pack(message()), "q", "x/0/0", 12, "t.1")
    assert len(opened) == 2


def test_a_connection_that_died_while_idle_is_replaced_at_once(broker):
    """The message that finds it dead is sent all the same."""
    queue = Queue("idle", routing_key="idle")(broker.default_channel)
    queue.declare()
    publisher = Publisher(lambda: Connection("memory://publisher"))
    publisher.send_back(pack(message()), "idle", "x/0/0", 12, "t.1")
    publisher._channel = Broken()
    publisher.send_back(pack(message()), "idle", "x/0/0", 12, "t.1")
    for _ in range(2):
        received(broker, queue).ack()
    publisher.close()


def test_a_broker_that_does_not_answer_blocks_no_caller():
    """The outbox takes a message at once, and says so when it holds too many."""
    stuck, sent = threading.Event(), []

    class Stuck:
        def publish(self, *copy):
            stuck.wait(60)

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
    outbox.close(60)
    assert sent.pop() == "closed"
