"""The number of slots of a pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.concurrency import gevent
from celery.concurrency.prefork import TaskPool

from celery_singleton_lock.worker.pools import slots_of


@pytest.mark.parametrize(("inner", "slots"), [(SimpleNamespace(_processes=5), 5), (None, 2)])
def test_the_slots_of_a_pool_are_those_that_it_has_now(inner, slots):
    """Also while it shuts down, when it has no processes any more and is still asked."""
    pool = TaskPool(2)
    pool._pool = inner
    assert slots_of(pool) == slots


def test_idle_slots_of_a_gevent_pool_count_before_celery_5_7():
    """Its number of processes was that of the running tasks: a worker with one had no free slot."""
    pytest.importorskip("gevent")

    class OlderPool(gevent.TaskPool):
        num_processes = property(lambda self: len(self._pool))

    pool = OlderPool(3)
    pool.on_start()
    assert slots_of(pool) == 3
    pool.grow(1)
    assert slots_of(pool) == 4
