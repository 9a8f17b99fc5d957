"""Which deliveries are of one message, and how often a message may come back."""

from __future__ import annotations

import math
from datetime import datetime, timezone

import pytest
from kombu import Queue
from kombu.message import Message
from kombu.transport import memory, pyamqp, redis

from celery_singleton_lock.core.owner_token import base_of, token_for
from celery_singleton_lock.worker.redelivery import (
    dead_letters_of,
    has_dead_letters,
    history_of,
    identifies_by_id,
    identity_of,
    most_returns,
)

OF_SQS = {"sqs_message": {"MessageId": "m-1", "ReceiptHandle": "differs each time"}}


@pytest.mark.parametrize(
    ("message", "identity"),
    [
        (Message(properties={"delivery_tag": "tag-1"}), "tag-1"),
        (Message(delivery_info=OF_SQS, properties={"delivery_tag": "a receipt"}), "m-1"),
        (Message(delivery_tag=7, properties={}), ""),
    ],
    ids=["virtual", "sqs", "amqp"],
)
def test_a_message_is_known_by_what_survives_its_redelivery(message, identity):
    """AMQP numbers the deliveries of a channel, and marks a second one."""
    assert identity_of(message) == identity


def test_identities_count_only_where_a_broker_marks_no_redelivery():
    """RabbitMQ and kombu's Redis mark what they deliver again."""
    assert not identifies_by_id(pyamqp.Transport)
    assert not identifies_by_id(redis.Transport)
    assert identifies_by_id(memory.Transport)


def test_two_deliveries_of_a_message_share_the_base_of_their_tokens_and_no_token():
    """A late holder of one delivery must own nothing of the other."""
    first, second = token_for("tag-1"), token_for("tag-1")
    assert base_of(first) == base_of(second) != base_of(token_for("tag-2"))
    assert first != second
    assert base_of(token_for("")) != base_of(token_for(""))


def test_a_message_that_was_dead_lettered_again_has_another_history():
    """So the mark to reject it counts once: also if the broker starts its list anew."""
    at = datetime(2026, 1, 1, tzinfo=timezone.utc)
    death = {"queue": "q", "reason": "rejected", "count": 1, "time": at}
    once, twice = history_of({"x-death": [death]}), history_of({"x-death": [death | {"count": 2}]})
    later = history_of({"x-death": [death | {"time": at.replace(hour=1)}]})
    assert history_of({}) == history_of({"x-death": []}) == ""
    assert len({"", once, twice, later}) == 4


@pytest.mark.parametrize(
    ("arguments", "setting", "most"),
    [
        ({}, 20, 20),
        ({"x-delivery-limit": 3}, 20, 3),
        ({"x-delivery-limit": 30}, 20, 20),
        ({"x-delivery-limit": -1}, 20, 20),
        ({"x-delivery-limit": 3}, None, 3),
        ({}, None, math.inf),
    ],
)
def test_the_lower_of_setting_and_queue_bounds_the_returns(arguments, setting, most):
    """-1 is RabbitMQ's word for no limit."""
    assert most_returns(Queue("q", queue_arguments=arguments), setting) == most
    assert most_returns(None, 20) == 20


def test_dead_letters_need_a_broker_and_a_queue_that_have_them():
    """A Redis queue with the arguments of a RabbitMQ one has none."""
    assert has_dead_letters(pyamqp.Transport)
    assert not has_dead_letters(redis.Transport)
    assert dead_letters_of(Queue("q", queue_arguments={"x-dead-letter-exchange": ""}))
    assert not dead_letters_of(Queue("q"))
    assert not dead_letters_of(None)
