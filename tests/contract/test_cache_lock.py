"""CacheLock: what it promises on every cache of Django's, on Redis alone, and nowhere."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("django")

from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.core.management import call_command

from celery_singleton_lock.django import CacheLock, LockTimeout, cache_locked
from celery_singleton_lock.django import generic_cache_lock as added_module
from celery_singleton_lock.errors import (
    BackendError,
    ConfigurationError,
    LockNameError,
    LockNotOwned,
    LockReentered,
    LockWaitTimeout,
)
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.redis.sync import RedisStore
from support import django_project as djangos
from support.waiting import eventually

_names = itertools.count(1)

KINDS = ("memory", "database", "redis")
ADDED = ("memory", "database")


class Odd(LocMemCache):
    """A cache on which things happen between two calls: what a test puts in is called once."""

    before: dict = {}  # noqa: RUF012  # one for all threads, as the cache

    def get(self, *args, **kwargs):
        self.before.pop("get", lambda: None)()
        return super().get(*args, **kwargs)

    def delete(self, *args, **kwargs):
        self.before.pop("delete", lambda: None)()
        done = super().delete(*args, **kwargs)
        self.before.pop("deleted", lambda: None)()
        return done


@pytest.fixture(scope="module", autouse=True)
def _project(redis_server, tmp_path_factory):
    """A Django project with a cache of each kind."""
    folder = tmp_path_factory.mktemp("caches")
    redis = {"BACKEND": djangos.REDIS, "LOCATION": redis_server.url}
    backends = {
        "default": {"BACKEND": djangos.MEMORY, "LOCATION": "default"},
        "memory": {"BACKEND": djangos.MEMORY, "LOCATION": "memory"},
        "odd": {"BACKEND": f"{Odd.__module__}.Odd", "LOCATION": "odd"},
        "database": {"BACKEND": djangos.DATABASE, "LOCATION": "cache_table"},
        "redis": redis,
        "other": {**redis, "KEY_PREFIX": "other"},
        "away": {"BACKEND": djangos.REDIS, "LOCATION": "redis://127.0.0.1:1"},
        "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
        "files": {
            "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
            "LOCATION": str(folder / "files"),
        },
        "wide": {"BACKEND": djangos.MEMORY, "KEY_PREFIX": "x" * 230},
    }
    with djangos.project(str(folder / "cache.sqlite3"), CACHES=backends, DEBUG=True):
        call_command("createcachetable", "cache_table", verbosity=0)
        yield


@pytest.fixture(params=KINDS)
def cache(request):
    """The alias of a cache."""
    return request.param


@pytest.fixture
def name():
    """A name that no other test uses."""
    return f"report:{next(_names)}"


def elsewhere(call):
    """Call in another thread, with caches and connections of its own."""

    def run():
        try:
            return call()
        finally:
            djangos.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(30)


def is_free(lock):
    """Whether another thread gets it at once."""

    def take():
        mine = CacheLock(lock.name, cache=lock.cache)
        got = mine.acquire()
        if got:
            mine.release()
        return got

    return elsewhere(take)


# --- on every cache -------------------------------------------------------------------------------


def test_one_thread_at_a_time_holds_it(cache, name):
    """Read, wait, write: exact with the lock."""
    total = [0]

    def add():
        lock = CacheLock(name, cache=cache, wait_timeout=20)
        for _ in range(5):
            with lock:
                seen = total[0]
                time.sleep(0.001)
                total[0] = seen + 1
        djangos.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: add(), range(4)))
    assert total == [20]


def test_who_finds_it_busy_hears_at_once_who_holds_it(cache, name):
    """LockTimeout has the lock's name, and for people the holder; it is a LockWaitTimeout."""

    def second():
        begun = time.monotonic()
        with pytest.raises(LockTimeout) as caught, CacheLock(name, cache=cache):
            pass
        return caught.value, time.monotonic() - begun

    with CacheLock(name, cache=cache, lease=20):
        error, took = elsewhere(second)
    assert took < 1
    assert isinstance(error, LockWaitTimeout)
    assert error.name.endswith(name)
    assert f"pid {os.getpid()} on " in error.holder
    assert error.holder in str(error)
    if cache == "redis":
        assert 15 < error.expires_in <= 20
    else:
        assert error.expires_in == 0


def test_who_waits_gets_it_when_it_is_released(cache, name):
    """Within its wait time-out."""
    got = threading.Event()

    def wait():
        with CacheLock(name, cache=cache, wait_timeout=15):
            got.set()
        djangos.close()

    with CacheLock(name, cache=cache):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not got.wait(0.15)
    waiter.join(15)
    assert got.is_set()


def test_who_waits_gives_up_when_its_time_is_over(cache, name):
    """``acquire`` answers False, and ``with`` raises."""

    def second():
        begun = time.monotonic()
        got = CacheLock(name, cache=cache).acquire(wait_timeout=0.3)
        return got, time.monotonic() - begun

    with CacheLock(name, cache=cache):
        got, took = elsewhere(second)
    assert not got
    assert 0.3 <= took < 2


def test_a_release_by_who_does_not_hold_it_is_refused(cache, name):
    """Nor does the object of another thread hold it."""
    lock = CacheLock(name, cache=cache)
    with pytest.raises(LockNotOwned):
        lock.release()
    with lock:
        with pytest.raises(LockNotOwned):
            elsewhere(lock.release)
        assert not is_free(lock)
        assert lock.held
    assert not lock.held
    assert is_free(lock)


def test_L34_a_release_leaves_the_lock_of_a_successor_alone(cache, name, redis_client):
    """The key went (cleared, evicted, lapsed), and another took the lock meanwhile."""
    late, successor = CacheLock(name, cache=cache), CacheLock(name, cache=cache)
    late.acquire()
    taken, done = threading.Event(), threading.Event()

    def follow():
        with successor:
            taken.set()
            done.wait(10)
            still = successor.held
        djangos.close()
        return still

    caches[cache].clear()
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(follow)
        assert taken.wait(10)
        with pytest.raises(LockNotOwned):
            late.release()
        assert not is_free(successor)
        done.set()
        assert follower.result(10)


def test_it_is_free_again_after_an_error_which_passes_through(cache, name):
    lock = CacheLock(name, cache=cache)
    with pytest.raises(ZeroDivisionError), lock:
        _ = 1 / 0
    assert is_free(lock)


def test_its_own_holder_would_wait_in_vain_and_is_told_so(cache, name):
    lock = CacheLock(name, cache=cache, wait_timeout=5)
    with lock, pytest.raises(LockReentered):
        lock.acquire()
    assert is_free(lock)


@pytest.mark.parametrize("odd", ["x" * 300, "two words", "línea", "tab\there", "\N{SNOWMAN}" * 90])
def test_a_name_of_any_length_and_letters_has_a_lock_of_its_own(cache, name, odd):
    """A key as memcached takes it: Django would warn of any other, and warnings are errors here."""
    lock = CacheLock(f"{name} {odd}", cache=cache)
    with lock:
        assert not is_free(lock)
        assert is_free(CacheLock(f"{name} {odd}!", cache=cache))
    assert lock.name == f"{name} {odd}"


# --- on Redis -------------------------------------------------------------------------------------


def test_on_redis_it_is_renewed_and_has_a_fencing_token(name):
    """It is held for longer than its lease, and its grants are numbered."""
    lock = CacheLock(name, cache="redis", lease=1)
    assert lock.atomic
    with lock:
        first = lock.fencing_token
        time.sleep(1.3)  # longer than the lease: that nothing happens cannot be awaited
        assert lock.held
        assert not is_free(lock)
    with lock:
        assert lock.fencing_token > first > 0


def test_on_redis_projects_with_different_key_prefixes_do_not_meet(name):
    with CacheLock(name, cache="redis"):
        assert is_free(CacheLock(name, cache="other"))


def test_on_redis_a_waiter_is_woken_by_the_release(name, redis_client):
    """It stands in the lock's queue, and does not poll."""
    lock = CacheLock(name, cache="redis", wait_timeout=10)
    store = RedisStore(redis_client, Keyspace())
    with lock:
        waiter = threading.Thread(target=lambda: lock.acquire() and lock.release())
        waiter.start()
        eventually(lambda: store.inspect(caches["redis"].make_key(name)).waiting == 1)
    waiter.join(10)
    assert is_free(lock)


def test_a_redis_that_is_away_is_told_of_as_by_every_lock(name):
    with pytest.raises(BackendError):
        CacheLock(name, cache="away").acquire()


@pytest.mark.needs_real_redis("has a policy of eviction")
def test_a_redis_that_evicts_is_told_of(make_redis, name, caplog):
    """Caches often may; a lock would go with them."""
    server = make_redis("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru")
    evicting = {"default": {"BACKEND": djangos.REDIS, "LOCATION": server.url}}
    with djangos.project(CACHES=evicting), CacheLock(name):
        pass
    assert "maxmemory-policy allkeys-lru" in caplog.text


# --- on caches that can add, get and delete -------------------------------------------------------


def test_a_cache_without_scripts_says_that_it_is_not_atomic(name):
    lock = CacheLock(name, cache="memory")
    with lock:
        assert (lock.atomic, lock.fencing_token) == (False, 0)
        assert 55 < lock.expires_in <= 60


def test_L34_what_is_over_by_our_own_clock_is_not_touched(name):
    """The key itself lives a second longer, so that nobody enters before its holder knows."""
    lock = CacheLock(name, cache="memory", lease=1)
    lock.acquire()
    time.sleep(1.01)  # likewise: the cache forgets by time alone
    assert not lock.held
    assert not is_free(lock)
    with pytest.raises(LockNotOwned, match="give it more than the work takes"):
        lock.release()
    eventually(lambda: is_free(lock), 3)


def test_L34_in_the_last_half_second_the_key_is_left_to_end_by_itself(name):
    """A pause between ``get`` and ``delete`` is dangerous when little of the lease is left."""
    lock = CacheLock(name, cache="memory", lease=1)
    lock.acquire()
    eventually(lambda: lock.expires_in < added_module.TOO_LATE)
    lock.release()
    assert not is_free(lock)
    assert not lock.held


def test_L34_what_a_cache_cannot_promise(name):
    """Stopped between ``get`` and ``delete`` until its key has gone, it deletes its successor's."""
    lock, successor = CacheLock(name, cache="odd"), CacheLock(name, cache="odd")
    lock.acquire()

    def stop_and_be_followed():
        caches["odd"].clear()
        elsewhere(successor.acquire)
        assert not is_free(successor)

    Odd.before["delete"] = stop_and_be_followed
    lock.release()
    assert is_free(successor)


def test_L18_an_error_between_add_and_bookkeeping_leaves_no_key(name):
    """Such as a soft time limit."""
    lock = CacheLock(name, cache="odd")
    Odd.before["get"] = interrupt
    with pytest.raises(InterruptedError):
        lock.acquire()
    assert not lock.held
    assert is_free(lock)


def interrupt():
    raise InterruptedError


@pytest.mark.parametrize("moment", ["get", "delete", "deleted"])
def test_L19_a_release_that_failed_can_be_done_again(name, moment):
    """Whether the cache had deleted the key or not."""
    lock = CacheLock(name, cache="odd")
    lock.acquire()
    Odd.before[moment] = interrupt
    with pytest.raises(InterruptedError):
        lock.release()
    lock.release()
    assert is_free(lock)


def test_an_error_of_the_body_is_not_replaced_by_one_of_the_release(name, caplog):
    def fail():
        Odd.before["get"] = interrupt
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), CacheLock(name, cache="odd"):
        fail()
    assert "was not released after an error" in caplog.text


def test_local_memory_is_told_of_where_there_may_be_other_processes(name, caplog):
    """Django's default cache excludes threads alone. Said once, and not while developing."""
    caplog.set_level(logging.WARNING)
    with djangos.project(
        CACHES={"default": {"BACKEND": djangos.MEMORY, "TIMEOUT": 7}}, DEBUG=False
    ):
        for _ in range(2):
            with CacheLock(name):
                pass
    assert caplog.text.count("is local memory") == 1


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "says"),
    [
        ("dummy", "is a DummyCache, which keeps nothing"),
        ("files", "is a FileBasedCache, of which add"),
        ("nowhere", "CACHES has no 'nowhere', or its BACKEND cannot be imported. There are: "),
        ("wide", "KEY_PREFIX of CACHES\\['wide'\\] leaves no room"),
    ],
)
def test_a_cache_that_can_keep_no_lock_is_refused(name, alias, says):
    """With DummyCache everybody would hold it."""
    with pytest.raises(ConfigurationError, match=says):
        CacheLock(name, cache=alias).acquire()


def test_a_cache_that_loses_what_is_added_is_refused(name):
    """Whatever it is called: it is asked whether the key is there."""
    Odd.before["get"] = caches["odd"].clear
    with pytest.raises(ConfigurationError, match="does not keep what is added"):
        CacheLock(name, cache="odd").acquire()


@pytest.mark.parametrize("lease", [None, 0, -1, 0.5, "60", True, float("nan"), 10**9])
def test_L24_a_lease_that_a_cache_would_misread_is_refused(lease):
    """None is for ever, 0 is "not at all", and half a second is cut down to 0."""
    with pytest.raises(ConfigurationError, match="lease must be a number of seconds from 1 to"):
        CacheLock("report", lease=lease)
    with pytest.raises(ConfigurationError, match="lease must be"):
        cache_locked("report", lease=lease)


@pytest.mark.parametrize("timeout", [None, -1, "5", True, float("inf")])
def test_L24_a_wait_that_is_no_duration_is_refused(timeout):
    with pytest.raises(ConfigurationError, match="wait_timeout must be a number of seconds"):
        CacheLock("report", wait_timeout=timeout)


@pytest.mark.parametrize("name", ["", None, 7, b"x", "\ud800"])
def test_a_name_that_is_no_text_is_refused(name):
    with pytest.raises(LockNameError):
        CacheLock(name)


# --- the decorator --------------------------------------------------------------------------------


def test_a_decorated_function_is_locked_by_its_arguments(cache, name):
    """The same call, however it is written, and no other."""

    @cache_locked(name + ":{month}:{kind}", cache=cache)
    def build(month, kind="full"):
        """Build a report."""
        if month:
            with pytest.raises(LockTimeout):
                elsewhere(lambda: build(month, kind="full"))
            elsewhere(lambda: build(0))
        return month

    assert build(3) == 3
    assert build(month=3) == 3
    assert (build.__name__, build.__doc__) == ("build", "Build a report.")


def test_the_key_may_be_a_function_of_the_arguments(name):
    """Such as of a view's, of which a template sees no attributes."""

    @cache_locked(lambda request, pk: f"{name}:{request.upper()}:{pk}", cache="memory")
    def view(request, pk):
        return is_free(CacheLock(f"{name}:USER:{pk}", cache="memory"))

    assert not view("user", pk=7)


def test_a_method_is_locked_by_its_arguments_but_self(name):
    class Reports:
        @cache_locked(name + ":{month}", cache="memory")
        def build(self, month):
            return is_free(CacheLock(f"{name}:{month}", cache="memory"))

    assert not Reports().build(5)


def test_a_call_that_does_not_fit_fails_as_without_the_lock(name):
    @cache_locked(name + ":{month}", cache="memory")
    def build(month):
        """Build a report."""

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'month'"):
        build()
    with pytest.raises(LockNameError, match="'month' is None"):
        build(None)


def test_what_runs_after_the_call_has_returned_is_refused():
    """The lock would be released before a coroutine or a generator has done anything."""

    async def coroutine():
        """Do nothing."""

    def generator():
        yield

    async def both():
        yield

    for function in (coroutine, generator, both):
        with pytest.raises(ConfigurationError, match="its body runs after"):
            cache_locked("report")(function)


def test_a_template_without_text_is_refused():
    """The error speaks of the function."""
    said = "^function .*: the key is '{month}': it has no literal text, so functions that have"
    with pytest.raises(ConfigurationError, match=said):
        cache_locked("{month}")(lambda month: None)


@pytest.mark.parametrize("args", [(), ("2024-01",), ("2024-01", 2)])
def test_without_a_key_the_decorator_says_so_when_the_function_is_called(args):
    """The function stands in the place of a key that is made by a function."""

    @cache_locked
    def report(*_args):
        """Never runs."""

    with pytest.raises(ConfigurationError, match=r'write @cache_locked\("report"\)'):
        report(*args)
    with pytest.raises(ConfigurationError, match="stands above report"):
        report(month=1)


def test_a_lock_that_two_threads_use_first_at_once_is_one_lock(cache, name, monkeypatch):
    """From Python 3.12 on each got a lock of its own, and one could not release what it held."""
    lock = CacheLock(name, lease=60, cache=cache)
    both, real = threading.Barrier(2), CacheLock._new_lock

    def made_at_once(self):
        made = real(self)
        both.wait(10)
        return made

    monkeypatch.setattr(CacheLock, "_new_lock", made_at_once)

    def turn(_):
        taken = lock.acquire(wait_timeout=10)
        held = lock.held
        lock.release()
        return taken, held, lock._lock

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(turn, range(2))
    assert first == second == (True, True, lock._lock)


def test_errors_speak_of_the_name_that_was_given_and_of_no_option_of_others(cache, name):
    """In Redis the name has the prefix and the version of the cache."""
    lock = CacheLock(name, cache=cache)
    with pytest.raises(LockNotOwned, match=f"lock {name!r}: this thread") as caught:
        lock.release()
    assert caught.value.name == name
    assert "thread_local" not in str(caught.value)
    with lock, pytest.raises(LockReentered, match=f"Lock {name!r} is held already") as caught:
        lock.acquire()
    assert caught.value.name == name
