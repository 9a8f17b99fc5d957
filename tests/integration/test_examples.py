"""The folders under examples/, as their README lines start them: real workers, real beat."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery

from support.waiting import eventually
from support.workers import CeleryWorker

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ("--without-mingle", "--without-gossip")


@pytest.fixture
def environment(redis_url, tmp_path):
    """What points the examples at this test's Redis and files."""
    return {
        "CELERY_BROKER_URL": redis_url,
        "CELERY_RESULT_BACKEND": redis_url,
        "FLASH_SALE_DB": str(tmp_path / "flash_sale.db"),
        "LEDGER_DB": str(tmp_path / "ledger.db"),
        "LEDGER_LEASE": "1.5",
        "REPORT_LOG": str(tmp_path / "report.log"),
        "REPORT_EVERY": "0.4",
    }


@pytest.fixture
def worker(environment, redis_url):
    """Start workers of an example: ``worker("ledger", concurrency=2)``."""

    def start(example, **options):
        return CeleryWorker(
            "tasks", redis_url, cwd=EXAMPLES / example, env=environment, args=QUICK, **options
        ).start()

    return start


@pytest.fixture
def client(redis_url):
    """Somebody who sends tasks by name, and waits for their ends."""
    with Celery("client", broker=redis_url, backend=redis_url) as app:
        yield app
        app.pool.force_close_all()


def run(example, script, environment):
    """Run a script of an example, and return what it prints."""
    return subprocess.run(
        [sys.executable, script],
        cwd=EXAMPLES / example,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    ).stdout


def test_the_flash_sale_oversells_without_the_lock_and_only_without(worker, environment):
    """Read, wait, write: exact to the unit with the lock, and not without it."""
    with worker("flash_sale", concurrency=4):
        printed = run("flash_sale", "sale.py", environment)
    unlocked, locked = (
        {product: int(n) for product, n in re.findall(r"'(\w+)': (-?\d+)", line)}
        for line in printed.splitlines()
    )
    assert sum(unlocked.values()) > 0
    assert locked == {"lamp": 0, "chair": 0}


@pytest.mark.chaos
def test_L33_the_ledger_refuses_a_worker_that_was_paused_past_its_lease(
    worker, client, environment, redis_url
):
    """SIGSTOP the holder's worker: another one goes on, and the late write is refused."""
    run("ledger", "paused.py", environment)  # makes the ledger; account 1 then holds 50
    first = worker("ledger", concurrency=2)
    paused = client.send_task("tasks.settle", [2, -1000, 1.0])
    next_one = client.send_task("tasks.settle", [2, 70])
    first.await_log("RECEIVED" if False else next_one.id)
    eventually(lambda: parked(redis_url, next_one.id), message="the second task is parked")
    worker("ledger", concurrency=2)
    for pid in [first.pid, *first.child_pids()]:
        os.kill(pid, signal.SIGSTOP)

    assert next_one.get(timeout=15) == 70

    for pid in [first.pid, *first.child_pids()]:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(Exception, match="account 2 has seen a fence above"):
        paused.get(timeout=15)
    assert client.send_task("tasks.settle", [2, 0]).get(timeout=15) == 70


def test_the_paused_script_shows_the_refusal_without_a_worker(environment):
    """A Lock that is not renewed stands for a machine that stood still."""
    printed = run("ledger", "paused.py", environment)
    assert "refused: account 1 has seen a fence above" in printed
    assert "the balance changed by 50" in printed
