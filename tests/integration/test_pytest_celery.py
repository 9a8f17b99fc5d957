"""The same tests with pytest-celery's fixtures, on local processes instead of containers.

The lock works in tests with pytest-celery: ``celery_setup`` with a broker, a backend and two
workers, whose containers are killed and restarted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from celery import _state

if os.environ.get("CI", "").lower() not in {"1", "true", "yes"}:
    pytest.importorskip("pytest_celery", reason='pip install ".[test]" brings pytest-celery')

from pytest_celery import (
    CELERY_REDIS_BACKEND,
    CELERY_REDIS_BROKER,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
)

from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.store.redis.sync import RedisStore
from support.local_cluster import LocalRedis, LocalWorker, RedisHandle, WorkerHandle, number_of
from support.waiting import eventually

LEASE = 15.0
TASKS = Path(__file__).with_name("cluster_tasks.py")


class LockSetup(CeleryTestSetup):
    """A setup whose lease ends within a test, and not while a process stands still."""

    @classmethod
    def update_app_config(cls, app):
        app.conf.update(
            singleton_lock_lease=LEASE,
            broker_connection_retry_on_startup=True,
            worker_cancel_long_running_tasks_on_connection_loss=False,
        )


class SecondWorker(LocalWorker):
    """Another worker of the same queue."""

    @classmethod
    def worker_name(cls):
        return "second_worker"


# -- pytest-celery's fixtures, with local processes ------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _django_can_be_looked_at():
    """pytest-celery asks each object for its class, which Django's bare settings refuse."""
    if "django.conf" in sys.modules:
        settings = sys.modules["django.conf"].settings
        if not settings.configured:
            settings.configure()


@pytest.fixture(autouse=True)
def _current_app_stays():
    """The setup's app makes itself the current one; other tests must not find it."""
    before = getattr(_state._tls, "current_app", None)
    yield
    _state._set_current_app(before)


@pytest.fixture(params=[CELERY_REDIS_BROKER])
def celery_broker(request):
    """Only this broker: pytest-celery's default is every one that it knows."""
    broker = request.getfixturevalue(request.param)
    yield broker
    broker.teardown()


@pytest.fixture(params=[CELERY_REDIS_BACKEND])
def celery_backend(request):
    """Only this backend."""
    backend = request.getfixturevalue(request.param)
    yield backend
    backend.teardown()


@pytest.fixture
def default_redis_broker(redis_provider, tmp_path):
    """A Redis process."""
    yield from redis_container("broker", redis_provider, tmp_path)


@pytest.fixture
def default_redis_backend(redis_provider, tmp_path):
    """Another Redis process."""
    yield from redis_container("backend", redis_provider, tmp_path)


def redis_container(name, provider, folder):
    """Start a Redis, and end it with the test."""
    container = LocalRedis(RedisHandle(name, RedisServer(provider), folder))
    container._container.start()
    yield container
    container.teardown()


@pytest.fixture
def default_worker_container_cls():
    return LocalWorker


@pytest.fixture
def default_worker_tasks(default_worker_container_cls):
    """Our tasks. Named, not imported: shared tasks would join every app of this process."""
    spec = importlib.util.spec_from_file_location("cluster_tasks", TASKS)
    return {*default_worker_container_cls.tasks_modules(), importlib.util.module_from_spec(spec)}


@pytest.fixture
def default_worker_container(worker_container, default_worker_container_cls):
    """The first worker process."""
    return worker_container(default_worker_container_cls)


@pytest.fixture
def worker_container(default_worker_env, default_worker_initial_content, tmp_path):
    """Start workers, and end them with the test."""
    made = []

    def make(cls):
        folder = tmp_path / cls.worker_name()
        folder.mkdir()
        handle = WorkerHandle(
            cls.worker_name(),
            command=cls.command(),
            env=default_worker_env,
            content=default_worker_initial_content,
            folder=folder,
        )
        made.append(cls(handle))
        handle.start()
        return made[-1]

    yield make
    for container in made:
        container.teardown()


@pytest.fixture
def celery_worker_cluster(celery_worker, worker_container, celery_setup_app):
    """Two workers, as pytest-celery's guide to clusters does it."""
    second = CeleryTestWorker(worker_container(SecondWorker), app=celery_setup_app)
    cluster = CeleryWorkerCluster(celery_worker, second)
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_setup_cls():
    return LockSetup


# -- what tests ask --------------------------------------------------------------------------------


class Cluster:
    """Sends tasks through a setup, and reads what they did."""

    def __init__(self, setup):
        self.setup = setup
        self.client = setup.backend.container.client
        self.locks = setup.broker.container.client
        self.store = RedisStore(self.locks)

    def send(self, key, n, gate=""):
        return self.setup.app.send_task("cluster.act", (key, n), {"gate": gate})

    def open(self, gate):
        self.client.set(f"gate:{gate}", "open")

    def events(self, key, event=None):
        entries = [json.loads(line) for line in self.client.lrange("journal", 0, -1)]
        return [e for e in entries if e["key"] == key and event in (None, e["e"])]

    def started(self, key, n):
        """Wait for a task's start; return the node on which it runs, and the others."""
        found = eventually(lambda: [e for e in self.events(key, "start") if e["n"] == n], 15)
        workers = list(self.setup.worker_cluster)
        here = next(w for w in workers if w.hostname() == found[0]["on"])
        return here, [w for w in workers if w is not here]

    def await_waiting(self, key, count):
        view = self.store.inspect(f"k:{key}")
        eventually(
            lambda: (v := self.store.inspect(f"k:{key}")).waiting == count and v.bodies >= count,
            10,
            lambda: f"{count} waiting: {view}",
        )

    def await_free(self, key):
        def free():
            view = self.store.inspect(f"k:{key}")
            return not (view.holders or view.waiting or view.adrift or view.bodies)

        eventually(free, 10, lambda: f"{key} free: {self.store.inspect(f'k:{key}')}")

    def close(self):
        self.store.close()
        self.client.close()
        self.locks.close()


@pytest.fixture
def cluster(celery_setup):
    cluster = Cluster(celery_setup)
    yield cluster
    cluster.close()


@pytest.mark.full
def test_the_setup_is_ready_by_every_check_of_pytest_celery(celery_setup):
    """Its tasks, control commands and container states all answer; a worker is what it says."""
    assert celery_setup.ready(ping=True, control=True, docker=True)
    assert len(celery_setup) == 4
    for worker in celery_setup.worker_cluster:
        worker.assert_log_exists("ready.")
        worker.assert_log_exists("locks live in Redis")
        worker.assert_log_does_not_exist("does not pass this worker's dispatcher", timeout=1)
        assert worker.container.env["CELERY_BROKER_URL"] == celery_setup.broker.container.url
        found = worker.get_running_processes_info(["pid"])
        assert {"pid": worker.container._container.worker.pid} in found
    nodes = {
        name for answer in celery_setup.app.control.ping(timeout=20, limit=4) for name in answer
    }
    assert nodes == {worker.hostname() for worker in celery_setup.worker_cluster}


@pytest.mark.full
def test_tasks_of_a_key_run_one_at_a_time_in_order_on_two_workers(cluster):
    """Five are parked behind a held key: no overlap, in order of arrival, with growing fences."""
    first = cluster.send("a", 0, gate="a-0")
    here, others = cluster.started("a", 0)
    rest = []
    for n in range(1, 6):
        rest.append(cluster.send("a", n))
        cluster.await_waiting("a", n)
    free = cluster.send("b", 0)
    assert free.get(timeout=60) == 0, "another key is not held up"
    cluster.open("a-0")
    assert [result.get(timeout=60) for result in (first, *rest)] == list(range(6))
    events = cluster.events("a")
    assert [(e["e"], e["n"]) for e in events] == [
        (what, n) for n in range(6) for what in ("start", "end")
    ]
    fences = [e["fence"] for e in cluster.events("a", "start")]
    assert fences == sorted(set(fences))
    here.assert_log_exists(f"cluster.act[{first.id}] succeeded")
    for other in others:
        other.assert_log_does_not_exist(f"cluster.act[{first.id}] succeeded")
    cluster.await_free("a")


@pytest.mark.full
def test_T7_a_killed_container_is_taken_over_within_a_lease(cluster):
    """Kill -9 of the holder's container: the parked task runs on the other worker, never both."""
    cluster.send("a", 0, gate="never")
    here, (other,) = cluster.started("a", 0)
    parked = cluster.send("a", 1)
    cluster.await_waiting("a", 1)
    here.kill()
    assert here.container.status == "exited"
    assert parked.get(timeout=60) == 1
    assert cluster.started("a", 1)[0] is other
    assert [(e["e"], e["n"]) for e in cluster.events("a")] == [
        ("start", 0), ("start", 1), ("end", 1),
    ]  # fmt: skip
    cluster.await_free("a")
    here.restart()
    assert here.container.status == "running"
    assert cluster.setup.ready(ping=True, control=True, docker=True)


@pytest.mark.full
def test_a_restart_of_every_container_loses_no_parked_task(cluster):
    """Both workers end warmly and come back: what was parked runs, in order, once each."""
    first = cluster.send("a", 0, gate="a-0")
    cluster.started("a", 0)
    parked = []
    for n in (1, 2, 3):
        parked.append(cluster.send("a", n))
        cluster.await_waiting("a", n)
    for worker in cluster.setup.worker_cluster:
        worker.container._container.kill("SIGTERM")  # a warm shutdown: it waits for its task
    cluster.open("a-0")
    assert first.get(timeout=60) == 0
    for worker in cluster.setup.worker_cluster:
        worker.restart()
    assert [result.get(timeout=60) for result in parked] == [1, 2, 3]
    assert [e["n"] for e in cluster.events("a", "start")] == [0, 1, 2, 3]
    cluster.await_free("a")


@pytest.mark.parametrize(
    ("name", "number"), [(None, 9), ("SIGKILL", 9), ("term", 15), (2, 2), ("15", 15)]
)
def test_a_handle_takes_signals_as_docker_does(name, number):
    """A number, a name with or without SIG, or nothing, which means KILL."""
    assert number_of(name) == number
