"""``locks report`` and ``locks mode``: against a real Redis, without a worker."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from celery_singleton_lock.cli.commands import locks
from celery_singleton_lock.core.model import Claim, Owner, new_token


@pytest.fixture
def run(own_book):
    """Run a command of ``celery -A app locks``, and return what it printed."""

    def call(*args, code=0, stdin=None):
        obj = SimpleNamespace(app=own_book.app)
        result = CliRunner().invoke(locks, args, input=stdin, obj=obj)
        assert result.exit_code == code, result.output
        return result.stdout

    return call


def observe_two(store):
    """Two runs at once, of a name that would rule a terminal."""
    owners = [Owner(new_token(), f"{n}/0/0", "settle", "w") for n in (1, 2)]
    for took in (None, 2.0):
        for owner in owners:
            store.observe(owner, Claim("\x1b[31mred"), waits=True, took=took)


def test_report_tells_who_would_have_waited(run, own_book):
    """By task and by lock; names do not rule the terminal."""
    assert "Nothing was observed" in run("report")
    observe_two(own_book.store)
    told = run("report")
    assert "Of 2 runs 1 would have been blocked." in told
    assert "settle" in told
    assert "\x1b" not in told
    (task,) = json.loads(run("report", "--json"))["tasks"]
    assert (task["name"], task["runs"], task["blocked"]) == ("settle", 2, 1)


def test_a_report_begins_anew_only_when_agreed(run, own_book):
    observe_two(own_book.store)
    run("report", "--reset", code=1, stdin="n\n")
    assert own_book.store.observed().tasks
    run("report", "--reset", "--yes")
    assert not own_book.store.observed().tasks


def test_mode_switches_and_shows_and_is_audited(run, own_book):
    """Of all tasks and of one; "declared" takes a switch away; a slip is wrong usage."""
    assert "No switch is set" in run("mode")
    run("mode", "off", "--why", "it stands still")
    assert json.loads(run("mode", "observe", "--task", "settle", "--json")) == {
        "*": "off",
        "settle": "observe",
    }
    assert "all tasks" in run("mode")
    run("mode", "declared")
    assert own_book.store.switches() == {"settle": "observe"}
    run("mode", "of", code=2)
    audit = run("audit")
    assert "(all tasks: off)" in audit
    assert "it stands still" in audit
