"""@locked, get_or_set and reset_all, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import redis
import redis.asyncio

from celery_singleton_lock import (
    AsyncLock,
    BackendRefused,
    BackendUnreachable,
    ConfigurationError,
    Lock,
    LockConflict,
    LockNameError,
    LockNotOwned,
    LockReentered,
    LockTimeout,
    async_get_or_set,
    async_reset_all,
    get_or_set,
    locked,
    new_token,
    reset_all,
)
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.core import loop_tasks
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.lock.backends import _watchdogs
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def _no_watchdog_stays():
    yield
    for dog in list(_watchdogs.values()):
        if hasattr(dog, "stop"):
            dog.stop()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def store(redis_client):
    store = RedisStore(redis_client)
    yield store
    store.close()


def held(store, name):
    return len(store.inspect(name).holders)


def play(redis_url, scene):
    """Play a scene in a loop: a coroutine function that takes a client for asyncio."""

    async def run():
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            return await asyncio.wait_for(scene(client), 120)

    return asyncio.run(run())


# --- @locked: the name ----------------------------------------------------------------------------


def test_a_function_runs_under_the_lock_that_its_arguments_name(redis_client, store):
    """Positional, keyword or default: one lock; the function keeps its attributes."""

    @locked("report:{report_id}:{kind}", redis_client)
    def build(report_id: int, kind: str = "pdf") -> str:
        """Build it."""
        return f"{held(store, 'report:7:pdf')} {report_id} {kind}"

    assert build(7) == build(report_id=7) == build(7, "pdf") == "1 7 pdf"
    assert build(8) == "0 8 pdf"
    assert (build.__name__, build.__doc__) == ("build", "Build it.")
    assert held(store, "report:7:pdf") == 0


class Report:
    def __init__(self, backend, store):
        self.backend, self.store, self.pk = backend, store, 3

    def make(backend, store):  # noqa: N805
        @locked("report:{page}", backend)
        def plain(self, page):
            return held(store, f"report:{page}")

        @locked(lambda self, page: f"own:{self.pk}:{page}", backend)
        def by_self(self, page):
            return held(store, f"own:3:{page}")

        @classmethod
        @locked("class:{page}", backend)
        def of_class(cls, page):
            return held(store, f"class:{page}")

        @staticmethod
        @locked("static:{page}", backend)
        def static(page):
            return held(store, f"static:{page}")

        names = {
            "plain": plain,
            "by_self": by_self,
            "of_class": of_class,
            "static": static,
        }
        return type("Made", (Report,), names)(backend, store)


@pytest.mark.parametrize("kind", ["plain", "by_self", "of_class", "static"])
def test_methods_run_under_their_locks(redis_client, store, kind):
    """Self and cls are not used for the name, but a callable gets them."""
    assert getattr(Report.make(redis_client, store), kind)(page=5) == 1


def test_without_a_key_each_set_of_arguments_is_a_lock(redis_client, store):
    @locked(None, redis_client)
    def build(report_id):
        return [each.decode() for each in redis_client.scan_iter("*:meta")]

    first, second = build(1), build(2)
    assert "test_without_a_key" in first[0] or "sha256" in first[0]
    assert set(second) - set(first)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("report:{reprot_id}", "Did you mean 'report_id'"),
        ("{report_id}", "no literal text"),
        ("report:{report_id.x}", r"with \[ \]\. For an attribute use a callable key"),
        ("report:{report_id", "brace"),
        (7, "an int is neither a template nor a callable"),
        (["report"], "a list is neither a template nor a callable; a key names one lock"),
        (lambda: "x", "cannot take the function's arguments"),
    ],
)
def test_a_key_that_fits_no_argument_is_refused_when_decorating(key, says):
    """The error speaks of the function and its key: a task has other options."""
    with pytest.raises(ConfigurationError, match=says) as caught:

        @locked(key, redis.Redis())
        def build(report_id):
            pytest.fail("never called")

    assert re.match(rf"function {__name__}\.\S+build: the key is ", str(caught.value))
    assert "task" not in str(caught.value)


def test_a_wrong_key_of_the_decorator_gives_a_one_line_error(redis_client):
    """The client and the key swapped; nothing but the function."""
    with pytest.raises(ConfigurationError) as swapped:
        locked(redis_client, "report:{report_id}")
    assert str(swapped.value) == (
        "@locked has a redis.Redis as its key and a str as its backend: they are swapped. Write "
        "@locked(key, client)."
    )

    with pytest.raises(ConfigurationError, match=r'build without .*@locked\("build", client\)'):

        @locked
        def build(report_id):
            pytest.fail("never called")

    for key in ("report", None, redis_client):
        with pytest.raises(ConfigurationError, match=r"no backend\. Write @locked\(key, client\)"):
            locked(key)


def test_a_long_lease_of_a_decorated_function_is_warned_of(redis_client):
    @locked("report:{report_id}", redis_client, lease=3_000)
    def build(report_id):
        return report_id

    with pytest.warns(ConfigurationWarning, match="lease is 3000 s") as caught:
        assert build(1) == 1
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("report:{report_id}", None, "or use a callable key that says what None means"),
        ("report:{report_id}", object(), "an object has no text .* leave it out of the key"),
        (None, object(), "leave it out with a key that names the others"),
        (lambda report_id: 5, 1, "the callable key returned an int"),
    ],
)
def test_an_argument_without_a_valid_name_gives_an_error_about_the_function(key, value, says):
    """With what its key can do."""

    @locked(key, redis.Redis())
    def build(report_id):
        pytest.fail("never called")

    with pytest.raises(LockNameError, match=says) as caught:
        build(value)
    assert str(caught.value).startswith(f"function {__name__}.")
    assert "lock_" not in str(caught.value).replace(__name__, "")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_conflict": "park"}, "Only a task can be parked"),
        ({"on_conflict": "later"}, "wait, skip, fail"),
        ({"on_conflict": "skip", "wait_timeout": 1.0}, "does not wait"),
        ({"wait_timeout": 0}, "wait_timeout must be"),
    ],
)
def test_invalid_options_are_refused_when_decorating(options, says):
    with pytest.raises(ConfigurationError, match=says):
        locked("report", redis.Redis(), **options)


async def numbers():
    yield 1


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (staticmethod(print), "above @staticmethod"),
        (classmethod(print), "above @classmethod"),
        (numbers, "generator"),
        (7, "decorates functions"),
    ],
)
def test_only_functions_can_be_decorated(thing, says):
    with pytest.raises(ConfigurationError, match=says):
        locked("report", redis.Redis())(thing)


def plainly_wrapped(function):
    """What many decorators do, for timing or logging: a plain function that calls."""

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


async def coroutine():
    """A body that runs when it is awaited."""


def generator():
    """A body that runs when it is read."""
    yield


async def async_generator():
    yield


@pytest.mark.parametrize("function", [coroutine, generator, async_generator])
def test_a_body_that_runs_after_the_call_is_refused_behind_another_decorator_too(
    redis_client, function
):
    """Formerly three bodies ran at once.

    Each call returned, and released its lock, before its body ran.
    """
    for wrapped in (plainly_wrapped(function), contextmanager(function)):
        with pytest.raises(ConfigurationError, match="Put @locked below that decorator"):
            locked("a", redis_client)(wrapped)


def test_a_body_below_another_decorator_runs_under_its_lock(redis_url):
    """It is at the place that the error names."""

    async def play():
        async with redis.asyncio.Redis.from_url(redis_url) as client:

            @plainly_wrapped
            @locked("a", client)
            async def body():
                return await AsyncLock(client, "a").owner() is not None

            return await body()

    assert asyncio.run(play())


def test_a_function_that_returns_a_coroutine_or_generator_is_refused(redis_client, redis_url):
    """It would run without the lock, and no check of the function could have seen it."""

    def later():
        return coroutine()

    def read():
        return (number for number in range(3))

    for function, kind in ((later, "coroutine"), (read, "generator")):
        with pytest.raises(ConfigurationError, match=f"returned a {kind}, whose work would run"):
            locked("a", redis_client)(function)()

    async def play():
        async with redis.asyncio.Redis.from_url(redis_url) as client:

            @locked("a", client)
            async def starts_a_task():
                return asyncio.ensure_future(asyncio.sleep(0))

            with pytest.raises(ConfigurationError, match="returned a Task, whose work would run"):
                await starts_a_task()

    asyncio.run(play())


def test_a_call_with_wrong_arguments_raises_the_usual_type_error(redis_client):
    @locked("report:{report_id}", redis_client)
    def build(report_id):
        pytest.fail("never called")

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        build()
    with pytest.raises(LockNameError, match="is None"):
        build(None)


def test_a_backend_may_be_made_at_the_first_call(redis_client):
    """And once."""
    made = []

    @locked("report", lambda: made.append(1) or redis_client)
    def build():
        return len(made)

    assert build() == build() == 1


# --- @locked: conflicts ---------------------------------------------------------------------------


def test_waiting_calls_run_in_order(redis_client, pool):
    """Read, pause, write, without a lost update."""
    counter = [0]

    @locked("counter", redis_client)
    def add():
        seen = counter[0]
        threading.Event().wait(0.001)
        counter[0] = seen + 1

    for done in [pool.submit(add) for _ in range(20)]:
        done.result()
    assert counter == [20]


def test_a_wait_timeout_names_the_holder_and_the_rest_of_its_lease(redis_client):
    @locked("report", redis_client, wait_timeout=0.05)
    def build():
        pytest.fail("runs beside the holder")

    with Lock(redis_client, "report", lease=20), pytest.raises(LockTimeout) as caught:
        build()
    assert caught.value.holder.startswith(f"pid {os.getpid()} on ")
    assert 5 < caught.value.expires_in <= 20


def test_skip_returns_none_and_fail_names_the_holder(redis_client):
    @locked("report", redis_client, on_conflict="skip")
    def skipped():
        return "ran"

    @locked("report", redis_client, on_conflict="fail")
    def failed():
        return "ran"

    assert skipped() == failed() == "ran"
    with Lock(redis_client, "report", lease=20):
        assert skipped() is None
        with pytest.raises(LockConflict) as caught:
            failed()
    assert caught.value.holder.startswith(f"pid {os.getpid()} on ")
    assert 5 < caught.value.expires_in <= 20
    assert str(caught.value).startswith("Lock 'report' is busy. It is held by pid ")


def test_a_time_out_inside_of_the_function_is_its_own(redis_client):
    """It is not taken for a conflict of the function's own lock."""

    @locked("outer", redis_client, on_conflict="skip")
    def build():
        raise LockTimeout("of another", "inner")

    with pytest.raises(LockTimeout, match="of another"):
        build()


def test_a_function_that_calls_itself_gets_an_error(redis_client, store):
    """Instead of waiting for itself; under another name it may."""

    @locked("report:{report_id}", redis_client)
    def build(report_id, then):
        return build(then, None) if then is not None else "done"

    with pytest.raises(LockReentered, match="called itself"):
        build(1, 1)
    assert build(1, 2) == "done"
    assert held(store, "report:1") == 0


def test_a_function_longer_than_its_lease_gets_an_error_at_its_end(redis_client, store, caplog):
    """Its result may come from overlapping work; the option accepts that."""

    def outlive():
        ends = time.monotonic() + 0.1  # Redis may end the lease up to 1 ms before it ends here
        eventually(lambda: time.monotonic() > ends and not store.inspect("a").holders)
        return "result"

    options = {"lease": 0.1, "renew": False}
    with pytest.raises(LockNotOwned):
        locked("a", redis_client, **options)(outlive)()
    loose = locked("a", redis_client, **options, raise_on_release_error=False)(outlive)
    assert loose() == "result"
    assert "'a' was lost before the end of its block" in caplog.text


@pytest.mark.usefixtures("renew_often")
def test_options_go_to_the_lock(redis_client, store):
    lost = threading.Event()

    @locked("report", redis_client, limit=2, lease=20, on_lost=lambda *_: lost.set(), prefix="mine")
    def build():
        (holder,) = (
            RedisStore(redis_client, store.keyspace.__class__("mine")).inspect("report").holders
        )
        assert holder.expires_in <= 20
        Lock(redis_client, "report", prefix="mine").reset()
        assert lost.wait(60)

    with pytest.raises(Exception, match="does not hold it"):
        build()


# --- @locked: coroutines --------------------------------------------------------------------------


def test_coroutines_take_turns_skip_and_fail(redis_url):
    async def scene(client):
        counter = [0]

        @locked("counter:{n}", client)
        async def add(n):
            seen = counter[0]
            await asyncio.sleep(0)
            counter[0] = seen + 1

        @locked("counter:{n}", client, on_conflict="skip")
        async def skipped(n):
            return "ran"

        @locked("counter:{n}", client, on_conflict="fail")
        async def failed(n):
            return "ran"

        @locked("counter:{n}", client, wait_timeout=0.05)
        async def outer(n):
            with pytest.raises(LockReentered):
                await outer(n)
            with pytest.raises(LockTimeout):
                await asyncio.create_task(outer(n))
            with pytest.raises(LockConflict):
                await failed(n)
            return await skipped(n), await skipped(n + 1)

        await asyncio.gather(*(add(1) for _ in range(10)))
        assert counter == [10]
        assert await outer(1) == (None, "ran")
        with pytest.raises(TypeError):
            await outer()

    play(redis_url, scene)


def test_a_cancelled_coroutine_gives_its_lock_back(redis_url, store):
    async def scene(client):
        begun = asyncio.Event()

        @locked("report", client)
        async def build():
            begun.set()
            await asyncio.sleep(10)

        task = asyncio.create_task(build())
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        while loop_tasks.tasks:  # the release, if Redis is slow
            await asyncio.wait(loop_tasks.tasks)

    play(redis_url, scene)
    assert held(store, "report") == 0


# --- get_or_set -----------------------------------------------------------------------------------


def test_one_computes_and_the_rest_wait_and_read(redis_client, pool):
    """However many ask at once."""
    computed = []

    def compute():
        computed.append(1)
        threading.Event().wait(0.1)
        return {"title": "forty-two"}

    def ask():
        return get_or_set(redis_client, "page:42", compute, expire=60)

    assert [done.result() for done in [pool.submit(ask) for _ in range(8)]] == [
        {"title": "forty-two"}
    ] * 8
    assert computed == [1]
    assert 0 < redis_client.pttl("page:42") <= 60_000


def test_one_computes_and_the_tasks_wait_and_read(redis_url):
    async def scene(client):
        computed = []

        async def compute():
            computed.append(1)
            await asyncio.sleep(0.05)
            return [None]

        ask = functools.partial(async_get_or_set, client, "page:42", compute, expire=60)
        assert await asyncio.gather(*(ask() for _ in range(8))) == [[None]] * 8
        assert await ask() == [None]
        assert computed == [1]

    play(redis_url, scene)


def test_a_failed_computation_is_the_failure_of_one_and_the_next_computes(redis_client, pool):
    turns = iter([ZeroDivisionError, None])

    def compute():
        threading.Event().wait(0.05)
        if next(turns):
            raise ZeroDivisionError
        return 1

    asked = [pool.submit(get_or_set, redis_client, "v", compute, expire=60) for _ in range(3)]
    ended = [done.exception() or done.result() for done in asked]
    assert sorted(type(each).__name__ for each in ended) == ["ZeroDivisionError", "int", "int"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("renew_often", "no_heartbeat")
def test_a_killed_computation_blocks_others_only_until_its_lease_expires(
    redis_server, redis_client, store
):
    """SIGKILL during the computation: a waiter computes after the end of the lease."""
    child = os.fork()
    if child == 0:
        with redis_server.client() as own:
            get_or_set(own, "v", threading.Event().wait, expire=60, lease=3)
    eventually(lambda: held(store, "get_or_set:v"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    began = time.monotonic()
    assert get_or_set(redis_client, "v", lambda: "computed", expire=60) == "computed"
    assert time.monotonic() - began < 20, "and not at the next heartbeat"


def test_a_computation_that_lost_the_lock_does_not_overwrite_the_value(redis_client, store):
    """Its own value is returned; what the next has computed stays."""

    def compute():
        store.reset("get_or_set:v")
        redis_client.set("v", '"newer"')
        threading.Event().wait(0.5)  # a renewal is due, and refused
        return "older"

    assert get_or_set(redis_client, "v", compute, expire=60, lease=0.6) == "older"
    assert get_or_set(redis_client, "v", compute, expire=60) == "newer"


def test_what_a_task_computed_without_its_lock_is_not_kept(redis_url, redis_client, store):
    """As with threads; errors of the computation are raised unchanged."""

    async def scene(client):
        async def compute():
            store.reset("get_or_set:v")
            await asyncio.sleep(0.5)
            return "older"

        async def refuse():
            raise LockNotOwned("mine", "another")

        assert await async_get_or_set(client, "v", compute, expire=60, lease=0.6) == "older"
        with pytest.raises(LockNotOwned, match="mine"):
            await async_get_or_set(client, "v", refuse, expire=60)

    play(redis_url, scene)
    assert redis_client.get("v") is None


def test_values_are_written_and_read_by_the_callers_functions(redis_client):
    options = {"expire": 60, "dumps": str.encode, "loads": bytes.decode}
    for _ in range(2):
        assert get_or_set(redis_client, "v", lambda: "väl", **options) == "väl"
    assert redis_client.get("v") == "väl".encode()


def test_the_wait_for_a_value_is_bounded(redis_client):
    with Lock(redis_client, "get_or_set:v"), pytest.raises(LockTimeout):
        get_or_set(redis_client, "v", lambda: 1, expire=60, wait_timeout=0.05)
    with pytest.raises(ConfigurationError, match="expire"):
        get_or_set(redis_client, "v", lambda: 1, expire=0)


def test_errors_about_the_value_belong_to_this_package_and_name_its_key(redis_client, redis_url):
    """For threads and for asyncio: of another type, unreadable, and without a server."""
    redis_client.set("text", "no JSON")
    redis_client.rpush("list", "x")
    for key, kind, says in (
        ("text", ConfigurationError, "'text' .JSONDecodeError.*Delete the key"),
        ("list", BackendRefused, "'list' .*WRONGTYPE"),
    ):
        with pytest.raises(kind, match=says):
            get_or_set(redis_client, key, dict, expire=60)

        async def scene(client, key=key, kind=kind, says=says):
            with pytest.raises(kind, match=says):
                await async_get_or_set(client, key, dict, expire=60)

        play(redis_url, scene)
    with redis.Redis(port=1) as nobody, pytest.raises(BackendUnreachable):
        get_or_set(nobody, "v", dict, expire=60)


def test_a_computation_that_asks_for_its_own_value_is_refused_at_once(redis_client, redis_url):
    """Formerly it waited for itself for ever."""

    def ask(key):
        return get_or_set(
            redis_client, "v", lambda: get_or_set(redis_client, key, dict, expire=60), expire=60
        )

    with pytest.raises(LockReentered, match="'v' called get_or_set for the same key"):
        ask("v")
    assert ask("other") == {}
    assert ask("v") == {}  # is there now

    async def play():
        async with redis.asyncio.Redis.from_url(redis_url) as client:

            async def inner():
                return await async_get_or_set(client, "w", inner, expire=60)

            with pytest.raises(LockReentered, match="'w' called get_or_set for the same key"):
                await async_get_or_set(client, "w", inner, expire=9)

    asyncio.run(play())


def _in_a_child(call):
    """Run a call in a forked child; return the function that returns whether it succeeded."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        finally:
            os._exit(code)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_by_a_computation_waits_and_reads(redis_server, store):
    """Formerly it was refused with LockReentered, as if it were its parent."""

    def read():
        with redis_server.client() as own:
            assert get_or_set(own, "v", lambda: "computed again", expire=60) == "computed"

    def compute():
        children.append(_in_a_child(read))
        eventually(lambda: store.inspect("get_or_set:v").waiting)
        return "computed"

    children = []
    with redis_server.client() as client:
        get_or_set(client, "v", compute, expire=60)
    assert children.pop()()


@pytest.mark.usefixtures("redis_client")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_by_a_locked_function_waits_for_its_lock(redis_server):
    """Formerly it was refused with LockReentered, as if it were its parent."""

    @locked("x", redis_server.client, wait_timeout=60)
    def call(inside):
        inside()

    children = []
    call(lambda: children.append(_in_a_child(lambda: call(int))))
    assert children.pop()()


def test_a_computation_may_ask_another_server_for_the_same_key(redis_client, make_redis):
    """A value may be kept twice: near and far."""
    far = make_redis().client()
    near = lambda: get_or_set(far, "v", lambda: 7, expire=9)  # noqa: E731
    assert get_or_set(redis_client, "v", near, expire=9) == 7


def test_a_coroutine_function_is_for_the_other_function(redis_client):
    """Its coroutine would have been stored."""

    async def compute():
        return 1

    with pytest.raises(ConfigurationError, match="Use async_get_or_set"):
        get_or_set(redis_client, "v", compute, expire=60)


def test_a_given_token_must_come_from_the_package(redis_client):
    """As the error for any other token says."""
    lock = Lock(redis_client, "tokens")
    with pytest.raises(ConfigurationError, match=r"celery_singleton_lock\.new_token\(\)"):
        lock.acquire(token="mine")
    token = new_token()
    assert lock.acquire(token=token)
    assert lock.token == token
    lock.release()


# --- reset_all ------------------------------------------------------------------------------------


def test_a_pattern_is_text(redis_client, redis_url):
    """A number fits no name, and would be refused by Python in the middle."""
    with pytest.raises(ConfigurationError, match=r"pattern must be .*not an int"):
        reset_all(redis_client, 5)

    async def scene(client):
        with pytest.raises(ConfigurationError, match=r"pattern must be .*not an int"):
            await async_reset_all(client, 5)

    play(redis_url, scene)


def test_all_locks_are_taken_from_their_holders_and_counted(redis_client, redis_url, store):
    """Also names that keys show as digests; those of another prefix are left alone."""
    names = ["account:1", "account:2", "x" * 3000, "other"]
    for reset in (
        lambda pattern: reset_all(redis_client, pattern),
        lambda pattern: play(redis_url, lambda client: async_reset_all(client, pattern)),
    ):
        taken = [Lock(redis_client, name, renew=False) for name in names]
        taken.append(Lock(redis_client, "other", prefix="mine", renew=False))
        assert all(lock.acquire() for lock in taken)
        assert reset("account:*") == 2
        assert [held(store, name) for name in names] == [0, 0, 1, 1]
        assert reset("") == 2
        assert reset("") == 0
        assert taken[-1].owned()
        taken[-1].release()


def test_a_lock_that_scan_returns_twice_is_not_taken_from_the_next_waiter(
    redis_client, store, monkeypatch
):
    """SCAN may return a key again while Redis resizes its table."""
    holder = Lock(redis_client, "report", renew=False)
    assert holder.acquire()
    waiter = Owner(new_token())
    store.acquire(waiter, Claim("report"), wait=30.0)
    ask = redis_client.execute_command

    def scanned(*words, **options):
        if words[0] != "SCAN":
            return ask(*words, **options)
        _, keys = ask("SCAN", 0, *words[2:], **options)
        return (0 if words[1] else 1), keys

    monkeypatch.setattr(redis_client, "execute_command", scanned)
    assert reset_all(redis_client) == 1
    assert [each.token for each in store.inspect("report").holders] == [waiter.token]
