"""A deployment lowers the limit of a lock while tasks are parked."""

from __future__ import annotations

from celery_singleton_lock.store.operator.base import Operator
from integration.book import LONG_LEASE

LEASE = LONG_LEASE
BY = Operator("jane")


def version(limit):
    """Return the configuration of a version of the application."""
    return {"task_annotations": {"act": {"lock_limit": limit}}}


def test_a_lowered_limit_holds_for_tasks_that_were_parked_before(own_book):
    """No further message comes, which would declare it. Those that are granted already run."""
    own_book.store.pause("k:a", BY)
    with own_book.worker(pool="threads", concurrency=4, conf=version(2)):
        tasks = [own_book.send("act", "a", n, hold=0.3) for n in range(6)]
        own_book.await_waiting("a", 6)
    with own_book.worker(pool="threads", concurrency=4, conf=version(1)) as worker:
        own_book.store.resume("k:a", BY)
        for task in tasks:
            own_book.value(task, 30)
        assert "is in force" not in worker.log()
    running, most = 0, []
    for event in own_book.events():
        running += {"start": 1, "end": -1}.get(event["e"], 0)
        most.append(running)
    assert max(most) <= 2
    assert max(most[4:]) == 1, "the first two had their grants"
