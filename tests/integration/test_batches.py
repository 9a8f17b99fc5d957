"""Tasks of celery-batches that are LockedTasks: each batch is one holder of the lock."""

from __future__ import annotations

import json
import os
import signal
from importlib import import_module

import pytest
from celery import chord, states

from celery_singleton_lock import ConfigurationError, Lock
from celery_singleton_lock.config.call_options import HEADER
from support.waiting import eventually
from support.workers import QUICK, CeleryWorker

pytest.importorskip("celery_batches")

APP = "integration.batches_app"


@pytest.fixture
def app(own_book, monkeypatch):
    """The app of the batches, which sends to the shared Redis."""
    monkeypatch.setenv("CELERY_BROKER_URL", own_book.url)
    made = import_module(APP).app
    made.conf.update(broker_url=own_book.url, result_backend=own_book.url)
    made.backend.on_task_call = lambda *_: None
    yield made
    made.close()


@pytest.fixture(params=["prefork", "threads"])
def pool(request):
    """The pool of the test's workers."""
    return request.param


def worker(own_book, pool="prefork", **options):
    """Return a worker of the batches, not started."""
    return CeleryWorker(APP, own_book.url, pool=pool, args=QUICK, **options)


def runs(book):
    """Return the batches that have begun, in order."""
    return [json.loads(run) for run in book.client.lrange("runs", 0, -1)]


def send(app, task, count=2, *, queue="celery", **kwargs):
    """Send messages; return their ids."""
    return [app.tasks[task].apply_async((n,), kwargs, queue=queue).id for n in range(count)]


def ended(book, results):
    """Wait for the ends of messages; return state and result of each."""
    return [book.outcome(result) for result in results]


def test_batches_of_one_lock_never_overlap(own_book, app, pool):
    """In two workers; each message is in one batch, which sees its lock."""
    with worker(own_book, pool, queues="one"), worker(own_book, pool, queues="two"):
        sent = send(app, "park", 12, queue="one") + send(app, "park", 12, queue="two")
        assert {state for state, _ in ended(own_book, sent)} == {states.SUCCESS}
        found = runs(own_book)
    assert sorted(each for run in found for each in run["ids"]) == sorted(sent)
    assert {run["inside"] for run in found} == {1}
    assert {(run["lock"], run["held"]) for run in found} == {("batch", True)}
    assert {tuple(run["names"]) for run in found} == {("batch",)}
    assert len({run["pid"] for run in found}) > 1
    assert not own_book.store.inspect("batch").holders


def test_batches_do_not_overlap_after_the_pool_was_restarted(own_book, app, pool):
    """``celery control pool_restart`` gave celery-batches the pool that takes no locks."""
    conf = {"conf": {"worker_pool_restarts": True}}
    with worker(own_book, pool, env={"BATCH": json.dumps(conf)}) as one:
        with Lock(own_book.client, "batch"):
            told = app.control.pool_restart(destination=[one.node_name], reply=True, timeout=20)
            assert "ok" in str(told)
            sent = send(app, "park", 4)
            eventually(lambda: own_book.store.inspect("batch").waiting or runs(own_book))
            assert runs(own_book) == []
        assert {state for state, _ in ended(own_book, sent)} == {states.SUCCESS}
        assert {run["lock"] for run in runs(own_book)} == {"batch"}


def test_skip_fail_and_a_time_out_reach_each_message(own_book, app, pool):
    """Also those of a chord; the worker logs each, and none has run."""
    with Lock(own_book.client, "batch"), worker(own_book, pool) as one:
        skipped = ended(own_book, send(app, "skip"))
        failed = ended(own_book, send(app, "fail"))
        late = ended(own_book, send(app, "patient"))
        whole = chord([app.tasks["skip"].s(n) for n in range(2)])(app.tasks["plain"].s())
        assert own_book.outcome(whole.id)[0] == states.FAILURE
        assert [state for state, _ in skipped] == [states.REVOKED] * 2
        assert all("lock 'batch' is held by pid" in str(why) for _, why in skipped)
        assert [state for state, _ in failed + late] == [states.FAILURE] * 4
        assert all("LockConflict" in repr(error) for _, error in failed)
        assert all("LockWaitTimeout" in repr(error) for _, error in late)
        eventually(lambda: one.log().count(" was skipped: ") >= 4)
        assert "Task park" not in one.log()
        assert not runs(own_book)
        told = eventually(lambda: len(t := own_book.client.lrange("refused", 0, -1)) == 8 and t)
        assert sorted(told) == sorted([b"skip"] * 4 + [b"fail"] * 2 + [b"timeout"] * 2)


def test_a_batch_of_a_killed_process_frees_the_lock_when_its_lease_ends(own_book, app):
    """Another worker's batch runs then, and not before."""
    short = {"concurrency": 1, "env": {"BATCH": json.dumps({"lock_lease": 3})}}
    with worker(own_book, **short), worker(own_book, **short):
        send(app, "park", 1, hold="never")
        (first,) = eventually(lambda: runs(own_book))
        now = own_book.store.time()
        (holder,) = own_book.store.inspect("batch").holders
        os.kill(first["pid"], signal.SIGKILL)
        after = send(app, "park", 4)
        assert {state for state, _ in ended(own_book, after)} == {states.SUCCESS}
        assert min(run["at"] for run in runs(own_book)[1:]) >= now + holder.expires_in - 0.01


def test_the_lock_of_a_long_batch_is_renewed(own_book, app, pool):
    """No other batch runs meanwhile."""
    with worker(own_book, pool):
        sent = send(app, "park", hold="gate")
        eventually(lambda: runs(own_book))
        behind = send(app, "park")
        own_book.await_renewal("batch", lock="{}")
        assert len(runs(own_book)) == 1
        own_book.client.set("gate", 1)
        assert {state for state, _ in ended(own_book, sent + behind)} == {states.SUCCESS}


def test_a_batch_takes_several_locks_and_none_in_the_other_modes(own_book, app, pool):
    """Observe and off run beside a holder."""
    with worker(own_book, pool) as one:
        assert {state for state, _ in ended(own_book, send(app, "both"))} == {states.SUCCESS}
        assert runs(own_book)[-1]["names"] == ["batch", "other"]
        with Lock(own_book.client, "batch"):
            for mode in ("observe", "off"):
                assert {state for state, _ in ended(own_book, send(app, mode))} == {states.SUCCESS}
                assert runs(own_book)[-1]["lock"] == ""
            one.await_log("would have been blocked: lock 'batch'")


def test_one_call_of_a_batch_has_no_lock_options(own_book, app):
    """Refused where it is called; from other senders that message fails, and the others run."""
    with pytest.raises(ConfigurationError, match="under one lock"):
        app.tasks["park"].apply_async((1,), lock_on_conflict="skip")
    with worker(own_book):
        wrong = app.tasks["park"].apply_async((1,), headers={HEADER: {"lock_on_conflict": "skip"}})
        right = app.tasks["park"].apply_async((2,))
        assert own_book.outcome(right.id)[0] == states.SUCCESS
        state, error = own_book.outcome(wrong.id)
        assert state == states.FAILURE
        assert "under one lock" in str(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lock_key": None}, "its name cannot depend on one call. Declare lock_args=[]"),
        ({"lock_key": "a:{requests}"}, "its name cannot depend on one call"),
        ({"lock_on_conflict": "requeue"}, "lock_on_conflict is 'requeue'"),
        ({"lock_max_waiting": 3}, "lock_max_waiting is 3"),
        ({"lock_on_retry": "keep"}, "lock_on_retry is 'keep'"),
        ({"lock_on_lost": "abort"}, "lock_on_lost is 'abort'"),
        ({"lock_hold_for": 5}, "lock_hold_for is 5,"),
    ],
    ids=str,
)
def test_what_a_batch_cannot_have_is_refused_at_worker_start(own_book, options, words):
    """With the task's name and the remedy."""
    one = CeleryWorker(APP, own_book.url, pool="solo", env={"BATCH": json.dumps(options)})
    one.start(wait=False)
    eventually(lambda: one.returncode is not None, 30)
    assert one.returncode != 0
    assert "task park is a task of celery-batches" in one.log()
    assert words in one.log()
    assert "Traceback" not in one.log()


# -- beside a usual task of the same lock ----------------------------------------------------------


def test_a_parked_task_is_not_kept_from_its_slot_for_ever_by_batches(own_book):
    """Batches without a deadline that share its lock are refused: they could keep all slots."""
    one = worker(own_book, env={"BATCH_SHARED": "1"}).start(wait=False)
    eventually(lambda: one.returncode is not None, 30)
    assert one.returncode != 0
    assert "lock_wait_timeout, and shares the lock_key 'batch' with usual" in one.log()
    assert "Traceback" not in one.log()


def test_a_batch_keeps_a_parked_task_from_its_slot_for_lock_wait_timeout_at_most(own_book, app):
    """The worker warns of it; the batch fails then, and the parked task runs."""
    env = {"BATCH_SHARED": "1", "BATCH": json.dumps({"conf": {"singleton_lock_wait_timeout": 3}})}
    with worker(own_book, concurrency=1, env=env) as one:
        assert 'both (a batch waits in its slot) and usual ("park") share the' in one.log()
        first = app.send_task("usual", (1, "gate")).id
        eventually(lambda: own_book.client.llen("usual") == 1)
        parked = app.send_task("usual", (2,)).id
        eventually(lambda: own_book.store.inspect("batch").waiting == 1)
        late = send(app, "park")
        eventually(lambda: (own_book.queued(), own_book.unacked()) == (0, 2), 10, "a batch waits")
        own_book.client.set("gate", 1)
        assert own_book.value(first) == 1
        assert own_book.value(parked) == 2
        assert {state for state, _ in ended(own_book, late)} == {states.FAILURE}
        assert not runs(own_book)
