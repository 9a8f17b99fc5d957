"""Each ending in each pool: the lock is free in time, the next task runs, and nothing remains.

By default prefork runs all endings except the longest, and threads those that its worker survives.
With CSL_TEST_MATRIX every pool runs all endings, and the measured times are written: see
ending_matrix.py.
"""

from __future__ import annotations

import os

import pytest

from integration import endings as table
from integration.book import needs_pool, standing
from integration.ending_matrix import VARIABLE, note
from integration.endings import ENDED, ENDINGS, ITSELF, NEVER, POOLS, WORKER, Scene, check
from support.waiting import never

ALL = VARIABLE in os.environ
LEASE = table.LEASE if ALL else 10.0


@pytest.fixture(scope="module", params=POOLS if ALL else ("prefork", "threads"))
def pool(request):
    """Every pool of the matrix."""
    needs_pool(request.param)
    return request.param


@pytest.fixture(scope="module")
def keeper(book):
    """A worker that outlives all; it parks for pools whose only slot is taken."""
    with standing(book.worker(name="keeper", queues="keeper", concurrency=4)) as worker:
        yield worker


@pytest.fixture
def play(request, book, pool, keeper, key, make_redis):
    """Play an ending on this pool, see that it ended as it must, and note the time it took."""

    def play(ending, *, late):
        if pool in ending.cannot:
            pytest.skip(ending.cannot[pool])
        if ending.full and not ALL:
            pytest.skip(f"with {VARIABLE} only: another test shows it in less time")
        if ending.own and pool != "prefork" and not ALL:
            pytest.skip(f"with {VARIABLE} only: it starts a worker of its own")
        worker = None if ending.own else request.getfixturevalue("worker")
        scene = Scene(book, pool, key, late, keeper, worker, make_redis=make_redis)
        with scene.own:
            note(ending, pool, check(ending, scene))

    return play


def endings(*parts):
    """The endings of some parts of the table, each with the acknowledgements that matter."""
    cases = [
        pytest.param(ending, late, id=f"{ending.name}-{'late' if late else 'early'} ack")
        for ending in ENDINGS
        if ending.part in parts
        for late in ending.acks()
    ]
    return pytest.mark.parametrize(("ending", "late"), cases)


@endings(ITSELF, ENDED)
def test_T17_the_lock_does_not_outlive_its_task(play, ending, late):
    """Within the bound the next one starts; the task's state and runs are those of a plain one."""
    play(ending, late=late)


@pytest.mark.full
@endings(WORKER)
def test_T7_the_lock_does_not_outlive_its_worker(play, ending, late):
    """Shut down, killed, resized, cut off: the next one starts in time, and not before."""
    play(ending, late=late)


@endings(NEVER)
def test_T18_a_message_that_cannot_be_decoded_takes_no_lock(play, ending, late):
    """The message ends as without locks, and the next one of its key starts at once."""
    play(ending, late=late)


@pytest.mark.full
@pytest.mark.parametrize("pool", ["threads"], indirect=True, scope="module")
def test_where_celery_cannot_end_a_task_it_keeps_its_lock(book, worker, pool, keeper, key):
    """Time limits and terminate do not affect a thread: it keeps running, and holds the lock."""
    scene = Scene(book, pool, key, late=False, keeper=keeper, worker=worker)
    scene.first(soft_time_limit=0.2, time_limit=0.4)
    scene.behind()
    end = {"terminate": True, "signal": "SIGKILL"}
    book.app.control.revoke(scene.both(), **end, reply=True, limit=2, timeout=20)
    never(lambda: scene.runs(scene.next), during=1, message="the next one started early")
    scene.let()
    assert book.value(scene.next) == 2
    assert book.state(scene.locked) == book.state(scene.plain)
    book.await_free(key)
