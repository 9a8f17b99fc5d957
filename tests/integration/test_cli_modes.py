"""``locks report`` and ``locks mode``: against a real Redis, without a worker."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from celery_singleton_lock.cli import locks, main
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.core.owner_token import new_token


@pytest.fixture
def run(own_book):
    """Run a command of ``celery -A app locks``, and return what it printed."""

    def call(*args, code=0, stdin=None):
        obj = SimpleNamespace(app=own_book.app)
        result = CliRunner().invoke(locks, args, input=stdin, obj=obj)
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.output

    return call


def observe_two(store):
    """Two runs at once, of a name that would rule a terminal."""
    owners = [Owner(new_token(), f"{n}/0/0", "settle", "w") for n in (1, 2)]
    for took in (None, 2.0):
        for owner in owners:
            store.record_observation(owner, Claim("\x1b[31mred"), waits=True, took=took)


def test_report_shows_which_tasks_would_have_waited(run, own_book):
    """By task and by lock; names do not rule the terminal."""
    assert "No runs were observed" in run("report")
    observe_two(own_book.store)
    told = run("report")
    assert "Of 2 runs 1 would have been blocked." in told
    assert "settle" in told
    assert "\x1b" not in told
    (task,) = json.loads(run("report", "--json"))["tasks"]
    assert (task["name"], task["runs"], task["blocked"]) == ("settle", 2, 1)


def test_a_report_is_reset_only_after_confirmation(run, own_book):
    observe_two(own_book.store)
    run("report", "--reset", code=1, stdin="n\n")
    assert own_book.store.observations().tasks
    run("report", "--reset", "--yes")
    assert not own_book.store.observations().tasks


def test_mode_switches_and_shows_and_is_audited(run, own_book):
    """Of all tasks and of one; "declared" takes a switch away; a slip is wrong usage."""
    assert "No switch is set" in run("mode")
    run("mode", "--yes", "off", "--why", "it stands still")
    assert json.loads(run("mode", "--yes", "observe", "--task", "act", "--json")) == {
        "*": "off",
        "act": "observe",
    }
    assert "all tasks" in run("mode")
    run("mode", "declared")
    assert own_book.store.switches() == {"act": "observe"}
    run("mode", "of", code=2)
    audit = run("audit")
    assert "(all tasks: off)" in audit
    assert "it stands still" in audit


def test_list_and_doctor_tell_why_tasks_overlap_after_a_switch(run, own_book):
    """Without locks, an operator would see an empty list and a healthy Redis."""
    assert "Switched" not in run("list")
    own_book.store.switch("*", "off")
    told = "Switched to run without locks: all tasks (off). See mode."
    assert run("list").splitlines() == ["No lock is held or waited for.", told]
    own_book.store.acquire(Owner(new_token(), "1/0/0", "settle", "w"), Claim("a"))
    assert run("list").splitlines()[-2:] == ["1 lock, 1 held; 0 waiting", told]
    assert [lock["name"] for lock in json.loads(run("list", "--json"))] == ["a"]
    checks = json.loads(run("doctor", "--json", "--quick", code=4))
    (found,) = [check for check in checks if check["name"] == "modes"]
    assert found["health"] == "warn"


def test_a_slip_in_the_name_of_a_task_switches_nothing(run, own_book):
    """An operator who believes that a task is off would look elsewhere."""
    refused = run("mode", "off", "--task", "atc", code=1)
    assert "neither a live worker nor the app has a LockedTask 'atc'" in refused
    assert "Did you mean 'act'?" in refused
    assert not own_book.store.switches()
    run("mode", "--yes", "off", "--task", "later.task", "--force")
    run("mode", "declared", "--task", "later.task")
    assert not own_book.store.switches()


def test_a_task_that_a_live_worker_locks_is_known_without_its_app(own_book):
    """``celery-singleton-lock`` has no app, and an app at hand may be an older one."""
    store = own_book.store
    store.worker_heartbeat("w", "R", ["q"], 60.0, tasks=["app.new"])
    env = {"CELERY_SINGLETON_LOCK_BACKEND": own_book.url}
    for task, code in (("app.new", 0), ("app.nwe", 1)):
        ran = CliRunner().invoke(main, ["mode", "observe", "--yes", "--task", task], env=env)
        assert ran.exit_code == code, ran.output
    assert store.switches() == {"app.new": "observe"}
