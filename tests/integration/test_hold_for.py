"""lock_hold_for: after a success no task of the key starts for a while."""

from __future__ import annotations

import re
import time

import pytest
from celery import Celery, states

from celery_singleton_lock import LockedTask
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually


def kept(book, key):
    """Return what keeps a key after a success."""
    return [holder for holder in book.view(key).holders if holder.state == "held_after"]


def test_the_next_of_a_key_starts_so_long_after_the_start_of_the_last(book, worker, key):
    """A blocked task is parked, and runs when the time is over."""
    began = time.monotonic()
    runs = [book.send("act_hold", key, n) for n in range(2)]
    assert [book.value(run) for run in runs] == [0, 1]
    _, second = book.starts(key)
    assert second["t"] - began >= 1.9


def test_skip_and_fail_say_how_long_the_lock_stays_taken(book, worker, key):
    """The reason names lock and task; the error has the seconds."""
    first = book.send("act_hold_long", key, 0)
    assert book.value(first) == 0
    eventually(lambda: kept(book, key))
    state, reason = book.outcome(book.send("act_skip", key, 1))
    assert state == states.REVOKED
    after = rf"after act_hold_long\[{first}\] has succeeded \(lock_hold_for\)"
    assert re.search(rf"lock 'k:{key}' stays held for another \d\d\.\d s {after}", str(reason))
    state, error = book.outcome(book.send("act_fail", key, 2))
    assert state == states.FAILURE
    assert "(lock_hold_for)" in str(error)
    assert book.order(key) == [0]


@pytest.mark.parametrize("end", ["raise", "retry", "ignore", "reject"])
def test_after_a_failure_the_lock_is_not_held(book, worker, key, end):
    """So a failed run is made up for at once."""
    book.started(book.send("act_hold_long", key, 0, end=end, extra=30))
    assert book.value(book.send("act", key, 1)) == 1
    assert not kept(book, key)


def test_all_locks_of_a_task_stay_taken(book, worker, key):
    """Each of several."""
    assert book.value(book.send("pair_hold", f"{key}-a", f"{key}-b")) is not None
    for name in (f"{key}-a", f"{key}-b"):
        eventually(lambda name=name: kept(book, name))


def test_it_outlives_the_worker(own_book, key):
    """Nobody renews it."""
    with own_book.worker(pool="solo") as worker:
        assert own_book.value(own_book.send("act_hold_long", key, 0)) == 0
        eventually(lambda: kept(own_book, key))
        own_book.kill_worker(worker)
    with own_book.worker(pool="solo"):
        assert own_book.outcome(own_book.send("act_skip", key, 1))[0] == states.REVOKED
    assert kept(own_book, key)


def test_eager_tasks_keep_it_too(redis_url, redis_client):
    """Where they take locks at all."""
    with Celery(
        "eager", broker="memory://", backend="cache+memory://", set_as_current=False
    ) as app:
        app.conf.update(singleton_lock_backend=redis_url, singleton_lock_eager=True)
        options = {"lock_on_conflict": "skip", "lock_hold_for": 60, "lock_key": "k:{key}"}

        @app.task(base=LockedTask, shared=False, **options)
        def act(key, fails):
            if fails:
                raise ValueError

        assert act.apply(("a", True)).state == states.FAILURE
        assert act.apply(("a", False)).state == states.SUCCESS
        assert act.apply(("a", False)).state == states.REVOKED
    (holder,) = RedisStore(redis_client).inspect("k:a").holders
    assert holder.state == "held_after"
