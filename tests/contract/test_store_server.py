"""What the store says of its server, and how it finds what waits there, whoever keeps it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.core.redis_keys import Keyspace, bucket_of
from celery_singleton_lock.core.model import SCHEMA, Claim, Owner, Parcel, new_token
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually

pytestmark = pytest.mark.contract


@pytest.fixture
def store(redis_client):
    store = RedisStore(redis_client)
    yield store
    store.close()


@pytest.mark.needs_real_redis("CONFIG and ACL")
def test_a_server_is_described_by_what_it_guarantees(make_redis):
    """An app that may not ask is told that nobody knows, not that all is well."""
    with make_redis("--appendonly", "no", "--save", "").client() as admin:
        store = RedisStore(admin)
        facts = store.describe()
        assert facts == {
            "version": admin.info("server")["redis_version"],
            "eviction": "noeviction",
            "persistence": "none",
            "replicas": "0",
        }
        admin.config_set("save", "900 1")
        admin.config_set("maxmemory-policy", "allkeys-lru")
        assert store.describe() == {
            **facts,
            "eviction": "allkeys-lru",
            "persistence": "snapshots",
        }
        admin.execute_command("ACL", "SETUSER", "teller", "on", ">pw", "+info")
        admin.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "-@all")
        told = {name: describe_as(admin, name) for name in ("teller", "worker")}
        assert told["teller"] == {**facts, "eviction": "allkeys-lru", "persistence": "unknown"}
        assert told["worker"] == dict.fromkeys(facts, "unknown")
        admin.config_set("appendonly", "yes")
        assert describe_as(admin, "teller")["persistence"] == "append-only file"
        admin.config_set("appendonly", "no")  # ends the process that writes it, which delays a stop


def describe_as(admin, name):
    """What a user is told."""
    options = {**admin.connection_pool.connection_kwargs, "username": name, "password": "pw"}
    with redis.Redis(connection_pool=redis.ConnectionPool(**options)) as client:
        return RedisStore(client).describe()


def test_a_fork_of_redis_that_says_less_is_unknown_where_it_is_silent(store):
    """Not every server of this protocol has the fields of Redis' INFO."""

    class Silent:
        def execute_command(self, command):
            return {"server_name": "other"}

    store.client = Silent()
    facts = store.describe()
    assert facts == dict.fromkeys(("version", "eviction", "persistence", "replicas"), "unknown")


def test_no_answer_is_one_error_whatever_was_asked():
    """Also at a worker's start, which goes on without Redis and not with another error."""
    client = redis.Redis(port=1, socket_connect_timeout=0.5, retry=Retry(NoBackoff(), 0))
    store = RedisStore(client)
    for ask in (
        store.describe,
        store.schema,
        store.time,
        store.probe,
        lambda: store.find(["id"]),
        lambda: store.body("a", "t.0"),
        lambda: store.neglected(1.0),
    ):
        with pytest.raises(BackendUnreachable):
            ask()


def test_the_schema_of_the_data_is_that_of_the_first_who_came(store, redis_client):
    """A later version must not take an older one's data for its own."""
    assert store.schema() == SCHEMA
    redis_client.set("csl:schema", "0")
    assert store.schema() == "0"
    assert redis_client.get("csl:schema") == b"0"


def test_the_time_is_the_servers(store, redis_client):
    """In seconds, with their fraction."""
    for _ in range(20):
        before, said, after = redis_client.time(), store.time(), redis_client.time()
        assert before[0] + before[1] / 1e6 <= said + 1e-6
        assert said - 1e-6 <= after[0] + after[1] / 1e6


def test_a_probe_leaves_nothing_that_anyone_waits_for(store):
    """It takes a lock that is its own, and gives it back."""
    store.probe()
    view = store.inspect("celery-singleton-lock probe")
    assert (view.holders, view.waiting) == ((), 0)
    assert view.counters["grants"] == 1
    store.probe()


def wants_a_look(client, store, name, seconds):
    """Note that a lock has wanted a look for so long."""
    since = int((store.time() - seconds) * 1000)
    client.zadd(Keyspace().due(bucket_of(name)), {name: since})


def test_locks_that_nobody_looks_after_are_found(store, redis_client):
    """Those that have waited for so long, and at most as many as were asked for."""
    for number in range(30):
        wants_a_look(redis_client, store, f"old:{number}", 5.0)
    wants_a_look(redis_client, store, "young", 1.0)
    old = {f"old:{number}" for number in range(30)}
    assert set(store.neglected(4.5, 100)) == old
    assert store.neglected(6.0) == []
    assert set(store.neglected(0.5, 100)) == {*old, "young"}
    assert len(store.neglected(4.5)) == 20
    assert set(store.neglected(4.5, 3)) < old
    assert len(store.neglected(4.5, 3)) == 3


@pytest.mark.parametrize("name", ["account:42", "two\nlines", "\n"])
def test_a_waiting_task_is_found_by_its_id(store, name):
    """Whatever its lock is called."""
    holder, who = Owner(new_token()), Owner(new_token(), "task-id/0/0")
    store.acquire(holder, Claim(name))
    store.park(who, Claim(name), Parcel(b"body", "R", "q"))
    assert store.find(["other", "task-id"]) == [(name, who.token)]
    assert store.find(["other"]) == []
    assert store.find([]) == []


@pytest.mark.needs_real_redis("INFO commandstats")
def test_many_questions_at_once_are_no_transaction(store, redis_client):
    """On a Cluster they could not be one: each bucket has its own slot."""
    redis_client.config_resetstat()
    store.find(["id"])
    store.neglected(1.0)
    store.park_many([(Owner(new_token(), "id/0/0"), Claim("a"), Parcel(b"b", "R", "q"))])
    assert "cmdstat_multi" not in redis_client.info("commandstats")


@pytest.mark.needs_real_redis("CLIENT LIST")
def test_to_reconnect_is_to_ask_anew_where_the_server_is(store, redis_client, redis_server):
    """All idle connections go, those for blocking calls too; the next call makes new ones."""

    def connections():
        with redis_server.client() as other:
            return {each["id"] for each in other.client_list()}

    store.wait("a", "nobody.0", 0.01)
    store.time()
    before = connections()
    store.reconnect()
    mine_and_the_blocking_one_and_who_looked = before - connections()
    assert len(mine_and_the_blocking_one_and_who_looked) == 3
    assert store.time() > 0
    assert store.wait("a", "nobody.0", 0.01) is False


def test_to_reconnect_cuts_off_nobody_who_is_being_answered(store, redis_client):
    """Another thread's wait goes on to its end, or until it is woken."""
    with ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(store.wait, "a", "t.0", 10.0)
        eventually(lambda: redis_client.info("clients")["blocked_clients"] == 1)
        store.reconnect()
        redis_client.rpush(Keyspace().wake("a", "t.0"), "1")
        assert waiting.result(5) is True
