"""A real Django project: task class, transactions, settings, caches and commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from celery import Celery, states

from celery_singleton_lock import Lock
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually
from support.workers import CeleryWorker

pytest.importorskip("django")
pytest.importorskip("celery.contrib.django.task")

ENTRY = "account:a"


class Site:
    """The project, with a database and a Redis of its own."""

    def __init__(self, url, folder, locks="django-cache://locks"):
        self.client = redis.Redis.from_url(f"{url.removesuffix('0')}1")  # as CACHES says
        self.store = RedisStore(self.client, Keyspace("site"))
        self.app = Celery(broker=url, backend=url, set_as_current=False)
        self._env = {
            "SITE_DATABASE": str(folder / "site.sqlite3"),
            "SITE_REDIS": url.removesuffix("/0"),
            "SITE_LOCKS": locks,
            "DJANGO_SETTINGS_MODULE": "integration.site.settings",
        }
        self._url = url

    def worker(self, **options):
        """Return a worker of the site, not started."""
        options["args"] = ()  # with mingle and gossip, as Celery starts it
        return CeleryWorker("integration.site", self._url, env=self._env, **options)

    def start(self, *args):
        """Start a command of manage.py."""
        command = [sys.executable, "-m", "integration.site", *map(str, args)]
        pipe = subprocess.PIPE
        env = self.worker().environment
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)

    def manage(self, *args, status=0):
        """Run a command of manage.py, and return what it prints."""
        with self.start(*args) as process:
            printed, told = process.communicate(timeout=120)
        assert process.returncode == status, told
        return printed.strip() if status == 0 else told

    def close(self):
        """Close what it has opened."""
        self.app.close()
        self.client.close()

    def book(self, *args):
        """Enter an amount; return the output of the command."""
        return json.loads(self.manage("book", *args))

    def waiting(self):
        """Return how many are parked for the account."""
        return self.store.inspect(ENTRY).waiting


@pytest.fixture
def site(redis_url, migrated, tmp_path):
    """The project, with copies of the migrated database and an empty Redis."""
    shutil.copy(migrated, tmp_path / "site.sqlite3")
    site = Site(redis_url, tmp_path)
    yield site
    site.close()


@pytest.fixture(scope="module")
def migrated(redis_server, tmp_path_factory):
    """A database of the project, with its tables."""
    folder = tmp_path_factory.mktemp("site")
    site = Site(redis_server.url, folder)
    site.manage("migrate", "--run-syncdb", "--verbosity", 0)
    site.manage("createcachetable", "--verbosity", 0)
    site.close()
    return folder / "site.sqlite3"


@pytest.fixture
def held(site):
    """Somebody else holds the account."""
    lock = Lock(site.client, ENTRY, lease=60, prefix="site", thread_local=False)
    lock.acquire()
    yield lock
    if lock.held:
        lock.release()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_t19_tasks_sent_on_commit_are_parked_and_run_under_their_lock(site, held, pool):
    """Of LockedTask and DjangoTask in one, and of LockedTask alone; in the Redis of an alias."""
    with site.worker(pool=pool):
        site.book("a", 7)
        eventually(lambda: site.waiting() == 2, 15)
        assert site.app.AsyncResult("settle-7").state == states.PENDING
        held.release()
        assert site.app.AsyncResult("settle-7").get(timeout=60) == [ENTRY, True, 7]
        eventually(lambda: not site.store.inspect(ENTRY).holders and site.waiting() == 0, 10)


@pytest.mark.full
def test_a_rolled_back_transaction_sends_no_task_and_takes_no_lock(site, redis_client):
    """No message, no key."""
    site.book("a", 8, "--rollback")
    assert redis_client.llen("celery") == 0
    assert site.client.keys("*") == []


def test_eager_tasks_of_a_command_lock_by_djangos_settings(site):
    """CELERY_SINGLETON_LOCK_EAGER and …_PREFIX, from Django's settings."""
    assert site.book("a", 9, "--eager")["eager"] == [ENTRY, True, 9]
    assert not site.store.inspect(ENTRY).holders


def test_a_worker_does_not_start_with_an_alias_that_is_missing(redis_url, tmp_path):
    """The error names the one that was perhaps meant."""
    site = Site(redis_url, tmp_path, locks="django-cache://lokcs")
    with pytest.raises(AssertionError, match="at start") as caught:
        site.worker().start()
    site.close()
    assert "is 'django-cache://lokcs': CACHES has no 'lokcs'. Did you mean \"locks\"?" in str(
        caught.value
    )


@pytest.mark.full
def test_manage_locks_is_the_command_line_of_the_project(site, held):
    """For the Redis that CACHES says, with the app that the project has made."""
    (lock,) = json.loads(site.manage("locks", "list", "--json"))
    assert (lock["name"], lock["held"]) == (ENTRY, 1)


def test_manage_check_says_what_is_wrong_with_the_locks(redis_url, tmp_path):
    """The app in INSTALLED_APPS brings the checks."""
    site = Site(redis_url, tmp_path, locks="django-cache://lokcs")
    assert "(celery_singleton_lock.E003) CELERY_SINGLETON_LOCK_BACKEND is" in site.manage(
        "check", status=1
    )
    site.close()


@pytest.mark.full
def test_processes_exclude_each_other_by_a_cache_lock_in_the_database(site, tmp_path):
    """Two processes count up a number in a file; a third was killed while it held the lock."""
    file = tmp_path / "number"
    file.write_text("0")
    with site.start("count", file, 1, "--stay") as killed:
        killed.communicate(timeout=120)
    assert killed.returncode == -9
    counting = [site.start("count", file, 12) for _ in range(2)]
    for process in counting:
        with process:
            _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
    assert file.read_text() == "25"


def test_the_cache_lock_example_runs_unchanged(redis_url):
    """examples/django_cache_lock.py: a concurrent call gets the name of the builder."""
    example = Path(__file__).parents[2] / "examples" / "django_cache_lock.py"
    env = {**os.environ, "CACHE_URL": redis_url}
    printed = subprocess.run(
        [sys.executable, example], env=env, capture_output=True, text=True, check=True
    ).stdout
    busy, done = printed.splitlines()
    assert re.fullmatch(r"report:May is being built by pid \d+ on .+", busy)
    assert done == "the report of May is built"
