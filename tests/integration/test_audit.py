"""Each operator action leaves one audit entry and one event."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from celery_singleton_lock import LockedTask
from celery_singleton_lock.admin.bulk_parked import purge
from celery_singleton_lock.admin.export_parked import export
from celery_singleton_lock.admin.select_parked import Filter
from celery_singleton_lock.admin.sweep import sweep_once
from celery_singleton_lock.cli.commands import COMMANDS, locks
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.events import LockAdmin
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.worker.install import install, observe
from celery_singleton_lock.worker.message_codec import pack
from support.waiters import park

NAME = "account:42"
LOOKS = {"list", "show", "why", "watch", "audit", "doctor", "tasks", "try"}
"""Commands that change nothing, and that show no arguments of tasks."""


UNIQUE = {"lock_key": "report", "lock_unique": "until_done"}


def unique(): ...


@pytest.fixture
def scene(own_book, tmp_path):
    """A held lock with two waiting messages, the events about it, and a way to run commands."""
    app, told = own_book.app, []
    app.task(base=LockedTask, name="unique", shared=False, **UNIQUE)(unique)
    observe(app, LockAdmin)(told.append)
    store = RedisAdminStore(own_book.client)
    holder = Owner(new_token(), "holding/0/0", "app.task")
    store.acquire(holder, Claim(NAME, lease=600))
    waiting = park_several(store, NAME, 2, realm=install(app).realm, body=a_message(own_book))
    file = tmp_path / "parked.jsonl"

    def run(*args, code=0):
        obj = SimpleNamespace(app=app)
        result = CliRunner().invoke(locks, [*map(str, args)], obj=obj)
        assert result.exit_code == code, result.output
        return result.output

    run("export", "--all", "--output", file)
    store.client.delete(store.keyspace.audit)
    told.clear()
    yield SimpleNamespace(
        store=store, told=told, run=run, holder=holder.token, waiting=waiting, file=file
    )
    store.close()


def park_several(store, name, number, **message):
    """Park messages, and return their tokens."""
    return [park(store, name, f"{name}-{n}", **message) for n in range(number)]


def a_message(book):
    """Return a message as a worker would park it."""
    with book.app.connection_for_read() as connection, connection.SimpleQueue("q") as queue:
        book.send("act", "key", queue="q")
        message = queue.get(timeout=60)
        message.ack()
        return pack(message)


STEPS = {
    "release": (["release", NAME, "--token", "HOLDER", "--force", "--yes"], NAME, 1),
    "drop": (["drop", NAME, "WAITER", "--yes"], NAME, 1),
    "promote": (["promote", NAME, "WAITER"], NAME, 1),
    "forget-call": (["forget-call", "unique"], "report", 1),
    "purge": (["purge", "--all", "--yes"], NAME, 2),
    "drain": (["drain", "--lock", NAME, "--rate", "0", "--yes"], NAME, 2),
    "export": (["export", "--lock", NAME], NAME, 2),
    "import": (["import", "FILE", "--again"], NAME, 2),
    "pause": (["pause", NAME], NAME, 1),
    "resume": (["resume", NAME], NAME, 1),
    "reopen": (["reopen", NAME], NAME, 1),
    "limit": (["limit", NAME, "3"], NAME, 1),
    "rate": (["rate", NAME, "9/s"], NAME, 1),
    "report": (["report", "--reset", "--yes"], "(report of what was observed)", 1),
    "mode": (["mode", "observe", "--yes"], "(all tasks: observe)", 1),
    "sweep": (["sweep"], "(all locks)", 1),
}


def test_every_command_is_tried_here():
    assert {command.name for command in COMMANDS} == LOOKS | set(STEPS)


@pytest.mark.parametrize("command", STEPS)
def test_each_operator_action_leaves_one_audit_entry_and_one_event(scene, command):
    """Also those that only read arguments of tasks (export), or that cron calls (sweep)."""
    args, lock, count = STEPS[command]
    if command == "resume":
        scene.store.pause(NAME, Operator("jane"))
        scene.store.client.delete(scene.store.keyspace.audit)
    if command == "reopen":
        scene.store.close_for(NAME, 60.0, "by app.task")
    if command == "forget-call":
        scene.store.announce("report", "unique", "lost")
    if command == "import":  # what waits is not parked a second time
        purge(scene.store, Filter(), Operator("jane", action="purge"))
        scene.store.client.delete(scene.store.keyspace.audit)
    stand_for = {"HOLDER": scene.holder, "WAITER": scene.waiting[0], "FILE": scene.file}
    why = [] if command in {"report", "sweep"} else ["--why", "because"]
    before = scene.store.time()
    scene.run(*[stand_for.get(arg, arg) for arg in args], *why)
    (entry,) = scene.store.audit()
    action = {"report": "reset"}.get(command, command)
    assert (entry["action"], entry["lock"], entry["count"]) == (action, lock, count)
    assert entry["who"]
    assert entry["host"]
    assert entry["via"] == "cli"
    assert entry.get("why", "") == ("because" if why else "")
    assert before - 0.001 <= entry["at"] <= scene.store.time()
    (event,) = scene.told
    assert (event.action, event.lock, event.count) == (action, lock, count)
    assert (event.who, event.host, event.via) == (entry["who"], entry["host"], "cli")


@pytest.mark.parametrize(
    "args",
    [
        ["resume", NAME],
        ["purge", "--task", "no such", "--yes"],
        ["drain", "--lock", "no such", "--yes"],
        ["export", "--lock", "no such"],
        ["drop", NAME, "WAITER", "--dry-run"],
        ["purge", "--all", "--dry-run"],
        ["mode"],
    ],
)
def test_a_refused_action_leaves_no_audit_entry(scene, args):
    scene.run(*[scene.waiting[0] if arg == "WAITER" else arg for arg in args])
    assert (scene.store.audit(), scene.told) == ([], [])


def test_a_second_pause_leaves_no_audit_entry(scene):
    scene.run("pause", NAME)
    scene.run("pause", NAME)
    assert len(scene.store.audit()) == len(scene.told) == 1


def test_the_audit_has_the_new_limit(scene):
    scene.run("limit", NAME, "3")
    scene.run("limit", NAME, "--clear")
    told = scene.run("audit")
    assert re.search(rf"limit 3 +{NAME}", told)
    assert re.search(rf"limit as declared +{NAME}", told)


def test_sweeps_of_a_cron_job_are_one_entry(scene):
    """Otherwise a day of them would displace all other entries."""
    for _ in range(3):
        scene.run("sweep")
    (entry,) = scene.store.audit()
    assert entry["count"] == 3
    sweep_once(scene.store, Operator("joe", "elsewhere"))
    newest = scene.store.audit()[0]
    assert (newest["who"], newest["count"]) == ("joe", 1)


def test_an_action_on_many_locks_does_not_displace_all_other_entries(scene):
    """The first twenty are named; of the others the number of locks and tasks is given."""
    store = scene.store
    store.promote(NAME, scene.waiting[1], Operator("jane"))
    for n in range(30):
        park_several(store, f"many:{n}", 2, body=b"{}\n")
    list(export(store, Filter("many:"), Operator("jane")))
    assert purge(store, Filter("many:"), Operator("jane", action="purge")).total == 60
    entries = store.audit()
    assert [entry["action"] for entry in entries] == ["purge"] * 20 + ["export"] * 20 + ["promote"]
    for each in (entries[:20], entries[20:40]):
        assert sum(entry["count"] for entry in each) == 60
        assert each[0]["more"] == 10
        assert len({entry["lock"] for entry in each}) == 20
    assert "and 10 more" in scene.run("audit")
