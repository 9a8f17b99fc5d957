"""CacheLock: its guarantees on every cache, on Redis, and on the other caches."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from celery.exceptions import SoftTimeLimitExceeded

pytest.importorskip("django")

from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.core.management import call_command

from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.django import (
    CacheLock,
    LockTimeout,
    cache_lock,
    cache_locked,
    generic_cache_lock,
)
from celery_singleton_lock.errors import (
    BackendError,
    ConfigurationError,
    LockNameError,
    LockNotOwned,
    LockReentered,
    LockWaitTimeout,
)
from celery_singleton_lock.store.redis.sync import RedisStore
from support import django_project
from support.interruption import Injected
from support.renewals import await_renewals
from support.waiting import eventually

_names = itertools.count(1)

KINDS = ("memory", "database", "redis")


class HookedCache(LocMemCache):
    """A cache that calls a function of the test before its next ``get`` or ``delete``."""

    before: dict = {}  # noqa: RUF012  # shared by all threads, like the cache

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
    redis = {"BACKEND": django_project.REDIS, "LOCATION": redis_server.url}
    backends = {
        "default": {"BACKEND": django_project.MEMORY, "LOCATION": "default"},
        "memory": {"BACKEND": django_project.MEMORY, "LOCATION": "memory"},
        "hooked": {"BACKEND": f"{HookedCache.__module__}.HookedCache", "LOCATION": "hooked"},
        "database": {"BACKEND": django_project.DATABASE, "LOCATION": "cache_table"},
        "redis": redis,
        "other": {**redis, "KEY_PREFIX": "other"},
        "away": {"BACKEND": django_project.REDIS, "LOCATION": "redis://127.0.0.1:1"},
        "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
        "files": {
            "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
            "LOCATION": str(folder / "files"),
        },
        "wide": {"BACKEND": django_project.MEMORY, "KEY_PREFIX": "x" * 230},
    }
    with django_project.project(str(folder / "cache.sqlite3"), CACHES=backends, DEBUG=True):
        call_command("createcachetable", "cache_table", verbosity=0)
        yield


@pytest.fixture(params=KINDS)
def cache(request):
    """The alias of a cache."""
    return request.param


@pytest.fixture
def name():
    """A lock name that no other test uses."""
    return f"report:{next(_names)}"


def in_another_thread(call):
    """Call in another thread, which has its own caches and connections."""

    def run():
        try:
            return call()
        finally:
            django_project.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(60)


def is_free(lock):
    """Return whether another thread can acquire the lock at once."""

    def take():
        mine = CacheLock(lock.name, cache=lock.cache)
        got = mine.acquire()
        if got:
            mine.release()
        return got

    return in_another_thread(take)


# --- on every cache -------------------------------------------------------------------------------


def test_one_thread_at_a_time_holds_it(cache, name):
    """Read, wait, write: the total is exact with the lock."""
    total = [0]

    def add():
        lock = CacheLock(name, cache=cache, wait_timeout=60)
        for _ in range(5):
            with lock:
                seen = total[0]
                time.sleep(0.001)
                total[0] = seen + 1
        django_project.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: add(), range(4)))
    assert total == [20]


def test_a_held_lock_raises_at_once_and_names_the_holder(cache, name):
    """LockTimeout has the lock's name and the holder's text. It is a LockWaitTimeout."""

    def second():
        begun = time.monotonic()
        with pytest.raises(LockTimeout) as caught, CacheLock(name, cache=cache):
            pass
        return caught.value, time.monotonic() - begun

    with CacheLock(name, cache=cache, lease=20):
        error, took = in_another_thread(second)
    assert took < 20
    assert isinstance(error, LockWaitTimeout)
    assert error.name.endswith(name)
    assert f"pid {os.getpid()} on " in error.holder
    assert error.holder in str(error)
    if cache == "redis":
        assert 5 < error.expires_in <= 20
    else:
        assert error.expires_in == 0


def test_a_waiter_gets_the_lock_when_it_is_released(cache, name):
    got = threading.Event()

    def wait():
        with CacheLock(name, cache=cache, wait_timeout=60):
            got.set()
        django_project.close()

    with CacheLock(name, cache=cache):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not got.wait(0.15)
    waiter.join(60)
    assert got.is_set()


def test_a_wait_ends_after_the_wait_timeout(cache, name):
    """``acquire`` returns False."""

    def second():
        begun = time.monotonic()
        got = CacheLock(name, cache=cache).acquire(wait_timeout=0.3)
        return got, time.monotonic() - begun

    with CacheLock(name, cache=cache):
        got, took = in_another_thread(second)
    assert not got
    assert 0.3 <= took < 20


def test_a_release_without_the_lock_is_refused(cache, name):
    """Also in another thread, through the same object."""
    lock = CacheLock(name, cache=cache)
    with pytest.raises(LockNotOwned):
        lock.release()
    with lock:
        with pytest.raises(LockNotOwned):
            in_another_thread(lock.release)
        assert not is_free(lock)
        assert lock.held
    assert not lock.held
    assert is_free(lock)


def test_L34_a_release_does_not_delete_the_lock_of_the_next_holder(cache, name, redis_client):
    """The key was cleared, evicted or has expired, and another thread has acquired the lock."""
    late, successor = CacheLock(name, cache=cache), CacheLock(name, cache=cache)
    late.acquire()
    taken, done = threading.Event(), threading.Event()

    def follow():
        with successor:
            taken.set()
            done.wait(60)
            still = successor.held
        django_project.close()
        return still

    caches[cache].clear()
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(follow)
        assert taken.wait(60)
        with pytest.raises(LockNotOwned):
            late.release()
        assert not is_free(successor)
        done.set()
        assert follower.result(60)


def test_an_error_of_the_body_is_raised_and_the_lock_is_released(cache, name):
    lock = CacheLock(name, cache=cache)
    with pytest.raises(ZeroDivisionError), lock:
        _ = 1 / 0
    assert is_free(lock)


def test_acquiring_a_lock_that_this_thread_holds_is_refused(cache, name):
    lock = CacheLock(name, cache=cache, wait_timeout=5)
    with lock, pytest.raises(LockReentered):
        lock.acquire()
    assert is_free(lock)


@pytest.mark.parametrize("odd", ["x" * 300, "two words", "línea", "tab\there", "\N{SNOWMAN}" * 90])
def test_names_of_any_length_and_characters_are_different_locks(cache, name, odd):
    """Memcached accepts every key: Django would warn of others, and warnings are errors here."""
    lock = CacheLock(f"{name} {odd}", cache=cache)
    with lock:
        assert not is_free(lock)
        assert is_free(CacheLock(f"{name} {odd}!", cache=cache))
    assert lock.name == f"{name} {odd}"


# --- on Redis -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("renew_often")
def test_on_redis_it_is_renewed_and_has_a_fencing_token(name, redis_client):
    """Its lease grows while it is held, and fencing tokens grow."""
    lock = CacheLock(name, cache="redis", lease=20)
    assert lock.atomic
    with lock:
        first = lock.fencing_token
        await_renewals(RedisStore(redis_client, Keyspace()), caches["redis"].make_key(name))
        assert lock.held
        assert not is_free(lock)
    with lock:
        assert lock.fencing_token > first > 0


def test_on_redis_projects_with_different_key_prefixes_have_different_locks(name):
    with CacheLock(name, cache="redis"):
        assert is_free(CacheLock(name, cache="other"))


def test_on_redis_a_waiter_is_granted_the_lock_by_the_release(name, redis_client):
    """It waits in the lock's queue, and does not poll."""
    lock = CacheLock(name, cache="redis", wait_timeout=60)
    store = RedisStore(redis_client, Keyspace())
    with lock:
        waiter = threading.Thread(target=lambda: lock.acquire() and lock.release())
        waiter.start()
        eventually(lambda: store.inspect(caches["redis"].make_key(name)).waiting == 1)
    waiter.join(60)
    assert is_free(lock)


def test_an_unreachable_redis_raises_backend_error(name):
    with pytest.raises(BackendError):
        CacheLock(name, cache="away").acquire()


@pytest.mark.needs_real_redis("fakeredis has no eviction policy")
def test_a_redis_that_evicts_keys_gives_a_warning(make_redis, name, caplog):
    """Caches are often configured so, and a lock may be evicted too."""
    server = make_redis("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru")
    evicting = {"default": {"BACKEND": django_project.REDIS, "LOCATION": server.url}}
    with django_project.project(CACHES=evicting), CacheLock(name):
        pass
    assert "maxmemory-policy allkeys-lru" in caplog.text


# --- on caches that can add, get and delete -------------------------------------------------------


def test_on_other_caches_the_lock_is_not_atomic_and_has_no_fencing_token(name):
    lock = CacheLock(name, cache="memory")
    with lock:
        assert (lock.atomic, lock.fencing_token) == (False, 0)
        assert 30 < lock.expires_in <= 60


def test_L34_a_lease_that_has_expired_by_the_local_clock_is_not_released(name):
    """The key expires a second later, so nobody gets the lock before its holder has lost it."""
    lock = CacheLock(name, cache="memory", lease=1)
    began = time.monotonic()
    lock.acquire()
    eventually(lambda: not lock.held)
    with pytest.raises(LockNotOwned, match="it must be longer than the work"):
        lock.release()
    eventually(lambda: is_free(lock), 3)
    assert time.monotonic() - began >= 2


def test_L34_in_the_last_half_second_of_a_lease_the_key_is_left_to_expire(name, monkeypatch):
    """A pause between ``get`` and ``delete`` is dangerous if little of the lease is left."""
    assert generic_cache_lock.TOO_LATE == 0.5
    monkeypatch.setattr(generic_cache_lock, "TOO_LATE", 60.0)  # here it is the whole lease
    lock = CacheLock(name, cache="memory", lease=60)
    lock.acquire()
    lock.release()
    assert not is_free(lock)
    assert not lock.held


def test_L34_a_holder_stopped_before_its_delete_may_delete_the_next_holders_key(name):
    """This is not promised: the lease expires between ``get`` and ``delete``."""
    lock, successor = CacheLock(name, cache="hooked"), CacheLock(name, cache="hooked")
    lock.acquire()

    def expire_and_let_another_acquire():
        caches["hooked"].clear()
        in_another_thread(successor.acquire)
        assert not is_free(successor)

    HookedCache.before["delete"] = expire_and_let_another_acquire
    lock.release()
    assert is_free(successor)


def test_L18_an_exception_right_after_add_leaves_no_key(name):
    """Such as a soft time limit."""
    lock = CacheLock(name, cache="hooked")
    HookedCache.before["get"] = interrupt
    with pytest.raises(InterruptedError):
        lock.acquire()
    assert not lock.held
    assert is_free(lock)


def interrupt():
    raise InterruptedError


@pytest.mark.parametrize("cache", ["memory", "redis"])
def test_a_block_interrupted_at_any_line_of_its_beginning_leaves_the_lock_free(cache, name):
    """Such as by a soft time limit: no code could release it then."""
    at, interrupted = 0, True
    while interrupted:
        at += 1
        lock = CacheLock(name, cache=cache)
        with (
            Injected(at, cache_lock, generic_cache_lock) as injected,
            suppress(SoftTimeLimitExceeded),
        ):
            lock.__enter__()
        interrupted = injected.where is not None
        if not interrupted:
            lock.release()
        assert not lock.held, injected.where
        assert is_free(lock), injected.where
    assert at > 5  # it did interrupt


@pytest.mark.parametrize("moment", ["get", "delete", "deleted"])
def test_a_block_whose_release_is_interrupted_leaves_the_lock_free(name, moment):
    """Not held until its lease ends: no code could release it then."""
    lock = CacheLock(name, cache="hooked")
    with pytest.raises(InterruptedError), lock:
        HookedCache.before[moment] = interrupt
    assert not lock.held
    assert is_free(lock)


def test_a_second_block_of_one_thread_leaves_the_first_its_lock(cache, name):
    with CacheLock(name, cache=cache) as lock:
        with pytest.raises(LockReentered):
            lock.__enter__()
        assert lock.held
        assert not is_free(lock)


@pytest.mark.parametrize("moment", ["get", "delete", "deleted"])
def test_L19_a_release_that_failed_can_be_repeated(name, moment):
    """Whether the cache has deleted the key or not."""
    lock = CacheLock(name, cache="hooked")
    lock.acquire()
    HookedCache.before[moment] = interrupt
    with pytest.raises(InterruptedError):
        lock.release()
    lock.release()
    assert is_free(lock)


def test_an_error_of_the_release_does_not_replace_an_error_of_the_body(name, caplog):
    def fail():
        HookedCache.before["get"] = interrupt
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), CacheLock(name, cache="hooked"):
        fail()
    assert "was not released after an error" in caplog.text


def test_a_cache_in_local_memory_gives_one_warning(name, caplog):
    """Django's default cache excludes only threads. With DEBUG there is no warning."""
    caplog.set_level(logging.WARNING)
    with django_project.project(
        CACHES={"default": {"BACKEND": django_project.MEMORY, "TIMEOUT": 7}}, DEBUG=False
    ):
        for _ in range(2):
            with CacheLock(name):
                pass
    assert caplog.text.count("is local memory") == 1


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "says"),
    [
        ("dummy", "is a DummyCache, which stores nothing"),
        ("files", "is a FileBasedCache, whose add"),
        (
            "nowhere",
            "CACHES has no cache 'nowhere', or its BACKEND cannot be imported. CACHES has: ",
        ),
        ("wide", "KEY_PREFIX of CACHES\\['wide'\\] is too long"),
    ],
)
def test_a_cache_that_cannot_keep_a_lock_is_refused(name, alias, says):
    with pytest.raises(ConfigurationError, match=says):
        CacheLock(name, cache=alias).acquire()


def test_a_cache_that_loses_the_added_key_is_refused(name):
    """Of any class: the key is read back."""
    HookedCache.before["get"] = caches["hooked"].clear
    with pytest.raises(ConfigurationError, match="has not stored the key of a lock"):
        CacheLock(name, cache="hooked").acquire()


@pytest.mark.parametrize("lease", [None, 0, -1, 0.5, "60", True, float("nan"), 10**9])
def test_L24_a_lease_that_a_cache_would_misread_is_refused(lease):
    """For a cache None means "for ever", 0 "not at all", and half a second becomes 0."""
    with pytest.raises(ConfigurationError, match="lease must be a number of seconds from 1 to"):
        CacheLock("report", lease=lease)
    with pytest.raises(ConfigurationError, match="lease must be"):
        cache_locked("report", lease=lease)


@pytest.mark.parametrize("timeout", [None, -1, "5", True, float("inf")])
def test_L24_an_invalid_wait_timeout_is_refused(timeout):
    with pytest.raises(ConfigurationError, match="wait_timeout must be a number of seconds"):
        CacheLock("report", wait_timeout=timeout)


@pytest.mark.parametrize("name", ["", None, 7, b"x", "\ud800"])
def test_an_invalid_name_is_refused(name):
    with pytest.raises(LockNameError):
        CacheLock(name)


# --- the decorator --------------------------------------------------------------------------------


def test_a_decorated_function_is_locked_by_its_arguments(cache, name):
    """Positional, keyword and default arguments give the same name."""

    @cache_locked(name + ":{month}:{kind}", cache=cache)
    def build(month, kind="full"):
        """Build a report."""
        if month:
            with pytest.raises(LockTimeout):
                in_another_thread(lambda: build(month, kind="full"))
            in_another_thread(lambda: build(0))
        return month

    assert build(3) == 3
    assert build(month=3) == 3
    assert (build.__name__, build.__doc__) == ("build", "Build a report.")


def test_the_key_may_be_a_function_of_the_arguments(name):
    """Such as of a view: a template cannot use attributes of the request."""

    @cache_locked(lambda request, pk: f"{name}:{request.upper()}:{pk}", cache="memory")
    def view(request, pk):
        return is_free(CacheLock(f"{name}:USER:{pk}", cache="memory"))

    assert not view("user", pk=7)


def test_a_method_is_locked_by_its_arguments_without_self(name):
    class Reports:
        @cache_locked(name + ":{month}", cache="memory")
        def build(self, month):
            return is_free(CacheLock(f"{name}:{month}", cache="memory"))

    assert not Reports().build(5)


def test_a_call_with_wrong_arguments_raises_the_usual_error(name):
    @cache_locked(name + ":{month}", cache="memory")
    def build(month):
        """Build a report."""

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'month'"):
        build()
    with pytest.raises(LockNameError, match="'month' is None"):
        build(None)


def test_a_coroutine_or_generator_function_is_refused():
    """The lock would be released before its body runs."""

    async def coroutine():
        """Do nothing."""

    def generator():
        yield

    async def both():
        yield

    for function in (coroutine, generator, both):
        with pytest.raises(ConfigurationError, match="its body runs after"):
            cache_locked("report")(function)


def test_a_template_without_literal_text_is_refused():
    """The error names the function."""
    said = "^function .*: the key is '{month}': it has no literal text, so unrelated functions"
    with pytest.raises(ConfigurationError, match=said):
        cache_locked("{month}")(lambda month: None)


@pytest.mark.parametrize("args", [(), ("2024-01",), ("2024-01", 2)])
def test_a_decorator_without_a_key_raises_when_the_function_is_called(args):
    """The decorator has taken the function for a callable key."""

    @cache_locked
    def report(*_args):
        """Never runs."""

    with pytest.raises(ConfigurationError, match=r'write @cache_locked\("report"\)'):
        report(*args)
    with pytest.raises(ConfigurationError, match="above report has no lock name"):
        report(month=1)


def test_two_threads_that_use_a_new_object_at_once_use_one_lock(cache, name, monkeypatch):
    """From Python 3.12 on each thread got its own lock, and one could not release it."""
    lock = CacheLock(name, lease=60, cache=cache)
    both, real = threading.Barrier(2), cache_lock.store_of

    def found_at_once(alias):
        both.wait(60)
        return real(alias)

    monkeypatch.setattr(cache_lock, "store_of", found_at_once)

    def acquire_and_release(_):
        taken = lock.acquire(wait_timeout=60)
        held = lock.held
        lock.release()
        return taken, held, lock._lock

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(acquire_and_release, range(2))
    assert first == second == (True, True, lock._lock)


def test_errors_have_the_given_name_and_no_options_of_other_classes(cache, name):
    """In Redis the name also has the prefix and the version of the cache."""
    lock = CacheLock(name, cache=cache)
    with pytest.raises(LockNotOwned, match=f"lock {name!r}: this thread") as caught:
        lock.release()
    assert caught.value.name == name
    assert "thread_local" not in str(caught.value)
    with lock, pytest.raises(LockReentered, match=f"already holds lock {name!r}") as caught:
        lock.acquire()
    assert caught.value.name == name
