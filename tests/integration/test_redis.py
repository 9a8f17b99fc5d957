"""Where the locks may live: TLS, sockets, ACL users, another Redis than the broker's."""

from __future__ import annotations

import shutil
import socket
import subprocess

import pytest

from integration.book import Book

SECRET = "p@ss:w/rd"
QUOTED = "p%40ss%3Aw%2Frd"


def works(book, key="a"):
    """Run three tasks of one key on a worker of its own; return the worker's log."""
    with book.worker(concurrency=2) as worker:
        first = book.send("act", key, 0, hold=f"{key}-0")
        book.started(first)
        rest = [book.send("act", key, n) for n in (1, 2)]
        book.await_waiting(key, 2)
        book.open(f"{key}-0")
        assert [book.value(r) for r in (first, *rest)] == [0, 1, 2]
        assert book.order(key) == [0, 1, 2]
        book.await_free(key)
        return worker.log()


def test_locks_live_in_another_redis_than_the_brokers(redis_url, make_redis, tmp_path):
    """``singleton_lock_backend``: no key of ours is in the broker's Redis."""
    locks = make_redis()
    conf = {"singleton_lock_backend": locks.url, "singleton_lock_prefix": "mine"}
    with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
        works(book)
        assert book.client.keys("mine:*")
        assert not book.client.keys("csl:*")
        assert not book.broker.keys("mine:*")


@pytest.mark.needs_real_redis
def test_rediss(redis_url, make_redis, tmp_path):
    """``rediss://`` with a self-signed certificate and CA."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        [*command.split(), *names, "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    try:
        locks = make_redis("--tls-cert-file", str(cert), "--tls-key-file", str(key),
                           "--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no")  # fmt: skip
        with locks.client() as client:
            port = _free_port()
            client.config_set("tls-port", port)
    except Exception as error:  # noqa: BLE001  # a server that was built without TLS
        pytest.skip(f"this server has no TLS: {error}")
    url = f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=required&ssl_ca_certs={cert}"
    with Book(
        redis_url, tmp_path, lock_url=locks.url, conf={"singleton_lock_backend": url}
    ) as book:
        works(book)
        assert book.client.keys("csl:*")


@pytest.mark.needs_real_redis
def test_unix_socket(redis_url, make_redis, tmp_path):
    """``unix://`` with a database."""
    path = tmp_path / "redis.sock"
    locks = make_redis("--unixsocket", str(path))
    conf = {"singleton_lock_backend": f"unix://{path}?db=3"}
    lock_url = locks.url.rpartition("/")[0] + "/3"
    with Book(redis_url, tmp_path, lock_url=lock_url, conf=conf) as book:
        works(book)
        assert book.client.keys("csl:*")


@pytest.mark.needs_real_redis
def test_an_acl_user_of_its_own_needs_only_the_prefix(redis_url, make_redis, tmp_path):
    """A user with just what our error tells to allow will do; its password stays hidden."""
    locks = make_redis()
    with locks.client() as client:
        allowed = "~csl:* resetchannels +@read +@write +eval +evalsha +time"
        client.execute_command("ACL", "SETUSER", "locker", "on", f">{SECRET}", *allowed.split())
    url = f"redis://locker:{QUOTED}@127.0.0.1:{locks.port}/0"
    conf = {"singleton_lock_backend": url}
    with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
        log = works(book)
    for word in (SECRET, QUOTED):
        assert word not in log


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_each_pool_serves(redis_url, tmp_path, pool):
    """prefork, threads and solo run the tasks of a key one at a time, in order, and free it."""
    with Book(redis_url, tmp_path) as book:
        sent = [book.send("act", "a", n) for n in range(20)]
        with book.worker(pool=pool, concurrency=2):
            assert [book.value(r) for r in sent] == list(range(20))
        assert book.order("a") == list(range(20))
        assert book.peak("a") == 1
        book.await_free("a")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
