"""The folders in examples/, started by the commands of their README, with real workers and beat."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path

import pytest
from celery import Celery

from celery_singleton_lock.config.url_text import realm_of
from celery_singleton_lock.core.model import Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually
from support.workers import CeleryWorker

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def environment(redis_url, tmp_path):
    """What points the examples at this test's Redis and files."""
    return {
        "CELERY_BROKER_URL": redis_url,
        "CELERY_RESULT_BACKEND": redis_url,
        "FLASH_SALE_DB": str(tmp_path / "flash_sale.db"),
        "LEDGER_DB": str(tmp_path / "ledger.db"),
        "LEDGER_LEASE": "10",
        "REPORT_LOG": str(tmp_path / "report.log"),
        "REPORT_EVERY": "0.4",
        "QUOTA_PERIOD": "2s",
    }


@pytest.fixture
def worker(environment, redis_url):
    """Start workers of an example: ``worker("ledger", concurrency=2)``."""

    def start(example, **options):
        return CeleryWorker(
            "tasks", redis_url, cwd=EXAMPLES / example, env=environment, **options
        ).start()

    return start


@pytest.fixture
def client(redis_url):
    """Somebody who sends tasks by name, and waits for their ends."""
    with Celery("client", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        yield app


@pytest.fixture
def held_and_waited_for(redis_client):
    """Whether one task runs and one waits: ``held_and_waited_for("account:2")``."""

    def look(name):
        view = RedisStore(redis_client).inspect(name)
        return [holder.state for holder in view.holders] == ["running"] and view.waiting == 1

    return look


def run(example, script, environment):
    """Run a script of an example, and return what it prints."""
    done = subprocess.run(
        [sys.executable, script],
        cwd=EXAMPLES / example,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_the_flash_sale_oversells_without_the_lock_and_only_without(worker, environment):
    """Read, wait, write: exact to the unit with the lock, and wrong without it."""
    worker("flash_sale", concurrency=4)
    unlocked, locked = (
        {product: int(number) for product, number in re.findall(r"'(\w+)': (-?\d+)", line)}
        for line in run("flash_sale", "sale.py", environment).splitlines()
    )
    assert sum(unlocked.values()) > 0
    assert locked == {"lamp": 0, "chair": 0}


def test_L33_the_ledger_refuses_a_holder_that_paused_past_its_lease(environment):
    """A Lock without renewal simulates a suspended machine."""
    printed = run("ledger", "paused.py", environment)
    assert "refused: account 1 has seen a fence above" in printed
    assert "the balance changed by 50" in printed


@pytest.mark.full
@pytest.mark.chaos
def test_L33_the_ledger_refuses_a_worker_that_was_stopped_past_its_lease(
    worker, client, environment, held_and_waited_for
):
    """SIGSTOP the holder's worker: another worker continues, and the late write is refused."""
    run("ledger", "paused.py", environment)  # makes the ledger
    first = worker("ledger", concurrency=2)
    late = client.send_task("tasks.settle", [2, -1000, 20.0])
    successor = client.send_task("tasks.settle", [2, 70])
    eventually(lambda: held_and_waited_for("account:2"))
    stopped = [first.pid, *first.child_pids()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    worker("ledger", concurrency=2)
    assert successor.get(timeout=60) == 70

    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(Exception, match="account 2 has seen a fence above"):
        late.get(timeout=60)
    assert client.send_task("tasks.settle", [2, 0]).get(timeout=60) == 70


@pytest.mark.full
def test_customers_have_their_quotas_and_an_api_refuses_one_call(worker, environment):
    """Two calls of 400 tokens fit in a period of 1,000, counted from the first start."""
    worker("quota", concurrency=4)
    acme, globex, refused = run("quota", "calls.py", environment).splitlines()
    first, second = (
        [float(each) for each in re.findall(r"\d+\.\d+", line)] for line in (acme, globex)
    )
    assert (len(first), len(second)) == (4, 4)
    assert first[2] >= 1.9
    assert second[0] >= 2.9
    assert second[2] >= 4.8
    assert refused == "refused by the API: 1"


def test_a_report_that_many_ask_for_is_made_once(worker, environment):
    """Duplicates have the first result, are refused, or follow: as the README shows.

    The first call must run for as long as the last one takes to be sent, so it takes its time here.
    """
    environment["REPORT_TAKES"] = "4"
    worker("reports", concurrency=4)
    assert run("reports", "ask.py", environment) == shown("reports")


@pytest.mark.full
def test_the_newest_preview_ends_the_one_that_runs(worker, environment):
    """As the README shows, except for the ids."""
    worker("preview", concurrency=2)
    hidden = re.compile(r"(?<=revoked: )\S+")
    printed = run("preview", "edit.py", environment)
    assert hidden.sub("…", printed) == hidden.sub("…", shown("preview"))


def shown(example):
    """Return what a script prints according to the README."""
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    console = readme.split(f"\n## [{example}]")[1].split("```")[1]
    return console.split("# another\n")[1]


@pytest.mark.full
def test_the_report_of_beat_never_overlaps_itself(worker, environment, redis_client, tmp_path):
    """A build takes 2.5 intervals: "skip" leaves the rest out, "park" catches up once."""
    worker("report", concurrency=4)
    command = [sys.executable, "-m", "celery", "-A", "tasks", "beat"]
    beat = subprocess.Popen(
        [*command, "--schedule", tmp_path / "schedule", "--pidfile="],
        cwd=EXAMPLES / "report",
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = Path(environment["REPORT_LOG"])
    try:
        eventually(lambda: log.exists() and all(n >= 3 for n in builds(log).values()), 20)
        eventually(lambda: left_out(redis_client, "lock 'tasks.report' is held by"))
        late = ("'tasks.report_catching_up'", "lock_max_waiting")
        eventually(lambda: left_out(redis_client, *late))
    finally:
        beat.terminate()
        beat.wait(60)


def builds(log):
    """Return how often each report was built, and see that its builds follow each other."""
    lines = log.read_text().splitlines()
    counts = {}
    for name in ("report", "report_catching_up"):
        steps = [step for who, step in map(str.split, lines) if who == name]
        assert all(earlier != later for earlier, later in pairwise(steps)), f"overlap: {lines}"
        counts[name] = steps.count("ends")
    return counts


def left_out(redis_client, *words):
    """Return whether a task was skipped for a reason with these words."""
    keys = redis_client.scan_iter("celery-task-meta-*")
    metas = [json.loads(redis_client.get(key)) for key in keys]
    reasons = [str(meta["result"]) for meta in metas if meta["status"] == "REVOKED"]
    return any(all(word in reason for word in words) for reason in reasons)


@pytest.mark.full
def test_transfers_between_accounts_lose_no_money(worker, environment):
    """Two workers, 300 transfers; half of them name their accounts the other way round."""
    for _ in range(2):
        worker("transfers", concurrency=2)
    assert run("transfers", "bank.py", environment) == "5,000 of 5,000\n"


@pytest.mark.parametrize(
    ("broker", "options", "prefix"),
    [
        ("amqp://guest:guest@localhost:1//", {}, ""),
        ("redis://localhost:1/0", {"global_keyprefix": "shop:"}, ""),
        ("redis://localhost:1/0", {}, "shop"),
    ],
)
def test_the_exporter_counts_parked_tasks_of_the_broker_of_the_workers(
    redis_url, redis_client, tmp_path, broker, options, prefix
):
    """It could not be told of RabbitMQ, nor of prefixes: an autoscaler saw no parked task."""
    queue = tmp_path.name
    store, key = RedisStore(redis_client, Keyspace(prefix or "csl")), f"k:{queue}"
    store.acquire(Owner(new_token(), "1/0/0", "settle", "w"), Claim(key))
    waits = Owner(new_token(), "2/0/0", "settle", "w")
    with Celery(broker=broker, set_as_current=False) as app:
        realm = realm_of(app.connection_for_read().as_uri(), options)
    store.park(waits, Claim(key), MessageToPark(b"body", realm, queue))
    port = free_port()
    given = {"CELERY_BROKER_URL": broker, "LOCKS_URL": redis_url, "PORT": str(port)}
    given["BROKER_TRANSPORT_OPTIONS"] = json.dumps(options)
    if prefix:
        given["LOCKS_PREFIX"] = prefix
    command = [sys.executable, EXAMPLES / "monitoring" / "exporter.py"]
    with subprocess.Popen(command, env={**os.environ, **given}) as exporter:
        try:
            told = f'celery_lock_parked{{queue="{queue}"}} 1.0'
            eventually(lambda: told in served(port), 30)
        finally:
            exporter.kill()


def test_the_exporter_counts_what_the_last_worker_ran_when_it_was_killed(
    redis_url, redis_client, tmp_path
):
    """Nobody swept: an autoscaler saw neither a message nor a parked task, and started none."""
    broker, queue = "amqp://localhost:1//", tmp_path.name
    store, key = RedisStore(redis_client), f"k:{queue}"
    with Celery(broker=broker, set_as_current=False) as app:
        realm = realm_of(app.connection_for_read().as_uri(), {})
    store.worker_heartbeat("w#1", realm, [queue], 1.0)
    parked = Owner(new_token(), "2/0/0", "settle", "w#1")
    store.park(parked, Claim(key), MessageToPark(b"body", realm, queue))
    granted = store.receive("w#1", 10)
    assert store.claim(parked._replace(token=granted.token), key, 1.0).verdict is Verdict.GRANTED
    assert not store.parked(realm)
    port = free_port()
    given = {"CELERY_BROKER_URL": broker, "LOCKS_URL": redis_url, "PORT": str(port)}
    command = [sys.executable, EXAMPLES / "monitoring" / "exporter.py"]
    with subprocess.Popen(command, env={**os.environ, **given}) as exporter:
        try:
            told = f'celery_lock_parked{{queue="{queue}"}} 1.0'
            eventually(lambda: told in served(port), 30)
        finally:
            exporter.kill()


def test_the_exporter_reads_the_locks_of_a_master_behind_sentinels():
    """It had no master_name for them: each scrape failed, and no alert of the fleet could fire."""
    port = free_port()
    given = {"CELERY_BROKER_URL": "amqp://localhost:1//", "LOCKS_URL": "sentinel://localhost:1/0"}
    given |= {"LOCKS_OPTIONS": json.dumps({"master_name": "mymaster"}), "PORT": str(port)}
    command = [sys.executable, EXAMPLES / "monitoring" / "exporter.py"]
    with subprocess.Popen(command, env={**os.environ, **given}) as exporter:
        try:
            eventually(lambda: "celery_lock_fleet_up 0.0" in served(port), 30)
        finally:
            exporter.kill()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def served(port):
    """Return the metrics that are served at a port; empty if nothing is."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            return page.read().decode()
    except OSError:
        return ""
