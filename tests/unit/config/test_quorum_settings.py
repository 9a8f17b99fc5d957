"""What several servers together cannot keep is refused, with what to use instead."""

from __future__ import annotations

import pytest
import redis.asyncio

from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import BackendRefused, ConfigurationError
from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.store.quorum.aio import AsyncQuorumStore
from celery_singleton_lock.store.quorum.sync import QuorumStore
from celery_singleton_lock.store.quorum.worker_store import TaskQuorum

SERVERS = ["redis://:secret@a:6379", "redis://b", "redis://c"]


def settings(**given):
    conf = {"backend": SERVERS, "on_conflict": "requeue", **given}
    return parse_settings({f"singleton_lock_{name}": value for name, value in conf.items()}.get)


def refusal(given, **declared):
    with pytest.raises(ConfigurationError) as caught:
        resolve_options("shop.settle", declared, given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "declared", "remedy"),
    [
        ({"on_conflict": "park"}, {}, 'Use "requeue", which returns them to the broker'),
        ({}, {"lock_on_conflict": "park"}, 'Use "requeue", which returns them to the broker'),
        ({}, {"lock_limit": 2}, "has one permit. Leave it out, or use one Redis."),
        ({}, {"lock_on_retry": "keep"}, 'Use "release"'),
        (
            {"hold_for": 60},
            {},
            "no lock stays held after a task. Leave it out (singleton_lock_hold",
        ),
        (
            {"mode": "observe"},
            {},
            'there is no report. Use "enforce" or "off" (singleton_lock_mode',
        ),
        (
            {},
            {"lock_lease": 31},
            "votes again 30 s after a restart, so a longer lease is not safe. Use a shorter lease",
        ),
    ],
)
def test_an_option_that_a_quorum_cannot_keep_is_refused(given, declared, remedy):
    """The error names the task, the option and what to use."""
    said = refusal(settings(**given), **declared)
    assert said.startswith("task shop.settle: lock_")
    assert remedy in said


MADE = {
    "Lock": lambda servers: Lock(servers, "lock"),
    "AsyncLock": lambda servers: AsyncLock(servers, "lock"),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(
    ("count", "given"), [(0, "none is"), (1, "1 is"), (2, "2 are"), (4, "4 are")]
)
def test_the_error_of_an_even_number_of_servers_or_too_few_says_how_many_are_needed(
    made, count, given
):
    """And one server, what to give instead of the list."""
    client = redis.asyncio.Redis() if made == "AsyncLock" else "redis://localhost"
    with pytest.raises(
        ConfigurationError, match="an odd number of servers, 3 or more, and"
    ) as told:
        MADE[made]([client] * count)
    assert f"and {given} given (" in str(told.value)
    assert ("For one server give its client, redis.Redis.from_url" in str(told.value)) == (
        count == 1
    )


def test_a_list_with_one_url_gives_the_same_error_in_the_settings():
    with pytest.raises(ConfigurationError, match=r"names 1 server: .* write its URL, not a list"):
        settings(backend=SERVERS[:1])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("nonsense://", "'nonsense://': a quorum has independent servers. Write each as"),
        ("localhost", "'localhost': a quorum has independent servers. Write each as"),
        ("memory://", "'memory://': a quorum has independent servers"),
        ("sentinel://c", "'sentinel://c': a quorum has independent servers"),
        ("redis+cluster://c", "'redis+cluster://c': a quorum has independent servers"),
        ("redis://:secret@c:x", "'redis://***@c:x': its port is not a number"),
        ("redis://:secret@c?socket_timeout=x", "'redis://***@c?socket_timeout=x': redis-py cannot"),
        (
            "redis://c;redis://d",
            "'redis://c;redis://d': it names several servers. Write one URL for each",
        ),
        (
            "redis://:secret@c,d:1",
            "'redis://***@c,d:1': it names several servers. Write one URL for each",
        ),
        (5, "an int: give a URL or a redis.Redis client."),
        (None, "a NoneType: give a URL or a redis.Redis client."),
        (
            redis.asyncio.Redis(),
            "a redis.asyncio.Redis: give a URL or a redis.Redis client; asyncio",
        ),
    ],
)
def test_a_wrong_entry_in_a_list_of_servers_is_named_without_its_password(wrong, said):
    """Where the list is given, and with what may stand there."""
    with pytest.raises(ConfigurationError) as told:
        Lock([*SERVERS[:2], wrong], "lock")
    assert str(told.value).startswith(f"Server 3 of the quorum is {said}")
    assert "secret" not in str(told.value) + str(told.value.__cause__)


def test_a_client_for_threads_in_a_list_for_asyncio_is_led_back():
    """Both worlds have a class of that name."""
    clients = [redis.asyncio.Redis(port=1), redis.Redis(port=2), redis.asyncio.Redis(port=3)]
    with pytest.raises(ConfigurationError) as told:
        AsyncLock(clients, "lock")
    assert str(told.value) == (
        "Server 2 of the quorum is a redis.Redis: give a redis.asyncio.Redis client; threads have "
        "Lock."
    )


def test_a_wrong_entry_in_the_setting_is_named_by_its_number():
    with pytest.raises(
        ConfigurationError, match=r"^singleton_lock_backend: server 3 is 'localhost'"
    ):
        settings(backend=[*SERVERS[:2], "localhost"])


def test_a_port_that_is_left_out_is_redis_own():
    """All clients spell a server alike, or they would queue for its locks in different places."""
    spelled = QuorumStore(["redis://a", "redis://b:6379", "redis://"]).operations.addresses
    assert spelled == ("a:6379", "b:6379", "localhost:6379")
    with pytest.raises(ConfigurationError, match=r"^a:6379 is given twice"):
        QuorumStore(["redis://a", "redis://b", "redis://:secret@a:6379/1"])


def test_a_longer_lease_goes_with_a_longer_wait_after_restarts():
    """longest_lease, in the options of the backend."""
    longer = settings(backend_options={"longest_lease": 60})
    assert resolve_options("shop.settle", {"lock_lease": 45}, longer).lease == 45


@pytest.mark.parametrize("name", ["longest_lease", "server_timeout"])
@pytest.mark.parametrize("value", [0, -1, "30", None, True, float("nan"), float("inf")])
def test_a_duration_of_a_quorum_that_is_none_is_refused(name, value):
    """Before a worker starts, and where a store is made."""
    with pytest.raises(ConfigurationError, match=rf"backend_options\[\"{name}\"\] is"):
        settings(backend_options={name: value})
    if value is not True:
        with pytest.raises(ConfigurationError, match=r"is .*: give seconds"):
            QuorumStore(SERVERS, **{name.removeprefix("server_"): value})


def test_a_quorum_is_shown_without_passwords():
    """All addresses are shown. A command for one Redis asks the user to choose."""
    assert "secret" not in settings().where()
    assert settings().where().count("redis://") == 3
    with pytest.raises(
        ConfigurationError, match=r"Give one of their URLs: celery-singleton-lock --backend URL."
    ):
        settings().address()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+cluster://c:6379,d:6379", "redis+cluster://c:6379,d:6379/0, is a Cluster. "),
        ("sentinel://c:26379", "sentinel://c:26379/0, is a Sentinel. "),
        ("memory://c", "memory://c, is in the memory of this process (in tests use one"),
        ("redis://b/1", "redis://b:6379/1, is listed twice, and would vote twice. "),
    ],
)
def test_what_is_no_independent_server_is_refused(url, why):
    """The error names which one, and why."""
    with pytest.raises(ConfigurationError) as caught:
        settings(backend=[*SERVERS[:2], url])
    assert str(caught.value).startswith("singleton_lock_backend: server 3, " + why)


def test_a_credential_provider_beside_a_password_is_refused():
    """As for one Redis."""
    with pytest.raises(ConfigurationError, match="Leave one out"):
        settings(backend_options={"credential_provider": "shop.vault:provider"}).addresses()


def test_the_verbs_of_operators_are_refused_on_a_quorum():
    """The error says that they need one Redis."""
    with pytest.raises(BackendRefused, match="names several servers"):
        admin_of(TaskQuorum(SERVERS))


@pytest.mark.parametrize("store", [QuorumStore, AsyncQuorumStore])
def test_a_prefix_of_keys_goes_with_the_store_of_several_servers(store):
    """So that a quorum can be admitted, and given another longest lease, under any of them."""
    servers = SERVERS
    if store is AsyncQuorumStore:
        servers = [redis.asyncio.Redis.from_url(url) for url in SERVERS]
    assert store(servers, prefix="shop").keyspace == Keyspace("shop")
    assert store(servers).keyspace == Keyspace()
    for wrong in ({"keyspace": "shop"}, {"keyspace": Keyspace(), "prefix": "shop"}):
        with pytest.raises(ConfigurationError, match=r"first part of keys|each sets the keys"):
            store(servers, **wrong)
