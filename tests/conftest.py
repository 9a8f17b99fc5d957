"""Fixtures that every part of the suite uses: a Redis, and the ends of what tests have started."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from celery_singleton_lock.demo.redis_provider import EmbeddedRedisError, Provider, find_provider
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.worker import message_stage
from support.ci import FailuresAtOnce, in_ci, skip_or_fail
from support.rabbitmq import RabbitMQ, VirtualHost, find_server
from support.redis_cluster import RedisCluster
from support.variants import Shard, left_out, words_of_no_test
from support.workers import CeleryWorker

# Each module is compiled once, not by each of some hundreds of processes, as where this is set.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ[message_stage.STRICT] = "1"  # here, and in all workers that tests start
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # an example may take seconds on a busy machine
PROVIDER = "CSL_TEST_REDIS"  # e.g. CSL_TEST_REDIS=fakeredis pytest: that kind and no other


def pytest_addoption(parser):
    """Offer what a run may play besides; here, since pytest asks no folder below in time."""
    parser.addoption("--foreign", action="store_true", help="run tests/foreign as well")
    parser.addoption("--full", action="store_true", help="play all pools, brokers and stores")
    parser.addoption(
        "--shard", metavar="K/N", help="with --full: all variants of one in N files, e.g. 2/3"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Print failures at once in CI."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if in_ci() and terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from some thousands of tests, which stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture
def full(request) -> bool:
    """Whether this run plays all of the test: with a shard, if the test's file is in it."""
    shard = _shard(request.config)
    return request.config.getoption("full") and (shard is None or shard.contains(request.node))


@pytest.fixture(scope="session")
def redis_provider() -> Provider:
    """The Redis of this run."""
    try:
        return find_provider(os.environ.get(PROVIDER) or None)
    except EmbeddedRedisError as error:
        skip_or_fail(str(error))
        raise


@pytest.fixture(scope="session")
def redis_server(redis_provider) -> Iterator[RedisServer]:
    """One server for all tests of the run; a test that hurts its server takes `make_redis`."""
    with RedisServer(redis_provider) as server:
        yield server


@pytest.fixture
def redis_url(redis_server) -> str:
    """URL of the shared server, empty."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def redis_client(redis_server, redis_url):
    """A client of the shared server, empty; answers are bytes."""
    with redis_server.client(decode_responses=False) as client:
        yield client


@pytest.fixture
def make_redis(redis_provider) -> Iterator[Callable[..., RedisServer]]:
    """Start private servers: ``make_redis("--maxmemory", "5mb")``. They end with the test."""
    with contextlib.ExitStack() as servers:

        def make(*args: str, **options) -> RedisServer:
            if not redis_provider.is_real and (args or options.get("password")):
                skip_or_fail(f"{redis_provider.kind} takes no server arguments")
            return servers.enter_context(RedisServer(redis_provider, args=args, **options))

        yield make


@pytest.fixture(scope="session")
def redis_cluster(redis_provider) -> Iterator[RedisCluster]:
    """One Cluster of three masters for all tests of the run that leave it as it is."""
    if not redis_provider.is_real:
        skip_or_fail(f"a Cluster needs a real Redis, and this run has {redis_provider}")
    with RedisCluster(redis_provider) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def replicated_cluster(redis_provider) -> Iterator[RedisCluster]:
    """A Cluster whose masters have a replica each; tests may let the two swap places."""
    if not redis_provider.is_real:
        skip_or_fail(f"a Cluster needs a real Redis, and this run has {redis_provider}")
    with RedisCluster(redis_provider, replicas=1) as cluster:
        yield cluster


@pytest.fixture
def cluster_client(redis_cluster):
    """A client of the shared Cluster, empty; answers are bytes."""
    with contextlib.closing(redis_cluster.client()) as client:
        redis_cluster.flush(client)
        yield client


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory) -> Iterator[RabbitMQ]:
    """The RabbitMQ of this run; its processes share one."""
    if find_server() is None:
        skip_or_fail("no RabbitMQ on this machine: apt-get install rabbitmq-server")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with RabbitMQ(shared / "rabbit") as server:
        yield server


@pytest.fixture
def rabbit_vhost(rabbit) -> Iterator[VirtualHost]:
    """A virtual host that this test has for itself."""
    with rabbit.vhost() as vhost:
        yield vhost


@pytest.fixture
def rabbit_url(rabbit_vhost) -> str:
    """URL of a RabbitMQ, empty."""
    return rabbit_vhost.url


@pytest.fixture
def needs_real_redis(redis_provider) -> None:
    """Ask for this, or mark with it, what fakeredis cannot show."""
    if not redis_provider.is_real:
        skip_or_fail(f"needs a real Redis, and this run has {redis_provider}")


@pytest.fixture(autouse=True)
def _needs_real_redis_mark(request) -> None:
    if request.node.get_closest_marker("needs_real_redis"):
        request.getfixturevalue("needs_real_redis")


@pytest.fixture(autouse=True)
def _no_earlier_test_is_heard(request) -> Iterator[None]:
    """Keep what the threads of earlier tests log out of ``caplog``; a watchdog may log a loss."""
    if "caplog" not in request.fixturenames:
        yield
        return
    handler = request.getfixturevalue("caplog").handler
    earlier = {*threading.enumerate()} - {threading.current_thread()}

    def is_of_this_test(_record: logging.LogRecord) -> bool:
        return threading.current_thread() not in earlier

    handler.addFilter(is_of_this_test)
    yield
    handler.removeFilter(is_of_this_test)


@pytest.fixture(autouse=True)
def _no_worker_stays() -> Iterator[None]:
    """End all workers that the test has started, with everything below them."""
    yield
    while CeleryWorker.started:
        CeleryWorker.started.pop().forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show the workers' logs with a failure."""
    report = yield
    if report.failed:
        for worker in CeleryWorker.started:
            report.sections.append((f"log of {worker!r}", worker.log_tail()))
    return report


LONGEST = (
    *("test_pools", "test_store_failures", "test_brokers", "test_lock", "test_store"),
    *("test_adrift", "test_cluster", "test_lease_watchdog"),
    *("chaos", "property", "integration", "contract"),
)
"""The longest files, and folders of such: they begin, so that no process ends alone with one."""


def pytest_collection_modifyitems(config, items):
    """Begin with the longest; deselect what this run does not play, unless a test is named."""
    items.sort(key=lambda item: _rank(item.path))
    if any("::" in argument for argument in config.args):
        return
    if unknown := words_of_no_test(items):
        raise pytest.UsageError("\n".join(unknown))
    ids = left_out(items, full=config.getoption("full"), shard=_shard(config))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in ids])
    items[:] = [item for item in items if item.nodeid not in ids]


def _shard(config) -> Shard | None:
    text = config.getoption("shard")
    if text is None:
        return None
    if not config.getoption("full"):
        raise pytest.UsageError(f"--shard {text} is a part of the full run: add --full")
    try:
        return Shard.of(text)
    except ValueError:
        raise pytest.UsageError(f"--shard {text}: write K/N, such as 2/3") from None


def _rank(path: Path) -> int:
    ranks = (LONGEST.index(name) for name in (path.stem, path.parent.name) if name in LONGEST)
    return next(ranks, len(LONGEST))
