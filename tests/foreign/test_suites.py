"""Other projects' tests pass with this package in place of theirs."""

from __future__ import annotations

import pytest

from celery_singleton_lock.demo.redis_server import RedisServer
from foreign.suite import Results, Suite, fetch, run, unpack
from foreign.suites import SUITES

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module", params=SUITES, ids=lambda suite: suite.name)
def suite(request) -> Suite:
    """Each of the suites."""
    return request.param


@pytest.fixture(scope="module")
def results(request, suite, redis_provider, tmp_path_factory) -> Results:
    """What became of each test of a suite: they run once."""
    archive = fetch(suite, request.config.cache.mkdir("foreign"))
    scratch = tmp_path_factory.mktemp(suite.name)
    with RedisServer(redis_provider) as server:
        return run(suite, unpack(suite, archive, scratch), server, scratch)


def test_what_has_an_equivalent_passes(suite, results, record_property):
    """Each of their tests passes that is not listed."""
    failed = [test for test in results.named("failed") if not suite.patterns(test)]
    listed = len(results.named("failed")) - len(failed)
    record_property(
        "foreign",
        f"{suite}: {len(results.named('passed'))} passed, {len(failed)} failed, {listed} without "
        f"an equivalent, {len(results.named('skipped'))} skipped by themselves",
    )
    texts = "\n".join(f"--- {test}\n{results.texts[test]}" for test in failed)
    assert not failed, f"{len(failed)} tests of {suite} fail and are not listed:\n{texts}"


def test_no_entry_of_the_table_is_stale(suite, results):
    """Each listed test exists, and fails still."""
    named = {pattern for test in results.outcomes for pattern in suite.patterns(test)}
    gone = [pattern for pattern in suite.listed if pattern not in named]
    passing = [test for test in results.named("passed", "skipped") if suite.patterns(test)]
    stale = [f"{pattern}: no such test" for pattern in gone] + [
        f"{test} passes" for test in passing
    ]
    assert not stale, f"take these out of the table of {suite}:\n" + "\n".join(stale)
