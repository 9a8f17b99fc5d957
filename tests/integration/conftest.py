"""Fixtures of the integration tests."""

from __future__ import annotations

import itertools
import os

import pytest

from celery_singleton_lock.embedded import RedisServer
from integration.book import Book, needs_pool, standing

_keys = itertools.count(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if "/integration/" in str(item.path):
            item.add_marker(pytest.mark.integration)


POOLS = "CSL_TEST_POOLS"  # e.g. CSL_TEST_POOLS=gevent,solo pytest tests/integration/test_order.py


@pytest.fixture(scope="module", params=os.environ.get(POOLS, "prefork,threads").split(","))
def pool(request):
    """The pool of the module's worker; ``@only("prefork")`` narrows it."""
    needs_pool(request.param)
    return request.param


@pytest.fixture(scope="module")
def book(pool, redis_provider, tmp_path_factory):
    """A task book on a Redis of its own, for one worker; each test uses keys of its own."""
    with (
        RedisServer(redis_provider) as server,
        Book(server.url, tmp_path_factory.mktemp("book")) as book,
    ):
        yield book


@pytest.fixture(scope="module")
def worker(book, pool):
    """A worker for all tests of a module; its children may be killed, it may not."""
    with standing(book.worker(pool=pool, concurrency=4)) as worker:
        yield worker


@pytest.fixture
def key():
    """A key that no other test uses."""
    return f"key{next(_keys)}"


@pytest.fixture
def own_book(redis_url, tmp_path):
    """The task book on the shared Redis, emptied, for tests that start workers of their own."""
    with Book(redis_url, tmp_path) as book:
        yield book


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
