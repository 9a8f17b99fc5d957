"""What the Redis store promises beyond the common contract: cost, refusals, loss of data."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import weakref

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.errors import BackendError, BackendRefused, BackendUnreachable
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.model import Claim, Ending, Owner, Parcel, Verdict, new_token
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually, in_time

pytestmark = pytest.mark.contract

NAME = "account:42"
REMEDY = "singleton_lock_prefix"


@pytest.fixture
def store(redis_client):
    store = RedisStore(redis_client, claim_lease=0.25)
    yield store
    store.close()


def owner(attempt=""):
    return Owner(new_token(), attempt, "app.task", "w", "host", 1)


def claim(lease=30.0, **more):
    return Claim(NAME, lease, **more)


def dump(client):
    """All keys but the worker's registry: how long they live does not matter here."""
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
        "park": lambda: store.park(message, claim(), Parcel(b"body", "R", "q", 30.0)),
        "claim": lambda: store.claim(holder, NAME, 60.0),
        "release": lambda: store.release(NAME, holder.token, Ending.FINAL, mark=True),
        "release again": lambda: store.release(NAME, holder.token, Ending.AGAIN),
        "cancel": lambda: store.release(NAME, waiter.token, Ending.CANCEL),
        "extend": lambda: store.extend([(NAME, holder.token, 60.0)]),
        "kick": lambda: store.kick(NAME, realm="R"),
        "reset": lambda: store.reset(NAME),
    }


# -- loss ------------------------------------------------------------------------------------------


def test_t24_scripts_that_the_server_forgot_are_sent_again(store, redis_client):
    who = owner()
    store.acquire(who, claim())
    redis_client.script_flush()
    assert store.extend([(NAME, who.token, 30.0)]) == [True]
    redis_client.script_flush()
    parcel = Parcel(b"body", "R", "q")
    replies = store.park_many([(owner(f"{n}/0/0"), claim(), parcel) for n in range(3)])
    assert [reply.verdict for reply in replies] == [Verdict.WAITING] * 3
    redis_client.script_flush()
    assert store.release(NAME, who.token, Ending.FINAL).verdict is Verdict.RELEASED


@pytest.mark.needs_real_redis("INFO commandstats")
def test_t24_a_batch_on_a_server_that_knows_no_script_sends_the_text_once(store, redis_client):
    redis_client.script_flush()
    redis_client.config_resetstat()
    askers = [owner(f"{n}/0/0") for n in range(20)]
    parcel = Parcel(b"body", "R", "q")
    replies = store.park_many([(who, claim(), parcel) for who in askers])
    assert [reply.verdict for reply in replies] == [Verdict.WAITING] * 20
    assert store.inspect(NAME).bodies == 20
    store.beat("w", "R", ["q"], 10.0)
    store.kick_many([NAME])
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
    store.beat("w", "R", ["q"], 3.0)
    holder, waiter = owner(), owner("id/0/0")
    store.acquire(holder, claim())
    store.acquire(waiter, claim(), wait=30.0)
    store.park(owner("other/0/0"), claim(), Parcel(b"body", "R", "q"))
    for token in (holder.token, waiter.token):
        store.release(NAME, token, Ending.FINAL)
    store.release(NAME, store.receive("w", 1.0).token, Ending.FINAL)
    for key in redis_client.scan_iter("*"):
        assert 0 < redis_client.pttl(key) <= 3_700_000, key


@pytest.mark.parametrize("lease", [30.0, 3600.0])
def test_l29_the_memory_of_a_lock_ends_soon_after_its_release(store, redis_client, lease):
    """It lives a minute longer than the lease would have; after a long lease, no more than that."""
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
def test_an_uncontended_pair_is_two_calls_of_few_commands(store, redis_client):
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
    "kick",
    "reset",
)


def staged(store):
    """A lock on which every verb has something to do."""
    holder, waiter = owner("h/0/0"), owner("w/0/0")
    store.acquire(holder, claim())
    store.acquire(waiter, claim(), wait=30.0)
    store.park(owner("m/0/0"), claim(), Parcel(b"body", "R", "q", 20.0))
    return holder, waiter


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("part", PARTS)
def test_a_key_of_another_type_is_an_error_and_nothing_is_written(store, redis_client, part, verb):
    """Lua has no roll-back: everything is checked before anything is written."""
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
    """Who is alone with a lock does without its bucket's keys; who queues is told."""
    key = getattr(Keyspace().lock(NAME), part)
    redis_client.lpush(key, "somebody else's")
    free = part in {"due", "index"}

    def acquires():
        return store.acquire(owner(), claim())

    def parks():
        return store.park(owner("p/0/0"), claim(), Parcel(b"body", "R", "q"))

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
    store.park(owner("m/0/0"), claim(), Parcel(b"body", "R", "q"))
    store.beat("w", "R", ["q"], 10.0)
    redis_client.set(keyspace.wake(NAME, waiter.token), "x")
    redis_client.set(keyspace.inbox("w"), "x")
    assert store.release(NAME, holder.token, Ending.FINAL).verdict is Verdict.RELEASED
    assert store.claim(waiter, NAME, 30.0).verdict is Verdict.GRANTED
    assert store.release(NAME, waiter.token, Ending.FINAL).verdict is Verdict.RELEASED
    redis_client.delete(f"{keyspace.fleet}:route:R:q")
    redis_client.set(f"{keyspace.fleet}:route:R:q", "x")
    time.sleep(0.3)
    store.kick(NAME)
    assert store.inspect(NAME).adrift == 1


def test_one_refused_lock_does_not_end_the_leases_of_others(store, redis_client):
    fine, other = owner(), owner()
    store.acquire(fine, claim())
    store.acquire(other, Claim("other"))
    redis_client.set(Keyspace().lock("other").done, "x")
    asked = [("other", other.token, 60.0), (NAME, fine.token, 60.0)]
    assert store.extend(asked) == [None, True]
    assert store.inspect(NAME).holders[0].expires_in > 50
    with pytest.raises(BackendRefused, match=REMEDY):
        store.extend(asked[:1])


def test_a_refused_lock_in_a_batch_is_its_own_error(store, redis_client):
    redis_client.set(Keyspace().lock(NAME).queue, "x")
    parcel = Parcel(b"body", "R", "q")
    refused, kept = store.park_many(
        [(owner("a/0/0"), claim(), parcel), (owner("b/0/0"), Claim("other"), parcel)]
    )
    assert isinstance(refused, BackendRefused)
    assert kept.verdict is Verdict.WAITING


@pytest.mark.needs_real_redis("maxmemory")
def test_t39_on_a_full_redis_leases_go_on_and_end_and_nothing_new_begins(make_redis):
    server = make_redis("--maxmemory-policy", "noeviction")
    with server.client(decode_responses=False) as client:
        store = RedisStore(client, claim_lease=5.0)
        store.beat("w", "R", ["q"], 60.0)
        holder, waiter, message = owner(), owner(), owner("m/0/0")
        store.acquire(holder, claim())
        store.acquire(waiter, claim(), wait=60.0)
        store.park(message, claim(), Parcel(b"body", "R", "q"))
        lapsing = owner()
        store.acquire(lapsing, Claim("lapsed", 0.05))
        time.sleep(0.1)  # the lease of who lapses
        client.config_set("maxmemory", "1")  # whatever is there is too much

        before = dump(client)
        refused = {
            "a free lock": lambda: store.acquire(owner(), Claim("free")),
            "a busy lock": lambda: store.acquire(owner(), claim(), wait=60.0),
            "a lapsed lock": lambda: store.acquire(owner(), Claim("lapsed")),
            "park": lambda: store.park(owner("n/0/0"), claim(), Parcel(b"b", "R", "q")),
            "park at a lapsed lock": lambda: store.park(
                owner("o/0/0"), Claim("lapsed"), Parcel(b"b", "R", "q")
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
        assert store.kick(NAME) == []
        assert store.reset(NAME) == 1
        store.close()


@pytest.mark.parametrize("end", [RedisStore.close, weakref.ref], ids=["closed", "dropped"])
def test_a_store_that_is_done_with_leaves_no_connection(make_redis, end):
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
        eventually(lambda: len(client.client_list()) == len(before))


@pytest.mark.needs_real_redis("maxmemory")
def test_t39_on_a_full_redis_who_died_is_swept_and_who_waits_goes_on(make_redis):
    """What is parked may be what fills it: if no sweeper could look, it would stay for ever."""
    server = make_redis("--maxmemory-policy", "noeviction")
    with server.client(decode_responses=False) as client:
        store = RedisStore(client, claim_lease=5.0)
        store.beat("w", "R", ["q"], 60.0)
        waits = owner("m/0/0")
        store.acquire(owner(), claim(0.05))
        store.park(waits, claim(), Parcel(b"body", "R", "q"))
        client.config_set("maxmemory", "1")
        time.sleep(0.1)  # the lease of who died
        assert store.neglected(0.0) == [NAME]
        assert store.take_due() == [NAME]
        store.kick(NAME, worker="w", realm="R")
        assert store.receive("w", 1.0).token == waits.token
        store.close()


@pytest.mark.needs_real_redis("ACL")
def test_a_user_who_may_not_run_scripts_is_told_what_to_allow(make_redis):
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
def test_a_user_who_may_do_just_what_the_error_advises_can_use_every_verb(make_redis):
    server = make_redis()
    advice = re.search(r"allow it: (.*?) on the keys", str(explain(redis.ResponseError("NOPERM"))))
    allowed = advice[1].split()
    assert allowed == ["+@read", "+@write", "+eval", "+evalsha", "+time"]
    with server.client(decode_responses=False) as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~csl:*", *allowed)
    with server.client(decode_responses=False, username="app", password="pw") as client:
        store, other = RedisStore(client), Claim("other")
        parcel = Parcel(b"body", "R", "q")
        store.beat("w", "R", ["q"], 10.0)
        holder, waiter = owner(), owner()
        assert store.acquire(holder, claim()).verdict is Verdict.GRANTED
        assert store.acquire(waiter, claim(), wait=30.0).verdict is Verdict.WAITING
        replies = store.park_many([(owner(f"{n}/0/0"), other, parcel) for n in range(3)])
        assert [reply.verdict for reply in replies] == [Verdict.WAITING] * 3
        assert store.park(owner("3/0/0"), other, parcel).verdict is Verdict.WAITING
        assert store.kick_many([NAME, "other"], realm="S") == []
        assert store.kick(NAME) == []
        assert store.extend([(NAME, holder.token, 30.0)]) == [True]
        assert store.release(NAME, holder.token, Ending.FINAL).verdict is Verdict.RELEASED
        assert store.wait(NAME, waiter.token, 1.0)
        assert store.claim(waiter, NAME, 30.0).verdict is Verdict.GRANTED
        assert store.body("other", store.receive("w", 1.0).token) == b"body"
        assert store.inspect("other").waiting == 3
        assert store.reset("other") == 1
        assert store.take_due() in ([], ["other"])
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


def test_an_unreachable_server_is_told_quickly_and_without_a_password():
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
        lambda: store.park_many([(owner(), claim(), Parcel(b"b", "R", "q"))]),
        lambda: store.body(NAME, "t.0"),
        store.time,
        lambda: store.receive("w", 5.0),
        lambda: store.wait(NAME, "t.0", 5.0),
    ]
    for call in calls:
        with pytest.raises(BackendUnreachable) as caught:
            call()
        assert "s3cret-word" not in f"{caught.value} {caught.value.__cause__}"
    in_time(time.monotonic() - began, 2)


def test_errors_are_ours():
    errors = {
        "WRONGTYPE Operation against a key": BackendRefused,
        "NOPERM this user has no permissions": BackendRefused,
        "user_script: no room for blooms": BackendRefused,
        "unknown command 'EVALSHA'": BackendRefused,
    }
    for sentence, kind in errors.items():
        assert isinstance(explain(redis.ResponseError(sentence)), kind)
    assert "maxmemory" not in str(explain(redis.ResponseError("no room for blooms")))
    assert isinstance(explain(redis.exceptions.BusyLoadingError("loading")), BackendUnreachable)
    assert isinstance(explain(redis.exceptions.AuthenticationError("x")), BackendRefused)
    assert isinstance(explain(ConnectionResetError("x")), BackendError)


def test_a_client_that_decodes_replies_serves_locks_too(redis_server, redis_url):
    with redis_server.client(decode_responses=True) as client:
        store = RedisStore(client)
        holder, waiter = owner(), owner()
        assert store.acquire(holder, claim()).verdict is Verdict.GRANTED
        assert store.acquire(waiter, claim(), wait=5.0).holder.token == holder.token
        assert store.release(NAME, holder.token, Ending.FINAL).verdict is Verdict.RELEASED
        assert store.wait(NAME, waiter.token, 1.0)
        assert store.inspect(NAME).holders[0].token == waiter.token
        store.close()


@pytest.mark.needs_real_redis("a server process to stop")
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
        in_time(time.monotonic() - began, 6)
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
    """A worker that is slow to leave would log a failure of ours, about a closed file."""
    run = [sys.executable, "-c", LEAVING, redis_url]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=30, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")
