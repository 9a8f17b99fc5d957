"""What a worker logs about the locks' Redis at its start."""

from __future__ import annotations

import json
import logging
import socket
import traceback
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from celery import Celery

from celery_singleton_lock import LockedTask, QuorumStore
from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.errors import BackendError, BackendRefused
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.startup_checks_redis import check_backend
from support.waiting import eventually
from support.workers import CeleryWorker

PATIENT = {"server_timeout": 5.0}
"""Options of a quorum in which a server may stop for a while."""

GOES_ON = ", or do what their lock_on_backend_error says. Other tasks run."


@pytest.fixture
def said(caplog):
    """Return what a worker with these settings says, from warnings on."""

    def start(**settings):
        caplog.clear()
        with Celery("shop", set_as_current=False) as app, caplog.at_level(logging.WARNING):
            app.conf.update({f"singleton_lock_{name}": value for name, value in settings.items()})
            app.task(base=LockedTask, name="started", shared=False)(settle)
            app.finalize()
            check_backend(install(app), ServerClock())
        return [record.getMessage() for record in caplog.records]

    return start


@pytest.fixture
def silent_ports():
    """Ports that are in use and never answer."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]


def settle():
    """Never runs."""


def test_the_log_names_a_silent_redis_and_the_waiting_worker(said, silent_ports):
    """By its address, without the password."""
    port = silent_ports[0]
    (told,) = said(backend=f"redis://:secret@127.0.0.1:{port}/0")
    assert told == (
        "celery-singleton-lock: The locks' Redis did not answer (ConnectionError: "
        f"Connection refused). It is redis://***@127.0.0.1:{port}/0, from singleton_lock_backend. "
        f"Locked tasks wait until it answers{GOES_ON}"
    )


@pytest.mark.needs_real_redis("a disk")
def test_a_worker_starts_though_its_redis_cannot_write_to_its_disk(said, make_redis):
    """As if it did not answer: tasks without locks run."""
    server = make_redis("--save", "3600 1", "--appendonly", "no")
    with server.client(decode_responses=True) as client:
        client.set("unsaved", 1)
        folder, name = (client.config_get(each)[each] for each in ("dir", "dbfilename"))
        Path(folder, name, "in the way").mkdir(parents=True)
        client.bgsave()
        eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    (told,) = said(backend=server.url)
    assert told.startswith(
        "celery-singleton-lock: The locks' Redis cannot write to its disk, and so refuses changes "
        f"(MISCONF): see its log. It is {server.url}, from singleton_lock_backend. Locked tasks"
    )


def test_a_wrong_host_name_is_reported_differently_from_a_silent_redis(said, caplog):
    """It is an error, with what to correct, and where."""
    (told,) = said(backend="redis://:secret@no-such-host.invalid:6379/0")
    assert caplog.records[0].levelno == logging.ERROR
    assert "ConnectionError: its host name cannot be resolved, " in told
    assert "It is redis://***@no-such-host.invalid:6379/0, from singleton_lock_backend." in told
    assert "If the host name is misspelt, correct it" in told


@pytest.mark.needs_real_redis("a password")
def test_a_missing_password_and_a_wrong_one_give_different_errors(said, make_redis):
    """One is to be added, the other corrected."""
    server = make_redis(password="other")
    with pytest.raises(BackendRefused, match=r"\(NOAUTH\): no password was given, and the server"):
        said(backend=f"redis://127.0.0.1:{server.port}/0")
    with pytest.raises(BackendRefused, match=r"\(WRONGPASS\): wrong user name or password"):
        said(backend=f"redis://:wrong@127.0.0.1:{server.port}/0")


@pytest.mark.needs_real_redis("a password")
def test_a_refused_worker_ends_with_one_line_that_gives_the_reason(make_redis, tmp_path):
    """There is no traceback, which would hide the sentence below thirty lines."""
    server, locks = make_redis(), make_redis(password="other")
    env = {"BAD": json.dumps({"conf": {"singleton_lock_backend": locks.url.replace("other", "x")}})}
    worker = CeleryWorker("integration.misconfigured_app", server.url, pool="solo", env=env)
    worker.start(wait=False)
    eventually(lambda: worker.returncode is not None, 30)
    last = worker.log().strip().splitlines()[-1]
    assert worker.returncode == 1
    assert "CRITICAL" in last
    assert "this worker does not start. The locks' Redis refused (WRONGPASS)" in last
    assert last.endswith(", from singleton_lock_backend.")
    assert "Traceback" not in worker.log()


def test_the_log_names_silent_servers_and_the_waiting_worker(said, silent_ports):
    """With the address and the reason of the wait."""
    servers = [f"127.0.0.1:{port}" for port in silent_ports]
    (told,) = said(backend=[f"redis://:secret@{each}" for each in servers], on_conflict="requeue")
    assert told == (
        f"celery-singleton-lock: 3 of the lock's 3 servers did not answer within 0.25 s "
        f"({', '.join(servers)}), and 2 are needed. The first error: The locks' Redis did not "
        "answer (ConnectionError: Connection refused). They are named in singleton_lock_backend. "
        f"Locked tasks wait until a majority of these servers votes{GOES_ON}"
    )


@pytest.mark.needs_real_redis("a quorum")
def test_a_refusing_server_and_a_silent_one_give_different_errors(said, silent_ports, make_redis):
    """A wrong password must be changed in the settings, whatever else is wrong."""
    port, server = silent_ports[0], make_redis(password="other")
    place = f"127.0.0.1:{server.port}"
    urls = [make_redis().url, f"redis://127.0.0.1:{port}", f"redis://:secret@{place}"]
    (told,) = said(backend=urls, on_conflict="requeue", backend_options=PATIENT)
    assert (
        f"2 of the lock's 3 servers did not answer within 5 s (127.0.0.1:{port}) or refused "
        f"({place}), and 2 are needed. The first refusal: The locks' Redis refused (WRONGPASS)"
    ) in told
    assert "secret" not in told


@pytest.mark.needs_real_redis("a password")
def test_a_redis_that_refuses_is_named_with_its_setting(said, make_redis):
    """By its address, without the password; of a quorum, with those that refused."""
    servers = [make_redis(password="other") for _ in range(3)]
    places = [f"127.0.0.1:{server.port}" for server in servers]
    with pytest.raises(BackendRefused) as caught:
        said(backend=f"redis://:secret@{places[0]}/0")
    assert str(caught.value).endswith(
        f"It is redis://***@{places[0]}/0, from singleton_lock_backend."
    )
    assert "WRONGPASS" in str(caught.value)
    assert "redis/" not in "".join(traceback.format_exception(caught.value)), "what Celery prints"
    urls = [f"redis://:secret@{place}" for place in places]
    with pytest.raises(BackendRefused) as caught:
        said(backend=urls, on_conflict="requeue", backend_options=PATIENT)
    assert f"3 of the lock's 3 servers refused ({', '.join(places)})" in str(caught.value)
    assert str(caught.value).endswith("They are named in singleton_lock_backend.")


@pytest.mark.needs_real_redis("a quorum")
@pytest.mark.parametrize("how", ["silent", "refusing"])
def test_the_log_names_the_missing_servers_of_a_quorum(said, silent_ports, make_redis, how):
    """The quorum works without them, so nothing else would show it.

    With the effect of one more loss.
    """
    well = [make_redis().url for _ in range(2)]
    out = f"127.0.0.1:{silent_ports[0] if how == 'silent' else make_redis(password='x').port}"
    urls = [*well, f"redis://:secret@{out}"]
    with closing(QuorumStore(urls, timeout=5.0)) as store, suppress(BackendError):
        store.admit()
    (told,) = said(backend=urls, on_conflict="requeue", backend_options=PATIENT)
    assert told.startswith(
        f"celery-singleton-lock: 1 of the lock's 3 servers is unavailable ({out}: The"
    )
    assert {"silent": "did not answer (ConnectionError: Conn", "refusing": "WRONGPASS"}[how] in told
    assert told.endswith(
        "The others keep the locks. With one more unavailable, nothing is granted."
    )
    assert "secret" not in told


@pytest.mark.needs_real_redis("a quorum")
def test_the_log_names_restarted_servers_and_the_waiting_worker(said, make_redis):
    """They answer, and do not vote yet."""
    servers = [make_redis().url for _ in range(3)]
    (told,) = said(backend=servers, on_conflict="requeue", backend_options=PATIENT)
    assert "servers were restarted" in told
    assert told.endswith(f"Locked tasks wait until a majority of these servers votes{GOES_ON}")


def test_missing_replicas_are_reported_once_at_the_start(said, redis_url):
    """Not only by each task that is parked."""
    (told,) = said(backend=redis_url, replicas_wait=2)
    assert told == (
        "celery-singleton-lock: singleton_lock_replicas_wait is 2, and the locks' Redis has 0 "
        "replicas. Until it has that many, parked messages are not acknowledged to the broker. "
        "Connect replicas, or lower the setting."
    )
    assert said(backend=redis_url) == []
