"""Task ids, arguments and names come from callers and must not control a terminal."""

from __future__ import annotations

import ast
import json
import logging
import re
from pathlib import Path

import pytest
from celery import Celery
from click.testing import CliRunner

import celery_singleton_lock
from celery_singleton_lock import LockedTask
from celery_singleton_lock.cli import main
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.errors import LockConflict
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.testing import SingletonLocks
from support.waiting import eventually

pytestmark = pytest.mark.integration

EVIL = "evil\x1b[2J\x9b31m\u202e\x7f\nroot\udc9b"
"""Escape sequences of both kinds, a turn of direction, DEL, a line break, half a surrogate."""

SENT = EVIL[:-1]
"""What a broker's JSON and Redis' UTF-8 let pass of it."""


def is_tame(text):
    """Return whether each line of a text can be printed as it is."""
    return all(line.isprintable() for line in text.split("\n"))


@pytest.fixture
def alone(redis_url):
    """Run ``celery-singleton-lock``; nothing that it prints may rule a terminal."""

    def call(*args, code=0, stdin=None):
        env = {"CELERY_SINGLETON_LOCK_BACKEND": redis_url}
        ran = CliRunner().invoke(main, [*args], input=stdin, env=env)
        assert ran.exit_code == code, (args, ran.stdout, ran.stderr)
        assert is_tame(ran.stdout + ran.stderr), (args, ran.stdout, ran.stderr)
        assert "\nroot" not in ran.stdout + ran.stderr, "a line that no command has written"
        return ran.stdout + ran.stderr

    return call


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client)
    yield store
    store.close()


def test_no_command_prints_a_task_id_raw(alone, store):
    """Neither its output nor its questions and errors."""
    holder = Owner(new_token(), f"{SENT}-h/0/0", f"app.{SENT}", f"w@{SENT}#1", SENT, 1)
    waiter = Owner(new_token(), f"{SENT}-w/0/0", f"app.{SENT}")
    lock = f"k:{SENT}"
    store.acquire(holder, Claim(lock))
    store.park(waiter, Claim(lock), MessageToPark(b"{}\n", "R", f"q-{SENT}"))
    for command in ("list", "show", "why", "watch", "audit", "doctor", "report"):
        many = {"show": [lock], "why": [f"{SENT}-w"], "watch": ["--count", "1"]}.get(command, [])
        alone(command, *many, code=4 if command == "doctor" else 0)
    alone("why", f"{SENT}-h")
    alone("why", SENT, code=1)
    alone("show", f"no {SENT}", code=1)
    assert json.loads(alone("show", lock, "--json"))["view"]["name"] == lock
    for flags in ([], ["--token", SENT], ["--token", holder.token], ["--token", waiter.token]):
        alone("release", lock, *flags, code=1)
    alone("release", lock, "--token", holder.token, "--force", code=1, stdin="n\n")
    for verb in ("drop", "promote"):
        alone(verb, lock, SENT, code=1)
        alone(verb, lock, f"{SENT}-h", code=1)
    alone("promote", lock, f"{SENT}-w")
    alone("drop", lock, f"{SENT}-w", code=1, stdin="n\n")
    alone("pause", lock, "--why", SENT)
    alone("why", f"{SENT}-w")
    alone("resume", lock)
    alone("purge", "--lock", lock, "--dry-run")
    alone("export", "--lock", lock)
    alone("drop", lock, f"{SENT}-w", "--yes")
    alone("release", lock, "--token", holder.token, "--force", "--yes")
    alone("audit")


def test_an_error_shows_no_task_id_raw():
    """Whoever shows it: a log, a traceback, a client that did not make it."""
    error = LockConflict(f"The lock is held by {EVIL}.", EVIL, EVIL)
    assert is_tame(str(error))
    assert is_tame(error.message)
    assert error.name == EVIL, "a fact, for programs"


def test_a_worker_logs_no_task_id_raw(caplog):
    """In this package's log lines; Celery's own lines show ids unchanged."""
    app = Celery("ids", broker="memory://", backend="cache+memory://", set_as_current=False)

    @app.task(base=LockedTask, lock_key="k", lock_on_conflict="skip", shared=False)
    def skipped(): ...

    @app.task(base=LockedTask, lock_key="k", shared=False)
    def parked(): ...

    def ours():
        told = [r for r in caplog.records if r.name.startswith("celery_singleton_lock")]
        return [record.getMessage() for record in told]

    caplog.set_level(logging.INFO, logger="celery_singleton_lock")
    heard = logging.getLogger("celery_singleton_lock")
    heard.addHandler(caplog.handler)  # a worker takes those of the root away
    with SingletonLocks(app) as locks, locks.worker(pool="threads"):
        with locks.hold("k"):
            waits = parked.apply_async(task_id=f"parked-{SENT}")
            locks.assert_parked(waits)
            left_out = skipped.apply_async(task_id=f"skipped-{SENT}")
            eventually(lambda: any("was skipped" in line for line in ours()))
            eventually(lambda: left_out.state == "REVOKED")
        locks.assert_ran_alone(waits)
    heard.removeHandler(caplog.handler)
    assert any(line.startswith(f"Task {parked.name}[parked-evil\\x1b") for line in ours())
    assert [line for line in ours() if not line.isprintable()] == []
    app.close()


def test_commands_print_through_one_function():
    """So that none forgets to make its text printable."""
    folder = Path(celery_singleton_lock.__file__).parent / "cli"
    calls = {
        (file.name, ast.unparse(node.func))
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and re.fullmatch(r"click\.(s?echo|confirm|prompt)|print", ast.unparse(node.func))
    }
    assert {file for file, _ in calls} == {"render.py", "watch.py"}
