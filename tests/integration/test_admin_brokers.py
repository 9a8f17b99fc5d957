"""drain, export and import with RabbitMQ; test_cli.py has Redis."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner
from kombu import Connection, Queue
from kombu.exceptions import OperationalError

from celery_singleton_lock import Lock
from celery_singleton_lock.cli import app_context
from celery_singleton_lock.cli.commands import locks
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.publisher import confirming
from integration.book import Book
from support.proxy import Proxy
from support.waiting import eventually, never

TENANT = {"x-tenant": "acme"}
NUMBER = 5


@pytest.fixture(params=["classic", "quorum"])
def kind(request):
    """The type of the queues."""
    return request.param


@pytest.mark.full
def test_parked_tasks_go_back_to_rabbitmq_and_come_again_from_a_file(make_book, tmp_path):
    """Unchanged: order, arguments, headers, priority; each once, without a lock header."""
    book = make_book()
    store = RedisAdminStore(book.client)
    file = tmp_path / "parked.jsonl"

    lock = Lock(book.client, "k:a", lease=300)
    lock.acquire()
    with book.worker(concurrency=1):
        sent = [book.send("act", "a", n, headers=TENANT, priority=3) for n in range(NUMBER)]
        book.await_waiting("a", NUMBER)
        eventually(lambda: book.left() == 0, 10, "acknowledged")
    ran(book, "export", "--lock", "k:a", "--output", file)
    ran(book, "drain", "--lock", "k:a", "--rate", 0, "--yes")
    assert store.inspect("k:a").bodies == 0
    eventually(lambda: book.queued() == NUMBER, 10, "in the broker again")
    seen = taken_and_put_back(book)
    assert [each["id"] for each in seen] == sent
    assert all(each["x-tenant"] == "acme" for each in seen)
    assert not {name for each in seen for name in each if "singleton" in name}

    lock.release()
    with book.worker(concurrency=1):
        assert [book.value(each, 30) for each in sent] == list(range(NUMBER))
        book.await_settled("a")
        book.client.delete(Keyspace().lock("k:a").done)  # Redis remembers for an hour what has run
        ran(book, "import", file, "--force")
        eventually(lambda: len(book.starts("a")) == 2 * NUMBER, 20, "all run again")
        book.await_settled("a")
    assert book.order("a") == [*range(NUMBER)] * 2
    assert book.peak("a") == 1
    carried = {(start["priority"], start["headers"]["x-tenant"]) for start in book.starts("a")}
    assert carried == {(3, "acme")}


@pytest.mark.full
def test_parked_tasks_move_to_another_broker_with_a_file_and_import_adopt(
    make_book, redis_url, tmp_path
):
    """From a Redis to RabbitMQ, and to another Redis for the locks; without --adopt they wait."""
    file = tmp_path / "parked.jsonl"
    with Book(redis_url, tmp_path) as old:
        lock = Lock(old.client, "k:a", lease=300)
        lock.acquire()
        with old.worker(concurrency=1):
            sent = [old.send("act", "a", n, headers=TENANT) for n in range(NUMBER)]
            old.await_waiting("a", NUMBER)
        ran(old, "export", "--all", "--output", file)

    def moved(database):
        url = redis_url.replace("/0", f"/{database}")
        return make_book(lock_url=url, conf={"singleton_lock_backend": url})

    astray = moved(8)
    with astray.worker(concurrency=1):
        ran(astray, "import", file)
        never(lambda: astray.starts("a"), 2, "they are another broker's")
    new = moved(7)
    with new.worker(concurrency=1):
        ran(new, "import", file, "--adopt")
        assert [new.value(each, 30) for each in sent] == list(range(NUMBER))
        new.await_settled("a")
    assert new.order("a") == list(range(NUMBER))
    assert {start["headers"]["x-tenant"] for start in new.starts("a")} == {"acme"}


def ran(book, *args):
    """Return what a command of this app's locks printed."""
    result = CliRunner().invoke(locks, [*map(str, args)], obj=SimpleNamespace(app=book.app))
    assert result.exit_code == 0, result.output
    return result.output


def taken_and_put_back(book):
    """Return the headers of the messages that are in the queue, and leave them there."""
    with Connection(book.vhost.url) as connection, connection.channel() as channel:
        found = [channel.basic_get("celery") for _ in range(NUMBER)]
        return [message.headers for message in found]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("command", "status"), [("pause k:a --force", 0), ("why unknown", 1), ("doctor", 1)]
)
def test_a_command_ends_though_rabbitmq_answers_nothing(
    rabbit_vhost, redis_url, monkeypatch, command, status
):
    """With an alarm (memory, disk) it reads no further message, and confirms none."""
    monkeypatch.setattr(app_context, "BROKER_PATIENCE", 0.3)
    with Proxy(rabbit_vhost.server.port) as proxy:
        url = rabbit_vhost.url.replace(f":{rabbit_vhost.server.port}/", f":{proxy.port}/")
        app = Celery("alarm", broker=url, backend=redis_url, set_as_current=False)
        given = {"confirm_publish": True}
        app.conf.broker_transport_options = given
        proxy.stall_at = b"celeryev" if command.startswith("pause") else b"celery.pidbox"
        ran = CliRunner().invoke(locks, command.split(), obj=SimpleNamespace(app=app))
        assert proxy.stalled
        assert ran.exit_code == status, ran.output
        assert app.conf.broker_transport_options == given


def test_commands_wait_for_no_confirmation_but_of_messages_that_they_send_back(rabbit_url):
    """An event or a question to the workers is no task. A drained message must not be lost."""
    app = Celery("alarm", broker=rabbit_url, set_as_current=False)
    app.conf.broker_transport_options = {"confirm_publish": True}
    side = app_context.AppSide(app, install(app))
    assert not app.connection_for_write().transport_options["confirm_publish"]
    connection = confirming(app.connection_for_write())
    assert connection.transport_options["confirm_publish"]
    side.close()
    assert app.connection_for_write().transport_options["confirm_publish"]


def test_a_process_that_ran_a_command_learns_that_rabbitmq_refuses_its_task(rabbit_url, redis_url):
    """As with call_command in a web process. The command's own connections confirm nothing."""
    app = Celery("web", broker=rabbit_url, backend=redis_url, set_as_current=False)
    app.conf.broker_transport_options = {"confirm_publish": True}
    app.conf.task_publish_retry = False
    full = Queue("full", queue_arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    app.amqp.queues.add(full)
    ran = CliRunner().invoke(locks, ["pause", "k:a", "--force"], obj=SimpleNamespace(app=app))
    assert ran.exit_code == 0, ran.output
    with pytest.raises(OperationalError):
        app.send_task("any", queue="full")
