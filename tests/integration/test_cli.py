"""The operators' commands, on a Redis with a password, which no output may show."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_singleton_lock import Lock
from celery_singleton_lock.admin.production_checks import CHECKLIST
from celery_singleton_lock.cli import bulk_commands, change_commands, locks, main, render
from celery_singleton_lock.config.url_text import realm_of
from celery_singleton_lock.core.installed_version import installed_version
from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Claim, Ending, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.redis_keys import bucket_of
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.flower.rows import LockRows
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.worker import operator_actions
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.message_codec import pack
from integration.book import Book, standing
from support.ci import skip_or_fail
from support.entry_points import metadata_path
from support.events import EventLog
from support.failing_store import FailingStores, Failure, Moment
from support.proxy import Proxy
from support.waiting import eventually

SECRET = "s3cr3t-of-the-locks"


@pytest.fixture(scope="module")
def book(redis_provider, tmp_path_factory):
    if not redis_provider.is_real:
        skip_or_fail("fakeredis has no password")
    with (
        RedisServer(redis_provider, password=SECRET) as server,
        Book(server.url, tmp_path_factory.mktemp("book")) as book,
    ):
        yield book


@pytest.fixture(scope="module")
def worker(book):
    with standing(book.worker(pool="prefork", concurrency=3, args=("-E",))) as worker:
        yield worker


@pytest.fixture
def admin(book):
    """The operators' store, with an empty audit."""
    store = RedisAdminStore(book.client)
    book.client.delete(store.keyspace.audit)
    yield store
    store.close()


class Ran:
    """The output of a command."""

    def __init__(self, result):
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert SECRET not in self.out + self.err
        assert "Traceback" not in self.out + self.err

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run(book):
    """Run a command of ``celery -A app locks``; it must end with ``code``, unless that is None."""

    def call(*args, code=0, stdin=None):
        obj = SimpleNamespace(app=book.app)
        ran = Ran(CliRunner().invoke(locks, [str(arg) for arg in args], input=stdin, obj=obj))
        assert code in {None, ran.code}, f"{args}: {ran.code}\n{ran.out}\n{ran.err}"
        return ran

    return call


@pytest.fixture
def alone(book):
    """Run a command of ``celery-singleton-lock``, which has no app."""

    def call(*args, code=0, stdin=None, url=book.url):
        env = {"CELERY_SINGLETON_LOCK_BACKEND": url}
        ran = Ran(CliRunner().invoke(main, [str(arg) for arg in args], input=stdin, env=env))
        assert ran.code == code, f"{args}: {ran.code}\n{ran.out}\n{ran.err}"
        return ran

    return call


@pytest.fixture
def contended(book, worker, key):
    """A task that holds the key's lock until its gate opens, and two that are parked."""
    first = book.send("act", key, 0, hold=key)
    book.started(first)
    rest = [book.send("act", key, n) for n in (1, 2)]
    book.await_waiting(key, 2)
    yield SimpleNamespace(first=first, rest=rest, name=f"k:{key}")
    book.open(key)


def token_of(admin, name):
    return admin.inspect(name).holders[0].token


def park(admin, name, number=1, queue="nowhere", task="app.task", age=0.0, realm="R", **claim):
    """Park messages that no worker consumes."""
    place = int((admin.time() - age) * 1_000_000) if age else 0
    tokens = []
    for i in range(number):
        owner = Owner(new_token(), f"{name}-{i}-{new_token()}/0/0", task)
        admin.park(
            owner, Claim(name, place=place and place + i), MessageToPark(b"{}\n", realm, queue)
        )
        tokens.append(owner.token)
    return tokens


# -- looking ---------------------------------------------------------------------------------------


def test_list_shows_holders_and_number_of_waiters(run, alone, contended):
    for command in (run, alone):
        out = command("list", contended.name).out
        assert re.search(rf"{contended.name} +1/1 +2 .*act\[{contended.first[:8]}\] on w", out)
        (lock,) = command("list", contended.name, "--json", "--sort", "waiting").json
        assert (lock["held"], lock["waiting"]) == (1, 2)
    assert "No lock that matches 'no such lock' is held or" in run("list", "no such lock").out


def test_list_sorts_as_people_do_and_counts_at_its_end(alone, admin):
    """10 comes after 2; the summary has the number of all locks, though only some are shown."""
    names = ["n:1", "n:2", "n:10", "n:010x", "n:" + "9" * 5_000]
    for name in reversed(names):
        admin.acquire(Owner(new_token(), "h/0/0", "t"), Claim(name))
    park(admin, "n:2", 2)
    assert [lock["name"] for lock in alone("list", "n:", "--json").json] == names
    assert alone("list", "n:").out.splitlines()[-1] == "5 locks, 5 held; 2 waiting"
    last = alone("list", "n:", "--limit", 2).out.splitlines()
    assert [line.split()[0] for line in last[1:3]] == ["n:1", "n:2"]
    assert last[-1] == "5 locks, 5 held; 2 waiting; the first 2 are shown"
    for name in names:
        admin.reset(name)


def test_a_table_is_no_wider_than_the_terminal(alone, admin, monkeypatch):
    """In a pipe names are not cut."""
    name, task = "wide:" + "x" * 50, "app." + "y" * 60
    admin.acquire(Owner(new_token(), "h/0/0", task), Claim(name))
    assert name in alone("list", "wide:").out
    monkeypatch.setattr(render, "width", lambda: 72)
    lines = alone("list", "wide:").out.splitlines()
    assert max(map(len, lines)) <= 72
    assert lines[1].startswith("wide:xxx")
    assert "…" in lines[1]
    admin.reset(name)


@pytest.mark.full
def test_why_reads_the_length_of_all_known_queues(run, book, worker, key, monkeypatch):
    """Those of the app, of its tasks and of its workers, not only the default queue."""
    monkeypatch.setattr(book.app.tasks["plain"], "queue", f"routed-{key}", raising=False)
    lost = book.send("act", key, queue=f"unknown-{key}")
    told = run("why", lost, code=1).out
    assert told.startswith("unseen: ")
    assert {"celery", f"routed-{key}"} <= set(re.findall(r"[\w-]+", told))
    with book.worker(concurrency=1, queues=[f"elsewhere-{key}"]):
        eventually(lambda: f"elsewhere-{key}" in run("why", lost, code=1).out)


def test_show_prints_holder_token_and_queue(run, contended, admin):
    out = run("show", contended.name).out
    assert f"token    {token_of(admin, contended.name)}" in out
    assert re.search(rf"1 +[\d.]+ s +parked +act\[{contended.rest[0]}\]", out)
    shown = run("show", contended.name, "--json").json
    assert [each["attempt"] for each in shown["waiting"]] == [f"{r}/0/0" for r in contended.rest]
    assert "no lock 'nobody' is known" in run("show", "nobody", code=1).err


@pytest.mark.full
def test_why_answers_at_every_point_of_a_tasks_way(run, alone, book, worker, key, contended):

    def says(pattern, task_id):
        """Wait for an answer: a worker that stands still gives none, and seems to be dead."""
        found = eventually(
            lambda: re.match(pattern, run("why", task_id, code=None).out),
            message=lambda: f"{pattern}: {run('why', task_id, code=None).out}",
        )
        return found.string

    says(
        rf"parked: blocked [\d.]+ s by act\[{contended.first[:8]}\] on w\d+@\S+, "
        r"lease [\d.]+ s left, you are 2nd\n$",
        contended.rest[1],
    )
    short = run("why", contended.rest[1][:8]).out
    assert short.endswith(f"you are 2nd (task {contended.rest[1]})\n")
    says("running: runs on w", contended.first)
    plain = book.send("plain", key, hold=key)
    book.started(plain)
    says("running: It runs on w", plain)
    later = book.send("act", f"{key}-later", countdown=300)
    says("eta: It was received by w", later)
    never = book.send("act", key, queue="nobody consumes this")
    says(r"(?s).*has not reached a worker \(look at the queue: ", never)
    assert "Run the command with the app" in alone("why", never, code=1).out
    book.open(key)
    book.value(contended.rest[1])
    says(r"finished: It ended with SUCCESS\.\n$", contended.rest[1])
    assert run("why", contended.rest[1], "--json").json["state"] == "finished"


def test_why_names_the_worker_that_holds_a_task_back_between_two_tries(run, book, contended):
    """It waits with ``lock_on_conflict="requeue"``. Nobody is to send it again."""
    waits = book.send("act_requeue_slow", contended.name.removeprefix("k:"), 3)

    told = eventually(lambda: re.match("received: .* did not get", run("why", waits).out)).string
    assert f"did not get '{contended.name}': that worker holds it back" in told
    assert "send it again" not in told


@pytest.mark.full
def test_why_promises_no_retry_of_a_task_that_a_cold_shutdown_has_ended(run, book, key):
    """From Celery 5.7 on its state is RETRY, but no message of it is anywhere."""
    with book.worker(pool="prefork", concurrency=1, queues=key) as worker:
        task_id = book.send("act", key, hold=key, queue=key)
        book.started(task_id)
        worker.signal(signal.SIGQUIT)
        worker.wait()
    told = run("why", task_id, code=1).out
    assert re.match("unseen: (It was cancelled by Celery|No worker, lock or result)", told)
    assert "acknowledged early" in told


def test_why_tells_that_a_retry_waits_in_the_broker(run, book, key):
    book.app.backend.mark_as_retry(key, ValueError("again"), traceback="Traceback")
    assert run("why", key).out == "eta: It waits for its retry in the broker's queue.\n"


def test_watch_shows_the_locks_again_and_again(run, contended):
    out = run("watch", contended.name, "--interval", 0.1, "--count", 3).out
    assert out.count(f"{contended.name}  1/1") == 3


@pytest.mark.parametrize("name", ["<script>\x1b[31mred", "שלום\u202eolleh", "x" * 10_000, "a\nb"])
def test_hostile_names_do_not_rule_the_terminal(run, alone, book, admin, name):
    lock = Lock(book.client, name, lease=30)
    lock.acquire()
    for out in (alone("list").out, alone("show", name).out):
        assert not set("\x1b\u202e") & set(out)
    assert max(map(len, alone("list").out.splitlines())) < 200
    found = run("release", name, "--token", token_of(admin, name), "--force", "--yes")
    assert not set("\x1b\u202e") & set(found.out)
    assert not set("\x1b\u202e") & set(alone("audit").out)


# -- stepping in -----------------------------------------------------------------------------------


def test_t28_release_is_refused_without_token_and_without_force(run, contended, admin):
    token = token_of(admin, contended.name)
    assert f"--token {token}" in run("release", contended.name, code=1).err
    assert "--terminate" in run("release", contended.name, "--token", token, code=1).err
    waiter = admin.list_waiters(contended.name, "queue").waiting[0].token
    said = run("release", contended.name, "--token", waiter, "--force", "--yes", code=1).err
    assert "there is nothing to release" in said
    assert token_of(admin, contended.name) == token
    assert admin.audit() == []


def test_t28_force_names_its_risk_asks_and_grants_the_next_waiter(
    run, contended, admin, book, tmp_path
):
    name, token = contended.name, token_of(admin, contended.name)
    asked = run("release", name, "--token", token, "--force", code=1, stdin="n\n")
    assert "at the same time" in asked.err
    assert token_of(admin, name) == token
    with EventLog(book.app) as events:
        run("release", name, "--token", token, "--force", "--why", "hangs", stdin="y\n")
        event = eventually(
            lambda: next((e for e in events.seen if e["type"] == "lock-admin"), None)
        )
    assert (event["action"], event["lock"], event["why"]) == ("release", name, "hangs")
    assert book.value(contended.rest[0]) == 1
    (entry,) = admin.audit()
    assert (entry["action"], entry["via"], entry["why"]) == ("release", "cli", "hangs")
    shown = run("audit").out
    assert re.search(rf"release +{name} +hangs", shown)
    assert run("audit", "--json").json[0]["task"] == "act"


def test_terminate_ends_the_holder_first_and_needs_no_force(run, alone, contended, admin, book):
    name, token = contended.name, token_of(admin, contended.name)
    assert "needs the app" in alone("release", name, "--token", token, "--terminate", code=2).err
    assert "has ended" in run("release", name, "--token", token, "--terminate").out
    assert book.outcome(contended.first)[0] == "REVOKED"
    assert [book.value(r) for r in contended.rest] == [1, 2]
    assert [entry["action"] for entry in admin.audit()] == ["terminate"]


def test_a_frozen_process_that_cannot_be_terminated_is_named(
    run, contended, admin, book, monkeypatch
):
    """It was not "terminated": it has a signal that it does not handle. Killing it helps."""
    monkeypatch.setattr(change_commands, "ENDED_WITHIN", 0.5)
    name, token = contended.name, token_of(admin, contended.name)
    (holder,) = admin.inspect(name).holders
    os.kill(holder.pid, signal.SIGSTOP)
    try:
        told = run("release", name, "--token", token, "--terminate", code=1).err
        assert f"its process (pid {holder.pid} on {holder.host}) has not ended" in told
        assert "kill the process" in told
        assert "In any other pool it is the whole worker, with all its tasks" in told
        assert f"process  pid {holder.pid} on {holder.host}\n" in run("show", name).out
    finally:
        os.kill(holder.pid, signal.SIGKILL)
    assert [book.value(r) for r in contended.rest] == [1, 2]


def test_nobody_is_told_to_kill_a_process_that_does_not_run_the_task(run, admin, key, monkeypatch):
    """The task keeps the lock while it is parked at another one. The process runs other tasks."""
    monkeypatch.setattr(change_commands, "ENDED_WITHIN", 0.5)
    a, b = f"{key}-a", f"{key}-b"
    first = Owner(new_token(), f"{key}/0/0", "act", "w@here#1", "here", 4711)
    admin.acquire(Owner(new_token()), Claim(b))
    admin.acquire(first, Claim(a))
    second = first._replace(token=new_token())
    lock_set = LockSet((Part(a, first.token), Part(b, second.token)), at=1)
    body = json.dumps({"headers": lock_set.header()}).encode() + b"\nbody"
    admin.park(second, Claim(b), MessageToPark(body, "R", "q"))
    assert "4711" not in run("show", a).out + run("show", a, "--json").out
    for options in (["--terminate"], []):
        told = run("release", a, "--token", first.token, *options, code=1).err
        assert f"does not run: it waits for the lock '{b}'" in told
        assert f"locks drop {b} {key}" in told
        assert "4711" not in told
    run("drop", b, key, "--yes")
    assert "nobody holds" in run("release", a, code=1).err
    admin.reset(b)


def test_a_lease_that_ends_by_itself_is_not_taken_for_a_terminated_task(run, admin, key):
    """A worker that stands still goes on with its task later: the operator must not rely on it."""
    owner = Owner(new_token(), f"{key}/0/0", "act", "w@gone#1", "gone", 4711)
    admin.acquire(owner, Claim(f"k:{key}", 2.0))
    told = run("release", f"k:{key}", "--token", owner.token, "--terminate", code=1).err
    assert "the lease of" in told
    assert "Whether its process (pid 4711 on gone) has ended is not known" in told
    assert "In any other pool it is the whole worker" in told


def test_a_broker_that_is_away_terminates_nothing_and_is_named(run, admin, key, book, monkeypatch):
    owner = Owner(new_token(), f"{key}/0/0", "act", "w@gone#1", "gone", 4711)
    admin.acquire(owner, Claim(f"k:{key}", 30.0))

    def refuse(*_, **__):
        raise ConnectionError(book.url)

    monkeypatch.setattr(book.app.control, "revoke", refuse)
    told = run("release", f"k:{key}", "--token", owner.token, "--terminate", code=3).err
    assert "nothing was terminated" in told
    assert "in others it is the whole worker" in told
    assert not admin.audit()
    admin.release(f"k:{key}", owner.token, Ending.FINAL)


def test_a_dropped_task_ends_revoked_and_the_others_go_on(run, contended, book, admin):
    name, (gone, stays) = contended.name, contended.rest
    assert run("drop", name, gone, "--dry-run", "--json").json["total"] == 1
    assert "It will not run" in run("drop", name, gone, code=1, stdin="n\n").err
    assert "use release" in run("drop", name, contended.first, code=1).err
    run("drop", name, gone, "--yes")
    state, reason = book.outcome(gone)
    assert state == "REVOKED"
    assert "dropped by" in str(reason)
    book.open(name.removeprefix("k:"))
    assert book.value(stays) == 2
    assert not book.starts(id=gone)
    assert admin.audit()[0]["count"] == 1


def test_a_promoted_task_is_next(run, contended, book):
    assert "is next" in run("promote", contended.name, contended.rest[1]).out
    book.open(contended.name.removeprefix("k:"))
    for result in contended.rest:
        book.value(result)
    assert book.order(contended.name.removeprefix("k:")) == [0, 2, 1]


def test_a_paused_lock_starts_nothing_until_it_is_resumed(run, contended, book, admin):
    name = contended.name
    assert "Paused" in run("pause", name, "--why", "migration").out
    assert "already" in run("pause", name).out
    book.open(name.removeprefix("k:"))
    assert book.value(contended.first) == 0
    eventually(lambda: "is paused (" in run("why", contended.rest[0]).out)
    assert "PAUSED" in run("list", name).out
    assert "migration" in run("show", name).out
    assert len(book.starts(name.removeprefix("k:"))) == 1
    run("resume", name)
    assert [book.value(r) for r in contended.rest] == [1, 2]


@pytest.mark.parametrize("task", ["act_skip", "act_fail"])
def test_the_error_of_a_task_at_a_paused_lock_says_how_to_resume(run, worker, book, key, task):
    """The lock has no holder that the error could name."""
    run("pause", f"k:{key}", "--force", "--why", "migration")
    state, reason = book.outcome(book.send(task, key, 0))
    assert state == {"act_skip": "REVOKED", "act_fail": "FAILURE"}[task]
    told = rf"lock 'k:{key}' is paused \(\S+@\S+, 20[\d-]+ [\d:]+ UTC: migration\) until an "
    assert re.search(told, str(reason)), reason
    assert f"locks resume k:{key}" in str(reason)
    run("resume", f"k:{key}")


@pytest.mark.parametrize("step", [["pause"], ["limit", "5"], ["limit", "--clear"]])
def test_a_slip_in_the_name_of_a_lock_is_no_success(run, contended, admin, book, step):
    """Otherwise an operator would assume that the lock is paused."""
    slip = contended.name.replace("k:", "kk:")
    verb, *rest = step
    told = run(verb, slip, *rest, code=1).err
    assert f"no lock '{slip}' is known" in told
    assert f"Did you mean '{contended.name}'?" in told
    assert "--force" in told
    assert admin.audit() == []
    run(verb, slip, *rest, "--force")
    assert admin.audit()[0]["lock"] == slip
    # It would be as similar to the slip of the next test as the name that is meant.
    for left in book.client.keys(f"*:{slip}:*"):
        book.client.delete(left)


def test_a_limit_is_changed_while_tasks_run(run, contended, book):
    name = contended.name
    assert "limit is 2" in run("limit", name, 2).out
    assert book.value(contended.rest[0]) == 1
    assert "set by an operator" in run("show", name).out
    assert "limit is 1" in run("limit", name, "--clear").out
    run("limit", name, code=2)


# -- many at once ----------------------------------------------------------------------------------


def test_purge_takes_those_that_fit_and_asks_before(run, alone, admin):
    park(admin, "p:old", 3, age=7200)
    park(admin, "p:new", 2)
    park(admin, "p:new", 2, task="app.other")
    old = ("purge", "--match", "p:", "--older-than", "1h", "--dry-run", "--json")
    for counted in (run(*old, "--any-broker").json, alone(*old).json):
        assert counted["locks"] == {"p:old": 3}
    assert "select the tasks: " in run("purge", code=2).err
    asked = alone("purge", "--match", "p:*", "--older-than", "1h", code=1, stdin="n\n")
    assert "Drop 3 parked tasks of 1 lock?" in asked.err
    alone("purge", "--match", "p:*", "--older-than", "1h", stdin="y\n")
    alone("purge", "--lock", "p:new", "--task", "*.other", "--yes")
    assert alone("purge", "--match", "p:", "--dry-run", "--json").json["locks"] == {"p:new": 2}
    told = [(e["action"], e["lock"], e["count"]) for e in admin.audit()]
    assert told == [("purge", "p:new", 2), ("purge", "p:old", 3)]
    alone("purge", "--match", "p:", "--yes")
    assert next(iter(admin.summarise_locks("p:old"))).is_idle


def parked_messages(book, key, number):
    """Park messages of the broker as a worker does; return their task ids."""
    queue, realm, ids = f"q-{key}", install(book.app).realm, []
    store = RedisAdminStore(book.client)
    with book.app.connection_for_read() as connection, connection.SimpleQueue(queue) as inbox:
        for n in range(number):
            ids.append(book.send("act", key, n, queue=queue))
            message = inbox.get(timeout=30)
            owner, body = Owner(new_token(), f"{ids[-1]}/0/0", "act"), pack(message)
            store.park(owner, Claim(f"k:{key}"), MessageToPark(body, realm, queue))
            message.ack()
    return ids


@pytest.fixture
def run_own(own_book):
    """Like ``run``, on a Redis without workers."""

    def call(*args):
        obj = SimpleNamespace(app=own_book.app)
        ran = Ran(CliRunner().invoke(locks, [str(arg) for arg in args], obj=obj))
        assert ran.code == 0, ran.err
        return ran

    return call


def test_purged_tasks_are_brought_back_from_the_file_of_the_purge(alone, admin, key, tmp_path):
    name, file = f"k:{key}", tmp_path / "purged.jsonl"
    admin.acquire(Owner(new_token()), Claim(name))
    park(admin, name, 3)
    args = ("purge", "--lock", name, "--output", file)
    alone(*args, "--dry-run")
    alone(*args, stdin="n\n", code=1)
    assert not file.exists()
    assert alone(*args, "--yes", "--json").json["total"] == 3
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    park(admin, name)
    assert "give a new file" in alone(*args, "--yes", code=2).err
    assert admin.inspect(name).bodies == 1
    assert alone("import", file, "--json").json["left"] == {"has ended already": 3}
    assert [alone("import", file, "--again", "--json").json["total"] for _ in "ab"] == [3, 0]
    assert admin.inspect(name).bodies == 4
    alone("purge", "--lock", name, "--yes")


def test_a_purge_whose_file_cannot_be_written_drops_nothing(alone, admin, key, tmp_path):
    name = f"k:{key}"
    admin.acquire(Owner(new_token()), Claim(name))
    park(admin, name, 3)
    file, limits = tmp_path / "purged.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as on a full disk
    try:
        told = alone("purge", "--lock", name, "--output", file, "--yes", code=1).err
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written (File too large). What is not in it is still parked." in told
    assert admin.inspect(name).bodies == 3
    alone("purge", "--lock", name, "--yes")


@pytest.mark.parametrize("step", ["promote", "pause", "resume"])
def test_a_step_whose_reply_was_lost_is_reported_as_done(run, admin, key, monkeypatch, step):
    """The call is repeated. The second one finds nothing to do."""
    name = f"k:{key}"
    holder = Owner(new_token())
    admin.acquire(holder, Claim(name))
    waiter = Owner(new_token(), f"{key}/0/0", "act")
    admin.acquire(waiter, Claim(name), wait=60.0)
    if step == "resume":
        admin.pause(name, _by())
    once = getattr(RedisAdminStore, step)

    def twice(store, *args, **how):
        once(store, *args, **how)
        if step == "promote":
            store.release(name, holder.token, Ending.FINAL)
        return once(store, *args, **how)

    monkeypatch.setattr(RedisAdminStore, step, twice)
    told = run(step, name, *([waiter.token] if step == "promote" else [])).out
    assert {"promote": "is next.", "pause": "Paused.", "resume": "Resumed."}[step] in told
    admin.resume(name, _by())
    admin.reset(name)


def test_resume_refuses_a_name_that_no_lock_has(alone, admin, key):
    told = alone("resume", f"{key}-mistyped", code=1).err
    assert f"no lock '{key}-mistyped' is known" in told
    assert "--force" not in told


@pytest.mark.parametrize(
    "junk", ["no JSON", "3", "null", "{}", '{"at": "x", "action": 1}', '{"at": "1"}', "[1]"]
)
def test_junk_in_the_audit_log_hides_no_other_entry(alone, admin, key, junk):
    admin.write_audit_entry(key, _by())
    admin.client.rpush(admin.keyspace.audit, junk)
    admin.client.rpush(admin.keyspace.audit, b"\xff")
    told = alone("audit").out
    assert key in told
    assert told.count("unreadable") == 2
    assert len(alone("audit", "--json").json) == 3
    admin.client.delete(admin.keyspace.audit)


@pytest.mark.full
def test_a_task_of_a_dead_worker_is_not_shown_as_running(run_own, own_book, key):
    """Until its lease ends: it shows the time without heartbeat, and when the lock is free."""
    book, name = own_book, f"k:{key}"
    worker = book.worker(pool="prefork", concurrency=1, conf={"singleton_lock_lease": 60}).start()
    first = book.send("act", key, 0, hold=key)
    book.started(first)
    behind = book.send("act", key, 1)
    book.await_waiting(key, 1)
    eventually(lambda: run_own("why", first).out.startswith("running: runs on w"))
    eventually(lambda: "silent" not in run_own("list", name).out + run_own("show", name).out)
    worker.kill()
    eventually(lambda: run_own("why", first).out.startswith("silent: "), 15)
    holder = rf"act\[{first[:8]}\] on w\S+"
    seconds = r"[\d.]+ s"
    assert re.fullmatch(
        rf"silent: ran on w\S+, which has shown no sign of life for {seconds}; if it is dead, "
        rf"'{name}' is free in {seconds} at the latest\n",
        run_own("why", first).out,
    )
    silence = rf"no sign of life for {seconds}; if it is dead, free in {seconds} at the latest"
    assert re.search(rf"by {holder} \({silence}\), you are next", run_own("why", behind).out)
    assert re.search(rf"holder   {holder} \({silence}\), silent\n", run_own("show", name).out)
    assert re.search(rf"{holder}, silent for {seconds}\n", run_own("list", name).out)
    rows = LockRows(RedisAdminStore(book.client))
    (row,) = rows.page(name)["locks"]
    assert (row["holders"][0]["state"], row["holders"][0]["silent_for"] > 0) == ("silent", True)
    assert rows.of_task(first, hint=name)["state"] == "silent"
    book.open(key)


def test_drained_tasks_run_without_this_library_in_their_order(run_own, alone, own_book, key):
    """To uninstall: parked messages go back to the broker unchanged, and any worker runs them."""
    book, store = own_book, RedisAdminStore(own_book.client)
    assert "needs the app" in alone("drain", "--all", code=2).err
    ids = parked_messages(book, key, 7)
    park(store, f"k:{key}", 1, realm="another")
    counted = run_own("drain", "--lock", f"k:{key}", "--dry-run", "--json").json
    assert (counted["total"], counted["left"]) == (7, {"of another broker": 1})
    drained = run_own("drain", "--lock", f"k:{key}", "--rate", 0, "--yes", "--json").json
    assert (drained["total"], drained["left"]) == (7, {"of another broker": 1})
    assert store.inspect(f"k:{key}").bodies == 1
    assert store.audit()[0]["count"] == 7
    sent = [json.loads(raw) for raw in book.broker.lrange(f"q-{key}", 0, -1)][::-1]
    assert [each["headers"]["id"] for each in sent] == ids
    assert not {name for each in sent for name in each["headers"] if "singleton" in name}
    run_own("purge", "--lock", f"k:{key}", "--any-broker", "--yes")
    with book.worker(queues=f"q-{key}", concurrency=1):
        assert [book.value(r) for r in ids] == list(range(7))
    assert book.order(key) == list(range(7))


def test_a_purge_leaves_the_tasks_of_another_application(run_own, alone, own_book, key):
    """Its callers would wait for ever: REVOKED is stored in the result backend of this app."""
    name, store = f"k:{key}", RedisAdminStore(own_book.client)
    parked_messages(own_book, key, 2)
    park(store, name, 3, realm="another")
    left = {"of another broker (--any-broker includes them)": 3}
    for how in ("--dry-run", "--yes"):
        purged = run_own("purge", "--all", how, "--json").json
        assert (purged["total"], purged["left"]) == (2, left)
    assert store.inspect(name).bodies == 3
    assert run_own("purge", "--lock", name, "--yes").out.splitlines() == [
        "        3  left: of another broker (--any-broker includes them)",
        "        0  dropped",
    ]
    assert run_own("purge", "--all", "--any-broker", "--dry-run", "--json").json["total"] == 3
    assert run_own("purge", "--all", "--any-broker", "--yes", "--json").json["total"] == 3


def test_copies_of_a_dropped_task_do_not_run_however_late_the_broker_sends_them(
    redis_url, redis_client
):
    """A killed worker leaves parked messages unacknowledged, and the broker sends them again."""
    app = Celery("late", broker=redis_url, backend=redis_url, set_as_current=False)
    app.conf.broker_transport_options = {"visibility_timeout": 30_000.0}
    store = RedisAdminStore(redis_client)
    store.acquire(holder := Owner(new_token(), "held/0/0", "app.task"), Claim("k:late"))
    park(store, "k:late", 2, realm=realm_of(redis_url))
    one, two = store.list_waiters("k:late", "queue").waiting
    obj = SimpleNamespace(app=app)
    for args in (
        ("drop", "k:late", one.task_id),
        ("purge", "--lock", "k:late"),
        ("release", "k:late", "--token", holder.token, "--force", "--drop"),
    ):
        ran = Ran(CliRunner().invoke(locks, [*args, "--yes"], obj=obj))
        assert ran.code == 0, ran.err
    for attempt in (one.attempt, two.attempt, "held/0/0"):
        until = redis_client.zscore(store.keyspace.lock("k:late").done, attempt)
        assert until / 1000 - store.time() == pytest.approx(60_000, abs=60)
    store.close()


def test_a_purge_without_an_app_does_not_drop_the_tasks_of_several_brokers(alone, admin, key):
    name = f"k:{key}"
    park(admin, name, 2)
    park(admin, name, 3, realm="another")
    for how in ("--dry-run", "--yes"):
        assert "have several brokers" in alone("purge", "--lock", name, how, code=1).err
    assert admin.inspect(name).bodies == 5
    purged = alone("purge", "--lock", name, "--any-broker", "--yes", "--json").json
    assert purged["total"] == 5


def test_all_tasks_are_not_switched_off_while_another_application_runs(run_own, own_book):
    """The switch has no broker: the tasks of the other application would overlap, too."""
    store = RedisAdminStore(own_book.client)
    obj = SimpleNamespace(app=own_book.app)
    store.worker_heartbeat("own@host", realm_of(own_book.url), ["q"], 600)
    run_own("mode", "off", "--yes")
    run_own("mode", "declared")
    store.worker_heartbeat("theirs@host", "another", ["q"], 600)
    for mode in ("off", "observe"):
        ran = Ran(CliRunner().invoke(locks, ["mode", mode, "--yes"], obj=obj))
        assert ran.code == 1
        assert "also to 'theirs@host' of another broker" in ran.err
    assert not store.switches()
    run_own("mode", "off", "--yes", "--task", "integration.worker_app.act", "--force")
    run_own("mode", "declared", "--task", "integration.worker_app.act")
    run_own("mode", "off", "--yes", "--force")
    assert store.switches() == {"*": "off"}
    run_own("mode", "declared")


def test_all_tasks_of_two_applications_are_not_switched_off_without_an_app(alone, own_book):
    """Nothing tells which of the two the operator means."""
    store = RedisAdminStore(own_book.client)
    url = ("--backend", own_book.url)
    store.worker_heartbeat("a@host", "one", ["q"], 600)
    ran = Ran(CliRunner().invoke(main, [*url, "mode", "off", "--yes"]))
    assert (ran.code, dict(store.switches())) == (0, {"*": "off"})
    assert Ran(CliRunner().invoke(main, [*url, "mode", "declared"])).code == 0
    store.worker_heartbeat("b@host", "another", ["q"], 600)
    for mode in ("off", "observe"):
        ran = Ran(CliRunner().invoke(main, [*url, "mode", mode, "--yes"]))
        assert ran.code == 1
        assert "of another broker" in ran.err
    assert not store.switches()
    ran = Ran(CliRunner().invoke(main, [*url, "mode", "off", "--yes", "--force"]))
    assert (ran.code, dict(store.switches())) == (0, {"*": "off"})
    assert Ran(CliRunner().invoke(main, [*url, "mode", "declared"])).code == 0
    store.close()


@pytest.mark.parametrize("before", [0, 2])
def test_a_purge_without_an_app_leaves_tasks_of_another_broker_that_come_while_it_asks(
    alone, admin, key, monkeypatch, before
):
    """The refusal is of no use if such tasks are parked between the check and the purge."""
    name = f"k:{key}"
    park(admin, name, before)
    real = bulk_commands.purge

    def late(*args, **how):
        park(admin, name, 3, realm="another")
        return real(*args, **how)

    if before:
        monkeypatch.setattr(render, "ask", lambda _: park(admin, name, 3, realm="another"))
    else:
        monkeypatch.setattr(bulk_commands, "purge", late)
    purged = alone("purge", "--lock", name, *([] if before else ["--yes"]), "--json").json
    left = {"of another broker (--any-broker includes them)": 3}
    assert (purged["total"], purged["left"]) == (before, left)
    assert admin.inspect(name).bodies == 3


def test_a_drain_that_the_broker_refuses_loses_nothing(run, book, admin, key, monkeypatch):
    realm = "R"
    park(admin, f"k:{key}", 3, realm=realm)

    def refuse(*_):
        raise ConnectionError(f"cannot reach {book.url}")

    monkeypatch.setattr("celery_singleton_lock.worker.publisher.Publisher.send_back", refuse)
    monkeypatch.setattr("celery_singleton_lock.cli.app_context.AppSide.realm", realm)
    asked = run("drain", "--lock", f"k:{key}", stdin="n", code=1).err
    assert "A worker that does not have the task of a message discards it. Send 3 parked" in asked
    said = run("drain", "--lock", f"k:{key}", "--yes", code=3).err
    assert "still parked" in said
    assert admin.inspect(f"k:{key}").bodies == 3
    run("purge", "--lock", f"k:{key}", "--any-broker", "--yes")


@pytest.mark.parametrize(("away", "asked"), [(True, 1), (False, 3)])
def test_a_purge_does_not_wait_for_the_results_one_by_one_if_they_cannot_be_stored(
    run, book, key, monkeypatch, away, asked
):
    """Each attempt takes two minutes if their Redis does not answer: a purge would take hours."""
    calls = []

    def fail(task_id, *_, **__):
        calls.append(task_id)
        raise ConnectionError

    monkeypatch.setattr(operator_actions, "SLOW", 0.0 if away else 60.0)
    monkeypatch.setattr(book.app.backend, "mark_as_revoked", fail)
    parked_messages(book, key, 3)
    told = run("purge", "--lock", f"k:{key}", "--yes")
    assert "3 results could not be stored" in told.err
    assert len(calls) == asked


def test_a_dropped_task_that_waits_in_its_slot_is_not_said_to_be_ended(run, admin, key):
    """It asks again, and runs: its result must not be REVOKED, and the question must not say so."""
    name = f"k:{key}"
    admin.acquire(Owner(new_token()), Claim(name))
    waiter = Owner(new_token(), f"{key}/0/0", "app.task")
    admin.acquire(waiter, Claim(name), wait=60.0)
    asked = run("drop", name, waiter.token, code=1, stdin="n\n").err
    assert "queues again within seconds" in asked
    assert "It will not run" not in asked
    dropped = run("drop", name, waiter.token, "--yes")
    assert dropped.out.split()[-2:] == ["1", "dropped"]
    assert "queues again within seconds" in dropped.err
    assert "could not be stored" not in dropped.err


def test_a_purge_does_not_wait_for_the_broker_once_per_lock(run, book, admin, key, monkeypatch):
    asked = []

    def fail():
        asked.append(1)
        raise ConnectionError

    for number in range(3):
        park(admin, f"k:{key}-{number}", realm=install(book.app).realm)
    monkeypatch.setattr(book.app.events, "default_dispatcher", fail)
    assert run("purge", "--match", key, "--yes", "--json").json["total"] == 3
    assert len(asked) == 1


def test_exported_tasks_are_imported_at_their_places_and_twice_is_once(
    run, alone, admin, contended, book, tmp_path
):
    """From one Redis to another; also if the import is repeated after a failure."""
    file = tmp_path / "parked.jsonl"
    name = contended.name
    run("export", "--lock", name, "--output", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "give a new file" in run("export", "--lock", name, "--output", file, code=2).err
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["attempt"] for line in lines] == [f"{r}/0/0" for r in contended.rest]
    admin.drop_waiters(name, [line["token"] for line in lines], _by(), done_for=None)
    counted = alone("import", file, "--dry-run").out
    assert counted.split()[0] == "2"
    assert "less those that wait, run or have ended: not asked here" in counted
    assert [alone("import", file, "--json").json["total"] for _ in range(2)] == [2, 0]
    assert admin.inspect(name).bodies == 2
    book.open(name.removeprefix("k:"))
    assert [book.value(r) for r in contended.rest] == [1, 2]
    assert book.order(name.removeprefix("k:")) == [0, 1, 2]
    book.await_free(name.removeprefix("k:"))
    for args in ((), ("--again",)):
        again = alone("import", file, *args, "--json").json
        assert (again["total"], again["left"]) == (0, {"has ended already": 2})
    file.write_text('{"no": "task"}\n')
    assert "line 1 is not a parked task" in alone("import", file, code=1).err


def test_an_import_does_not_run_drained_tasks_a_second_time(
    run_own, alone, own_book, key, tmp_path
):
    """They went to the broker after the export, and run without a lock."""
    book, file, name = own_book, tmp_path / "parked.jsonl", f"k:{key}"
    store = RedisAdminStore(book.client)
    parked_messages(book, key, 3)
    run_own("export", "--lock", name, "--output", file)
    run_own("drain", "--lock", name, "--rate", 0, "--yes")
    text = file.read_text()
    for args in ((file,), (file, "--dry-run"), (file, "--again"), ("-",)):
        refused = alone("import", *args, stdin=text, url=book.url, code=1)
        assert refused.err.startswith("Error: 3 tasks of this file may have been sent back")
        assert "--force" in refused.err
    with piped(text) as pipe:
        assert "3 tasks" in alone("import", pipe, url=book.url, code=1).err
    assert store.inspect(name).bodies == 0
    assert store.audit()[0]["action"] == "drain"
    counted = alone("import", file, "--force", "--dry-run", "--json", url=book.url).json
    assert (counted["total"], store.inspect(name).bodies) == (3, 0)
    with piped(text) as pipe:
        assert alone("import", pipe, "--force", "--json", url=book.url).json["total"] == 3
    assert store.inspect(name).bodies == 3
    assert (store.audit()[0]["action"], store.audit()[0]["count"]) == ("import --force", 3)
    later = alone("export", "--lock", name, url=book.url).out
    run_own("purge", "--lock", name, "--yes")
    with piped(later) as pipe:
        assert alone("import", pipe, "--again", "--json", url=book.url).json["total"] == 3
    run_own("purge", "--lock", name, "--yes")


@contextmanager
def piped(text):
    """Yield the name of a pipe with this text: a file that can be read once only."""
    out, into = os.pipe()
    with os.fdopen(into, "w") as file:
        file.write(text)
    try:
        yield f"/dev/fd/{out}"
    finally:
        os.close(out)


def _by():
    from celery_singleton_lock.store.operator.base import Operator  # noqa: PLC0415

    return Operator("test")


# -- care ------------------------------------------------------------------------------------------


def test_a_sweep_from_cron_republishes_messages_without_a_worker(run_own, alone, own_book, key):
    """Without workers, the length of the broker's queue shows an autoscaler that there is work."""
    parked_messages(own_book, key, 3)
    store = RedisAdminStore(own_book.client)
    due = store.keyspace.due(bucket_of(f"k:{key}"))
    store.client.zadd(due, {f"k:{key}": 1})
    told = alone("sweep", url=own_book.url).out
    assert re.search(r"locks swept: 1, .*3 messages without a worker", told)
    store.client.zadd(due, {f"k:{key}": 1})
    assert run_own("sweep", "--json").json == {"locks": 1, "published": 3, "adrift": 0}
    assert own_book.queued(f"q-{key}") == 3
    store.client.zadd(due, {f"k:{key}": 1})
    assert run_own("sweep", "--json").json["published"] == 0


def test_doctor_is_never_green_where_it_does_not_know(run, alone, worker, admin):

    alone("purge", "--all", "--any-broker", "--yes")  # what other tests have left without a worker

    def checks(command, **options):
        found = command("doctor", "--json", code=4, **options).json
        return {check["name"]: check for check in found}

    def found_by(command):
        """Wait until all but the persistence is right: no worker stands still, and all answer."""
        found = checks(command)
        wrong = {n for n, check in found.items() if check["health"] not in {"ok", "note"}}
        assert wrong == {"persistence"}, found
        return found

    found = eventually(lambda: found_by(alone))
    assert "appendonly yes" in found["persistence"]["told"]
    assert set(found) == {
        "connection", "scripts", "version", "eviction", "memory", "replicas", "persistence",
        "database", "clock", "schema", "workers", "modes", "sweeping", "lost", "quarantine",
        "backlog", "paused", "closed", "costs", "grants", "parked", "drift",
    }  # fmt: skip
    assert found["database"]["health"] == "note", "the broker is there too"
    assert "redis://***@" in alone("doctor", code=4).out
    found = eventually(lambda: found_by(run))
    assert "are running" in found["threads"]["told"]
    assert found["broker"]["told"].endswith("answers")
    assert "pw" not in found["broker"]["told"]
    assert found["consumers"]["health"] == "ok"
    assert found["versions"]["told"] == f"1 worker and this command have {installed_version()}"
    rights = ("on", ">pw", "~*", "&*", "+@all", "-info", "-config")
    admin.client.execute_command("ACL", "SETUSER", "half", *rights)
    url = re.sub(r"//:[^@]*@", "//half:pw@", str(_url(admin)))
    found = checks(alone, url=url)
    assert {name for name, check in found.items() if check["health"] == "unknown"} == {
        "version", "eviction", "memory", "replicas", "persistence",
    }  # fmt: skip


def test_doctor_ends_with_a_production_checklist(run, alone, worker):
    """In one order; without the app it says what it leaves out."""

    def listed(out):
        rows = out.partition("\nProduction checklist\n")[2].splitlines()[1:]
        return [row.split()[0] for row in rows]

    assert listed(run("doctor", code=4).out) == list(CHECKLIST)
    out = alone("doctor", code=4).out
    assert listed(out) == ["eviction", "persistence", "database", "clock", "For"]
    told = "For versions, threads, alerts give the app: celery -A YOUR_APP locks doctor"
    assert out.splitlines()[-1] == told


def _url(admin):
    kwargs = admin.client.connection_pool.connection_kwargs
    return f"redis://:{SECRET}@{kwargs['host']}:{kwargs['port']}"


def test_T27_doctor_reports_contradictions(alone, book, admin):
    lock = Lock(book.client, "drifted", lease=30)
    lock.acquire()
    (parked,) = park(admin, "drifted")
    assert "drift" in alone("doctor", code=4).out
    keys = admin.keyspace.lock("drifted")
    admin.client.zrem(keys.queue, parked)
    found = alone("doctor", "--json", code=1).json[-1]
    assert (found["name"], found["health"]) == ("drift", "fail")
    assert "it is not in the queue" in found["told"]
    admin.client.zadd(keys.queue, {parked: 1})
    admin.client.hdel(keys.record, parked)
    assert "without a record" in alone("doctor", code=1).out
    admin.client.delete(*keys)


def test_an_unreachable_redis_gives_a_one_line_error(alone):
    url = f"redis://:{SECRET}@localhost:1/0"
    for command in (["list"], ["show", "x"], ["why", "x"], ["audit"], ["pause", "x"]):
        said = alone(*command, code=3, url=url).err
        assert len(said.splitlines()) == 1
        assert "redis://***@localhost:1/0" in said
        assert "did not answer" in said
        assert "Check the address, and that Redis runs" in said
    assert "connection" in alone("doctor", code=3, url=url).out


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "may_change"),
    [(["list"], False), (["pause", "x"], True), (["mode", "off", "--yes", "--force"], True)],
)
def test_a_change_that_redis_does_not_answer_is_said_to_be_possible(alone, command, may_change):
    """A Redis that stands still executes the command when it continues."""
    with socket.create_server(("127.0.0.1", 0)) as still:
        url = f"redis://127.0.0.1:{still.getsockname()[1]}/0"
        said = alone(*command, code=3, url=url).err
    assert "no answer in time" in said
    assert ("It may still make the change later" in said) is may_change


@pytest.mark.parametrize("command", [("export", "--all"), ("purge", "--all", "--yes")])
def test_a_command_that_found_no_redis_leaves_no_empty_file_behind(alone, tmp_path, command):
    """The same command is refused while the file exists."""
    file = tmp_path / "parked.jsonl"
    alone(*command, "--output", file, code=3, url=f"redis://:{SECRET}@localhost:1/0")
    assert not file.exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--backend", f"amqp://u:{SECRET}@h", "list"], "amqp://***@h"),
        (["--backend", f"redis://:{SECRET}@h:x/0", "list"], "its port is not a number"),
        (["--option", SECRET, "list"], "NAME=VALUE"),
        (["--prefix", "a{b", "list"], "braces"),
        (["limit", "a", "0"], "0 is not in the range"),
        (["purge", "--older-than", "soon"], "is not a duration: give 90, 10m, 2h or 3d"),
        (["nonsense"], "No such command"),
        (["pause"], "give the name of one lock, or --match"),
    ],
)
def test_wrong_usage_says_what_to_change(args, told, book):
    env = {"CELERY_SINGLETON_LOCK_BACKEND": book.url}
    result = CliRunner().invoke(main, args, env=env)
    assert result.exit_code == 2
    assert told in result.stderr
    if "--option" not in args:
        assert SECRET not in result.stderr


def test_without_a_backend_it_says_where_to_name_one():
    result = CliRunner().invoke(main, ["list"], env={"CELERY_SINGLETON_LOCK_BACKEND": ""})
    assert result.exit_code == 2
    assert "give the locks' Redis" in result.stderr


# -- as people start it ----------------------------------------------------------------------------


def test_celery_finds_the_commands_by_the_entry_point(book, worker, contended, tmp_path):
    env = worker.environment
    env["PYTHONPATH"] = os.pathsep.join([*metadata_path(tmp_path), env["PYTHONPATH"]])
    command = [sys.executable, "-m", "celery", "-A", "integration.worker_app", "locks", "list"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert contended.name in ran.stdout
    assert SECRET not in ran.stdout


LAZY = """
from celery import Celery
from celery_singleton_lock import LockedTask

app = Celery("lazy", broker="memory://")

@app.task(base=LockedTask, lock_key="k:{key}")
def act(key):
    pass
"""


@pytest.mark.parametrize(("kind", "command"), [("inspect", "locks"), ("control", "lock_release")])
def test_celery_knows_our_remote_commands_before_the_app_has_made_its_tasks(
    worker, tmp_path, kind, command
):
    """Tasks are declared at the first use of the app.

    ``celery inspect`` reads the commands before.
    """
    (tmp_path / "lazy.py").write_text(LAZY)
    env = worker.environment
    paths = [*metadata_path(tmp_path), str(tmp_path), env["PYTHONPATH"]]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    asked = [sys.executable, "-m", "celery", "-A", "lazy", kind, "--list"]
    ran = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert command in ran.stdout, ran.stderr


# -- what is no name, number or file ---------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["show", "\udcff"],
        ["why", "\udcff"],
        ["list", "\udcff"],
        ["pause", "a", "--why", "\udcff", "--force"],
        ["drop", "a", "b", "\udcff", "--yes"],
        ["release", "a", "--token", "\udcff"],
        ["--prefix", "\udcff", "list"],
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_in_one_sentence(alone, command):
    """Such as a name that was cut within a character, or has another encoding."""
    said = alone(*command, code=2).err
    assert "is not valid UTF-8: \\udcff" in said


@pytest.mark.parametrize(
    "command",
    [
        ["limit", "a", 10**20, "--force"],
        ["show", "a", "--waiters", 10**20],
        ["list", "--limit", 10**20],
        ["watch", "--interval", 1e300],
    ],
)
def test_a_number_that_no_server_can_keep_is_refused(alone, command):
    """Formerly the error said that such a limit is negative."""
    assert "is not in the range" in alone(*command, code=2).err


def test_a_state_that_no_task_can_be_in_is_no_empty_answer(alone):
    assert (
        "'paked' is not one of 'above_rate', 'adrift'"
        in alone("purge", "--state", "paked", "--yes", code=2).err
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lock": 5}, "must be texts"),
        ({"lock": "\ud800"}, "surrogates not allowed"),
        ({"token": None}, "must be texts"),
        ({"limit": "x"}, "must be whole numbers"),
        ({"limit": 10**20}, "give a whole number, from 1 to"),
        ({"place": 1e300}, "must be whole numbers"),
        ({"lease": "x"}, "give seconds"),
        ({"message": "!"}, "Only base64"),
    ],
)
def test_a_damaged_export_gives_the_line_number_and_parks_nothing(alone, admin, key, changes, told):
    (token,) = park(admin, f"k:{key}")
    line = json.loads(alone("export", "--lock", f"k:{key}").out)
    alone("drop", f"k:{key}", token, "--yes")
    damaged = json.dumps({**line, **changes})
    assert told in alone("import", "--again", "-", stdin=damaged, code=1).err
    assert told in alone("import", "--dry-run", "-", stdin=damaged, code=1).err
    assert admin.inspect(f"k:{key}").bodies == 0


def test_a_binary_file_is_refused_as_an_export(alone, tmp_path):
    file = tmp_path / "export"
    file.write_bytes(b"\n\xd0\n")
    assert "is not a parked task (UnicodeDecodeError" in alone("import", file, code=1).err


def test_a_dry_import_for_programs_answers_in_json(alone, admin, key):
    (token,) = park(admin, f"k:{key}")
    line = alone("export", "--lock", f"k:{key}").out
    found = alone("import", "--dry-run", "--json", "-", stdin=line).json
    assert (found["total"], found["locks"]) == (1, {f"k:{key}": 1})
    alone("drop", f"k:{key}", token, "--yes")


# -- several messages with one id ------------------------------------------------------------------


def test_why_explains_all_messages_with_the_same_id(alone, admin, key):
    """The second call with an id in use runs too: to show only one of them is misleading."""
    name, task_id = f"k:{key}", f"id-{key}"
    holder = Owner(new_token(), f"{task_id}/0/0", "app.task", "w@h#1")
    admin.acquire(holder, Claim(name))
    tokens = []
    for _ in range(2):
        tokens.append(new_token())
        owner = Owner(tokens[-1], f"{task_id}/0/0", "app.task")
        admin.park(owner, Claim(name), MessageToPark(b"{}\n", "R", "nowhere"))
    lines = alone("why", task_id).out.splitlines()
    assert lines[0] == "3 messages have this id:"
    assert [line.partition(":")[0] for line in lines[1:]] == ["parked", "parked", "running"]
    assert "you are next" in lines[1]
    assert "you are 2nd" in lines[2]
    found = alone("why", task_id, "--json").json
    assert {found["token"], *(each["token"] for each in found["others"])} == {
        *tokens,
        holder.token,
    }
    said = alone("drop", name, task_id, "--yes", code=1).err
    assert "2 messages with the id" in said
    assert all(token in said for token in tokens)
    alone("drop", name, *tokens, "--yes")
    assert alone("why", task_id).out.startswith("running: ")
    admin.release(name, holder.token, Ending.FINAL)


# -- a Redis that goes away in between -------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "looks"),
    [("pause", 1), ("limit", 1), ("promote", 1), ("resume", 1), ("release", 2)],
)
def test_a_completed_action_is_reported_although_redis_is_away_afterwards(
    alone, admin, key, step, looks
):
    """Formerly it ended with "did not answer", and operators repeated the action."""
    name = f"k:{key}"
    holder = Owner(new_token(), "id/0/0", "app.task", "w@h#1")
    admin.acquire(holder, Claim(name))
    (token,) = park(admin, name)
    steps = {
        "pause": ([], "Paused."),
        "resume": ([], "It was not paused."),
        "limit": ([2], "The limit is 2."),
        "promote": ([token], "is next."),
        "release": (["--token", holder.token, "--force", "--yes"], "Released from task[id]"),
    }
    args, told = steps[step]
    failure = Failure(
        "inspect", looks + (step in {"pause", "limit", "resume"}), Moment.BEFORE, "connection"
    )
    with FailingStores(failure).installed():
        said = alone(step, name, *args).out
    assert told in said
    assert "Redis did not answer after that" in said
    assert step == "resume" or alone("audit", "--json").json[0]["action"] == step
    alone("resume", name)
    alone("limit", name, "--clear")
    alone("purge", "--lock", name, "--yes")


@pytest.mark.full
def test_why_answers_though_the_broker_is_away(alone, book, admin, key):
    """Formerly it ended with a traceback before it had searched the holders."""
    holder = Owner(new_token(), f"id-{key}/0/0", "app.task", "w@h#1")
    admin.acquire(holder, Claim(f"k:{key}"))
    app = Celery("away", broker="amqp://guest@127.0.0.1:1//", set_as_current=False)
    app.conf.singleton_lock_backend = book.url

    def why(task_id):
        return Ran(CliRunner().invoke(locks, ["why", task_id], obj=SimpleNamespace(app=app)))

    assert why(f"id-{key}").out.startswith("running: ")
    assert "the broker did not answer (OperationalError)" in why("unknown").out
    admin.release(f"k:{key}", holder.token, Ending.FINAL)
    app.close()


def test_a_forced_release_with_a_lost_reply_is_reported_as_done(alone, book, admin, key):
    """Formerly the client repeated it, and reported its own release as that of another operator."""
    name, address = f"k:{key}", urlsplit(book.url)

    def release(url):
        holder = Owner(new_token(), "id/0/0", "app.task", "w@h#1")
        admin.acquire(holder, Claim(name))
        return alone("release", name, "--token", holder.token, "--force", "--yes", url=url).out

    release(book.url)  # the server knows the script now
    with Proxy(address.port) as proxy:
        proxy.lose_reply_to = b'"action": "release"'
        said = release(f"redis://:{SECRET}@127.0.0.1:{proxy.port}{address.path}")
        assert proxy.lose_reply_to is None
    assert "Released from task[id]" in said
    assert [entry["count"] for entry in alone("audit", "--json").json[:2]] == [1, 1]


def test_the_event_of_a_limit_says_what_was_set_and_for_how_long(run, contended, book):
    with EventLog(book.app) as events:
        run("limit", contended.name, "3", "--for", "10m")
        run("rate", contended.name, "100/m", "9/s")
        run("pause", contended.name, "--for", "1h")
        run("resume", contended.name)
        found = eventually(
            lambda: (seen := [e for e in events.seen if e["type"] == "lock-admin"])[3:] and seen
        )
    told = [(each["action"], each["to"], each["seconds"]) for each in found]
    assert told == [
        ("limit", "3", 600.0),
        ("rate", "100/m, 9/s", 0.0),
        ("pause", "", 3600.0),
        ("resume", "", 0.0),
    ]
    run("limit", contended.name, "--clear")
    run("rate", contended.name, "--clear")
