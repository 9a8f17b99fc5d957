"""``manage.py locks``: arguments, output and exit status."""

from __future__ import annotations

import io
import json

import pytest

pytest.importorskip("django")

from celery import Celery, _state
from django.core.management import CommandError, call_command

from celery_singleton_lock import Lock, LockedTask
from celery_singleton_lock.django.management.commands.locks import Command
from support import django_project


@pytest.fixture(autouse=True)
def app(redis_url):
    """The project's app, with one locked task."""
    before = getattr(_state._tls, "current_app", None)
    with Celery("shop", broker=redis_url, set_as_current=False) as app, django_project.project():
        task = app.task(name="shop.settle", shared=False, base=LockedTask, lock_key="account:1")
        task(lambda: None)
        _state._set_current_app(app)
        yield app
    _state._set_current_app(before)


@pytest.fixture
def held(redis_client):
    """A held lock."""
    with Lock(redis_client, "account:1"):
        yield


def manage(*arguments):
    """Run it from the command line; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        Command().run_from_argv(["manage.py", "locks", *arguments])
    return ended.value.code


def called(*arguments):
    """Run it with ``call_command``; return its output."""
    out = io.StringIO()
    call_command(Command(), *arguments, stdout=out)
    return out.getvalue()


def test_it_runs_the_commands_for_the_projects_app(held, capsys):
    """With the options of each command and those of manage.py."""
    assert manage("list", "--json") == 0
    (lock,) = json.loads(capsys.readouterr().out)
    assert lock["name"] == "account:1"
    assert manage("--settings", "shop.settings", "--pythonpath=.", "show", "account:1") == 0
    assert "account:1" in capsys.readouterr().out


def test_help_names_the_commands(capsys):
    assert manage("--help") == 0
    shown = capsys.readouterr().out
    assert "Usage: manage.py locks" in shown
    assert all(name in shown for name in ("doctor", "release", "watch", "--app", "--settings"))


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["show", "account:7"], 1, "account:7"),
        (["shwo"], 2, "No such command 'shwo'"),
        (["purge"], 2, "select the tasks: "),
    ],
)
def test_the_exit_status_is_kept(arguments, status, says, capsys):
    """With ``call_command`` it is the error's ``returncode``."""
    assert manage(*arguments) == status
    assert says in capsys.readouterr().err
    with pytest.raises(CommandError) as caught:
        called(*arguments)
    assert caught.value.returncode == status
    assert says in str(caught.value)


def test_an_app_may_be_named(capsys):
    """By the same rules as for ``celery -A``."""
    assert manage("--app", "no.such.project", "list") == 2
    assert "--app no.such.project: No module named 'no'" in capsys.readouterr().err


def test_an_unreachable_redis_has_its_own_exit_status(app, capsys):
    app.conf.singleton_lock_backend = "redis://127.0.0.1:1"
    assert manage("list") == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_call_command_prints_to_stdout(held):
    (lock,) = json.loads(called("list", "--json"))
    assert lock["name"] == "account:1"


@pytest.mark.parametrize("command", [("why", "no-such-task"), ("doctor",), ("doctor", "--quick")])
def test_no_command_ends_the_program_that_calls_it(command):
    """SystemExit passed ``except Exception``: the rest of the program did not run, silently."""
    try:
        called(*command)
        status = 0
    except CommandError as error:
        status = error.returncode
    assert status == manage(*command)


def test_without_an_app_of_the_project_it_fails(capsys, monkeypatch):
    """Celery's default app would show no locks, which would be misleading."""
    _state._set_current_app(None)
    monkeypatch.setattr(_state, "default_app", None)  # a worker in a thread may have set it
    assert manage("list") == 2
    assert "the project has not created a Celery app" in capsys.readouterr().err
