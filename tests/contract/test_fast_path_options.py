"""The fast path to Redis follows the options of the client."""

from __future__ import annotations

import pytest
import redis
from redis.backoff import DecorrelatedJitterBackoff, NoBackoff
from redis.retry import Retry

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.redis.fast_path import FastConnection, FastPath, is_plain, packed
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import Script

ECHO = Script("echo", "return ARGV[1]", "lock", ("said",))
KEYS = Script("keys", "return table.concat(KEYS, ' ')", "lock", ())


@pytest.fixture
def client(redis_client):
    for script in (ECHO, KEYS):
        redis_client.script_load(script.text)
    return redis_client


def said(word):
    return packed(ECHO, "csl", "lock", (word,), ())


def copy_of(client, **options):
    """A client to the same server with these options alone."""
    at = client.connection_pool.connection_kwargs
    return redis.Redis(
        connection_pool=redis.ConnectionPool(host=at["host"], port=at["port"], **options)
    )


def cut_all(client):
    """Have the server close all other connections."""
    client.client_kill_filter(_type="normal", skipme=True)


@pytest.mark.parametrize("prefix", ["csl", "other:app"])
def test_the_keys_are_those_below_the_prefix(client, prefix):
    """In the scripts' order."""
    told = FastPath(client).ask(packed(KEYS, prefix, "lock", (), ()))
    assert told.decode().split() == list(Keyspace(prefix).lock("lock"))


def test_a_lost_connection_is_opened_again_as_often_as_the_client_would(client):
    """By the client's own rule; without one, once."""
    rule = Retry(NoBackoff(), 2)
    assert FastPath(copy_of(client, retry=rule))._retry is rule
    wire = FastPath(copy_of(client))
    assert wire._retry._retries == 1
    assert wire.ask(said("0")) == b"0"
    cut_all(client)
    assert wire.ask(said("1")) == b"1"


def test_a_failed_connection_is_reported_after_any_number_of_attempts(client):
    """The rule is the client's, its progress each call's own: two threads may try at once."""
    rule = Retry(DecorrelatedJitterBackoff(cap=0.002, base=0.001), 2)
    wire = FastPath(redis.Redis(port=1, retry=rule))
    with pytest.raises(redis.ConnectionError):
        wire.ask(said("0"))
    assert wire._retry._backoff._previous_backoff == 0


def test_what_ended_one_connection_closes_the_idle_ones(client):
    """They lead to the same server, and would each fail once."""
    wire = FastPath(copy_of(client))
    first, second, third = (wire._connect() for _ in range(3))
    wire._idle += map(FastConnection, (first, second, third))
    cut_all(client)
    assert wire.ask(said("1")) == b"1"
    assert first._sock is None
    assert second._sock is None
    assert third._sock is None
    assert len(wire._idle) == 1


def test_only_a_connection_that_is_a_socket_and_no_more_is_read_past_redis_py(client):
    """Not one of a user's own class, nor one whose health is looked after."""

    class Own(redis.Connection):
        pass

    assert is_plain(client.connection_pool)
    assert is_plain(copy_of(client, health_check_interval=0).connection_pool)
    assert not is_plain(copy_of(client, health_check_interval=5).connection_pool)
    assert not is_plain(redis.ConnectionPool(connection_class=Own))
    assert not is_plain(redis.ConnectionPool(connection_class=Own, health_check_interval=5))


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_server_sends_nothing_between_the_answers(client, protocol):
    """Which the newer protocol allows; the client's choice does not count here."""
    wire = FastPath(copy_of(client, protocol=protocol))
    assert wire._connect().protocol == 2


def test_a_password_that_the_server_does_not_ask_for_is_as_good_as_for_the_client(client):
    """With the newer protocol redis-py names the user; without one the server refuses it."""
    told = copy_of(client, password="of-production", protocol=3)
    assert told.ping()
    assert FastPath(told).ask(said("1")) == b"1"


def test_so_is_one_of_a_credential_provider(client):
    """Also if the provider replaces it meanwhile, or tells the user."""
    vault = Vault(("of-production",))
    told = copy_of(client, credential_provider=vault, protocol=3)
    assert told.ping()
    wire = FastPath(told)
    assert wire.ask(said("1")) == b"1"
    vault.given = ("default", "of-production")
    cut_all(client)
    assert wire.ask(said("2")) == b"2"


class Vault(redis.CredentialProvider):
    """Tells what it was given."""

    def __init__(self, given):
        self.given = given

    def get_credentials(self):
        return self.given


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_user_that_the_client_names_is_kept(client, protocol):
    wire = FastPath(copy_of(client, username="ann", password="pw", protocol=protocol))
    assert wire._kwargs["username"] == "ann"
    assert "username" not in FastPath(copy_of(client, protocol=protocol))._kwargs


def test_a_task_does_not_wait_for_redis_pys_client(client, monkeypatch):
    """Neither with a new lock nor with a grant: it is half of the time that a lock takes."""
    store = RedisStore(copy_of(client), direct=True)
    owner = Owner("token", "id/0/0", "task", "worker")
    other = owner._replace(token="other", attempt="id2/0/0")
    asked = Claim("lock", 30, 1)
    store.acquire(other, asked)
    store.acquire(owner, asked, wait=30)
    store.release("lock", other.token, Ending.FINAL)
    store.claim(owner, "lock", 30)  # now the server knows all scripts

    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(store.client.connection_pool, "get_connection", refuse)
    assert store.claim(owner, "lock", 30).verdict is Verdict.GRANTED
    assert store.release("lock", owner.token, Ending.FINAL).verdict is Verdict.RELEASED
    assert store.acquire(other, asked).verdict is Verdict.GRANTED
