"""Reading one answer from a socket: in whatever pieces it comes, and whatever else comes."""

from __future__ import annotations

import socket

import pytest
import redis

from celery_singleton_lock.store.redis import fast_path


@pytest.fixture(params=[1, 65536], ids=["byte by byte", "at once"])
def ends(request, monkeypatch):
    """A connection as redis-py has opened it, and the server's end of it."""
    monkeypatch.setattr(fast_path, "_CHUNK", request.param)
    ours, servers = socket.socketpair()
    connection = redis.Connection()
    with ours, servers:
        ours.settimeout(0.2)
        connection._sock = ours
        yield connection, servers
        connection._sock = None


def ask(ends, answer):
    connection, server = ends
    server.sendall(answer)
    return fast_path._by_socket(connection, b"*1\r\n$4\r\nPING\r\n")


@pytest.mark.parametrize("text", [b"", b"abc", b"\r\n", b"$3\r\nabc\r\n" * 30])
def test_a_text_is_read_whole(ends, text):
    """Its length counts, not what looks like an end in it."""
    assert ask(ends, b"$%d\r\n%b\r\n" % (len(text), text)) == text
    assert ends[1].recv(100) == b"*1\r\n$4\r\nPING\r\n"


@pytest.mark.parametrize(
    ("answer", "kind", "sentence"),
    [
        (b"-ERR no\r\n", redis.ResponseError, "no"),
        (b"-NOSCRIPT none\r\n", redis.exceptions.NoScriptError, "none"),
        (b"-ERR \xff\r\n", redis.ResponseError, "\ufffd"),
        (b":7\r\n", redis.InvalidResponse, "the answer is neither a bulk string nor an error"),
        (b"$3\r\nab", redis.TimeoutError, "Timeout on the socket"),
        (b"", redis.TimeoutError, "Timeout on the socket"),
    ],
)
def test_what_is_no_text_is_the_error_that_redis_py_has_for_it(ends, answer, kind, sentence):
    """An error of the server, of its protocol, or of the way to it."""
    with pytest.raises(kind) as caught:
        ask(ends, answer)
    assert type(caught.value) is kind
    assert str(caught.value) == sentence


@pytest.mark.parametrize("answer", [b"", b"$3", b"$3\r\n", b"$3\r\nabc\r"])
def test_a_connection_that_is_closed_in_the_middle_is_lost(ends, answer):
    """Wherever the answer was cut."""
    ends[1].sendall(answer)
    ends[1].shutdown(socket.SHUT_WR)
    with pytest.raises(redis.ConnectionError, match=r"^Connection closed by server\.$"):
        fast_path._by_socket(ends[0], b"PING")


def test_an_error_of_the_socket_has_its_cause(ends):
    """What the system says."""
    ends[0]._sock.close()
    with pytest.raises(redis.ConnectionError, match=r"^Error on the socket: .*Bad file descriptor"):
        fast_path._by_socket(ends[0], b"PING")


def test_more_than_one_answer_is_none():
    """What follows would be taken for the next one's."""
    ours, servers = socket.socketpair()
    connection = redis.Connection()
    with ours, servers:
        connection._sock = ours
        servers.sendall(b"$1\r\na\r\n$1\r\nb\r\n")
        with pytest.raises(redis.InvalidResponse):
            fast_path._by_socket(connection, b"PING")
        connection._sock = None
