"""The broker is away while tasks hold locks, wait for them, and are granted them.

The locks are in another Redis, which keeps running.
"""

from __future__ import annotations

import json
import urllib.request
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from kombu import Connection
from kombu.utils.url import parse_url

from celery_singleton_lock import Lock
from celery_singleton_lock.cli.commands import locks
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.worker import publisher
from celery_singleton_lock.worker.message_codec import pack
from integration.book import Book, needs_pool, pools
from integration.brokers import BrokerBook
from support.broker_message import message
from support.proxy import Proxy, free_port
from support.rabbitmq import RabbitMQ
from support.versions import HEARS_AFTER_OUTAGE
from support.waiting import eventually, never

parser = pytest.importorskip("prometheus_client.parser")

LEASE = 15.0
AWAY = 6.0
"""Seconds: longer than a worker waits before it renews a lease."""

pytestmark = pytest.mark.needs_real_redis("a broker that ends and starts again")


@pytest.fixture(params=pools("prefork", "threads", "gevent"))
def pool(request):
    needs_pool(request.param)
    return request.param


@pytest.fixture
def metrics_port():
    """Where the worker of the test serves its metrics."""
    return free_port()


@pytest.fixture
def conf(redis_url, metrics_port):
    """Settings of the test's app."""
    return {
        "singleton_lock_backend": redis_url,
        "singleton_lock_lease": LEASE,
        "singleton_lock_metrics_port": metrics_port,
    }


@pytest.fixture(params=["redis"])
def broker(request):
    """What can be stopped and started, and keeps all that it has confirmed."""
    if request.param == "redis":
        return request.getfixturevalue("make_redis")(
            "--appendonly", "yes", "--appendfsync", "always"
        )
    request.getfixturevalue("rabbit")  # skips where there is none; it is not one to be stopped
    return request.getfixturevalue("own_rabbit")


@pytest.fixture
def own_rabbit(tmp_path):
    """A RabbitMQ that no other test uses."""
    with RabbitMQ(tmp_path / "rabbit") as server:
        yield server


@pytest.fixture
def book(broker, redis_url, tmp_path, conf):
    if isinstance(broker, RabbitMQ):
        with (
            broker.vhost() as vhost,
            BrokerBook("classic", redis_url, tmp_path, vhost=vhost, conf=conf) as book,
        ):
            yield book
        return
    with Book(broker.url, tmp_path, backend=redis_url, lock_url=redis_url, conf=conf) as book:
        yield book


def sample(port, name):
    """Return the value of a series of the tasks ``act``; None if there is none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
    found = [each for family in families for each in family.samples]
    return next((e.value for e in found if e.name == name and e.labels == {"task": "act"}), None)


@pytest.mark.full
@pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)
def test_a_task_that_ends_while_the_broker_is_away_has_not_lost_its_lock(
    book, broker, pool, metrics_port
):
    """Its end is heard of when the broker is back: no loss is logged, counted or told.

    And the time for which it held its lock ends with the task, not with the outage.
    """
    if pool == "prefork" and not HEARS_AFTER_OUTAGE:
        pytest.skip("Celery 5.4 and 5.5 forget what runs in prefork when the broker is lost")
    if pool == "gevent":
        pytest.skip("kombu's sleep between two attempts stops all greenlets: docs/pools.md")
    with book.worker(pool=pool, args=("-E",)) as worker:
        first = book.start_holder("a", 1)
        eventually(lambda: book.unacked() == 0, 5, "acknowledged")
        broker.stop()
        worker.await_log("Connection to broker lost", 10)
        book.open("a-1")
        book.await_free("a")
        never(lambda: "was lost" in worker.log(), AWAY)
        broker.start()
        assert book.value(first, 30) == 1
        assert eventually(lambda: sample(metrics_port, "celery_lock_hold_seconds_count"), 30) == 1
        held = sample(metrics_port, "celery_lock_hold_seconds_sum")
        ((began, ended, _),) = book.runs("a")
        assert ended - began - 0.1 < held < ended - began + AWAY
        assert not sample(metrics_port, "celery_lock_lost_total")
        never(lambda: "was lost" in worker.log(), 1.5)


@pytest.mark.full
def test_a_grant_goes_to_a_worker_that_has_its_broker(book, broker, pool):
    """One whose main loop looks for the broker begins nothing; a store plays the other worker."""
    lock = Lock(book.client, "k:a", lease=60, thread_local=False)
    lock.acquire()
    with book.worker(pool=pool) as cut_off:
        parked = book.send("act", "a", 1)
        book.await_waiting("a", 1)
        book.await_consumers(cut_off)
        store, (route,) = book.store, book.client.keys("csl:fleet:route:*")
        realm, queue = route.decode().split(":")[-2:]
        store.worker_heartbeat("other#1", realm, [queue], 120.0, 1)
        broker.stop()
        cut_off.await_log("Connection to broker lost", 10)
        eventually(lambda: book.workers_with_a_free_slot() == ["other#1"], message="it gets none")
        lock.release()
        delivery = eventually(lambda: store.receive("other#1", 0.5), 5)
        assert delivery.verdict == "granted"
        store.leave("other#1", realm, [queue])
        broker.start()
        assert book.value(parked, 30) == 1
        book.await_free("a")
        assert len(book.starts("a")) == 1


@pytest.mark.full
@pytest.mark.timeout(120)
def test_commands_do_not_wait_for_ever_for_a_broker_that_stands_still(book, broker):
    """A Redis broker that was stopped, or is cut off, accepts connections and answers nothing.

    Celery waits for it without an end. The settings of the app are restored, since Django's
    ``call_command`` runs a command in the process of another program.
    """
    given = book.app.conf.broker_transport_options
    RedisAdminStore(book.client).pause("k:a", Operator("jane"))
    broker.pause()
    try:
        found = {
            each["name"]: each["health"]
            for each in json.loads(ran(book, "doctor", "--json", code=1))
        }
        ran(book, "resume", "k:a")
    finally:
        broker.resume()
    assert found["connection"] == "ok"
    assert found["broker"] == "fail"
    assert book.app.conf.broker_transport_options == given


def ran(book, *args, code=0):
    """Return what a command has printed."""
    result = CliRunner().invoke(locks, list(args), obj=SimpleNamespace(app=book.app))
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.mark.full
def test_a_rabbitmq_that_stands_still_ends_a_publish_with_an_error(rabbit_url, monkeypatch):
    """``locks drain`` did not end: who closes a connection in good order waits for its answer."""
    monkeypatch.setattr(publisher, "CONFIRMED_WITHIN", 1.0)
    there = parse_url(rabbit_url)
    with Connection(rabbit_url) as connection:
        connection.SimpleQueue("q").close()  # declares it
    with Proxy(there["port"]) as proxy:
        here = {**there, "port": proxy.port, "transport": "pyamqp"}
        sender = publisher.Publisher(lambda: Connection(**here, connect_timeout=1))
        sender.send_back(pack(message()), "q", "x/0/0", 12, "t.1")
        proxy.stalled = True
        with pytest.raises(OSError, match="timed out"):
            sender.send_back(pack(message()), "q", "x/0/0", 12, "t.1")
        proxy.stalled = False
        sender.send_back(pack(message()), "q", "x/0/0", 12, "t.1")
        sender.close()
