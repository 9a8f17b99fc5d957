"""Tasks whose locks are on five servers. Two servers are killed, then a third."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest
from celery import Celery
from celery.exceptions import TimeoutError as NoResult

from celery_singleton_lock import LockedTask
from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.store.quorum.sync import QuorumStore
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.startup_checks_redis import check_backend
from support.versions import RESTORES_SOON
from support.waiting import eventually
from support.workers import CeleryWorker

pytestmark = [pytest.mark.needs_real_redis("five servers")]


@pytest.fixture
def servers(redis_provider):
    with ExitStack() as stack:
        servers = [stack.enter_context(RedisServer(redis_provider)) for _ in range(5)]
        with closing(QuorumStore([server.url for server in servers], timeout=5.0)) as store:
            store.admit()
        yield servers


@pytest.fixture
def make_worker(servers, redis_url):
    """Make workers: ``make_worker(QUORUM_POLICY="wait")``."""

    def make(urls=None, **env):
        env["QUORUM_SERVERS"] = " ".join(urls or [server.url for server in servers])
        return CeleryWorker(
            "integration.quorum_app", redis_url, backend=redis_url, env=env,
            concurrency=2,
        )  # fmt: skip

    return make


@pytest.fixture
def send(redis_url, tmp_path):
    """Send tasks for a number: ``send("a", 3)``."""
    with Celery("client", broker=redis_url, backend=redis_url, set_as_current=False) as app:

        def send(name, count=1):
            arguments = (name, str(tmp_path))
            return [
                app.send_task("integration.quorum_app.add_one", arguments) for _ in range(count)
            ]

        yield send


@pytest.mark.full
def test_no_task_is_lost_or_doubled_when_servers_die(servers, make_worker, send, tmp_path, full):
    """Two of five die in the middle: all run, one at a time. With three dead: none, until back.

    On two workers; each addition to the number is there, so no two were at it at once.
    """
    many = 200 if full else 24
    with make_worker() as worker, make_worker() as other:
        results = send("a", many)
        number = tmp_path / "a"
        eventually(lambda: number.exists() and int(number.read_text() or 0) >= 4, 30)
        for server in servers[:2]:
            server.kill()
        assert sorted(result.get(timeout=60) for result in results) == list(range(1, many + 1))
        fences = [int(line) for line in (tmp_path / "a.fences").read_text().split()]
        assert fences == sorted(set(fences))
        assert len(fences) == many
        servers[2].kill()
        late = send("a")[0]
        eventually(lambda: "did not answer within" in worker.log() + other.log(), 20)
        with pytest.raises(NoResult):
            late.get(timeout=1)
        servers[2].restart(keep_data=False)  # votes again after one longest lease
        assert late.get(timeout=120) == many + 1


def test_tasks_that_wait_in_their_slots_run_one_at_a_time(make_worker, send, tmp_path):
    """lock_on_conflict="wait" on a quorum: in the queue of the lock's coordinator."""
    with make_worker(QUORUM_POLICY="wait"):
        results = send("a", 8)
        assert sorted(result.get(timeout=60) for result in results) == list(range(1, 9))


@pytest.mark.skipif(not RESTORES_SOON, reason="a copy comes after 100 s")
@pytest.mark.full("requeue")
@pytest.mark.parametrize("policy", ["wait", "requeue"])
def test_t14_a_redelivered_copy_does_not_run_on_a_quorum(
    make_worker, send, redis_client, tmp_path, policy
):
    """Nothing is parked there: the copy goes back to the broker until the first has ended."""
    with make_worker(QUORUM_POLICY=policy, QUORUM_VISIBLE="1", QUORUM_GATE="go") as worker:
        result = send("a")[0]
        eventually(lambda: worker.log().count(f"[{result.id}] received") > 1)
        (tmp_path / "go").touch()
        assert result.get(timeout=60) == 1
        eventually(lambda: not (redis_client.hlen("unacked") or redis_client.llen("celery")), 20)
        assert (tmp_path / "a").read_text() == "1"


def test_a_worker_logs_which_promises_a_quorum_cannot_keep(servers, make_worker):
    """Parked messages; and that one server was given by two names."""
    worker = make_worker(QUORUM_POLICY="park")
    worker.start(wait=False)
    eventually(lambda: 'Use "requeue", which returns them to the broker' in worker.log(), 30)
    aliases = [servers[0].url, servers[1].url, servers[0].url.replace("127.0.0.1", "localhost")]
    worker = make_worker(aliases)
    worker.start(wait=False)
    eventually(lambda: "Servers 1 and 3 of the quorum are one server" in worker.log(), 30)


def test_an_evicting_server_is_refused(servers):
    """It would throw votes away when it is full, and vote again."""
    with servers[3].client() as client:
        client.config_set("maxmemory-policy", "volatile-lru")
    urls = [server.url for server in servers]
    with Celery("shop", set_as_current=False) as app:
        app.conf.update(singleton_lock_backend=urls, singleton_lock_on_conflict="requeue")

        @app.task(base=LockedTask, name="settle", shared=False)
        def settle():
            """Never runs."""

        app.finalize()
        with pytest.raises(BackendRefused, match="volatile-lru"):
            check_backend(install(app), ServerClock())


def test_a_list_of_servers_is_checked():
    """Number, kind and distinctness; the errors say what to give."""

    def refused(*urls):
        with pytest.raises(ValueError, match="singleton_lock_backend") as caught:
            parse_settings({"singleton_lock_backend": list(urls)}.get)
        return str(caught.value)

    assert "a quorum needs an odd number of servers, three or more" in refused(
        "redis://a", "redis://b"
    )
    assert "is listed twice" in refused("redis://a", "redis://b", "redis://a/1")
    assert "is a Sentinel" in refused("redis://a", "redis://b", "sentinel://c")
    assert "must be a URL" in refused("redis://a", "redis://b", 3)
