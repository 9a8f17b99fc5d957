"""The fast path to Redis: after any interruption the next call gets its own reply."""

from __future__ import annotations

import signal
import threading
from contextlib import closing

import pytest
import redis
from celery.exceptions import SoftTimeLimitExceeded
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.store.redis.fast_path import FastPath, packed
from celery_singleton_lock.store.scripts import Script

ECHO = Script("echo", "return ARGV[1]", "lock", ("said", "again", "once_more"))
SLOW = Script("slow", "local n = 0 for i = 1, 2e7 do n = n + i end return 'slow'", "lock", ())
BAD = Script("bad", "return redis.error_reply('OOM no')", "lock", ())

NUMBER = Script("number", "return 7", "lock", ())


def said(what):
    return packed(ECHO, "csl", "lock", (what,), ("again", "once more"))


@pytest.fixture(scope="module")
def client():
    with RedisServer() as server, server.client() as client:
        for script in (ECHO, SLOW, BAD, NUMBER):
            client.script_load(script.text)
        yield client


@pytest.fixture
def wire(client):
    with closing(FastPath(client)) as wire:
        yield wire


def test_a_call_is_packed_as_the_server_reads_it():
    """Text, bytes and numbers, with their lengths in bytes."""
    command = packed(ECHO, "csl", "lock", ("é", b"\x00\r\n"), (7,))
    assert command.startswith(b"*18\r\n$7\r\nEVALSHA\r\n$40\r\n")
    assert command.endswith(b"$2\r\n\xc3\xa9\r\n$3\r\n\x00\r\n\r\n$1\r\n7\r\n")


def struck_after(seconds, wire):
    """Make a slow call, during which the alarm rings."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    wire.ask(packed(SLOW, "csl", "lock", (), ()))


def test_an_answer_that_was_not_read_is_not_taken_for_the_next(wire):
    """A soft time limit strikes while Redis works."""
    wire.ask(said("0"))

    def strike(*_):
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for number in range(1, 6):
            with pytest.raises(SoftTimeLimitExceeded):  # it may strike before the call, too
                struck_after(0.01 * number, wire)
            assert wire.ask(said(number)) == str(number).encode()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_connection_that_the_server_closed_is_opened_again(client, wire):
    """Idle connections are dropped by servers and proxies; that is no outage."""
    wire.ask(said("0"))
    client.client_kill_filter(_type="normal", skipme=True)
    assert wire.ask(said("1")) == b"1"


def test_a_refusal_is_an_answer(wire):
    """The connection stays, and the next call works."""
    with pytest.raises(redis.ResponseError):
        wire.ask(packed(BAD, "csl", "lock", (), ()))
    assert wire.ask(said("1")) == b"1"


def test_an_answer_may_come_in_pieces(wire):
    """A text that is longer than one read of the socket."""
    for word in ("x" * 3_000_000, "", "\r\n$1\r\n"):
        assert wire.ask(said(word)) == word.encode()


def test_what_is_no_text_is_no_answer(wire):
    """A number, or a list, is none that a lock's script gives: the connection is in doubt."""
    with pytest.raises(redis.InvalidResponse):
        wire.ask(packed(NUMBER, "csl", "lock", (), ()))
    assert wire.ask(said("1")) == b"1"


@pytest.mark.needs_real_redis("a server process to stop")
def test_a_server_that_stalls_is_given_up(make_redis):
    """After the socket's time-out, by the error that redis-py has for it."""
    server = make_redis()
    with server.client(socket_timeout=3, retry=Retry(NoBackoff(), 0)) as client:
        client.script_load(ECHO.text)
        with closing(FastPath(client)) as wire:
            assert wire.ask(said("0")) == b"0"
            server.pause()
            with pytest.raises(redis.TimeoutError):
                wire.ask(said("1"))
            server.resume()


@pytest.mark.parametrize("option", [{"health_check_interval": 1}, {"protocol": 3}])
def test_options_of_the_client_count(client, option):
    """Where redis-py looks after the health of a connection, it reads the answers as well."""
    options = {**client.connection_pool.connection_kwargs, **option}
    own = redis.Redis(connection_pool=redis.ConnectionPool(**options))
    with closing(FastPath(own)) as wire:
        for number in range(3):
            assert wire.ask(said(number)) == str(number).encode()


def test_threads_do_not_share_a_connection(wire):
    """Each thread reads its own answers."""
    wrong = []

    def work(name):
        for number in range(300):
            word = f"{name}-{number}"
            if wire.ask(said(word)) != word.encode():
                wrong.append(word)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


ELEMENTS = (b"a", b"", b"\r\n*-1\r\n", b"x" * 3_000_000)


def test_each_element_of_an_inbox_is_received_once_and_in_order(client, wire):
    """Whatever is in it, and however long it is; and nothing once it is empty."""
    client.rpush("inbox", *ELEMENTS)
    assert tuple(wire.pop("inbox", 1.0) for _ in ELEMENTS) == ELEMENTS
    assert wire.pop("inbox", 0.01) is None
    client.rpush("inbox", b"b")
    assert wire.pop("inbox", 1.0) == b"b"


def test_an_inbox_that_another_program_uses_is_an_error(client, wire):
    """The next call gets its own answer."""
    client.set("text", "of another program")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        wire.pop("text", 1.0)
    assert wire.ask(said("1")) == b"1"


def test_a_wait_for_an_inbox_is_not_repeated(client, wire):
    """It may have taken an element, whose lock is then granted again when its lease has ended."""
    assert wire.pop("inbox", 0.01) is None
    client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(redis.ConnectionError):
        wire.pop("inbox", 1.0)
    client.rpush("inbox", b"a")
    assert wire.pop("inbox", 1.0) == b"a"


def test_a_wait_that_is_interrupted_leaves_no_answer_for_the_next(client, wire):
    """A soft time limit strikes while the inbox is empty."""

    def strike(*_):
        raise SoftTimeLimitExceeded

    wire.ask(said("0"))  # connects: an interrupted connect leaves a socket to the garbage collector
    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(SoftTimeLimitExceeded):
            wire.pop("inbox", 10.0)
        client.rpush("inbox", b"a")
        assert wire.ask(said("1")) == b"1"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        client.delete("inbox")
