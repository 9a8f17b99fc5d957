"""Locks in memory: what is no lock's business, but the server's, its clock's, or the address'."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time

import pytest
import redis.asyncio
from celery import Celery
from click.testing import CliRunner

from celery_singleton_lock import AsyncLock, ConfigurationError, Lock
from celery_singleton_lock.cli import main
from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.core.clock import MovableClock, SystemClock
from celery_singleton_lock.core.model import Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.testing import SingletonLocks, memory_client
from celery_singleton_lock.testing.clock_control import LockTime
from support.waiting import eventually

NAME = "account:42"


@pytest.fixture
def client():
    """A client of a server of this test's own."""
    return memory_client(f"unit-{new_token()}")


def test_the_same_name_is_the_same_store_and_another_is_another(client):
    other = connect(parse_backend_url(f"memory://{client.server.name}"), {}, patience=1.0)
    assert Lock(client, NAME).acquire()
    assert not Lock(other, NAME).acquire(blocking=False)
    assert Lock(memory_client("another"), NAME).acquire(blocking=False)


@pytest.mark.parametrize("direct", [False, True])
def test_it_answers_the_short_way_too(client, direct):
    store, who = RedisStore(client, direct=direct), Owner(new_token())
    assert store.acquire(who, Claim(NAME)).verdict is Verdict.GRANTED
    assert store.acquire(Owner(new_token()), Claim(NAME)).verdict is Verdict.BLOCKED


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://", "memory://"),
        ("memory://Orders", "memory://Orders"),
        ("memory:///", "memory://"),
    ],
)
def test_an_address_in_memory_is_a_name(url, shown):
    address = parse_backend_url(url)
    assert (str(address), address.in_memory) == (shown, True)


@pytest.mark.parametrize("url", ["memory://me:secret@x", "memory://x/0", "memory://x?db=1"])
def test_it_has_a_name_and_no_more(url):
    with pytest.raises(ConfigurationError, match="have only a name") as refused:
        parse_backend_url(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("missing", ["fakeredis", "lupa"])
def test_what_is_missing_is_named_with_its_extra(monkeypatch, missing):
    # First as it is: a fakeredis that is imported without lupa knows no scripts for ever after.
    importlib.import_module("celery_singleton_lock.store.memory")
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "celery_singleton_lock.store.memory")
    package = importlib.import_module("celery_singleton_lock.store")
    monkeypatch.delattr(package, "memory")
    app, extra = Celery("bare", set_as_current=False), r'pip install "celery-.*\[testing\]"'
    for use in (memory_client, SingletonLocks(app).__enter__):
        with pytest.raises(ConfigurationError, match=extra):
            use()
    assert app.conf.get("singleton_lock_backend") is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused(client):
    """It has a copy, and its locks would exclude nobody."""
    assert Lock(client, NAME).acquire()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Lock(client, NAME).acquire(blocking=False)
        except ConfigurationError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        assert f"are in the memory of process {os.getpid()}" in said.read()


def test_a_blocked_call_ends_when_the_clock_moves(client):
    """A command that blocks for a minute ends when a minute has passed on the server's clock."""
    waits = threading.Thread(
        target=RedisStore(client).wait, args=(NAME, "nobody", 1000.0), daemon=True
    )
    waits.start()
    eventually(lambda: (client.server.advance(60.0), waits.join(0.05), not waits.is_alive())[-1])


def test_keys_expire_by_the_servers_clock(client):
    client.set("key", "x", px=600_000)
    client.server.advance(500.0)
    assert client.get("key") == b"x"
    client.server.advance(101.0)
    assert client.get("key") is None


def test_every_store_has_the_clock_of_its_server(client):
    """What waits and renews goes by the server's in memory, and by the machine's for a Redis."""
    assert RedisStore(client).clock is client.server.clock
    assert RedisAdminStore(client).clock is client.server.clock
    for store in (RedisStore(redis.Redis()), AsyncRedisStore(redis.asyncio.Redis())):
        assert isinstance(store.clock, SystemClock)
    assert Lock(client, NAME)._watchdog.clock is client.server.clock


@pytest.mark.parametrize("kind", [lambda client: client, RedisStore])
def test_an_asynclock_is_refused_in_memory(client, kind):
    """It would block its loop: that server runs in the caller's thread."""
    with pytest.raises(ConfigurationError, match=r"only for threads.*redis\.asyncio\.Redis"):
        AsyncLock(kind(client), NAME)


def test_a_stopped_clock_keeps_the_order_of_what_comes():
    clock = MovableClock()
    clock.stop()
    clock.stop()
    still = clock.microseconds()
    assert clock.microseconds() == still
    assert [clock.tick() - still for _ in range(3)] == [1, 2, 3]


def test_a_stopped_clock_moves_only_forward_and_on_request():
    clock = MovableClock()
    clock.stop()
    still, ran = clock.microseconds(), clock.monotonic()
    clock.advance(1000.0)
    assert clock.microseconds() == still + 1_000_000_000
    assert clock.monotonic() >= ran + 1000
    clock.go()
    clock.go()
    assert 0 <= clock.microseconds() - still - 1_000_000_000 < 60_000_000


def test_a_client_works_while_the_servers_clock_is_stopped():
    """Nobody who waits in place waits for ever."""
    clock = MovableClock()
    clock.stop()
    before = clock.monotonic()
    time.sleep(0.002)
    assert clock.monotonic() > before


def test_the_package_imports_celery_only_when_needed():
    """The plugin is imported in every run of pytest, and with it the package."""
    code = (
        "import sys, celery_singleton_lock.pytest_plugin as plugin\n"
        "print([name for name in ('celery', 'kombu', 'redis', 'fakeredis') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["doctor", "list"])
def test_the_command_line_refuses_locks_in_memory(command):
    """It is another process: what it would show is an empty store of its own."""
    told = CliRunner().invoke(main, ["--backend", "memory://nobody-here", command])
    assert told.exit_code == 1
    assert "memory://nobody-here: these locks are in the memory of a test's process" in told.output
    assert "singleton_locks" in told.output


def test_time_that_passes_repeats_what_a_worker_reported(client):
    """Formerly it took no slots and all tasks, and its stopped queues were consumed again."""
    store, server = RedisAdminStore(client), client.server
    stopped = {"q": 17.0}
    store.worker_heartbeat("w", "realm", ["q"], 3.0, 2, tasks=["app.task"], stopped=stopped)
    names = ("worker:w", "free:w")
    before = client.mget(f"{store.keyspace.fleet}:{name}" for name in names)
    tasks = client.smembers(f"{store.keyspace.fleet}:tasks:w")
    LockTime(server).advance(3600)
    assert client.mget(f"{store.keyspace.fleet}:{name}" for name in names) == before
    assert client.smembers(f"{store.keyspace.fleet}:tasks:w") == tasks
