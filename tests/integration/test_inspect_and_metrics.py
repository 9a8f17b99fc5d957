"""What a worker shows of its locks: ``inspect``, ``control``, metrics, logs; never a password."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from urllib.parse import quote

import pytest
from celery import Celery, states

from celery_singleton_lock import LockedTask
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.metrics import export
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.testing import SingletonLocks, worker_in_thread
from integration.book import Book, standing
from support.proxy import free_port
from support.waiting import eventually

parser = pytest.importorskip("prometheus_client.parser")
pytestmark = pytest.mark.needs_real_redis

PASSWORD = "S3cret/w0rd@x"  # what a URL must escape
USER = "locks-user"
SECRETS = (PASSWORD, quote(PASSWORD, safe=""), "S3cret")


@pytest.fixture(scope="module")
def scene(redis_provider, redis_server, tmp_path_factory):
    """A worker with metrics whose locks' Redis needs a user and a password."""
    acl = f"{USER} on >{PASSWORD} ~* &* +@all"
    port = free_port()
    with RedisServer(redis_provider, args=("--user", *acl.split()), password=PASSWORD) as locks:
        url = f"redis://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{locks.port}/0"
        conf = {
            "singleton_lock_backend": url,
            "singleton_lock_metrics_port": port,
            "singleton_lock_lease": 15.0,
        }
        folder = tmp_path_factory.mktemp("sight")
        with Book(redis_server.url, folder, lock_url=url, conf=conf) as book:
            book.metrics = f"http://127.0.0.1:{port}/metrics"
            with standing(book.worker(concurrency=3, args=("-E",))) as worker:
                yield book, worker


@pytest.fixture
def book(scene):
    return scene[0]


@pytest.fixture
def worker(scene):
    return scene[1]


def scraped(book):
    with urllib.request.urlopen(book.metrics, timeout=20) as answer:
        return answer.read().decode()


def sample(book, name, **labels):
    """Return the value of a series; 0 if there is none."""
    for family in parser.text_string_to_metric_families(scraped(book)):
        for each in family.samples:
            if each.name == name and each.labels == labels:
                return each.value
    return 0


def blocked_total(task, policy, waits_for="holder"):
    """Return the series of a task's refusals."""
    return "celery_lock_blocked_total", {"task": task, "policy": policy, "waits_for": waits_for}


def inspected(book, command, *args):
    """Return the worker's reply to a command line."""
    line = [sys.executable, "-m", "celery", "-A", "integration.worker_app", *command.split()]
    line += [*args, "--json", "--timeout", "20", "--destination", nodes(book)[0]]
    env = book.worker().environment
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    replies = json.loads(done.stdout.splitlines()[-1])
    (answer,) = (replies[0] if isinstance(replies, list) else replies).values()
    return answer


def nodes(book):
    """Return the names of the nodes that answer."""
    return [*book.app.control.inspect(timeout=20, limit=1).ping()]


def locks(book, **arguments):
    """Return the worker's reply to ``inspect locks``."""
    (answer,) = (
        book.app.control.inspect(timeout=20, limit=1)._request("locks", **arguments).values()
    )
    return answer


@pytest.fixture
def blocked(book, worker, key):
    """A task that holds its lock, and one that is parked behind it."""
    holder = book.start_holder(key)
    parked = book.send("act", key, 1)
    book.await_waiting(key, 1)
    yield holder, parked
    book.open(f"{key}-0")
    for result in (holder, parked):
        assert book.outcome(result)[0] == states.SUCCESS
    book.await_free(key)


def test_inspect_locks_shows_what_a_worker_holds_and_waits_for(book, blocked, key):
    """With the token that a forced release needs."""
    (held,) = eventually(lambda: inspected(book, "inspect locks", f"k:{key}")["locks"], 10)
    (view,) = book.view(key).holders
    assert (held["lock"], held["id"], held["task"]) == (f"k:{key}", blocked[0], "act")
    assert (held["token"], held["state"], held["pid"]) == (view.token, "held", view.pid)
    assert held["age"] > 0

    def whole():
        answer = locks(book, name="nobody's")
        assert answer["locks"] == []
        assert (answer["held"], answer["parking"], answer["suspended"]) == (1, 0, 0)
        assert answer["parked"] >= 1
        assert answer["threads"].keys() >= {"singleton-lock-agent", "csl-watchdog"}
        assert all(seconds is None or 0 <= seconds < 10 for seconds in answer["threads"].values())
        assert answer["threads"]["csl-watchdog"] is not None  # there is a lease to renew
        return answer

    answer = eventually(whole)  # the worker learns a little later what Redis knows

    def stats():
        (told,) = book.app.control.inspect(timeout=20, limit=1).stats().values()
        return told["singleton_lock"]

    eventually(lambda: stats()["in_flight"] == {f"k:{key}": 1})
    assert stats().keys() == answer.keys() - {"locks", "locks_left_out"}


def test_a_worker_lists_a_running_task_until_it_has_ended(book, worker, key):
    """``why`` finds it there, beside any number of locks."""
    store = RedisAdminStore(book.client, book.store.keyspace)
    holder = book.start_holder(key)
    (view,) = book.view(key).holders

    def listed():
        return [each for each in store.locate_running(holder) if each[2] == view.token]

    assert eventually(listed, 10) == [(holder, f"k:{key}", view.token)]
    book.open(f"{key}-0")
    eventually(lambda: not listed(), 10, "it is no longer listed")


def test_inspect_locks_answers_while_redis_does_not(book, worker, blocked, key):
    """It does not use Redis: an outage does not delay the reply."""
    book.client.client_pause(1500)
    answer = locks(book, name=f"k:{key}")
    assert [each["state"] for each in answer["locks"]] == ["held"]


def test_what_inspect_locks_names_is_bounded(book, blocked, key):
    """As many as asked for, and the number of the others."""

    def bounded():
        answer = locks(book, most=0)
        return (answer["locks"], answer["locks_left_out"]) == ([], 1)

    eventually(bounded)  # the tasks of earlier tests have been forgotten


@pytest.mark.full
def test_lock_release_takes_the_lock_and_is_audited(book, worker, key):
    """The next task runs beside the former holder, which is notified.

    Operator and reason are audited.
    """
    holder = book.start_holder(key)
    behind = book.send("act", key, 1)
    book.await_waiting(key, 1)
    token = book.view(key).holders[0].token
    answer = inspected(book, "control lock_release", token, "ann", "it hangs")
    assert "will be taken" in answer["ok"]
    assert book.value(behind) == 1
    audit = RedisAdminStore(book.client, book.store.keyspace).audit()
    entry = next(each for each in audit if each.get("lock") == f"k:{key}")
    assert (entry["who"], entry["via"], entry["why"]) == ("ann", "control", "it hangs")
    worker.await_log(f"The lock 'k:{key}' was taken from its task for ann")
    eventually(
        lambda: sample(book, "celery_lock_lost_total", task="act"), 10, "the loss is counted"
    )
    book.open(f"{key}-0")
    assert book.value(holder) == 0
    book.await_free(key)


def test_lock_release_of_an_unknown_token_does_nothing(book, worker):
    answers = book.app.control.broadcast(
        "lock_release", {"token": "nobody.0"}, reply=True, timeout=20, limit=1
    )
    assert [next(iter(each.values())) for each in answers] == [
        {"error": "no task of this worker has this token"}
    ]


def test_lock_mode_refuses_what_it_does_not_know(book, worker):
    """A misspelt mode changes nothing."""
    for arguments in ({"mode": "of"}, {"mode": "off", "task": "nobody"}):
        (answer,) = book.app.control.broadcast(
            "lock_mode", arguments, reply=True, timeout=20, limit=1
        )
        assert "error" in next(iter(answer.values()))
    assert book.store.switches() == {}


def test_parked_tasks_are_counted_by_queue_with_their_age(book, worker, blocked):
    """For autoscalers; no series without waiters."""
    eventually(lambda: sample(book, "celery_lock_parked", queue="celery") == 1)
    assert 0 < sample(book, "celery_lock_oldest_parked_seconds", queue="celery") < 180
    eventually(lambda: sample(book, "celery_lock_fleet_up") == 1)


def test_tasks_are_counted_with_their_waits_and_holds(book, worker, key):
    """Counters and histograms of the children of a prefork pool."""
    names = {
        "acquired": ("celery_lock_acquired_total", {"task": "act"}),
        "parked": blocked_total("act", "park"),
        "skipped": blocked_total("act_skip", "skip"),
        "failed": blocked_total("act_fail", "fail"),
        "delivered": ("celery_lock_delivered_total", {"task": "act", "verdict": "granted"}),
        "waits": ("celery_lock_wait_seconds_count", {"task": "act"}),
        "holds": ("celery_lock_hold_seconds_count", {"task": "act"}),
    }
    before = {what: sample(book, name, **labels) for what, (name, labels) in names.items()}
    held_before = sample(book, "celery_lock_hold_seconds_sum", task="act")
    holder = book.start_holder(key)
    parked = book.send("act", key, 1)
    book.await_waiting(key, 1)
    for task in ("act_skip", "act_fail"):
        book.outcome(book.send(task, key, 2))
    book.open(f"{key}-0")
    assert [book.value(result) for result in (holder, parked)] == [0, 1]
    expected = dict.fromkeys(names, 1) | {"acquired": 2, "waits": 2, "holds": 2}

    def grown():
        now = {what: sample(book, name, **labels) for what, (name, labels) in names.items()}
        assert {what: now[what] - before[what] for what in names} == expected
        return True

    eventually(grown, 5)
    assert sample(book, "celery_lock_hold_seconds_sum", task="act") > held_before
    assert f"k:{key}" not in scraped(book), "no series by lock, unless asked for"


def test_a_registry_of_the_application_has_the_metrics_of_its_worker():
    """Otherwise the alerts of outages, errors and hanging threads never fire."""
    app = Celery("own", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_backend = "memory://own"

    @app.task(base=LockedTask, lock_key="own", shared=False)
    def task(): ...

    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    export(app, registry)
    value = registry.get_sample_value
    assert value("celery_lock_parked_messages_total") is None, "no worker runs here"
    with SingletonLocks(app) as own, worker_in_thread(app):
        with own.hold("own"):
            own.assert_parked(task.delay())
            assert value("celery_lock_parked_messages_total") == 1
        assert value("celery_lock_backend_errors_total") == 0
        assert value("celery_lock_backend_down_seconds") == 0
        assert value("celery_lock_thread_last_round_seconds", {"thread": "csl-watchdog"}) >= 0
    assert value("celery_lock_held") is None, "the worker has ended"
    app.close()


def test_tasks_of_a_paused_lock_say_that_they_wait_for_an_operator(book, worker, key):
    """The error, the counter and the log line do not name a holder, since there is none."""
    lock, jane = f"k:{key}", Operator("jane", "desk")
    series = [blocked_total(*each, "pause") for each in (("act", "park"), ("act_fail", "fail"))]
    before = [sample(book, name, **labels) for name, labels in series]
    operators = admin_of(book.store)
    operators.pause(lock, jane)
    parked, failed = book.send("act", key, 1), book.send("act_fail", key, 2)
    _, error = book.outcome(failed)
    assert error.waits_for == WaitsFor.PAUSE
    worker.await_log(f"for '{lock}', which is paused, or closed for a time; `locks why {parked}`")
    grown = [count + 1 for count in before]
    eventually(lambda: [sample(book, name, **labels) for name, labels in series] == grown, 5)
    operators.resume(lock, jane)
    assert book.value(parked) == 1


def test_metrics_listen_on_localhost_by_default(worker):
    """They show names of tasks and queues, and need no password."""
    worker.await_log("metrics on http://127.0.0.1:")


def test_doctor_can_ask_each_worker_for_the_port_of_its_metrics(book, worker):
    """The program that asks may have other settings than the workers."""
    port = int(book.metrics.split(":")[2].partition("/")[0])
    assert locks(book)["metrics_port"] == port


def test_the_log_line_of_a_parked_task_has_its_rank_and_the_command_to_run(worker, blocked, key):
    """One line at INFO, the only one that explains why it does not start."""
    holder, parked = blocked
    worker.await_log(f"Task act[{parked}] is parked: 1st for 'k:{key}' behind act[{holder}] on ")
    line = next(line for line in worker.log().splitlines() if f"act[{parked}] is parked" in line)
    assert "INFO" in line
    assert line.endswith(f"; `locks why {parked}` shows more")


def test_a_port_that_is_taken_ends_no_worker(book, worker, key):
    """Two workers of one machine may have the same settings."""
    with book.worker(concurrency=1, queues=["elsewhere"]) as second:
        second.await_log("no metrics are served on 127.0.0.1")
        assert book.value(book.send("act", key, 1, queue="elsewhere")) == 1


@pytest.mark.full
def test_passwords_are_nowhere(book, worker, blocked, key):
    """Not in logs, errors, inspect conf, stats and locks, nor in metrics."""
    texts = {
        "conf": inspected(book, "inspect conf"),
        "stats": inspected(book, "inspect stats"),
        "locks": inspected(book, "inspect locks"),
        "report": inspected(book, "inspect report"),
        "metrics": scraped(book),
        "log": worker.log(),
        "error": book.outcome(book.send("act_fail", key, 3)),
    }
    for what, text in texts.items():
        for secret in SECRETS:
            assert secret not in str(text), what
    assert USER in str(texts["locks"]) or "127.0.0.1" in str(texts["locks"]), "it shows where"


def test_the_error_of_a_wrong_password_does_not_show_it(book, worker, key):
    """Neither the wrong one nor the right one is in the log or the error."""
    wrong = f"redis://{USER}:wr0ngS3cret@127.0.0.1:{book.client.connection_pool.connection_kwargs['port']}/0"
    conf = {"singleton_lock_backend": wrong, "singleton_lock_metrics_port": None}
    other = book.worker(conf=conf, pool="threads", queues=["wrong"], loglevel="DEBUG")
    other.start(wait=False)
    eventually(lambda: "WRONGPASS" in other.log() or not other.is_running, 20)
    eventually(lambda: not other.is_running or "ready" in other.log(), 20)
    error = ""
    if other.is_running:
        error = str(book.outcome(book.send("act_failing", key, 1, queue="wrong")))
    assert "wrong user name or password" in other.log() + error
    for secret in (*SECRETS, "wr0ngS3cret"):
        assert secret not in other.log() + error
    other.end()
