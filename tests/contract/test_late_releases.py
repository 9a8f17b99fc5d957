"""A release whose reply nobody waits for: the lock is free, and what went wrong is reported."""

from __future__ import annotations

import queue
import threading
from contextlib import closing, suppress

import pytest
import redis
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import worker_process_shutdown

from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reply, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed, rates_of
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import BackendError, BackendRefused, BackendUnreachable
from celery_singleton_lock.store.redis import fast_path
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.worker.execution import late_releases
from celery_singleton_lock.worker.execution.late_releases import LateReleases
from celery_singleton_lock.worker.lock_header import NO_HEADER, LockHeader
from support.interruption import Injected
from support.proxy import Proxy
from support.waiting import eventually

DONE_FOR = 3600.0
OWNER = Owner("0a0a.0", "id/0/0", "task", "w", "host", 1)
CLAIM = Claim("a", 60.0)
HEADER = NO_HEADER._replace(name="a", token=OWNER.token, worker="w")
NEXT = Owner("0b0b.0", "other/0/0", "task", "w", "host", 1)


@pytest.fixture
def proxy(redis_server, redis_url):
    """A proxy before the shared server, which is empty."""
    with Proxy(int(redis_url.rsplit(":", 1)[1].split("/")[0])) as proxy:
        yield proxy


@pytest.fixture
def store(proxy):
    """The store of a pool process."""
    client = redis.Redis.from_url(proxy.url, socket_timeout=1)
    with closing(client), closing(RedisStore(client, Keyspace("csl"), direct=True)) as store:
        yield store


@pytest.fixture
def reported():
    """What was reported, in order."""
    return queue.SimpleQueue()


@pytest.fixture
def releases(store, reported):
    """Sends releases on the store; its thread reports to ``reported``."""

    def report(_header: LockHeader, outcome: Reply | BackendError, *, expired: bool) -> None:
        assert not expired
        reported.put(outcome)

    return LateReleases(lambda: store, DONE_FOR, report)


@pytest.fixture
def held(store, redis_client):
    """The lock is held; the other scripts are known to the server, too."""
    store.acquire(NEXT, CLAIM)
    store.release("a", NEXT.token, Ending.FINAL)
    assert store.acquire(OWNER, CLAIM).verdict is Verdict.GRANTED


def _holders(client):
    return [key for key in client.scan_iter("*holders*") if client.zcard(key)]


def nothing(reported):
    with pytest.raises(queue.Empty):
        reported.get(timeout=0.2)
    return True


@pytest.mark.usefixtures("held")
def test_the_lock_is_free_although_nobody_reads_the_reply(
    releases, store, reported, redis_client, monkeypatch
):
    monkeypatch.setattr(releases, "_round", lambda: False)
    assert releases.send(HEADER)
    eventually(lambda: not _holders(redis_client))
    assert store.acquire(NEXT, CLAIM).verdict is Verdict.GRANTED
    assert store.read_unread_replies(float("inf")) is False
    assert nothing(reported)


@pytest.mark.usefixtures("held")
def test_an_idle_process_reads_the_reply(releases, store, reported):
    assert releases.send(HEADER)
    eventually(lambda: not any(line.has_unread_reply for line in store._fast_path._idle))
    assert nothing(reported)


def test_the_next_start_that_a_rate_allows_is_reported(releases, store, reported):
    """Its worker sets a timer: else the next task of a smooth rate would start up to 1 s late."""
    rated = CLAIM._replace(flow=packed(rates_of("1/h")))
    assert store.acquire(OWNER, rated).verdict is Verdict.GRANTED
    store.park(NEXT, rated, MessageToPark(b"body", "R", "q", None))
    assert releases.send(HEADER)
    told = reported.get(timeout=5)
    assert (told.verdict, told.waits_for) == (Verdict.RELEASED, WaitsFor.RATE)
    assert 3590 < told.next_look < 3600
    assert nothing(reported)


@pytest.mark.usefixtures("held")
def test_the_next_command_gets_its_own_reply(releases, store, reported):
    """200 tasks in a row: none takes the reply to the release before for its own."""
    for number in range(200):
        owner = OWNER._replace(token=f"{number:04x}.0", attempt=f"{number}/0/0")
        claim = CLAIM._replace(name=f"a{number % 3}")
        reply = store.acquire(owner, claim)
        assert reply.verdict is Verdict.GRANTED, number
        header = HEADER._replace(name=claim.name, token=owner.token)
        assert releases.send(header)
    assert nothing(reported)


@pytest.mark.usefixtures("held")
def test_a_release_whose_reply_is_lost_is_repeated_and_is_no_loss(
    releases, proxy, reported, redis_client
):
    proxy.lose_reply = 1
    releases.send(HEADER)
    outcome = reported.get(timeout=10)
    assert (outcome.verdict, outcome.repeated) == (Verdict.ABSENT, True)
    assert not _holders(redis_client)


@pytest.mark.usefixtures("held")
def test_a_release_that_does_not_arrive_is_repeated(releases, proxy, reported, redis_client):
    """The connection is cut behind the release, while the next task asks for its lock."""
    proxy.stalled = True
    releases.send(HEADER)
    assert _holders(redis_client)
    proxy.cut()
    proxy.stalled = False
    eventually(lambda: not _holders(redis_client))
    assert nothing(reported)


@pytest.mark.usefixtures("held")
def test_the_next_task_gets_its_lock_when_the_release_was_lost(
    releases, store, proxy, reported, redis_client
):
    """Its connection is closed, with the unread reply: both calls are repeated."""
    proxy.lose_reply = 1
    releases.send(HEADER)
    eventually(lambda: proxy.lose_reply is None)
    other = CLAIM._replace(name="b")
    assert store.acquire(NEXT, other).verdict is Verdict.GRANTED
    assert reported.get(timeout=10).repeated
    assert len(_holders(redis_client)) == 1


@pytest.mark.usefixtures("held")
def test_a_lock_that_was_taken_away_is_reported(releases, reported, redis_client):
    redis_client.flushdb()
    releases.send(HEADER)
    outcome = reported.get(timeout=10)
    assert (outcome.verdict, outcome.repeated) == (Verdict.ABSENT, False)


@pytest.mark.usefixtures("held")
def test_a_server_that_forgot_the_scripts_gets_them_again(releases, reported, redis_client):
    redis_client.script_flush()
    releases.send(HEADER)
    eventually(lambda: not _holders(redis_client))
    assert nothing(reported)


@pytest.mark.usefixtures("held")
def test_a_release_that_redis_refuses_is_reported(releases, reported, redis_client):
    (record,) = redis_client.scan_iter("*:record*")
    redis_client.delete(record)
    redis_client.set(record, "not a hash")
    releases.send(HEADER)
    assert isinstance(reported.get(timeout=10), BackendRefused)


@pytest.mark.usefixtures("held")
def test_a_release_to_a_server_that_is_gone_is_reported(releases, proxy, reported):
    proxy.stalled = True
    releases.send(HEADER)
    assert isinstance(reported.get(timeout=20), BackendUnreachable)


def test_a_release_that_cannot_be_sent_raises_and_is_not_reported(releases, store, proxy, reported):
    proxy.target = 1
    proxy.cut()
    store.close()
    with pytest.raises(BackendError):
        releases.send(HEADER)
    assert nothing(reported)


@pytest.mark.usefixtures("held")
def test_an_error_of_a_report_ends_no_later_report(releases, reported, redis_client, monkeypatch):
    """The thread goes on."""
    redis_client.flushdb()

    report, failed = releases._report, []

    def fail_once(*args: object, **options: object) -> None:
        if not failed:
            failed.append(args)
            raise RuntimeError
        report(*args, **options)

    monkeypatch.setattr(releases, "_report", fail_once)
    releases.send(HEADER)
    releases.send(HEADER)
    assert reported.get(timeout=10).verdict is Verdict.ABSENT


@pytest.mark.usefixtures("held")
def test_a_process_that_ends_reports_its_last_release(releases, proxy, reported, monkeypatch):
    """Redis is silent, and a process that ends without a report leaves the lock to its lease."""
    monkeypatch.setattr(late_releases, "LAST", 20.0)
    proxy.stalled = True
    releases.send(HEADER)
    worker_process_shutdown.send(sender=None)
    assert isinstance(reported.get_nowait(), BackendUnreachable)


@pytest.mark.usefixtures("held")
def test_a_process_that_ends_waits_for_no_reply_that_has_arrived(releases, reported):
    releases.send(HEADER)
    worker_process_shutdown.send(sender=None)
    assert not releases.thread.is_alive()
    assert nothing(reported)


def test_the_release_is_waited_for_if_no_thread_can_be_started(releases, monkeypatch, caplog):
    def start(_thread):
        msg = "can't start new thread"
        raise RuntimeError(msg)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert not releases.send(HEADER)
    assert not releases.send(HEADER)
    assert not caplog.records


@pytest.mark.usefixtures("held")
def test_a_time_limit_while_a_connection_is_closed_hides_no_release(store, proxy, monkeypatch):
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()

    def disconnect() -> None:
        raise SoftTimeLimitExceeded

    store.send_release("a", OWNER.token, "w", DONE_FOR, heard.put)
    (line,) = store._fast_path._idle
    with monkeypatch.context() as patch:
        patch.setattr(line.connection, "disconnect", disconnect)
        with pytest.raises(SoftTimeLimitExceeded):
            store.close()
    line.connection.disconnect()
    assert isinstance(heard.get_nowait(), redis.ConnectionError)


def test_a_time_limit_at_the_first_release_breaks_no_later_one(
    releases, store, reported, monkeypatch
):
    """It strikes while the thread is created."""

    def strike(*_: object) -> None:
        raise SoftTimeLimitExceeded

    with monkeypatch.context() as patch:
        patch.setattr(late_releases, "BackgroundThread", strike)
        with pytest.raises(SoftTimeLimitExceeded):
            releases.send(HEADER)
    store.acquire(OWNER, CLAIM)
    assert releases.send(HEADER)
    assert nothing(reported)


def test_a_store_with_a_connection_that_is_no_socket_waits_for_its_replies(redis_server, redis_url):
    client = redis.Redis.from_url(redis_url, health_check_interval=5)
    with closing(client), closing(RedisStore(client, Keyspace("csl"), direct=True)) as store:
        releases = LateReleases(lambda: store, DONE_FOR, print)
        assert not releases.send(HEADER)
        assert not hasattr(releases, "thread")


def test_a_time_limit_while_the_next_task_reads_a_failed_reply_leaves_the_lock_to_nobody(
    releases, store, reported, redis_client, monkeypatch
):
    """The server has forgotten the script; the exception strikes at any line of the next call."""
    monkeypatch.setattr(releases, "_round", lambda: False)
    where: str | None = ""
    number = 0
    while where is not None:
        number += 1
        store.acquire(OWNER, CLAIM)
        redis_client.script_flush()
        assert releases.send(HEADER)
        modules = (fast_path, late_releases)
        with suppress(SoftTimeLimitExceeded), Injected(number, *modules) as injected:
            store.acquire(NEXT, CLAIM._replace(name="b"))
        where = injected.where
        store.read_unread_replies(float("inf"))
        while not releases._failed.empty():
            releases._repeat_release(releases._failed.get())
        assert not store.inspect("a").holders, where
        store.release("b", NEXT.token, Ending.FINAL)
    assert number > 20, "lines were struck"
    while not reported.empty():
        assert reported.get().repeated
