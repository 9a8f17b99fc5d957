"""Facts about the server, and the search for waiters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.core.model import SCHEMA, Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.redis_keys import Keyspace, bucket_of
from celery_singleton_lock.errors import BackendUnreachable
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
    """Without permission the result is "unknown", not OK."""
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
    """Return the error text."""
    options = {**admin.connection_pool.connection_kwargs, "username": name, "password": "pw"}
    with redis.Redis(connection_pool=redis.ConnectionPool(**options)) as client:
        return RedisStore(client).describe()


def test_missing_facts_of_a_redis_fork_are_reported_as_unknown(store):
    """Not every server of this protocol has the fields of Redis' INFO."""

    class Silent:
        def execute_command(self, command):
            return {"server_name": "other"}

    store.client = Silent()
    facts = store.describe()
    assert facts == dict.fromkeys(("version", "eviction", "persistence", "replicas"), "unknown")


def test_no_answer_is_one_error_whatever_was_asked():
    """Also at a worker's start, which continues without Redis, but not after other errors."""
    client = redis.Redis(port=1, socket_connect_timeout=0.5, retry=Retry(NoBackoff(), 0))
    store = RedisStore(client)
    for ask in (
        store.describe,
        store.schema,
        store.time,
        store.probe,
        lambda: store.locate_tasks(["id"]),
        lambda: store.body("a", "t.0"),
        lambda: store.unswept_locks(1.0),
    ):
        with pytest.raises(BackendUnreachable):
            ask()


def test_the_first_worker_sets_the_schema_of_the_data(store, redis_client):
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
    """It acquires and releases its own lock."""
    store.probe()
    view = store.inspect("celery-singleton-lock probe")
    assert (view.holders, view.waiting) == ((), 0)
    assert view.counters["grants"] == 1
    store.probe()


def wants_a_look(client, store, name, seconds):
    """Make the sweep of a lock overdue by some seconds."""
    since = int((store.time() - seconds) * 1000)
    client.zadd(Keyspace().due(bucket_of(name)), {name: since})


def test_unswept_locks_are_found(store, redis_client):
    """Those that have waited for so long, and at most as many as were asked for."""
    for number in range(30):
        wants_a_look(redis_client, store, f"old:{number}", 500.0)
    wants_a_look(redis_client, store, "young", 100.0)
    old = {f"old:{number}" for number in range(30)}
    assert set(store.unswept_locks(400.0, 100)) == old
    assert store.unswept_locks(1000.0) == []
    assert set(store.unswept_locks(50.0, 100)) == {*old, "young"}
    assert len(store.unswept_locks(400.0)) == 20
    assert set(store.unswept_locks(400.0, 3)) < old
    assert len(store.unswept_locks(400.0, 3)) == 3


@pytest.mark.parametrize("name", ["account:42", "two\nlines", "\n"])
def test_a_waiting_task_is_found_by_its_id(store, name):
    """Whatever its lock is called."""
    holder, who = Owner(new_token()), Owner(new_token(), "task-id/0/0")
    store.acquire(holder, Claim(name))
    store.park(who, Claim(name), MessageToPark(b"body", "R", "q"))
    assert store.locate_tasks(["other", "task-id"]) == [(name, who.token)]
    assert store.locate_tasks(["other"]) == []
    assert store.locate_tasks([]) == []


@pytest.mark.needs_real_redis("INFO commandstats")
def test_many_questions_at_once_are_no_transaction(make_redis):
    """On a Cluster they could not be one: each bucket has its own slot."""
    with (
        make_redis().client(decode_responses=False) as client,
        closing(RedisStore(client)) as store,
    ):
        store.locate_tasks(["id"])
        store.unswept_locks(1.0)
        store.park_many([(Owner(new_token(), "id/0/0"), Claim("a"), MessageToPark(b"b", "R", "q"))])
        assert "cmdstat_multi" not in client.info("commandstats")


@pytest.mark.needs_real_redis("CLIENT LIST")
def test_a_reconnect_resolves_the_address_again(store, redis_client, redis_server):
    """All idle connections go, those for blocking calls too; the next call makes new ones."""

    def connections():
        with redis_server.client() as other:
            return {each["id"] for each in other.client_list()}

    store.wait("a", "nobody.0", 0.01)
    store.time()
    before = connections()
    store.reconnect()
    mine_and_the_blocking_one_and_who_looked = before - connections()
    assert len(mine_and_the_blocking_one_and_who_looked) >= 3
    assert store.time() > 0
    assert store.wait("a", "nobody.0", 0.01) is False


def test_a_reconnect_interrupts_no_running_call(store, redis_client):
    """Another thread's wait is not interrupted."""
    with ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(store.wait, "a", "t.0", 30.0)
        eventually(lambda: redis_client.info("clients")["blocked_clients"] == 1)
        store.reconnect()
        redis_client.rpush(Keyspace().wake("a", "t.0"), "1")
        assert waiting.result(60) is True


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.needs_real_redis("INFO commandstats")
def test_a_refusal_beside_many_holders_reads_none_that_was_read_before(store, redis_client, copy):
    """The first search reads them; later ones read only holders that came since."""

    def commands_of_a_refusal():
        redis_client.config_resetstat()
        refused = Owner(new_token(), "refused/0/0", "app.task")
        store.acquire(refused, Claim("lock", 60.0, limit=200, copy=copy))
        return sum(found["calls"] for found in redis_client.info("commandstats").values())

    for number in range(200):
        holder = Owner(new_token(), f"{number}/0/0", "app.task")
        store.acquire(holder, Claim("lock", 60.0, limit=200))
    commands_of_a_refusal()
    with_one_holder = 50
    assert commands_of_a_refusal() <= with_one_holder
    assert redis_client.pttl(Keyspace().attempts("lock")) > 0


def test_former_holders_do_not_fill_the_cache_of_attempts(store, redis_client):
    holders = [Owner(new_token(), f"first{number}/0/0", "app.task") for number in range(20)]
    for holder in holders:
        store.acquire(holder, Claim("lock", 60.0, limit=20))
    for number in range(300):
        store.release("lock", holders[number % 20].token, Ending.FINAL)
        holder = holders[number % 20] = Owner(new_token(), f"{number}/0/0", "app.task")
        store.acquire(holder, Claim("lock", 60.0, limit=20, copy=1))
    assert redis_client.zcard(Keyspace().attempts("lock")) <= 150


def test_a_key_of_another_program_in_place_of_the_cache_of_attempts_does_no_harm(
    store, redis_client
):
    redis_client.set(Keyspace().attempts("lock"), "not ours")
    for number in range(20):
        holder = Owner(new_token(), f"{number}/0/0", "app.task")
        store.acquire(holder, Claim("lock", 60.0, limit=20))
    copy = Owner(new_token(), "7/0/0", "app.task")
    assert store.acquire(copy, Claim("lock", 60.0, limit=20, copy=1)).verdict is Verdict.TWIN


def test_a_parked_task_is_found_by_its_id_whichever_version_has_parked_it(store, redis_client):
    """Older versions write an entry with the task id for a first attempt, too."""
    index = Keyspace().index(bucket_of("lock"))
    store.acquire(Owner(new_token(), "runs/0/0"), Claim("lock", 60.0))
    first, retry, older = (
        Owner(new_token(), attempt, "app.task") for attempt in ("a/0/0", "b/1/0", "c/0/0")
    )
    for who in (first, retry, older):
        store.park(who, Claim("lock"), MessageToPark(b"body", "R", "q"))
    redis_client.hset(index, "@c", f"lock\n{older.token}")
    found = {("lock", who.token) for who in (first, retry, older)}
    assert set(store.locate_tasks(["a", "b", "c"])) == found
    assert len(store.locate_tasks(["c"])) == 1
    for who in (first, retry, older):
        store.release("lock", who.token, Ending.CANCEL)
    assert redis_client.hgetall(index) == {}
