"""Our errors for errors of redis-py."""

from __future__ import annotations

import os
import socket
import ssl

import pytest
from redis import exceptions as redis_errors
from redis.asyncio.sentinel import MasterNotFoundError as NoMasterForTasks
from redis.sentinel import MasterNotFoundError

from celery_singleton_lock.errors import BackendRefused, BackendUnreachable, LockUnusable
from celery_singleton_lock.store.error_mapping import explain


@pytest.mark.parametrize("code", ["UNBLOCKED", "NOREPLICAS", "MASTERDOWN", "BUSY"])
def test_a_refusal_that_passes_by_itself_is_no_answer_and_named(code):
    """Who gets it asks again, as if nobody had answered."""
    told = explain(redis_errors.ResponseError(f"{code} some words of the server"))
    assert type(told) is BackendUnreachable
    assert str(told) == f"The locks' Redis cannot serve now ({code})."


@pytest.mark.parametrize(
    "error",
    [
        redis_errors.ConnectionError("redis://user:secret@host"),
        ConnectionResetError("secret"),
    ],
)
def test_a_missing_reply_is_recognized_by_the_class_of_the_error(error):
    """Its words may hold an address with its password."""
    told = explain(error)
    assert type(told) is BackendUnreachable
    assert str(told) == f"The locks' Redis did not answer ({type(error).__name__})."


def coming_of(cause):
    """Return redis-py's error, as it makes it of the system's."""
    try:
        try:
            raise cause
        except OSError:
            raise redis_errors.ConnectionError("redis://user:secret@host")  # noqa: B904  # as there
    except redis_errors.ConnectionError as error:
        return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (coming_of(ConnectionRefusedError(111, "secret")), f"Error: {os.strerror(111)}"),
        (coming_of(socket.gaierror(-2, "Name unknown")), "cannot be resolved, Name unknown"),
        (coming_of(socket.gaierror()), "Error: its host name cannot be resolved)"),
        (coming_of(ssl.SSLCertVerificationError(1, "secret")), "cannot be verified: unknown;"),
        (coming_of(ssl.SSLError(1, "secret")), "TLS failed"),
        (redis_errors.TimeoutError("BUSY redis://user:secret@host"), "Error: no answer in time"),
        (redis_errors.BusyLoadingError("secret"), "Error: it is still loading its data"),
    ],
    ids=str,
)
def test_the_error_of_a_failed_connection_has_the_systems_message(error, told):
    """A slip in the host name wants another remedy than a server that is down."""
    said = explain(error)
    assert type(said) is BackendUnreachable
    assert str(said).startswith(f"The locks' Redis did not answer ({type(error).__name__}: ")
    assert told in str(said)
    assert "secret" not in str(said)


@pytest.mark.parametrize("kind", [redis_errors.ReadOnlyError, redis_errors.ResponseError])
def test_an_error_of_a_replica_is_named_and_may_be_retried(kind):
    """It did answer, and writes after a failover at the latest."""
    told = explain(kind("READONLY secret"))
    assert type(told) is BackendUnreachable
    assert str(told).startswith("The locks' Redis is a replica (READONLY): give its master's")
    assert "secret" not in str(told)


def test_the_error_for_a_slot_that_moves_says_how_to_end_an_interrupted_move():
    """The address is right, and Redis runs."""
    told = explain(redis_errors.TryAgainError("secret"))
    assert type(told) is BackendUnreachable
    assert "redis-cli --cluster fix" in str(told)
    assert "secret" not in str(told)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("unknown command 'evalsha', with args", "does not allow scripts (EVALSHA, EVAL)"),
        ("unknown command 'SCAN', with args", "does not know SCAN"),
        ("unknown command `set`, with args", "does not know SET"),
    ],
)
def test_a_server_that_lacks_a_command_may_be_a_sentinel(said, told):
    """Which answers on a port of its own, and knows few commands."""
    error = explain(redis_errors.ResponseError(said))
    assert type(error) is BackendRefused
    assert told in str(error)
    assert "if it is a Sentinel, write sentinel:// instead of redis://" in str(error)


@pytest.mark.parametrize(
    "kind", [MasterNotFoundError, NoMasterForTasks], ids=["threads", "asyncio"]
)
def test_the_error_without_a_master_says_what_to_check(kind):
    """For threads and for asyncio."""
    told = explain(kind("No master found for 'secret'"))
    assert type(told) is BackendUnreachable
    assert "sentinel_kwargs" in str(told)
    assert "secret" not in str(told)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (redis_errors.ResponseError("WRONGTYPE x"), "WRONGTYPE", "singleton_lock_prefix"),
        (redis_errors.ResponseError("NOAUTH x"), "NOAUTH", "put it into the URL"),
        (redis_errors.ResponseError("OOM x"), "OOM", "maxmemory"),
        (redis_errors.OutOfMemoryError("x"), "OOM", "maxmemory"),
        (redis_errors.NoPermissionError("x"), "NOPERM", "+evalsha"),
        (redis_errors.AuthenticationError("x"), "WRONGPASS", "wrong user name or password"),
        (redis_errors.AuthenticationError("Authentication required."), "NOAUTH", "no password was"),
        (
            redis_errors.AuthenticationError(
                "HELLO must be called with the client already authenticated, otherwise the …"
            ),
            "NOAUTH",
            "no password was given",
        ),
        (
            redis_errors.AuthenticationError("AUTH called without any password configured"),
            "AUTH",
            "take it out of the URL",
        ),
        (redis_errors.ResponseError("user executing the script can't x"), "NOPERM", "+evalsha"),
    ],
)
def test_a_refusal_names_what_to_change(error, code, says):
    """Also where redis-py has taken the code off the sentence."""
    told = explain(error)
    assert type(told) is (LockUnusable if code == "WRONGTYPE" else BackendRefused)
    assert str(told).startswith(f"The locks' Redis refused ({code}): ")
    assert says in str(told)


def test_a_server_without_scripts_gives_a_specific_error_and_others_are_unchanged():
    """In whatever letters it says so."""
    told = explain(redis_errors.ResponseError("Unknown Command 'EVALSHA'"))
    assert type(told) is BackendRefused
    assert "which every lock needs" in str(told)
    told = explain(redis_errors.ResponseError("ERR something else"))
    assert type(told) is BackendRefused
    assert str(told) == "The locks' Redis refused: ERR something else."


@pytest.mark.parametrize(
    ("verified", "remedy"),
    [
        ("self-signed certificate in certificate chain", "ssl_ca_certs"),
        ("Hostname mismatch, certificate is not valid for 'secret'.", "a host name that the"),
        ("IP address mismatch, certificate is not valid for 'secret'.", "a host name that the"),
    ],
)
def test_an_invalid_certificate_is_reported_with_its_cause_and_what_to_change(verified, remedy):
    cause = ssl.SSLCertVerificationError(1, "secret")
    cause.verify_message = verified
    said = str(explain(coming_of(cause)))
    assert f"TLS failed, its certificate cannot be verified: {verified.split(',')[0]}; " in said
    assert remedy in said
    assert "secret" not in said


def test_a_redis_that_accepts_no_more_clients_is_not_said_to_be_away():
    """Commands would say to check its address, and that it runs; a restart would lose the locks."""
    told = explain(redis_errors.ConnectionError("max number of clients reached"))
    assert isinstance(told, BackendUnreachable)
    assert "raise maxclients" in str(told)
    assert "did not answer" not in str(told)
