"""Workers with different data schemas never share one Redis: the second one is refused."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from celery_singleton_lock.cli import locks
from celery_singleton_lock.core.model import SCHEMA, SCHEMAS
from integration.book import LONG_LEASE, Book
from support.waiting import eventually


@pytest.fixture(scope="module")
def lease():
    """No lease ends here, also not while a process stands still."""
    return LONG_LEASE


def other_version(book, schema, **options):
    """Return a worker of a version that knows another schema, not started."""
    return book.worker(app="integration.other_schema_app", env={"SCHEMA": schema}, **options)


def refusal(worker):
    """Start a worker that must refuse; return its log when it has ended with an error."""
    worker.start(wait=False)
    eventually(lambda: worker.returncode is not None, 20, lambda: f"refuses\n{worker.log_tail()}")
    assert worker.returncode != 0, worker.log_tail()
    assert "ready." not in worker.log()
    return worker.log()


@pytest.mark.full
@pytest.mark.parametrize("schema", ["0", "3"], ids=["an-older-worker", "a-newer-worker"])
def test_a_worker_of_another_schema_is_refused(own_book, schema):
    """It ends with an error that names both schemas and the remedy; the first keeps running."""
    with own_book.worker() as ours:
        first = own_book.start_holder("a")
        parked = own_book.send("act", "a", 1)
        own_book.await_waiting("a", 1)
        log = refusal(other_version(own_book, schema))
        for words in (
            f"data of schema {SCHEMA} (key csl:schema)",
            f"this version needs {schema}",
            "Upgrade all workers together",
            "delete that key",
            "singleton_lock_prefix",
            "do not exclude each other",
        ):
            assert words in log
        own_book.open("a-0")
        assert [own_book.value(first), own_book.value(parked)] == [0, 1]
        assert ours.is_running
    assert own_book.peak("a") == 1


@pytest.mark.full
def test_a_worker_is_refused_by_another_schema_and_writes_nothing(own_book):
    """What the other version keeps there is as it was, key by key."""
    with other_version(own_book, "3"):
        assert own_book.value(own_book.send("act", "a", 0)) == 0
    before = snapshot(own_book.client)
    assert before[b"csl:schema"] == b"3"
    log = refusal(own_book.worker())
    assert "data of schema 3" in log
    assert f"this version needs {' or '.join(SCHEMAS)}" in log
    assert snapshot(own_book.client).keys() <= before.keys()
    assert own_book.client.get("csl:schema") == b"3"


@pytest.mark.full
def test_the_remedies_of_the_error_work(own_book):
    """A prefix of its own, or the key deleted once the others are gone: the worker starts."""
    own_book.client.set("csl:schema", "99")
    assert "schema 99" in refusal(own_book.worker())
    with own_book.worker(conf={"singleton_lock_prefix": "mine"}):
        assert own_book.value(own_book.send("act", "a", 0)) == 0
    own_book.client.delete("csl:schema")
    with own_book.worker():
        assert own_book.value(own_book.send("act", "a", 1)) == 1
    assert own_book.client.get("csl:schema") == SCHEMA.encode()


def snapshot(client):
    """Return all keys of locks; the values of plain ones."""
    return {
        key: client.get(key) if client.type(key) == b"string" else None
        for key in client.scan_iter("csl:*")
    }


@pytest.mark.full
def test_parked_tasks_move_to_another_schema_by_the_recipe(own_book, tmp_path, redis_url):
    """docs/upgrading.md: export with the old version, import with the new one, a new prefix.

    Each runs once, in its order, with a higher fencing token. The old keys stay until they are
    deleted, so that the old version can be started again.
    """
    file = tmp_path / "parked.jsonl"
    with own_book.worker() as old:
        first = own_book.start_holder("a")
        parked = [own_book.send("act", "a", n) for n in (1, 2)]
        own_book.await_waiting("a", 2)
        old.signal(signal.SIGTERM)
        eventually(lambda: not own_book.consumers(), 20)  # it takes no grants any more
        own_book.open("a-0")
        assert own_book.value(first) == 0
        eventually(lambda: not old.is_running, 20)
    command(own_book, "export", "--all", "--output", file)
    conf = {**own_book.conf, "singleton_lock_prefix": "csl2"}
    with (
        Book(redis_url, own_book.journal.folder, conf=conf) as new_book,
        other_version(new_book, "3"),
    ):
        command(new_book, "import", file)
        assert [new_book.value(task_id) for task_id in parked] == [1, 2]
    starts = own_book.starts("a")
    assert [event["id"] for event in starts] == [first, *parked]
    assert [event["fence"] for event in starts] == sorted(event["fence"] for event in starts)
    assert own_book.client.get("csl:schema") == SCHEMA.encode()
    assert own_book.client.get("csl2:schema") == b"3"


def command(book, *args):
    """Run a command of ``celery -A app locks``; it must succeed."""
    obj = SimpleNamespace(app=book.app)
    ran = CliRunner().invoke(locks, [*map(str, args)], obj=obj)
    assert ran.exit_code == 0, ran.output
