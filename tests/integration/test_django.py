"""A real Django project: its task class, its transactions, its settings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from celery import Celery, states

from celery_singleton_lock import Lock
from celery_singleton_lock.keys import Keyspace
from celery_singleton_lock.store.redis import RedisStore
from support.waiting import eventually
from support.workers import CeleryWorker

pytest.importorskip("django")
pytest.importorskip("celery.contrib.django.task")

ENTRY = "account:a"


class Site:
    """The project, with a database and a Redis of its own."""

    def __init__(self, url, folder, client):
        self.client = client
        self.store = RedisStore(client, Keyspace("site"))
        self.app = Celery(broker=url, backend=url, set_as_current=False)
        self._env = {
            "SITE_DATABASE": str(folder / "site.sqlite3"),
            "DJANGO_SETTINGS_MODULE": "integration.site.settings",
        }
        self._url = url

    def worker(self, **options):
        """Return a worker of the site, not started."""
        return CeleryWorker("integration.site", self._url, env=self._env, **options)

    def manage(self, *args):
        """Run a command of manage.py, and return what it prints."""
        command = [sys.executable, "-m", "integration.site", *map(str, args)]
        env = self.worker().environment
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def book(self, *args):
        """Enter an amount; return what the command tells."""
        return json.loads(self.manage("book", *args))

    def waiting(self):
        """Return how many are parked for the account."""
        return self.store.inspect(ENTRY).waiting


@pytest.fixture
def site(redis_url, redis_client, tmp_path):
    """The project, migrated."""
    site = Site(redis_url, tmp_path, redis_client)
    site.manage("migrate", "--run-syncdb", "--verbosity", 0)
    yield site
    site.app.close()


@pytest.fixture
def held(redis_client):
    """Somebody else holds the account."""
    lock = Lock(redis_client, ENTRY, lease=3, prefix="site", thread_local=False)
    lock.acquire()
    yield lock
    if lock.held:
        lock.release()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_t19_tasks_sent_on_commit_are_parked_and_run_under_their_lock(site, held, pool):
    """``delay_on_commit`` and ``apply_async_on_commit``, of a LockedTask and DjangoTask in one."""
    with site.worker(pool=pool):
        site.book("a", 7)
        eventually(lambda: site.waiting() == 2, 15)
        assert site.app.AsyncResult("settle-7").state == states.PENDING
        held.release()
        assert site.app.AsyncResult("settle-7").get(timeout=60) == [ENTRY, True, 7]
        eventually(lambda: not site.store.inspect(ENTRY).holders and site.waiting() == 0, 10)


def test_what_is_rolled_back_is_neither_sent_nor_locked(site, redis_client):
    """No message, no key."""
    site.book("a", 8, "--rollback")
    assert redis_client.llen("celery") == 0
    assert redis_client.keys("site:*") == []


def test_eager_tasks_of_a_command_lock_by_djangos_settings(site):
    """CELERY_SINGLETON_LOCK_EAGER and …_PREFIX, from Django's settings."""
    assert site.book("a", 9, "--eager")["eager"] == [ENTRY, True, 9]
    assert not site.store.inspect(ENTRY).holders
