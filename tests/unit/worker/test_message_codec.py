"""A message comes back from its parked bytes as it was."""

from __future__ import annotations

import pytest
from kombu.exceptions import ContentDisallowed

from celery_singleton_lock.worker.lock_header import HEADER_KEY, MOVED
from celery_singleton_lock.worker.message_codec import pack, unpack
from support.broker_message import message


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


@pytest.mark.parametrize("name", [HEADER_KEY, MOVED, "redelivered"])
def test_what_belongs_to_one_delivery_is_left_out(name):
    """Our own marks do not come back; a task that is parked sees what it had seen otherwise."""
    assert name not in unpack(pack(message(headers={"id": "x", name: "stale"}))).headers


def test_the_properties_that_a_transport_adds_are_kept_as_a_task_can_see_them():
    """The route of ``delivery_info`` too, but not what else is in it, which need not be JSON."""
    route = {"exchange": "e", "routing_key": "k"}
    added = {"delivery_tag": "t", "body_encoding": "base64", "delivery_info": route}
    with_object = {**added, "delivery_info": {**route, "receipt": object()}}
    assert unpack(pack(message(properties=with_object))).properties == added


def test_lock_headers_of_a_parked_message_stay_with_it():
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
