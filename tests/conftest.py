"""Fixtures that every part of the suite uses: a Redis, and the ends of what tests have started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from celery_singleton_lock.demo.redis_server import EmbeddedRedisError, Provider, RedisServer, find_provider
from support.ci import skip_or_fail
from support.rabbitmq import RabbitMQ, VirtualHost, find_server
from support.redis_cluster import RedisCluster
from support.waiting import Late
from support.workers import CeleryWorker

PROVIDER = "CSL_TEST_REDIS"  # e.g. CSL_TEST_REDIS=fakeredis pytest: that kind and no other


def pytest_addoption(parser):
    """Offer the tests of other projects; here, since pytest asks no folder below in time."""
    parser.addoption("--foreign", action="store_true", help="run tests/foreign as well")


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
    """One of which each master has a replica; tests may let the two swap places."""
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
def _no_worker_stays() -> Iterator[None]:
    """End all workers that the test has started, with everything below them."""
    yield
    while CeleryWorker.started:
        CeleryWorker.started.pop().forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show the workers' logs with a failure, and note whether it is one of time."""
    report = yield
    report.late = bool(report.failed and call.excinfo and call.excinfo.errisinstance(Late))
    if report.failed:
        for worker in CeleryWorker.started:
            report.sections.append((f"log of {worker!r}", worker.log_tail()))
    return report


PLAYS = 3
"""How often a test is played, at most, of which the only failure is that it was late."""

LATE = "late"


def pytest_runtest_protocol(item, nextitem):
    """Play a test; again, if it was late, and nothing else: see `support.waiting.in_time`."""
    about = {"nodeid": item.nodeid, "location": item.location}
    item.ihook.pytest_runtest_logstart(**about)
    late = []
    for _ in range(PLAYS):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        found = [report.longrepr.reprcrash.message for report in reports if report.late]
        if not found or any(report.failed and not report.late for report in reports):
            break
        late += found
    for report in reports:
        report.user_properties += [(LATE, text.partition("Late: ")[2]) for text in late]
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(**about)
    return True


def pytest_terminal_summary(terminalreporter):
    """Tell which tests were in time only when they were played again."""
    passed = terminalreporter.getreports("passed")
    late = {
        report.nodeid: [text for name, text in report.user_properties if name == LATE]
        for report in passed
        if report.when == "call"
    }
    late = {test: texts for test, texts in late.items() if texts}
    if late:
        terminalreporter.section("in time when played again")
        for test, texts in late.items():
            terminalreporter.line(f"LATE {test}: {'; '.join(texts)}")


FULL = "CSL_TEST_FULL"  # CSL_TEST_FULL=1 pytest: also the second pool or queue type of slow scenes

ONE_POOL = frozenset(
    {
        "test_brokers",
        "test_events",
        "test_rabbitmq",
        "test_redelivery",
        "test_outages",
        "test_sentinel",
    }
)
"""Files that play scenes of 10 s and more: the usual run leaves their threads to the full one."""


LONGEST = (
    *("test_pools", "test_brokers", "test_lock", "test_store"),
    *("chaos", "property", "integration", "contract"),
)
"""The longest files, and folders of such: they begin, so that no process ends alone with one."""


def pytest_collection_modifyitems(config, items):
    """Begin with the longest; leave out what only the full run plays (pytest: deselected)."""
    items.sort(key=lambda item: _rank(item.path))
    if os.environ.get(FULL):
        return
    left = [item for item in items if _for_the_full_run(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def _rank(path: Path) -> int:
    ranks = (LONGEST.index(name) for name in (path.stem, path.parent.name) if name in LONGEST)
    return next(ranks, len(LONGEST))


def _for_the_full_run(item) -> bool:
    variants = {word for mark in item.iter_markers("full_run_plays") for word in mark.args}
    if item.path.stem in ONE_POOL:
        variants.add("threads")
    return any(variant in item.name for variant in variants)
