"""A worker whose hooks into Celery fail detects it and works without them.

If a message does not pass the dispatcher, its lock is acquired in the pool: later, and it occupies
a slot. The worker logs a warning. The lock is never skipped.
"""

from __future__ import annotations

import pytest
from celery import states

from integration.book import Book
from integration.test_adrift import adrift
from support.waiting import eventually, never

UNKNOWN_WAY = "creates request classes in an unknown way"
BREAKS = ["own", "composed", "unwrapped", "replaced"]
MORTAL = {"singleton_lock_lease": 4.0}
"""Settings of a worker in which a process is killed: its lock is free soon after that."""
WARNING = "does not pass this worker's dispatcher"
WHY = {
    "own": (
        "integration.changed_celery_app.OwnRequest",
        "celery_singleton_lock.worker.request.LockedRequest",
    ),
    "composed": (UNKNOWN_WAY, "a version of Celery that this package supports"),
    "unwrapped": (UNKNOWN_WAY, "a version of Celery that this package supports"),
    "replaced": ("replaced consumer.on_task_request", "Let that step call"),
}


def broken(book, how, **options):
    """Return a worker whose hooks fail, not started."""
    return book.worker(app="integration.changed_celery_app", env={"BREAK": how}, **options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "pool"),
    [*((how, "prefork") for how in BREAKS), ("own", "threads"), ("unwrapped", "threads")],
)
def test_a_failed_hook_is_reported_and_the_lock_is_acquired_in_the_pool(own_book, how, pool):
    """A warning names task, cause and remedy; tasks of a key never overlap, others run."""
    with broken(own_book, how, pool=pool, concurrency=4) as worker:
        log = worker.log()
        for words in (WARNING, "task act does not", *WHY[how]):
            assert words in log
        first = own_book.start_holder("a")
        others = [own_book.send("act", "a", n) for n in (1, 2)]
        assert own_book.value(own_book.send("act", "b", 7)) == 7, "a slot is left"
        never(lambda: len(own_book.starts("a")) > 1, during=0.5)
        own_book.open("a-0")
        assert [own_book.value(r) for r in (first, *others)] == [0, 1, 2]
        more = [own_book.send("act", "a", n, hold=0.02) for n in range(3, 12)]
        assert [own_book.value(r) for r in more] == list(range(3, 12))
        assert own_book.peak("a") == 1
        assert all(start["held"] and start["lock"] == "k:a" for start in own_book.starts("a"))
        assert not any(start["leaks"] for start in own_book.starts())
        own_book.await_free("a")
        assert worker.is_running


def test_policies_work_without_hooks_in_the_main_process(own_book):
    """fail, skip and lock_wait_timeout end the task as declared; no task runs without the lock."""
    with broken(own_book, "own", concurrency=4):
        first = own_book.start_holder("a")
        ends = {
            task: own_book.outcome(own_book.send(task, "a", 1))
            for task in ("act_fail", "act_skip", "act_patient")
        }
        own_book.open("a-0")
        assert own_book.value(first) == 0
        assert {task: state for task, (state, _) in ends.items()} == {
            "act_fail": states.FAILURE,
            "act_skip": states.REVOKED,
            "act_patient": states.FAILURE,
        }
        assert "LockConflict" in repr(ends["act_fail"][1])
        assert "LockWaitTimeout" in repr(ends["act_patient"][1])
        assert "lock_wait_timeout" in str(ends["act_patient"][1])
        assert own_book.order("a") == [0]
        own_book.await_free("a")


@pytest.mark.full
def test_a_holder_longer_than_its_lease_keeps_its_lock_without_hooks(own_book):
    """The pool renews the lease, and no other task gets the lock."""
    with broken(own_book, "composed", concurrency=2):
        first = own_book.start_holder("a")
        second = own_book.send("act", "a", 1)
        own_book.await_renewal("a")
        own_book.open("a-0")
        assert [own_book.value(first), own_book.value(second)] == [0, 1]
        assert own_book.peak("a") == 1


@pytest.mark.full
def test_without_hooks_the_lock_of_a_killed_child_is_free_within_a_lease(own_book):
    """The main process does not know the lock, so its lease must expire.

    Then the next task runs.
    """
    with broken(own_book, "own", concurrency=2, conf=MORTAL):
        first = own_book.send("act", "a", 0, hold="never")
        own_book.kill_child(own_book.started(first)["pid"])
        second = own_book.send("act", "a", 1)
        assert own_book.value(second) == 1
        assert own_book.peak("a") == 1
        own_book.await_free("a")


@pytest.mark.needs_real_redis("a server that goes away and comes back")
def test_without_hooks_the_pool_applies_the_policy_for_outages(redis_url, make_redis, tmp_path):
    """``retry``: it waits in its slot until Redis is back; ``fail``: it fails; ``run``: it runs."""
    locks = make_redis()
    conf = {"singleton_lock_backend": locks.url}
    with (
        Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book,
        broken(book, "own", concurrency=4) as worker,
    ):
        locks.kill()
        patient = book.send("act", "a", 1)
        state, error = book.outcome(book.send("act_failing", "b", 2))
        assert (state, type(error).__name__) == (states.FAILURE, "BackendUnreachable")
        assert book.value(book.send("act_running", "c", 3)) == 3
        assert not book.starts("c")[0]["held"]
        worker.await_log("act waits in its slot for the lock 'k:a'")
        assert not book.starts("a")
        locks.start()
        assert book.value(patient) == 1
        assert book.starts("a")[0]["held"]


def test_a_request_class_derived_from_LockedRequest_is_accepted(own_book):
    """The remedy in the warning: no warning, and blocked tasks occupy no slot."""
    with broken(own_book, "derived", concurrency=2) as worker:
        assert WARNING not in worker.log()
        first = own_book.start_holder("a")
        rest = [own_book.send("act", "a", n) for n in (1, 2, 3)]
        own_book.await_waiting("a", 3)
        assert own_book.value(own_book.send("act", "b", 7)) == 7
        own_book.open("a-0")
        assert [own_book.value(r) for r in (first, *rest)] == [0, 1, 2, 3]
        assert own_book.order("a") == [0, 1, 2, 3]


def test_a_plain_task_with_a_request_class_derived_from_LockedRequest_can_retry(own_book):
    """A base class of all tasks has the class: plain tasks are retried as before."""
    with broken(own_book, "shared", concurrency=1):  # else RETRY may be stored after SUCCESS
        plain = own_book.app.send_task("integration.changed_celery_app.act_plain", (7,))
        assert own_book.value(plain.id) == 7
        assert own_book.value(own_book.send("act", "a", 1)) == 1


@pytest.mark.full
@pytest.mark.parametrize("how", ["own", "composed", "replaced"])  # "unwrapped" is told the same
def test_a_worker_without_hooks_beside_a_normal_one_loses_and_doubles_nothing(own_book, how):
    """The normal worker parks tasks, then ends: each runs once, one at a time."""
    with own_book.worker(name="whole", concurrency=2):
        first = own_book.start_holder("a")
        parked = [own_book.send("act", "a", n) for n in (1, 2, 3)]
        own_book.await_waiting("a", 3)
        bad = broken(own_book, how, name="broken", concurrency=2).start()
        own_book.open("a-0")
    assert own_book.value(first) == 0
    with own_book.worker(name="again", concurrency=2):
        assert [own_book.value(r) for r in parked] == [1, 2, 3]
        late = [own_book.send("act", "a", n) for n in range(4, 10)]
        assert sorted(own_book.value(r) for r in late) == list(range(4, 10))
        bad.stop()
    assert sorted(own_book.order("a")) == list(range(10))
    assert own_book.peak("a") == 1
    own_book.await_free("a")


@pytest.mark.full
def test_messages_that_no_worker_can_run_are_reported(own_book):
    """An error names their lock. They stay parked, and run when a worker passes its self-test."""
    whole = own_book.worker(name="whole", concurrency=2, conf=MORTAL).start()
    own_book.started(own_book.send("act", "a", 0, hold="never"))
    left = own_book.send("act", "a", 1)
    own_book.await_waiting("a", 1)
    whole.end()  # which leaves its queue and the parked message behind
    for due in own_book.client.scan_iter("csl:{b*}:due"):
        own_book.client.zadd(due, {"k:a": 0}, xx=True)  # as after a long time without a worker
    with broken(own_book, "own", name="broken") as worker:
        worker.await_log("messages are parked for the lock 'k:a'")
        assert "ERROR" in worker.log()
    with own_book.worker(name="again", concurrency=2):
        assert own_book.value(left) == 1
    assert own_book.order("a") == [0, 1]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("how", ["own", "composed"])
def test_T34_a_worker_without_hooks_runs_no_copy_beside_its_original(own_book, how):
    """A republished message runs once, and is no longer parked."""
    holder, first, parked = adrift(own_book)
    own_book.open("a-0")
    own_book.value(first)
    eventually(lambda: own_book.queued("far") >= 1, 15, "the message is with the broker")
    with broken(own_book, how, queues="far", name="broken"):
        assert own_book.value(parked[0]) == 1
        with own_book.worker(queues="far", name="whole"):
            assert own_book.value(own_book.send("act", "a", 5, queue="far")) == 5
    assert own_book.order("a") == [0, 1, 5]
    own_book.await_free("a", 10)
    holder.stop()
