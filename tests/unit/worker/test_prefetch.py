"""How many messages the broker may send while some are held for the locks' Redis."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from celery.worker.consumer import Consumer
from kombu.common import QoS

from celery_singleton_lock.worker.runtime import change_prefetch

SLOTS = 4


class Reconnected(Consumer):
    """Celery's consumer after a lost connection, at which its four slots ran tasks."""

    def __init__(self):
        conf = SimpleNamespace(worker_enable_prefetch_count_reduction=True)
        self.app = SimpleNamespace(conf=conf)
        self.pool = SimpleNamespace(num_processes=SLOTS)
        self.prefetch_multiplier = self.initial_prefetch_count = 1
        self.qos = QoS(lambda prefetch_count: None, 1)
        self._maximum_prefetch_restored = False


@pytest.fixture
def consumer():
    return Reconnected()


def test_an_outage_after_a_reconnect_leaves_the_prefetch_count_that_celery_wants(consumer):
    """Celery restores its count from the one that the outage has raised."""
    for _ in range(SLOTS - 1):
        change_prefetch(consumer, 1)
    consumer._restore_prefetch_count_after_connection_restart(None)
    assert consumer.qos.value == SLOTS
    for _ in range(SLOTS - 1):
        change_prefetch(consumer, -1)
    assert consumer.qos.value == SLOTS


def test_an_outage_takes_back_what_it_has_added(consumer):
    for change in (1, 1, 1, -1, -1, -1):
        change_prefetch(consumer, change)
    assert consumer.qos.value == consumer.initial_prefetch_count


def test_what_was_added_for_a_former_connection_is_not_taken_from_the_next(consumer):
    change_prefetch(consumer, 1)
    consumer.initial_prefetch_count = SLOTS
    consumer.qos = QoS(partial(print), SLOTS)
    change_prefetch(consumer, -1)
    assert consumer.qos.value == SLOTS


def test_an_outage_does_not_use_up_the_prefetch_count_of_a_worker_with_an_eta_limit(consumer):
    """It keeps six tasks with an ETA and held four others: then it receives further ones again."""
    consumer.initial_prefetch_count, limit = SLOTS, SLOTS + 6
    consumer.qos = QoS(lambda prefetch_count: None, SLOTS)
    consumer.qos.max_prefetch = limit
    plain = consumer.qos.increment_eventually
    consumer.qos.increment_eventually = lambda: plain(0 if consumer.qos.value == limit else 1)
    for _ in range(6):
        consumer.qos.increment_eventually()  # as Celery does for each ETA
    for change in (1, 1, 1, 1, -1, -1, -1, -1):
        change_prefetch(consumer, change)
    assert consumer.qos.value == limit
    consumer.qos.decrement_eventually()  # the time of one has come
    for change in (1, -1):
        change_prefetch(consumer, change)
    assert consumer.qos.value == limit - 1


def test_no_prefetch_limit_stays_none_and_nothing_is_sent_without_a_connection(consumer):
    consumer.initial_prefetch_count, consumer.qos = 0, QoS(partial(print), 0)
    for change in (1, -1):
        change_prefetch(consumer, change)
    assert consumer.qos.value == 0
    consumer.qos = None
    change_prefetch(consumer, 1)
