"""Only for the Redis store: cost, refusals, loss of data."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.core.model import DONE_FOR, Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import (
    BackendError,
    BackendRefused,
    BackendUnreachable,
    LockUnusable,
)
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.redis.blocking import BlockingClients, blocking_client
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.requests import Pop
from support.passing_time import let_pass
from support.waiting import eventually, in_time

pytestmark = pytest.mark.contract

NAME = "account:42"
REMEDY = "singleton_lock_prefix"


@pytest.fixture
def store(redis_client):
    store = RedisStore(redis_client, claim_lease=20.0)
    yield store
    store.close()


@pytest.fixture
def own_store(make_redis):
    """A store on a server to which threads of earlier tests send no commands."""
    with make_redis().client(decode_responses=False) as client:
        store = RedisStore(client, claim_lease=20.0)
        yield store
        store.close()


def owner(attempt=""):
    return Owner(new_token(), attempt, "app.task", "w", "host", 1)


def claim(lease=30.0, **more):
    return Claim(NAME, lease, **more)


def dump(client):
    """All keys except those of the worker's heartbeat."""
    found = {}
    for key in client.scan_iter("*"):
        found[key] = client.dump(key)
    return found


def verbs(store, holder, waiter):
    """Every verb that touches a lock's keys, as calls that would change something."""
    message, copy = owner("new/0/0"), owner("new/0/0")
    return {
        "acquire": lambda: store.acquire(owner(), claim(), wait=30.0),
        "acquire a copy": lambda: store.acquire(copy, claim(copy=True)),
        "park": lambda: store.park(message, claim(), MessageToPark(b"body", "R", "q", 30.0)),
        "claim": lambda: store.claim(holder, NAME, 60.0),
        "release": lambda: store.release(NAME, holder.token, Ending.FINAL, mark=True),
        "release again": lambda: store.release(NAME, holder.token, Ending.AGAIN),
        "cancel": lambda: store.release(NAME, waiter.token, Ending.CANCEL),
        "extend": lambda: store.extend([(NAME, holder.token, 60.0)]),
        "sweep_and_grant": lambda: store.sweep_and_grant(NAME, realm="R"),
        "reset": lambda: store.reset(NAME),
    }


# -- loss ------------------------------------------------------------------------------------------


def test_t24_scripts_that_the_server_forgot_are_sent_again(store, redis_client):
    who = owner()
    store.acquire(who, claim())
    redis_client.script_flush()
    assert store.extend([(NAME, who.token, 30.0)]) == [True]
    redis_client.script_flush()
    to_park = MessageToPark(b"body", "R", "q")
    replies = store.park_many([(owner(f"{n}/0/0"), claim(), to_park) for n in range(3)])
    assert [reply.verdict for reply in replies] == [Verdict.WAITING] * 3
    redis_client.script_flush()
    assert store.release(NAME, who.token, Ending.FINAL).verdict is Verdict.RELEASED


@pytest.mark.needs_real_redis("INFO commandstats")
def test_t24_a_batch_on_a_server_that_knows_no_script_sends_the_text_once(own_store):
    store, redis_client = own_store, own_store.client
    redis_client.script_flush()
    redis_client.config_resetstat()
    askers = [owner(f"{n}/0/0") for n in range(20)]
    to_park = MessageToPark(b"body", "R", "q")
    replies = store.park_many([(who, claim(), to_park) for who in askers])
    assert [reply.verdict for reply in replies] == [Verdict.WAITING] * 20
    assert store.inspect(NAME).bodies == 20
    store.worker_heartbeat("w", "R", ["q"], 600.0)
    store.sweep_and_grant_many([NAME])
    assert store.receive("w", 1.0).token == askers[0].token  # in the order of the batch
    stats = redis_client.info("commandstats")
    assert stats["cmdstat_eval"]["calls"] == 4  # park, inspect, beat, kick
    assert "cmdstat_script|load" not in stats


def test_t24_l29_after_a_flushall_holders_own_nothing_and_fences_still_grow(store, redis_client):
    who = owner()
    fence = store.acquire(who, claim()).fencing_token
    redis_client.flushall()
    assert store.extend([(NAME, who.token, 30.0)]) == [False]
    assert store.claim(who, NAME, 30.0).verdict is Verdict.ABSENT
    assert store.release(NAME, who.token, Ending.FINAL).verdict is Verdict.ABSENT
    assert store.acquire(owner(), claim()).fencing_token > fence


def test_l29_an_idle_lock_leaves_only_what_expires(store, redis_client):
    store.worker_heartbeat("w", "R", ["q"], 60.0)
    holder, waiter = owner(), owner("id/0/0")
    store.acquire(holder, claim())
    store.acquire(waiter, claim(), wait=30.0)
    store.park(owner("other/0/0"), claim(), MessageToPark(b"body", "R", "q"))
    for token in (holder.token, waiter.token):
        store.release(NAME, token, Ending.FINAL)
    store.release(NAME, store.receive("w", 1.0).token, Ending.FINAL)
    for key in redis_client.scan_iter("*"):
        assert 0 < redis_client.pttl(key) <= (DONE_FOR + 100) * 1000, key


@pytest.mark.parametrize("lease", [30.0, 3600.0])
def test_l29_the_memory_of_a_lock_ends_soon_after_its_release(store, redis_client, lease):
    """It expires a minute after the end of the lease; after a long lease, in a minute."""
    who = owner()
    store.acquire(who, Claim(NAME, lease))
    store.release(NAME, who.token, Ending.FINAL)
    keys = list(redis_client.scan_iter("*"))
    assert len(keys) == 1
    assert 0 < redis_client.pttl(keys[0]) <= min(lease, 30.0) * 1000 + 60_000


def test_a_server_clock_that_steps_back_repeats_no_fence(redis_client):
    from celery_singleton_lock.store.scripts import load_scripts  # noqa: PLC0415

    clock = "local function server_time() return redis.call('GET', 'now') end"
    store = RedisStore(redis_client, scripts=load_scripts(clock))
    fences = []
    for now in (1_800_000_000_000_000, 1_799_999_990_000_000, 1_799_999_980_000_000):
        redis_client.set("now", now)
        who = owner()
        fences.append(store.acquire(who, claim()).fencing_token)
        store.release(NAME, who.token, Ending.FINAL)
    assert fences == sorted(set(fences))


# -- cost ------------------------------------------------------------------------------------------


@pytest.mark.needs_real_redis("INFO commandstats")
def test_a_worker_of_the_release_candidate_can_end_a_task_after_ours(store, redis_client):
    """It takes the last score for PEXPIRE, which refuses fractions.

    Its release failed in the middle, so the message stayed in Redis, and a copy of it could run.
    """
    for number, done_for in enumerate((3600.001, 3599.5, 0.3)):
        who = owner(f"id{number}/0/0")
        store.acquire(who, claim())
        store.release(NAME, who.token, Ending.FINAL, mark=True, done_for=done_for)
        ((_, last),) = redis_client.zrange(store.keyspace.lock(NAME).done, -1, -1, withscores=True)
        assert last == int(last)


def test_an_uncontended_pair_is_two_calls_of_few_commands(own_store):
    store, redis_client = own_store, own_store.client
    who = owner()
    store.acquire(who, claim())
    store.release(NAME, who.token, Ending.FINAL)
    redis_client.config_resetstat()
    store.acquire(who, claim())
    store.release(NAME, who.token, Ending.FINAL)
    stats = redis_client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 2
    assert sum(each["calls"] for each in stats.values()) <= 18


# -- refusals --------------------------------------------------------------------------------------

PARTS = (
    "holders",
    "queue",
    "record",
    "meta",
    "bodies",
    "deadlines",
    "adrift",
    "done",
    "due",
    "index",
)
VERBS = (
    "acquire",
    "acquire a copy",
    "park",
    "claim",
    "release",
    "release again",
    "cancel",
    "extend",
    "sweep_and_grant",
    "reset",
)


def staged(store):
    """A lock on which every verb has something to do."""
    holder, waiter = owner("h/0/0"), owner("w/0/0")
    store.acquire(holder, claim())
    store.acquire(waiter, claim(), wait=30.0)
    store.park(owner("m/0/0"), claim(), MessageToPark(b"body", "R", "q", 20.0))
    return holder, waiter


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("part", PARTS)
def test_a_key_of_another_type_is_an_error_and_nothing_is_written(store, redis_client, part, verb):
    """Lua has no rollback: everything is checked before the first write."""
    call = verbs(store, *staged(store))[verb]
    key = getattr(Keyspace().lock(NAME), part)
    redis_client.delete(key)
    redis_client.lpush(key, "somebody else's")
    before = dump(redis_client)
    with pytest.raises(BackendRefused, match=REMEDY):
        call()
    assert dump(redis_client) == before


@pytest.mark.parametrize("part", PARTS)
def test_a_key_of_another_type_at_an_idle_lock(store, redis_client, part):
    """Without waiters a lock does not use the keys of its bucket; a waiter gets an error."""
    key = getattr(Keyspace().lock(NAME), part)
    redis_client.lpush(key, "somebody else's")
    free = part in {"due", "index"}

    def acquires():
        return store.acquire(owner(), claim())

    def parks():
        return store.park(owner("p/0/0"), claim(), MessageToPark(b"body", "R", "q"))

    if free:
        assert acquires().verdict is Verdict.GRANTED
    for call in [parks] if free else [acquires, parks]:
        before = dump(redis_client)
        with pytest.raises(BackendRefused, match=REMEDY):
            call()
        assert dump(redis_client) == before


def test_foreign_keys_around_the_lock_cost_a_wake_up_and_no_grant(store, redis_client):
    """A wake list, an inbox or a route of another type leaves no change half done."""
    keyspace = Keyspace()
    holder, waiter = owner(), owner()
    store.acquire(holder, claim())
    store.acquire(waiter, claim(), wait=30.0)
    store.park(owner("m/0/0"), claim(), MessageToPark(b"body", "R", "q"))
    store.worker_heartbeat("w", "R", ["q"], 600.0)
    redis_client.set(keyspace.wake(NAME, waiter.token), "x")
    redis_client.set(keyspace.inbox("w"), "x")
    assert store.release(NAME, holder.token, Ending.FINAL).verdict is Verdict.RELEASED
    assert store.claim(waiter, NAME, 30.0).verdict is Verdict.GRANTED
    assert store.release(NAME, waiter.token, Ending.FINAL).verdict is Verdict.RELEASED
    redis_client.delete(f"{keyspace.fleet}:route:R:q")
    redis_client.set(f"{keyspace.fleet}:route:R:q", "x")
    let_pass(store, 25)  # the grant lapses
    store.sweep_and_grant(NAME)
    assert store.inspect(NAME).adrift == 1


def test_one_refused_lock_does_not_end_the_leases_of_others(store, redis_client):
    fine, other = owner(), owner()
    store.acquire(fine, claim())
    store.acquire(other, Claim("other"))
    redis_client.set(Keyspace().lock("other").queue, "x")
    asked = [("other", other.token, 60.0), (NAME, fine.token, 60.0)]
    assert store.extend(asked) == [None, True]
    assert store.inspect(NAME).holders[0].expires_in > 50
    with pytest.raises(BackendRefused, match=REMEDY):
        store.extend(asked[:1])


def test_a_limited_lock_lets_no_other_lock_of_a_renewal_forget_its_limit(store, redis_client):
    """Without its meta key a held lock is not listed, and its limit counts as 1."""
    limited, other = owner(), owner()
    store.acquire(limited, claim())
    store.acquire(other, Claim("other", 5.0, 3))
    redis_client.hset(Keyspace().lock(NAME).meta, "ruled", "1")
    store.extend([(NAME, limited.token, 600.0), ("other", other.token, 600.0)])
    assert redis_client.pttl(Keyspace().lock("other").meta) > 300_000


def test_a_refused_lock_in_a_batch_is_its_own_error(store, redis_client):
    redis_client.set(Keyspace().lock(NAME).queue, "x")
    to_park = MessageToPark(b"body", "R", "q")
    refused, kept = store.park_many(
        [(owner("a/0/0"), claim(), to_park), (owner("b/0/0"), Claim("other"), to_park)]
    )
    assert isinstance(refused, BackendRefused)
    assert kept.verdict is Verdict.WAITING


@pytest.mark.needs_real_redis("maxmemory")
def test_t39_on_a_full_redis_leases_go_on_and_end_and_nothing_new_begins(make_redis):
    server = make_redis("--maxmemory-policy", "noeviction")
    with server.client(decode_responses=False) as client:
        store = RedisStore(client, claim_lease=60.0)
        store.worker_heartbeat("w", "R", ["q"], 600.0)
        holder, waiter, message = owner(), owner(), owner("m/0/0")
        store.acquire(holder, claim())
        store.acquire(waiter, claim(), wait=60.0)
        store.park(message, claim(), MessageToPark(b"body", "R", "q"))
        lapsing = owner()
        store.acquire(lapsing, Claim("lapsed", 0.05))
        time.sleep(0.1)  # the lease of who lapses
        client.config_set("maxmemory", "1")  # whatever is there is too much

        before = dump(client)
        refused = {
            "a free lock": lambda: store.acquire(owner(), Claim("free")),
            "a busy lock": lambda: store.acquire(owner(), claim(), wait=60.0),
            "a lapsed lock": lambda: store.acquire(owner(), Claim("lapsed")),
            "park": lambda: store.park(owner("n/0/0"), claim(), MessageToPark(b"b", "R", "q")),
            "park at a lapsed lock": lambda: store.park(
                owner("o/0/0"), Claim("lapsed"), MessageToPark(b"b", "R", "q")
            ),
        }
        for what, call in refused.items():
            with pytest.raises(BackendRefused, match="maxmemory"):
                call()
            assert dump(client) == before, what

        assert store.extend([(NAME, holder.token, 60.0)]) == [True]
        assert store.claim(holder, NAME, 60.0).verdict is Verdict.GRANTED
        assert (
            store.release(NAME, holder.token, Ending.FINAL, mark=True).verdict is Verdict.RELEASED
        )
        assert store.wait(NAME, waiter.token, 1.0)
        assert store.claim(waiter, NAME, 60.0).verdict is Verdict.GRANTED
        assert store.release(NAME, waiter.token, Ending.FINAL).verdict is Verdict.RELEASED
        delivery = store.receive("w", 1.0)
        assert delivery.token == message.token
        assert store.claim(Owner(delivery.token), NAME, 60.0).verdict is Verdict.GRANTED
        assert store.release(NAME, delivery.token, Ending.AGAIN).verdict is Verdict.RELEASED
        assert store.sweep_and_grant(NAME) == []
        assert store.reset(NAME) == 1
        store.close()


@pytest.mark.parametrize("end", [RedisStore.close, weakref.ref], ids=["closed", "dropped"])
def test_a_closed_store_leaves_no_connection(make_redis, end):
    """Those for calls that block, and those past redis-py; the client of the caller stays open."""
    server = make_redis()
    with server.client() as client:
        before = client.client_list()
        store = RedisStore(client, direct=True)
        store.acquire(owner(), claim())
        store.wait(NAME, new_token(), 0.01)
        assert len(client.client_list()) > len(before)
        end(store)
        del store
        gc.collect()  # on Python 3.10 the error about an unknown script is part of a cycle
        eventually(lambda: len(client.client_list()) == len(before))


def test_a_store_that_is_hung_up_leaves_no_connection_of_its_client(make_redis):
    """With each supported redis-py, and at once: the client is still known here."""
    server = make_redis()
    with server.client() as client:
        before = len(client.client_list())
        store = RedisStore(connect(parse_backend_url(server.url), {}, patience=2))
        store.inspect(NAME)
        assert len(client.client_list()) == before + 1
        store.hang_up()
        eventually(lambda: len(client.client_list()) == before)


@pytest.mark.needs_real_redis("maxmemory")
def test_t39_on_a_full_redis_dead_holders_are_swept_and_waiters_are_granted(make_redis):
    """Parked messages may be what fills it: without sweeps they would stay for ever."""
    server = make_redis("--maxmemory-policy", "noeviction")
    with server.client(decode_responses=False) as client:
        store = RedisStore(client, claim_lease=60.0)
        store.worker_heartbeat("w", "R", ["q"], 600.0)
        waits = owner("m/0/0")
        store.acquire(owner(), claim(0.05))
        store.park(waits, claim(), MessageToPark(b"body", "R", "q"))
        client.config_set("maxmemory", "1")
        time.sleep(0.1)  # the lease of who died
        assert store.unswept_locks(0.0) == [NAME]
        assert store.take_due_locks() == [NAME]
        store.sweep_and_grant(NAME, worker="w", realm="R")
        assert store.receive("w", 1.0).token == waits.token
        store.close()


@pytest.mark.needs_real_redis("ACL")
def test_a_redis_user_without_script_permission_gets_the_permission_to_add(make_redis):
    server = make_redis()
    with server.client(decode_responses=False) as admin:
        admin.acl_setuser(
            "app",
            enabled=True,
            passwords=["+s3cret-word"],
            keys=["*"],
            categories=["+@all", "-@scripting"],
        )
        with server.client(
            decode_responses=False, username="app", password="s3cret-word"
        ) as client:
            with pytest.raises(BackendRefused, match=r"NOPERM.*\+evalsha") as caught:
                RedisStore(client).acquire(owner(), claim())
            assert "s3cret-word" not in str(caught.value)
        with server.client(decode_responses=False, username="app", password="wr0ng-word") as client:
            with pytest.raises(BackendRefused) as caught:
                RedisStore(client).acquire(owner(), claim())
            assert "wr0ng-word" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.needs_real_redis("ACL")
def test_the_permissions_that_the_error_advises_are_enough_for_every_call(make_redis):
    server = make_redis()
    advice = re.search(r"allow it: (.*?) on the keys", str(explain(redis.ResponseError("NOPERM"))))
    allowed = advice[1].split()
    assert allowed == ["+@read", "+@write", "+eval", "+evalsha", "+time"]
    with server.client(decode_responses=False) as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~csl:*", *allowed)
    with server.client(decode_responses=False, username="app", password="pw") as client:
        store, other = RedisStore(client), Claim("other")
        to_park = MessageToPark(b"body", "R", "q")
        store.worker_heartbeat("w", "R", ["q"], 600.0)
        holder, waiter = owner(), owner()
        assert store.acquire(holder, claim()).verdict is Verdict.GRANTED
        assert store.acquire(waiter, claim(), wait=30.0).verdict is Verdict.WAITING
        replies = store.park_many([(owner(f"{n}/0/0"), other, to_park) for n in range(3)])
        assert [reply.verdict for reply in replies] == [Verdict.WAITING] * 3
        assert store.park(owner("3/0/0"), other, to_park).verdict is Verdict.WAITING
        assert store.sweep_and_grant_many([NAME, "other"], realm="S") == []
        assert store.sweep_and_grant(NAME) == []
        assert store.extend([(NAME, holder.token, 30.0)]) == [True]
        assert store.release(NAME, holder.token, Ending.FINAL).verdict is Verdict.RELEASED
        assert store.wait(NAME, waiter.token, 1.0)
        assert store.claim(waiter, NAME, 30.0).verdict is Verdict.GRANTED
        assert store.body("other", store.receive("w", 1.0).token) == b"body"
        assert store.inspect("other").waiting == 3
        assert store.reset("other") == 1
        assert store.take_due_locks() in ([], ["other"])
        assert store.time() > 0
        assert store.schema()
        store.probe()
        store.leave("w", "R", ["q"])
        assert store.describe()["version"] == "unknown"  # that wants more, and is not needed
        store.close()


@pytest.mark.needs_real_redis("ACL")
def test_a_user_without_the_lock_keys_is_refused_and_nothing_is_written(make_redis):
    server = make_redis()
    with server.client(decode_responses=False) as admin:
        admin.acl_setuser(
            "app", enabled=True, passwords=["+pw"], keys=["mine:*"], categories=["+@all"]
        )
        with server.client(decode_responses=False, username="app", password="pw") as client:
            with pytest.raises(BackendRefused, match="NOPERM"):
                RedisStore(client).acquire(owner(), claim())
            assert dump(admin) == {}
            mine = RedisStore(client, Keyspace("mine"))
            assert mine.acquire(owner(), claim()).verdict is Verdict.GRANTED


def test_an_unreachable_server_is_reported_quickly_and_without_a_password():
    client = redis.Redis.from_url(
        "redis://user:s3cret-word@127.0.0.1:1/0",
        socket_connect_timeout=0.5,
        retry=Retry(NoBackoff(), 0),
    )
    store = RedisStore(client)
    began = time.monotonic()
    calls = [
        lambda: store.acquire(owner(), claim()),
        lambda: store.extend([(NAME, "t.0", 5.0)]),
        lambda: store.park_many([(owner(), claim(), MessageToPark(b"b", "R", "q"))]),
        lambda: store.body(NAME, "t.0"),
        store.time,
        lambda: store.receive("w", 60.0),
        lambda: store.wait(NAME, "t.0", 60.0),
    ]
    for call in calls:
        with pytest.raises(BackendUnreachable) as caught:
            call()
        assert "s3cret-word" not in f"{caught.value} {caught.value.__cause__}"
    in_time(time.monotonic() - began, 25)


def test_errors_of_redis_py_become_errors_of_this_package():
    errors = {
        "WRONGTYPE Operation against a key": LockUnusable,
        "ERR user_script:9: attempt to compare nil script: ab, on @user_script:9.": LockUnusable,
        "ERR Error running script (call to f_a): @user_script:9: user_script:9: Expected value": (
            LockUnusable
        ),
        "MISCONF Redis is configured to save script: ab, on @user_script:9.": BackendUnreachable,
        "NOPERM this user has no permissions": BackendRefused,
        "user_script: no room for blooms": BackendRefused,
        "unknown command 'EVALSHA'": BackendRefused,
    }
    for sentence, kind in errors.items():
        assert type(explain(redis.ResponseError(sentence))) is kind
    assert "maxmemory" not in str(explain(redis.ResponseError("no room for blooms")))
    assert isinstance(explain(redis.exceptions.BusyLoadingError("loading")), BackendUnreachable)
    assert isinstance(explain(redis.exceptions.AuthenticationError("x")), BackendRefused)
    assert isinstance(explain(ConnectionResetError("x")), BackendError)


def test_a_client_that_decodes_replies_serves_locks_too(redis_server, redis_url):
    with redis_server.client(decode_responses=True) as client:
        store = RedisStore(client)
        holder, waiter = owner(), owner()
        assert store.acquire(holder, claim()).verdict is Verdict.GRANTED
        assert store.acquire(waiter, claim(), wait=60.0).holder.token == holder.token
        assert store.release(NAME, holder.token, Ending.FINAL).verdict is Verdict.RELEASED
        assert store.wait(NAME, waiter.token, 1.0)
        assert store.inspect(NAME).holders[0].token == waiter.token
        store.close()


@pytest.mark.needs_real_redis("a server process to stop")
def test_waiters_outnumber_the_connections_of_a_pool_by_default(redis_client):
    """It has 100 with redis-py 8. Who found none to wait on asked again and again."""
    clients = BlockingClients(partial(blocking_client, redis_client))
    waiters = 110
    with closing(clients), ThreadPoolExecutor(waiters) as threads:
        waits = threads.map(clients.pop, [Pop("csl:nothing", 1.0)] * waiters)
        assert list(waits) == [None] * waiters


def test_a_wait_on_a_stalled_server_ends_soon_after_its_time(make_redis):
    """The socket time-out follows the block: no waiter is held far past its deadline."""
    server = make_redis()
    store = RedisStore(server.client())
    assert store.wait(NAME, "nobody.0", 0.01) is False
    server.pause()
    try:
        began = time.monotonic()
        with pytest.raises(BackendUnreachable):
            store.wait(NAME, "nobody.0", 1.0)
        in_time(time.monotonic() - began, 30)  # a minute with redis-py's retries
    finally:
        server.resume()
        store.close()


LEAVING = """
import atexit, sys, threading

failed = threading.Event()
atexit.register(failed.wait, 1.0)  # the first one to be registered is the last one to be called

import redis
from celery_singleton_lock.store.redis.sync import RedisStore

store = RedisStore(redis.Redis.from_url(sys.argv[1]))

def receive():
    try:
        store.receive("w", 30.0)
    except BaseException as error:
        print(repr(error))
        failed.set()

threading.Thread(target=receive, daemon=True).start()
while not any(each["cmd"] == "blpop" for each in store.client.client_list()):
    pass
"""


def test_the_end_of_a_process_takes_no_connection_from_its_threads(redis_url):
    """Otherwise a worker that stops slowly would log an error about a closed file."""
    run = [sys.executable, "-c", LEAVING, redis_url]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=150, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_bucket_that_another_program_uses_keeps_no_other_from_being_swept(redis_url):
    """Its own locks are refused; all others are swept."""
    with closing(redis.Redis.from_url(redis_url)) as client:
        store = RedisStore(client)
        buckets = sorted({store.keyspace.lock(f"lock{n}").due for n in range(200)})
        client.set(buckets[0], "of another program")
        for bucket in buckets[1:]:
            client.zadd(bucket, {f"of {bucket}": 1})
        assert len(store.take_due_locks(100)) == len(buckets) - 1
        store.close()


def test_many_grants_do_not_each_need_a_round_trip(own_store):
    """If they come faster than they are read, all are void by then, and none of them ever runs."""
    client, inbox = own_store.client, own_store.keyspace.inbox("w")
    head = '{"lock":"k","token":"%d","fence":"1","verdict":"granted","whole":"1","waited":"0"}'
    client.rpush(inbox, *(f"{head % number}\nbody" for number in range(300)))
    tokens = [own_store.receive("w", 60.0).token for _ in range(300)]
    assert tokens == [str(number) for number in range(300)]
    stats = client.info("commandstats")
    asked = sum(stats.get(f"cmdstat_{word}", {"calls": 0})["calls"] for word in ("blpop", "lpop"))
    assert asked < 10
    assert own_store.receive("w", 0.01) is None
