"""Several locks in eager tasks, in observe mode, and in workers without hooks."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from celery import Celery, states

from celery_singleton_lock import (
    Lock,
    LockConflict,
    LockedTask,
    LockReentered,
    current_lock,
    current_locks,
)
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.testing import SingletonLocks, worker_in_thread
from integration.book import Book, only
from support.waiting import eventually, never

# --- eager ----------------------------------------------------------------------------------------


@pytest.fixture
def scene(redis_url, redis_client):
    """An app whose eager tasks take their locks, and what they saw of these."""
    app = Celery("eager", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        singleton_lock_backend=redis_url, singleton_lock_lease=60, singleton_lock_eager=True
    )
    seen = []

    def task(name, **options):
        options = {"lock_keys": ["k:{key}", "k:{n}"], **options}

        def run(self, key, n=0):
            seen.append([each.name for each in self.locks])
            return self.lock.held and self.lock.name == current_lock().name

        return app.task(bind=True, base=LockedTask, name=name, shared=False, **options)(run)

    yield SimpleNamespace(
        app=app, task=task, seen=seen, store=RedisStore(redis_client), client=redis_client
    )
    app.close()


def test_an_eager_task_takes_all_of_its_locks(scene):
    """In order, and gives them back."""
    assert scene.task("both").apply(("b", "a")).get()
    assert scene.seen == [["k:a", "k:b"]]
    assert not any(scene.store.inspect(f"k:{name}").holders for name in "ab")


def test_an_eager_task_that_does_not_get_the_second_lock_keeps_none(scene):
    """lock_on_conflict="fail" names the one that is busy; a task that waits has it in the end."""
    with Lock(scene.client, "k:b", lease=60):
        failed = scene.task("fails", lock_on_conflict="fail").apply(("a", "b"))
        assert isinstance(failed.result, LockConflict)
        assert failed.result.name == "k:b"
        assert not scene.store.inspect("k:a").holders
    with Lock(scene.client, "k:b", lease=60, thread_local=False) as busy:
        waits = threading.Timer(0.2, busy.release)
        waits.start()
        assert scene.task("waits").apply(("a", "b")).get()
        waits.join()
        busy.acquire()


def test_an_eager_task_that_calls_one_of_its_locks_is_refused(scene):
    """Any of them, not only the first."""
    inner = scene.task("inner", lock_keys=None, lock_key="k:{key}")

    def run(key, n):
        return inner.apply((n,)).get(disable_sync_subtasks=False)

    outer = scene.app.task(
        base=LockedTask, name="outer", shared=False, lock_keys=["k:{key}", "k:{n}"]
    )(run)
    with pytest.raises(LockReentered, match="'k:b'"):
        outer.apply(("a", "b")).get()


# --- a worker's pool alone, and relaxed modes -----------------------------------------------------


@pytest.mark.full
@only("prefork")
def test_without_hooks_the_pool_acquires_all_locks(own_book, pool):
    """With a Request class of the user's own: none is skipped, and there is no deadlock."""
    broken = {"app": "integration.changed_celery_app", "env": {"BREAK": "own"}}
    with own_book.worker(pool=pool, concurrency=3, **broken):
        own_book.start_holder("b", 1)
        pairs = [own_book.send("pair", *names) for names in ("ab", "ba", "ab", "ba")]
        never(lambda: own_book.starts(task="pair"), 0.5)
        own_book.open("b-1")
        for pair in pairs:
            own_book.value(pair)
        for start in own_book.starts(task="pair"):
            assert [(name, held) for name, _, held in start["locks"]] == [
                ("k:a", True),
                ("k:b", True),
            ]
        own_book.await_free("a")
        own_book.await_free("b")


@pytest.mark.full
@only("prefork")
def test_observe_mode_records_waits_for_several_locks(own_book, pool):
    """lock_mode="observe": it runs at once, and the report names the lock that was busy."""
    conf = {"singleton_lock_mode": "observe"}
    with own_book.worker(pool=pool, concurrency=3, conf=conf):
        first = own_book.start_holder("b", 1)
        task = own_book.send("pair", "a", "b")
        assert own_book.started(task)["locks"] == []
        own_book.value(task)
        own_book.open("b-1")
        own_book.value(first)
        report = eventually(lambda: own_book.store.observations().locks, 10)
    assert [(lock.name, lock.blocked) for lock in report] == [("k:b", 1)]


# --- Cluster --------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.needs_real_redis("a Cluster")
def test_locks_of_a_task_may_live_on_different_masters(
    redis_url, redis_cluster, cluster_client, tmp_path
):
    """Each lock is a script of its own: kept while the task is parked at the other, handed on."""
    conf = {"singleton_lock_backend": redis_cluster.url, "singleton_lock_lease": 10.0}
    with Book(redis_url, tmp_path, conf=conf) as book, book.worker(concurrency=3):
        book.store = ClusterStore(cluster_client)
        with Lock(book.store, "k:b", lease=60):
            first = book.send("pair", "a", "b")
            book.await_waiting("b", 1)
            eventually(lambda: [each.task_id for each in book.view("a").holders] == [first])
        sent = [book.send("pair", *names, hold=0.01) for names in ("ba", "cd", "ef", "fa", "db")]
        for task in (first, *sent):
            book.value(task)
        for name in "abcdef":
            assert book.peak(name) <= 1
            book.await_free(name)


# --- memory ---------------------------------------------------------------------------------------


def test_locks_in_memory_keep_the_first_while_the_task_is_parked_at_the_second():
    """The pytest plugin's assertions hold for several locks as for one."""
    app = Celery("several", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_backend = "memory://several"
    seen = []

    @app.task(base=LockedTask, shared=False, name="pair", lock_keys=["k:{a}", "k:{b}"])
    def pair(a, b):
        seen.append([lock.name for lock in current_locks()])

    with SingletonLocks(app) as locks, worker_in_thread(app):
        with locks.hold("k:2"):
            result = pair.delay(2, 1)
            locks.assert_parked(result, lock="k:2")
            assert [holder.task_id for holder in locks.holders("k:1")] == [result.id]
            assert not seen
        assert result.get(timeout=60) is None
        assert result.state == states.SUCCESS
        locks.assert_free("k:1")
        locks.assert_free("k:2")
    assert seen == [["k:1", "k:2"]]
    app.close()
