"""A fleet that is being upgraded: workers of two versions share one Redis, one queue and its locks.

The version before is taken out of the history of this repository. Its workers run its own test
apps, whose journals have the form of today's.
"""

from __future__ import annotations

import pytest

from chaos.__main__ import summary
from chaos.storm import Storm
from integration.book import SAFE_LEASE, Book
from support.older_version import OlderVersion, older_version
from support.waiting import eventually

BEFORE = "09874d3e4cf23fc3e6cb350b08559af152339adb"
"""The last commit before parked messages leave Redis for the broker, and rejected ones are kept."""

CANDIDATE = "68fe8a7935e456fd0d32f1f5f26af7da2617a4c4"
"""The last commit before the changes that follow the release candidate."""

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.needs_real_redis("signals, append-only data"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> OlderVersion:
    """The version before."""
    found = older_version(BEFORE, tmp_path_factory.mktemp("before"))
    for module in ("celery_singleton_lock", "chaos.tasks", "integration.taskbook"):
        assert found.file_of(module).is_relative_to(found.folder)
    return found


@pytest.fixture
def book(redis_url, tmp_path):
    with Book(redis_url, tmp_path, conf={"singleton_lock_lease": SAFE_LEASE}) as book:
        yield book


@pytest.mark.full
@pytest.mark.parametrize("killed", ["old", "new"])
def test_what_a_killed_worker_has_parked_runs_in_one_of_the_other_version(book, before, killed):
    """In its order, retries too; each run has a larger fencing token than the one before it."""
    workers = {"old": book.worker(**before.worker()), "new": book.worker()}
    one = workers.pop(killed).start()
    (other,) = workers.values()
    first = book.send("act_lost", "a", 0, hold="never")
    book.started(first)
    parked = [book.send("act_lost", "a", n, end="retry" if n == 2 else "return") for n in (1, 2, 3)]
    book.await_waiting("a", 3)
    with other:
        book.kill_worker(one)
        assert [book.value(sent) for sent in parked] == [1, 2, 3]
        book.await_free("a")
    starts = book.starts("a")
    assert [start["n"] for start in starts] == [0, 1, 2, 3, 2]
    fences = [start["fence"] for start in starts]
    assert fences == sorted(set(fences))
    assert book.peak("a") == 1


@pytest.mark.full
def test_a_worker_of_the_release_candidate_ends_parked_tasks_after_a_new_one(book, tmp_path):
    """Its releases failed in the middle, so the messages stayed in Redis after their tasks."""
    candidate = older_version(CANDIDATE, tmp_path / "candidate")
    remembered = {"broker_transport_options": {"visibility_timeout": 36_000}}  # their ends, so long
    for start, options in ((0, {}), (10, candidate.worker())):
        with book.worker(conf=remembered, **options):
            first = book.start_holder("a", start, "act_lost")
            parked = [book.send("act_lost", "a", start + n) for n in (1, 2)]
            book.await_waiting("a", 2)
            book.open(f"a-{start}")
            assert [book.value(sent) for sent in (first, *parked)] == [start + n for n in range(3)]
            book.await_free("a")
            eventually(lambda: book.view("a").bodies == 0, 5, "no message is left")


@pytest.mark.slow
@pytest.mark.long("storm")
def test_a_storm_over_workers_of_two_versions_breaks_no_rule(tmp_path, before):
    """15 s of kills, stops and outages: nothing is lost, and no lease is held by two bodies.

    The judge proves that process by process: when each body knew that it held its lease, and under
    which fencing token.
    """
    report = Storm(tmp_path, seed=1, seconds=15, past=before).run()
    assert not report.violations, summary(report)
    workers = {run.worker.partition("@")[0] for run in report.history.runs}
    assert workers == {"c0", "c1", "c2", "c3"}  # c1 and c3 are old
    assert report.struck >= 5, "the storm was none"
