"""Locks on a Redis with TLS, whose certificate a CA of its own has signed."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import redis.asyncio
from celery import Celery
from click.testing import CliRunner

from celery_singleton_lock import AsyncLock, BackendUnreachable, Lock, LockedTask
from celery_singleton_lock.cli import main
from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.demo.redis_server import RedisServer, free_ports
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.startup_checks_redis import check_backend
from integration.book import Book
from integration.test_redis import works
from support.versions import CHECKS_HOST_NAME
from support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.needs_real_redis("TLS")

NOT_TRUSTED = "TLS failed, its certificate cannot be verified"


class Certificates:
    """Files of a CA, of another one, and of a server that the first has signed for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca, self.other_ca = self._authority("ca"), self._authority("other")
        self.key, request = folder / "server.key", folder / "server.csr"
        self.certificate, names = folder / "server.pem", folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1")
        self._openssl(f"req -newkey rsa:2048 -nodes -subj /CN=s -keyout {self.key} -out {request}")
        signed = f"-CA {self.ca} -CAkey {self.ca}.key -CAcreateserial -extfile {names}"
        self._openssl(f"x509 -req -in {request} {signed} -days 2 -out {self.certificate}")

    def _authority(self, name: str) -> Path:
        file = self._folder / name
        new = "req -x509 -newkey rsa:2048 -nodes -days 2"
        self._openssl(f"{new} -subj /CN={name} -keyout {file}.key -out {file}")
        return file

    def _openssl(self, arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def files(certificates):
    files = ["--tls-cert-file", certificates.certificate, "--tls-key-file", certificates.key]
    files += ["--tls-ca-cert-file", certificates.ca, "--tls-auth-clients", "no"]
    return [str(each) for each in files]


@pytest.fixture(scope="module")
def locks(files, redis_provider):
    """A server with a port for TLS, and one without for the test itself."""
    with RedisServer(redis_provider, args=files) as server:
        yield server


@pytest.fixture(scope="module")
def port(locks):
    (port,) = free_ports(1)
    try:
        with locks.client() as client:
            client.config_set("tls-port", port)
    except redis.RedisError as error:
        pytest.skip(f"this server was built without TLS: {error}")
    return port


@pytest.fixture
def address(port, certificates):
    """Make the URL: ``address(ca=...)``."""

    def make(ca=certificates.ca, scheme="rediss", host="127.0.0.1"):
        return f"{scheme}://{host}:{port}/0?ssl_cert_reqs=required&ssl_ca_certs={ca}"

    return make


@pytest.mark.full
@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("scheme", ["rediss", pytest.param("valkeys", marks=pytest.mark.full)])
def test_a_worker_has_its_locks_behind_tls(redis_url, tmp_path, locks, address, scheme, pool):
    """``rediss://``, and ``valkeys://``: tasks are parked, run in order, and free the lock."""
    conf = {"singleton_lock_backend": address(scheme=scheme)}
    with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
        works(book, pool=pool)
        assert book.client.keys("csl:*")


def test_locks_in_code_and_commands_work_behind_tls(address):
    with redis.Redis.from_url(address()) as client, Lock(client, "sync") as lock:
        assert lock.owned()
        listed = CliRunner().invoke(main, ["--backend", address(), "list"])
    assert "sync" in listed.output

    async def scene():
        async with (
            redis.asyncio.Redis.from_url(address()) as client,
            AsyncLock(client, "async") as lock,
        ):
            assert await lock.owned()

    asyncio.run(scene())
    examined = CliRunner().invoke(main, ["--backend", address(), "doctor"])
    assert re.search(r"connection +ok +answers", examined.output)


@pytest.mark.usefixtures("port")  # skips on a server without TLS
def test_a_lock_waits_on_a_cluster_whose_client_comes_from_a_url_with_tls(
    files, certificates, redis_provider
):
    """A free lock was acquired, and a held one raised an error: in a cache stampede all but one."""
    (port,) = free_ports(1)
    mode = ["--cluster-enabled", "yes", "--tls-cluster", "yes", "--tls-port", str(port)]
    with RedisServer(redis_provider, args=[*files, *mode]) as server:
        with server.client() as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            eventually(lambda: admin.cluster("INFO")["cluster_state"] == "ok")
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificates.ca}"
        with redis.RedisCluster.from_url(url) as client, redis.RedisCluster.from_url(url) as other:
            holder, waiter = (
                Lock(each, "a", lease=60, thread_local=False) for each in (client, other)
            )
            assert holder.acquire()
            assert not waiter.acquire(blocking_timeout=0.5)
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(waiter.acquire, blocking_timeout=PATIENCE)
                holder.release()
                assert waits.result()


def test_a_worker_with_a_wrong_ca_says_at_its_start_what_to_change(address, certificates, caplog):
    """At ERROR: it does not pass, unlike an outage."""
    with Celery("shop", set_as_current=False) as app:
        app.conf.singleton_lock_backend = address(ca=certificates.other_ca)
        app.task(base=LockedTask, name="started", shared=False)(print)
        app.finalize()
        check_backend(install(app), ServerClock())
    told = caplog.records[-1]
    assert told.levelno == logging.ERROR
    assert f"(ConnectionError: {NOT_TRUSTED}: " in told.getMessage()
    assert "name the file of its CA in ssl_ca_certs" in told.getMessage()
    assert "from singleton_lock_backend. Correct the TLS options and restart" in told.getMessage()


def test_a_lock_and_a_command_with_a_wrong_ca_say_what_to_change(address, certificates):
    wrong = address(ca=certificates.other_ca)
    with (
        redis.Redis.from_url(wrong, retry=None) as client,
        pytest.raises(BackendUnreachable, match="name the file of its CA in ssl_ca_certs"),
    ):
        Lock(client, "lock").acquire()
    listed = CliRunner().invoke(main, ["--backend", wrong, "list"])
    assert listed.exit_code == 3
    assert NOT_TRUSTED in listed.output


@pytest.mark.skipif(not CHECKS_HOST_NAME, reason="older versions do not compare it")
def test_a_host_name_that_the_certificate_lacks_is_reported_as_such(address):
    listed = CliRunner().invoke(main, ["--backend", address(host="localhost"), "list"])
    assert f"{NOT_TRUSTED}: Hostname mismatch; use a host name that the" in listed.output
