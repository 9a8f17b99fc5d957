"""Fixtures of the integration tests."""

from __future__ import annotations

import gc
import itertools
import warnings
from contextlib import ExitStack

import pytest
from celery import Celery

from celery_singleton_lock import Lock
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.testing import clock_control
from celery_singleton_lock.testing.assertions import LockAssertions
from integration.book import SAFE_LEASE, Book, needs_pool, pools, standing
from integration.brokers import BROKERS, BrokerBook
from support.versions import QUORUM_QUEUES
from support.waiting import PATIENCE

_keys = itertools.count(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if "/integration/" in str(item.path):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="module", params=pools("prefork", "threads"))
def pool(request):
    """The pool of the module's worker; ``@only("prefork")`` narrows it."""
    needs_pool(request.param)
    return request.param


@pytest.fixture(scope="module")
def book_conf():
    """Settings of the module's book; a module may have its own."""
    return {}


@pytest.fixture(scope="module")
def lease(request):
    """Seconds of the leases in all books; a module may have its own, or name it as ``LEASE``.

    A short lease ends while a process stands still, so that the next task starts beside it. Where
    no test waits for the end of a lease, it may be long (:data:`integration.book.LONG_LEASE`).
    """
    return getattr(request.module, "LEASE", SAFE_LEASE)


@pytest.fixture(scope="module")
def book(pool, lease, book_conf, redis_provider, tmp_path_factory):
    """A task book on a Redis of its own, for one worker; each test uses keys of its own."""
    conf = {"singleton_lock_lease": lease, **book_conf}
    with (
        RedisServer(redis_provider) as server,
        Book(server.url, tmp_path_factory.mktemp("book"), conf=conf) as book,
    ):
        yield book


@pytest.fixture(scope="module")
def worker_options():
    """What the module's worker is started with; a module may have its own."""
    return {}


@pytest.fixture(scope="module")
def worker(book, pool, worker_options):
    """A worker for all tests of a module; its children may be killed, it may not."""
    with standing(book.worker(pool=pool, **{"concurrency": 4, **worker_options})) as worker:
        yield worker


@pytest.fixture
def key():
    """A key that no other test uses."""
    return f"key{next(_keys)}"


@pytest.fixture
def locked(book, worker, key):
    """The lock of the test's key, which another client holds: tasks are blocked in the pool."""
    lock = Lock(book.client, f"k:{key}", lease=60, thread_local=False)
    lock.acquire()
    yield lock
    if lock.held:
        lock.release()


@pytest.fixture
def sending_app(redis_url):
    """An app without tasks on the shared Redis, emptied: it sends tasks by their names."""
    with Celery("client", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        yield app
        app.backend.result_consumer.stop()  # else its subscription stays open
        app.backend.client.connection_pool.disconnect()
    del app
    with warnings.catch_warnings():  # an error that get() has raised keeps sockets of the client
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def own_book(redis_url, tmp_path, lease):
    """The task book on the shared Redis, emptied, for tests that start workers of their own."""
    with Book(redis_url, tmp_path, conf={"singleton_lock_lease": lease}) as book:
        yield book


@pytest.fixture(autouse=True)
def _patient_assertions(monkeypatch):
    """Let the assertions for users' tests wait as long as :func:`support.waiting.eventually`."""
    for name in ("assert_parked", "assert_skipped", "assert_ran_alone", "assert_free"):
        defaults = getattr(LockAssertions, name).__kwdefaults__
        monkeypatch.setitem(defaults, "timeout", PATIENCE)
    monkeypatch.setattr(clock_control, "PATIENCE", PATIENCE)


@pytest.fixture(params=BROKERS)
def kind(request):
    """The broker, and the type of its queues; ``@only_kind("redis")`` narrows it."""
    return request.param


@pytest.fixture
def make_book(kind, redis_url, tmp_path, lease, request):
    """Make task books on the broker of this test: ``make_book("one", "two", conf={...})``."""
    if kind == "quorum" and not QUORUM_QUEUES:
        pytest.skip("Celery 5.4 cannot consume quorum queues")
    with ExitStack() as books:

        def make(*names: str, **options) -> BrokerBook:
            vhost = None if kind == "redis" else request.getfixturevalue("rabbit_vhost")
            names = names or ("celery",)
            options["conf"] = {"singleton_lock_lease": lease, **options.get("conf", {})}
            folder = options.pop("folder", tmp_path)
            book = BrokerBook(kind, redis_url, folder, vhost=vhost, names=names, **options)
            return books.enter_context(book)

        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show the logs of standing workers too, and the journal."""
    report = yield
    if report.failed:
        for worker in standing.workers:
            report.sections.append((f"log of {worker!r}", worker.log_tail()))
        for name in ("book", "own_book"):
            found = getattr(item, "funcargs", {}).get(name)
            if found is not None:
                report.sections.append((f"journal of {name}", found.journal_tail()))
    return report
