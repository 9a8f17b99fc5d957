"""Invalid declarations and settings are refused by name, with what to change."""

from __future__ import annotations

import json
import math

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, LockedTask
from support.waiting import eventually
from support.workers import CeleryWorker

SECRET = "s3cr-t-word"


def declare(**options):
    """Declare a task, as at import, and finalize its app, as a worker does."""
    app = Celery("bad", broker="memory://", set_as_current=False)

    @app.task(name="settle", base=LockedTask, shared=False, **options)
    def settle(account_id, note=""):
        return account_id

    app.finalize()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lock_on_conflict": "parc"}, ["settle", "lock_on_conflict", "parc", "park"]),
        ({"lock_expiry": 30}, ["settle", "lock_expiry", "lock_lease"]),
        ({"lock_leese": 30}, ["settle", "lock_leese", "lock_lease"]),
        ({"lock_key": "account:{acount_id}"}, ["settle", "lock_key", "acount_id", "account_id"]),
        ({"lock_key": "{account_id}"}, ["settle", "lock_key", "text"]),
        ({"lock_key": ""}, ["settle", "lock_key"]),
        ({"lock_key": 7}, ["settle", "lock_key", "7"]),
        ({"lock_args": ["acount_id"]}, ["settle", "lock_args", "acount_id"]),
        ({"lock_args": "account_id"}, ["settle", "lock_args"]),
        ({"lock_key": "a:{account_id}", "lock_args": []}, ["settle", "lock_key", "lock_args"]),
        ({"lock_lease": 0}, ["settle", "lock_lease", "0"]),
        ({"lock_lease": -5}, ["settle", "lock_lease", "-5"]),
        ({"lock_lease": math.nan}, ["settle", "lock_lease", "nan"]),
        ({"lock_lease": math.inf}, ["settle", "lock_lease", "inf"]),
        ({"lock_lease": 0.2}, ["settle", "lock_lease", "0.2", "watchdog"]),
        ({"lock_lease": "30"}, ["settle", "lock_lease", "'30'"]),
        ({"lock_limit": 0}, ["settle", "lock_limit", "0"]),
        ({"lock_limit": 1.5}, ["settle", "lock_limit", "1.5"]),
        ({"lock_wait_timeout": -1}, ["settle", "lock_wait_timeout", "-1"]),
        ({"lock_max_waiting": -1}, ["settle", "lock_max_waiting", "-1"]),
        ({"lock_max_waiting": 1, "lock_on_full": "drop"}, ["settle", "lock_on_full", "drop"]),
        ({"lock_on_backend_error": "ignore"}, ["settle", "lock_on_backend_error", "ignore"]),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_when_it_is_declared(options, words):
    """The error is a ConfigurationError that names task, option and what to write instead."""
    with pytest.raises(ConfigurationError) as caught:
        declare(**options)
    for word in words:
        assert word in str(caught.value)


def refused(own_book, bad, *, app="integration.misconfigured_app", pool="solo", timeout=60, **urls):
    """Start a worker that must refuse; return its log when it has ended with an error."""
    urls.setdefault("broker", own_book.url)
    worker = CeleryWorker(app, pool=pool, env={"BAD": json.dumps(bad)}, **urls)
    worker.start(wait=False)
    eventually(
        lambda: worker.returncode is not None, timeout, lambda: f"refuses\n{worker.log_tail()}"
    )
    assert worker.returncode != 0, worker.log_tail()
    assert "ready." not in worker.log()
    assert "Traceback" not in worker.log(), "what is to be changed is one sentence"
    assert not [k for k in own_book.client.keys("csl:*") if b"fleet" in k], "it told the fleet"
    return worker.log()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"options": {"lock_lease": 0}}, ["settle", "lock_lease"]),
        ({"conf": {"singleton_lock_leese": 3}}, ["singleton_lock_leese", "singleton_lock_lease"]),
        ({"conf": {"singleton_lock_lease": -1}}, ["singleton_lock_lease", "-1"]),
        ({"conf": {"singleton_lock_on_conflict": "x"}}, ["singleton_lock_on_conflict", "park"]),
        ({"conf": {"singleton_lock_prefix": "a{b"}}, ["singleton_lock_prefix"]),
        (
            {"conf": {"singleton_lock_backend": f"http://joe:{SECRET}@localhost/0"}},
            ["singleton_lock_backend", "redis://", "***@localhost"],
        ),
        (
            {"conf": {"singleton_lock_backend": f"redis://:{SECRET}@localhost/x"}},
            ["singleton_lock_backend", "database"],
        ),
        ({"locked": False, "options": {"lock_key": "a"}}, ["settle", "lock_key", "LockedTask"]),
        (
            {"batched": True},
            ["settle: integration.misconfigured_app.Batched has a Strategy of its own"],
        ),
    ],
    ids=str,
)
def test_a_worker_refuses_to_start_and_says_why(own_book, bad, words):
    """Non-zero exit, the sentence in its log, no password in it, and nothing in Redis."""
    log = refused(own_book, bad)
    for word in words:
        assert word in log
    assert SECRET not in log


def test_a_forgotten_LockedTask_is_refused_by_a_worker_whose_app_imports_nothing_of_it(own_book):
    """The commonest first mistake: without a word the task would run without its lock."""
    bad = {"options": {"lock_key": "account:{account_id}"}}
    log = refused(own_book, bad, app="integration.app_without_import")
    assert (
        "task settle: lock_key is set, but the task is not a LockedTask, so no lock would be "
        "taken. Declare it with base=LockedTask (from celery_singleton_lock import LockedTask), or "
        "remove the option."
    ) in log


def test_options_of_a_users_own_class_are_allowed_if_LockedTask_is_not_imported(own_book):
    """They may be meant for that class: the worker says what they do not do, and starts."""
    env = {"BAD": json.dumps({"audited": True, "options": {"lock_key": "a"}})}
    app = "integration.app_without_import"
    with CeleryWorker(app, own_book.url, pool="solo", env=env) as worker:
        assert "task settle has lock_key, and its class Audited is not derived" in worker.log()


@pytest.mark.full
def test_an_annotation_for_all_tasks_may_have_lock_options(own_book):
    """It goes to Celery's own tasks, and to the user's plain ones, which cannot mean it."""
    conf = {"task_annotations": {"*": {"lock_lease": 12}}}
    for app in ("integration.misconfigured_app", "integration.app_without_import"):
        with CeleryWorker(
            app, own_book.url, pool="solo", env={"BAD": json.dumps({"conf": conf})}
        ) as worker:
            assert "lock_lease" not in worker.log()


def test_a_worker_without_a_redis_for_its_locks_refuses_to_start(own_book):
    """Neither broker nor results are Redis: the error names the setting to set."""
    log = refused(own_book, {}, broker="memory://", backend="cache+memory://")
    assert "singleton_lock_backend" in log


@pytest.mark.needs_real_redis
def test_L31_a_redis_that_evicts_keys_is_refused_unless_allowed(own_book, make_redis):
    """Parked tasks could be thrown away; ``allow_eviction`` accepts that."""
    server = make_redis("--maxmemory-policy", "allkeys-lru")
    conf = {"singleton_lock_backend": server.url}
    log = refused(own_book, {"conf": conf})
    assert "allkeys-lru" in log
    assert "allow_eviction" in log
    conf["singleton_lock_backend_options"] = {"allow_eviction": True}
    env = {"BAD": json.dumps({"conf": conf})}
    with CeleryWorker("integration.misconfigured_app", own_book.url, pool="solo", env=env):
        pass


@pytest.mark.needs_real_redis
def test_a_redis_that_forbids_scripts_is_refused(own_book, make_redis):
    """An ACL user without +@scripting: the error says what to allow, without the password."""
    server = make_redis()
    with server.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "joe", "on", f">{SECRET}", "~*", "&*", "+@all", "-@scripting"
        )
    url = server.url.replace("redis://", f"redis://joe:{SECRET}@")
    log = refused(own_book, {"conf": {"singleton_lock_backend": url}})
    assert "NOPERM" in log
    assert "+evalsha" in log
    assert SECRET not in log


@pytest.mark.needs_real_redis
def test_a_redis_whose_user_may_not_block_is_refused(own_book, make_redis):
    """No grant would arrive: parked tasks would wait for ever, and nothing would tell why."""
    server = make_redis()
    with server.client() as client:
        rights = f"joe on >{SECRET} ~* &* +@all -@blocking"
        client.execute_command("ACL", "SETUSER", *rights.split())
    url = server.url.replace("redis://", f"redis://joe:{SECRET}@")
    log = refused(own_book, {"conf": {"singleton_lock_backend": url}})
    assert "(NOPERM): the ACL user may not run BLPOP; allow it: " in log


@pytest.mark.needs_real_redis
def test_a_wrong_password_is_refused(own_book, make_redis):
    """The error says so, and does not show the password."""
    server = make_redis(password="right")
    url = f"redis://:{SECRET}@127.0.0.1:{server.port}/0"
    log = refused(own_book, {"conf": {"singleton_lock_backend": url}})
    assert "password" in log
    assert SECRET not in log


def test_data_of_another_schema_is_refused(own_book):
    """A worker does not touch what another version of this library wrote."""
    own_book.client.set("csl:schema", "99")
    log = refused(own_book, {})
    assert "99" in log
    assert "singleton_lock_prefix" in log
    assert own_book.client.keys("csl:*") == [b"csl:schema"] or "probe" in str(
        own_book.client.keys("csl:*")
    )


def test_a_key_that_holds_another_type_fails_its_task_and_no_other(own_book):
    """Another program's key in the place of a lock: that task fails by name, others run."""
    keys = own_book.store.keyspace.lock("k:taken")
    own_book.client.set(keys.holders, "not ours")
    with own_book.worker() as worker:
        failing = own_book.send("act_failing", "taken", 1)
        state, error = own_book.outcome(failing)
        assert state == "FAILURE"
        assert "WRONGTYPE" in str(error)
        assert "singleton_lock_prefix" in str(error)
        assert own_book.value(own_book.send("act", "free", 2)) == 2
        assert worker.is_running
    assert own_book.client.get(keys.holders) == b"not ours"
    assert own_book.client.keys(f"{keys.holders.removesuffix('holders')}*") == [
        keys.holders.encode()
    ]
