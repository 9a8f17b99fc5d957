"""``locks tasks`` and ``locks try``: against a real Redis, without a worker."""

from __future__ import annotations

import importlib
import json
import re
import sys
from types import SimpleNamespace

import pytest
from celery import Celery, _state
from click.testing import CliRunner

from celery_singleton_lock import DuplicateTask, LockedTask
from celery_singleton_lock.cli import locks, main
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.unique import UniqueCall
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.worker.install import install


def key_of(account_id, amount=0):
    return f"account:{account_id}"


def settle(account_id, amount=0): ...
def close(number): ...
def of_account(account_id): ...
def of_day(day): ...
def nothing(): ...
def move(a, b): ...


class KeyOf:
    def __call__(self, account_id):
        return f"account:{account_id}"


@pytest.fixture
def app(redis_url):
    """An app with one task of each kind of key."""
    app = Celery("bank", broker=redis_url, set_as_current=False)
    same = KeyOf()

    def declare(name, function, base=LockedTask, **options):
        app.task(base=base, name=f"bank.{name}", shared=False, **options)(function)

    declare("settle", settle, lock_key="account:{account_id}")
    declare("close", close, lock_key="account:{number}", lock_on_conflict="skip")
    declare("digest", of_account, lock_key="account:{account_id!h}")
    declare("called", settle, lock_key=key_of, lock_limit=3)
    declare("object", of_account, lock_key=same)
    declare("object_too", of_account, lock_key=same, lock_lease=60)
    declare("report", of_day, lock_args=["day"])
    declare("alone", nothing, lock_args=[], lock_mode="observe")
    declare("default", of_day)
    declare("move", move, lock_keys={"account:{a}": None, "fee:{b}": 2})
    declare("sent", nothing, lock_key="of:{__queue__}:{__headers__[tenant]}")
    declare("make", of_day, lock_key="report:{day}", lock_unique="until_done")
    declare(
        "user",
        of_day,
        lock_key="day:{day}",
        lock_unique=600.0,
        lock_unique_key="{__headers__[user]}",
        lock_on_duplicate="raise",
    )
    declare("plain", nothing, base=None)
    yield app
    app.close()


@pytest.fixture
def run(app):
    """Run a command of ``celery -A app locks``; it must end with ``code``."""

    def call(*args, code=0, of=app):
        ran = CliRunner().invoke(locks, [*map(str, args)], obj=SimpleNamespace(app=of))
        assert ran.exit_code == code, ran.output
        assert "Traceback" not in ran.output
        return ran.stdout if code == 0 else ran.stderr

    return call


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client)
    yield store
    store.close()


# -- tasks -----------------------------------------------------------------------------------------


def test_tasks_shows_the_key_policy_limit_and_lease_of_each_task(run):
    lines = {line.split()[0]: line for line in run("tasks").splitlines()}
    assert lines["TASK"].split()[:6] == ["TASK", "KEY", "POLICY", "LIMIT", "LEASE", "MODE"]
    assert "account:{account_id}  " in lines["bank.settle"]
    assert lines["bank.close"].split()[2:6] == ["skip", "1", "30", "s"]
    assert f"callable {key_of.__module__}.key_of" in lines["bank.called"]
    assert f"callable {KeyOf.__module__}.KeyOf" in lines["bank.object"]
    assert " 60 s " in lines["bank.object_too"]
    assert "lock_args day" in lines["bank.report"]
    assert "one lock for all calls" in lines["bank.alone"]
    assert " observe" in lines["bank.alone"]
    assert "all arguments" in lines["bank.default"]
    assert re.search(r"account:\{a\}, fee:\{b\} +park +1, 2 ", lines["bank.move"])
    assert "bank.plain" not in lines


def test_tasks_shows_who_shares_a_key(run):
    """Whatever its arguments are called; a digest of an argument is another name."""
    found = {task["name"]: task for task in json.loads(run("tasks", "--json"))}
    shares = {name.partition(".")[2]: task["shares_with"] for name, task in found.items()}
    assert {name: others for name, others in shares.items() if others} == {
        "settle": ["bank.close", "bank.move"],
        "close": ["bank.move", "bank.settle"],
        "move": ["bank.close", "bank.settle"],
        "object": ["bank.object_too"],
        "object_too": ["bank.object"],
    }
    assert found["bank.move"]["keys"] == [
        {"key": "account:{a}", "kind": "template", "limit": 1},
        {"key": "fee:{b}", "kind": "template", "limit": 2},
    ]
    assert found["bank.default"]["keys"] == [{"key": "", "kind": "digest", "limit": 1}]
    assert found["bank.report"]["keys"] == [{"key": "day", "kind": "arguments", "limit": 1}]


def test_tasks_asks_no_redis(monkeypatch):
    monkeypatch.setattr(_state, "_on_app_finalizers", set())  # shared tasks of other tests
    with Celery("away", broker="redis://localhost:1/0", set_as_current=False) as app:
        ran = CliRunner().invoke(locks, ["tasks"], obj=SimpleNamespace(app=app))
        assert ran.output == "The app declares no locked task. Give a task base=LockedTask.\n"
        assert ran.exit_code == 0


@pytest.mark.parametrize("command", [["tasks"], ["try", "bank.settle"]])
def test_tasks_and_try_need_the_app(command, redis_url):
    ran = CliRunner().invoke(main, ["--backend", redis_url, *command])
    assert ran.exit_code == 2
    assert f"{command[0]} needs the app: celery -A YOUR_APP locks" in ran.output


APP = """
from celery import Celery

app = Celery("includes", broker="{url}", set_as_current=False)
app.conf.imports = ["csl_elsewhere"]
"""

MODULE = """
from celery_singleton_lock import LockedTask
from csl_includes import app

@app.task(base=LockedTask, name="elsewhere.settle", lock_key="account:{account_id}", shared=False)
def settle(account_id):
    pass
"""


@pytest.fixture
def with_imports(redis_url, tmp_path, monkeypatch):
    """An app whose tasks are in a module that only ``imports`` names."""
    (tmp_path / "csl_includes.py").write_text(APP.format(url=redis_url))
    (tmp_path / "csl_elsewhere.py").write_text(MODULE)
    (tmp_path / "csl_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    app = importlib.import_module("csl_includes").app
    yield app
    app.close()
    for name in ("csl_includes", "csl_elsewhere"):
        sys.modules.pop(name, None)


def test_tasks_of_modules_that_only_workers_import_are_found(run, with_imports):
    assert "elsewhere.settle" in run("tasks", of=with_imports)
    assert "'account:7'" in run("try", "elsewhere.settle", "--args", "[7]", of=with_imports)


def test_the_mode_of_a_task_that_only_workers_import_can_be_switched(run, with_imports):
    """It was refused as unknown, unless a worker was live."""
    assert "off" in run("mode", "off", "--yes", "--task", "elsewhere.settle", of=with_imports)


def test_a_module_that_cannot_be_imported_is_named_in_one_line(run, with_imports):
    with_imports.conf.imports = ["csl_broken"]
    said = run("tasks", of=with_imports, code=1)
    assert "cannot be imported: ZeroDivisionError: division by zero (" in said
    assert "csl_broken.py, line 1)" in said
    assert len(said.splitlines()) == 1


# -- try -------------------------------------------------------------------------------------------


def test_try_tells_the_lock_and_that_no_worker_is_there(run):
    """In the first hour the worker is often forgotten."""
    out = run("try", "bank.settle", "--args", "[42]", "--kwargs", '{"amount": 7}')
    lines = out.splitlines()
    assert lines[1].split() == ["account:42", "0/1", "0", "free"]
    assert lines[3] == "It would start at once, under 'account:42'."
    assert lines[4].startswith("But no live worker with this task consumes the queue 'celery': ")


def test_try_tells_behind_whom_the_call_would_wait(run, app, store):
    store.worker_heartbeat("w@h#1", install(app).realm, ["celery"], 600, tasks=["bank.settle"])
    holder = Owner(new_token(), "6952b19d-xyz/0/0", "bank.settle", "w@h#1")
    store.acquire(holder, Claim("account:42", lease=600))
    out = run("try", "bank.settle", "--args", "[42]")
    told = "It would be parked, as the 1st in the queue: 'account:42' is held by settle[6952b19d] "
    assert told in out
    assert "no live worker" not in out
    found = json.loads(run("try", "bank.close", "--args", "[42]", "--json"))
    assert (found["task"], found["queue"], found["mode"]) == ("bank.close", "celery", "enforce")
    assert (found["outcome"], found["lock"]) == ("skip", "account:42")
    (lock,) = found["locks"]
    assert (lock["held"], lock["limit"], lock["waits_for"]) == (1, 1, "holder")
    assert lock["holders"][0]["token"] == holder.token


def test_try_names_all_locks_in_their_order(run):
    found = json.loads(run("try", "bank.move", "--args", '["z", 1]', "--json"))
    assert [(lock["name"], lock["limit"]) for lock in found["locks"]] == [
        ("account:z", 1),
        ("fee:1", 2),
    ]


@pytest.mark.parametrize("task", ["bank.called", "bank.object"])
def test_try_calls_a_callable_key(run, task):
    assert "'account:9'" in run("try", task, "--kwargs", '{"account_id": 9}')


def test_try_knows_the_queue_and_the_headers_of_the_message(run):
    assert "'of:celery:acme'" in run("try", "bank.sent", "--header", "tenant=acme")
    out = run("try", "bank.sent", "--header", "tenant=a=b", "--queue", "slow")
    assert "'of:slow:a=b'" in out
    assert "tenant" in run("try", "bank.sent", code=1)


def test_try_heeds_a_switched_mode(run):
    run("mode", "off", "--yes", "--task", "bank.settle")
    out = run("try", "bank.settle", "--args", "[42]")
    assert "It would start at once, without a lock: its mode is off." in out


def test_try_sends_and_changes_nothing(run, redis_client):
    before = {key: redis_client.dump(key) for key in redis_client.keys("*")}
    run("try", "bank.move", "--args", "[1, 2]")
    assert {key: redis_client.dump(key) for key in redis_client.keys("*")} == before


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["bank.setle"], 1, "has no locked task 'bank.setle'. Did you mean 'bank.settle'?"),
        (["xyz"], 1, "has no locked task 'xyz'. See locks tasks."),
        (["bank.plain"], 1, "the task 'bank.plain' is not a LockedTask, and takes no lock. Give"),
        (["bank.settle"], 1, "cannot be called with its arguments: missing a required argument"),
        (["bank.settle", "--args", "[1, 2, 3]"], 1, "too many positional arguments"),
        (["bank.settle", "--kwargs", '{"acount": 1}'], 1, "cannot be called with its arguments"),
        (["bank.settle", "--args", "[null]"], 1, "account_id"),
        (["bank.settle", "--args", "42"], 2, "--args is 42: it is an int. Give a list, such as"),
        (["bank.settle", "--args", "[42"], 2, "--args is [42: it is not JSON ("),
        (["bank.settle", "--args", "[" * 100_000], 2, "it is not JSON ("),
        (["bank.settle", "--kwargs", "[]"], 2, "--kwargs is []: it is a list. Give an object,"),
        (["bank.settle", "--header", "tenant"], 2, "--header tenant: write NAME=VALUE"),
        (["bank.settle", "--args", "\udcff"], 2, "is not valid UTF-8"),
        ([], 2, "Missing argument 'TASK'"),
    ],
)
def test_try_says_what_is_wrong_with_a_call(run, args, code, told):
    said = run("try", *args, code=code)
    assert told in said
    assert len(said) < 1000


@pytest.mark.parametrize("name", ["\x1b[31mred", "שלום\u202eolleh", "a\nb"])
def test_what_a_caller_wrote_reaches_no_terminal_raw(run, name):
    out = run("try", "bank.settle", "--args", json.dumps([name]))
    out += run("try", name, code=1)
    out += run("try", "bank.settle", "--args", name, code=2)
    out += run("try", "bank.sent", "--header", f"tenant={name}", "--queue", name)
    out += run("try", "bank.sent", "--header", name, code=2)
    assert not set("\x1b\u202e") & set(out)
    assert "a\nb" not in out


# -- unique calls ----------------------------------------------------------------------------------

DAY = ["--args", '["may"]']


def test_try_tells_that_a_call_like_one_that_was_sent_is_not_sent(run, app):
    first = app.tasks["bank.make"].delay("may")
    told = run("try", "bank.make", *DAY)
    assert f"It would not be sent. Task {first.id} was sent before, and counts for another " in told
    found = json.loads(run("try", "bank.make", *DAY, "--json"))
    assert (found["outcome"], found["duplicate_of"]) == ("duplicate", first.id)
    assert app.tasks["bank.make"].delay("may").duplicate, "what it foretold"
    found = json.loads(run("try", "bank.make", "--args", '["june"]', "--json"))
    assert (found["outcome"], found["duplicate_of"]) == ("run", "")


def test_try_tells_that_a_call_is_being_sent_or_is_here(run, store):
    store.announce("report:may", "bank.make", "first")
    told = "It would not be sent. Task first is being sent. If its sender has died, this call is "
    assert told in run("try", "bank.make", *DAY)
    unique = UniqueCall("report:may", "bank.make", until_start=False, most=60.0)
    claim = Claim("report:may", lease=600, flow=packed((), unique=unique))
    store.acquire(Owner(new_token(), "first/0/0", "bank.make", "w@h#1"), claim)
    told = "It would not be sent. Task first is parked, or holds the lock (lock_unique)."
    assert told in run("try", "bank.make", *DAY)
    refused = run("forget-call", "bank.make", *DAY, code=1)
    assert "task first is parked, or holds the lock, so its message is not lost" in refused
    assert "See locks why first" in refused
    assert store.audit() == []


def test_a_call_whose_message_was_purged_is_sent_again(run, app, store):
    first = app.tasks["bank.make"].delay("may")
    told = run("forget-call", "bank.make", *DAY, "--why", "purged")
    assert (
        f"Task {first.id} does not count as sent any more: the next call like it is sent." in told
    )
    (entry,) = store.audit()
    assert (entry["action"], entry["lock"], entry["why"]) == ("forget-call", "report:may", "purged")
    again = app.tasks["bank.make"].delay("may")
    assert (again.duplicate, again.id != first.id) == (False, True)


def test_calls_are_told_apart_by_the_headers_of_the_message(run, app):
    jane, joe = ({"user": "jane"}, {"user": "joe"})
    app.tasks["bank.user"].apply_async(("may",), headers=jane)
    told = run("try", "bank.user", *DAY, "--header", "user=jane")
    assert "It would not be sent: DuplicateTask would be raised. Task " in told
    assert re.search(r" was sent before, and counts for another (9|10) min ", told)
    assert "It would start at once" in run("try", "bank.user", *DAY, "--header", "user=joe")
    assert "no call like this one counts as sent, so the next one is sent" in run(
        "forget-call", "bank.user", *DAY, "--header", "user=joe", code=1
    )
    with pytest.raises(DuplicateTask):
        app.tasks["bank.user"].apply_async(("may",), headers=jane)
    assert not app.tasks["bank.user"].apply_async(("may",), headers=joe).duplicate


def test_show_names_the_call_that_counts_though_no_worker_has_it(run, store):
    """The lock has no holder and no waiter yet."""
    assert "no lock 'report:may' is known" in run("show", "report:may", code=1)
    store.announce("report:may", "bank.make", "first")
    store.confirm_sent("report:may", "bank.make", "first", 0, 600.0)
    told = run("show", "report:may")
    assert "unique   bank.make: task first is in the broker, and counts as sent for another" in told
    (call,) = json.loads(run("show", "report:may", "--json"))["calls"]
    assert (call["task_id"], call["state"], call["followers"]) == ("first", "sent", 0)


def test_a_task_without_lock_unique_has_no_call_to_forget(run):
    told = run("forget-call", "bank.settle", "--args", "[42]", code=1)
    assert "each call of the task 'bank.settle' is sent: it has no lock_unique" in told
