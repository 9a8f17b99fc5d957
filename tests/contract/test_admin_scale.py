"""Many locks and parked tasks: no script blocks Redis for 5 ms, and memory is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from celery_singleton_lock.admin.lock_views import list_locks
from celery_singleton_lock.core.model import Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.worker.message_codec import pack
from support.waiters import hold_many, in_batches

pytestmark = [
    pytest.mark.contract,
    pytest.mark.needs_real_redis("SLOWLOG"),
    pytest.mark.timeout(900),
    pytest.mark.long("100000", "200000"),
]

SLOW_US = 5000
FULL = 100_000
GROWTH = 10  # MB, at most, of a program that is given ten times as much
PROGRAM = r"""
import re, sys
from celery_singleton_lock.cli import {group}
try:
    {group}({arguments})
finally:
    status = open("/proc/self/status").read()
    print(re.search(r"VmHWM:\s*(\d+)", status)[1], file=sys.stderr)
"""
APP = "from types import SimpleNamespace; from celery import Celery; app = Celery(broker={url!r})"


@pytest.fixture
def server(make_redis):
    return make_redis("--slowlog-log-slower-than", str(SLOW_US), "--slowlog-max-len", "1000")


@pytest.fixture
def store(server):
    with server.client(decode_responses=False) as client:
        store = RedisAdminStore(client)
        yield store
        store.close()


def park_many(store, number, body, realm="R", after=0):
    def call(i):
        n = after + i
        owner = Owner(new_token(), f"id{n}/0/0", f"bank.settle{n % 2}")
        return store.operations.park_call(owner, Claim("hot"), MessageToPark(body, realm, "q"))

    in_batches(store, number, call)


def program(server, group, arguments, app=False):
    """Run a command in a process of its own; return what it says, seconds, and its peak in MB."""
    given = repr(arguments) + (", obj=SimpleNamespace(app=app)" if app else "")
    text = (APP.format(url=server.url) if app else "") + PROGRAM.format(
        group=group, arguments=given
    )
    env = {**os.environ, "CELERY_SINGLETON_LOCK_BACKEND": server.url}
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", text], env=env, capture_output=True, text=True, check=False
    )
    took = time.monotonic() - began
    assert ran.returncode == 0, ran.stderr
    peak = int(ran.stderr.splitlines()[-1]) / 1024
    print(f"{arguments}: {took:.1f} s, {peak:.0f} MB")
    return (json.loads(ran.stdout) if "--json" in arguments else ran.stdout), took, peak


@contextmanager
def kept_briefly(store, number):
    """Redis is kept for a moment only: a step is few commands, and little of its processor's time.

    The slow log counts real time, in which others may have had the processor: so it is read in the
    full run alone, which has the machine for itself, and may hold one step of a thousand.
    """
    store.client.config_resetstat()
    store.client.slowlog_reset()
    began = busy(store)
    yield
    used = busy(store) - began
    ran = {name[8:]: stat["calls"] for name, stat in store.client.info("commandstats").items()}
    steps = sum(ran.pop(name, 0) for name in ("evalsha", "eval", "scan"))
    inside = sum(ran.values()) / steps
    slow = [entry["duration"] for entry in store.client.slowlog_get(1000)]
    print(f"{steps} steps, {inside:.0f} commands, {used / steps * 1000:.2f} ms each; slow: {slow}")
    assert inside < 500
    assert used / steps < SLOW_US / 1_000_000
    assert number < FULL or len(slow) <= steps / 1000


def busy(store):
    """Return the seconds for which the server's main thread has had a processor."""
    info = store.client.info("cpu")
    return sum(
        info.get(f"used_cpu_{kind}_main_thread", info[f"used_cpu_{kind}"])
        for kind in ("user", "sys")
    )


@pytest.mark.parametrize("number", [3000, 100000])
def test_all_locks_are_listed_without_keeping_redis(server, store, number):
    """No command takes 5 ms."""
    hold_many(store, number)
    program(server, "main", ["mode"])  # the first start compiles
    with kept_briefly(store, number):
        out, _, _ = program(server, "main", ["list"])
        assert len(out.splitlines()) == number + len(("headings", "", "summary"))
        assert len(list_locks(store, "account:2?")) == 10


def test_a_thousand_holders_of_one_lock_are_found_without_keeping_redis(store):
    """Each holder was appended to a text, which was copied each time: 0.3 s of Redis."""
    for _ in range(10):
        limit = Claim("pool", 600.0, 1000)
        calls = [(Owner(new_token(), f"id{n}/0/0", "t", "w#1"), limit) for n in range(100)]
        assert {store.acquire(*call).verdict for call in calls} == {Verdict.GRANTED}
    began = busy(store)
    (lock,) = store.summarise_locks(holders=1000)
    assert len(lock.holders) == 1000
    assert busy(store) - began < 0.06


@pytest.mark.full
@pytest.mark.parametrize("number", [1000, 200000])
def test_parked_tasks_are_listed_and_purged_within_bounded_memory(server, store, number):
    """Of 1 kB each; the program needs no more than for a tenth of them."""
    hold = Owner(new_token())
    store.acquire(hold, Claim("hot", 3600))
    park_many(store, number // 10, b"x" * 1024)
    _, _, few = program(server, "main", ["export", "--all"])
    park_many(store, number - number // 10, b"x" * 1024, after=number // 10)
    with kept_briefly(store, number):
        shown, _, _ = program(server, "main", ["show", "hot", "--json"])
        assert shown["view"]["bodies"] == number
        which = ["--task", "bank.settle1"]
        purged, _, peak = program(server, "main", ["purge", *which, "--yes", "--json"])
        assert purged["total"] == number // 2
        assert peak < few + GROWTH
        exported, _, peak = program(server, "main", ["export", "--all"])
        assert exported.count("\n") == number // 2
        assert peak < few + GROWTH


@pytest.mark.full
@pytest.mark.parametrize("number", [1000, 200000])
def test_parked_tasks_are_drained_within_bounded_memory(server, store, number):
    """To a real broker, on the same Redis."""
    from celery import Celery  # noqa: PLC0415

    from celery_singleton_lock.worker.install import install  # noqa: PLC0415

    app = Celery(broker=server.url)
    with app.connection_for_read() as connection, connection.SimpleQueue("q") as queue:
        app.send_task("bank.settle", ["x" * 700], queue="q")
        message = queue.get(timeout=30)
        body = pack(message)
        message.ack()
    store.acquire(Owner(new_token()), Claim("hot", 3600))
    arguments = ["drain", "--all", "--rate", "0", "--yes", "--json"]
    park_many(store, number // 10, body, install(app).realm)
    _, _, few = program(server, "locks", arguments, app=True)
    store.client.delete("q")
    park_many(store, number, body, install(app).realm)
    with kept_briefly(store, number):
        drained, _, peak = program(server, "locks", arguments, app=True)
    assert drained["total"] == number
    assert store.client.llen("q") == number
    assert peak < few + GROWTH
    assert store.inspect("hot").bodies == 0
    app.close()
