"""Lock and AsyncLock on a real server. The numbers are those of docs/traps.md."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
import redis
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock.core import lock_steps as plans_module
from celery_singleton_lock.core.model import Claim, Ending, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.errors import (
    BackendRefused,
    BackendUnreachable,
    LockLost,
    LockNotOwned,
    LockReentered,
    LockWaitTimeout,
)
from celery_singleton_lock.lock import base as hold_module
from celery_singleton_lock.lock import lease_watchdog as watchdog_module
from celery_singleton_lock.lock import sync as lock_module
from celery_singleton_lock.lock import wait_for_turn as turn_module
from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.cluster.aio import AsyncClusterStore
from celery_singleton_lock.store.quorum.aio import AsyncQuorumStore
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from support.granted_tokens import granted_tokens
from support.interruption import Injected
from support.loop_thread import Driven
from support.renewals import await_renewals
from support.waiting import eventually, never

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("patient_quorums")]

FAR = 20
"""Seconds after which a call has missed what it waits for; the next chance comes even later."""

IN_THREAD = pytest.mark.not_in_memory(
    "that server runs in the caller's thread, where the exception could strike it as well"
)

ASYNC_STORES = {
    "redis": AsyncRedisStore,
    "cluster": AsyncClusterStore,
    "quorum": partial(AsyncQuorumStore, timeout=10.0, longest_lease=3600.0),
}

VERBS = {"acquire", "claim", "release", "extend", "wait", "inspect"}


class Troubled:
    """A real store on a bad line: loses replies, cuts calls, and lets a test act in between."""

    def __init__(self, store):
        self._store = store
        self.lost = []  # the next reply of these methods is lost; the server has run the script
        self.cut = []  # the next call of these methods does not reach the server
        self.before = {}  # verb -> what happens once, just before it
        self.calls = []

    def __getattr__(self, verb):
        real = getattr(self._store, verb)
        return (lambda *args, **kw: self._call(verb, real, args, kw)) if verb in VERBS else real

    def _call(self, verb, real, args, kw):
        self.calls.append(verb)
        self.before.pop(verb, lambda: None)()
        self.fail(self.cut, verb, "cut")
        answer = real(*args, **kw)
        self.fail(self.lost, verb, "reply lost")
        return answer

    @staticmethod
    def fail(those, verb, how):
        if verb in those:
            those.remove(verb)
            raise BackendUnreachable(how)


@pytest.fixture(params=["redis", "cluster", "quorum", "in_memory"])
def kind(request):
    """Where the locks live."""
    return request.param


@pytest.fixture
def grants_lapse():
    """Grants must be claimed within half a second: for tests in which nobody claims one."""


@pytest.fixture
def claim_lease(request):
    """Seconds in which grants must be claimed: more than any pause of a busy machine."""
    return 0.5 if "grants_lapse" in request.fixturenames else 10.0


@pytest.fixture
def store(make_store, claim_lease):
    return make_store(claim_lease=claim_lease)


@pytest.fixture
def troubled(store):
    return Troubled(store)


class AsyncTroubled:
    """The same for asyncio, of the same troubles."""

    def __init__(self, store, troubled):
        self._store, self._troubled = store, troubled

    def __getattr__(self, verb):
        real = getattr(self._store, verb)
        if verb not in VERBS:
            return real

        async def call(*args, **kw):
            self._troubled.calls.append(verb)
            if verb in self._troubled.before:
                await asyncio.to_thread(self._troubled.before.pop(verb))
            self._troubled.fail(self._troubled.cut, verb, "cut")
            answer = await real(*args, **kw)
            self._troubled.fail(self._troubled.lost, verb, "reply lost")
            return answer

        return call


@pytest.fixture
def make_thread_lock(store):
    """A function that makes locks for threads; at the end none of their threads may remain."""
    made = []

    def make(name="lock", backend=store, **options):
        made.append(Lock(backend, name, **options))
        return made[-1]

    yield make
    for lock in made:
        lock._watchdog.stop()


@pytest.fixture(params=["Lock", "AsyncLock"])
def make_lock(request, kind, store, claim_lease):
    """Make locks of each kind; those for asyncio are driven through a loop thread."""
    if request.param == "Lock":
        return request.getfixturevalue("make_thread_lock")
    if kind == "in_memory":
        pytest.skip("no AsyncLock lives in memory")
    thread, client = (request.getfixturevalue(name) for name in ("loop_thread", "async_backend"))
    own = ASYNC_STORES[kind](client, claim_lease=claim_lease)

    def for_asyncio(backend):
        if backend is store:
            return own
        return AsyncTroubled(own, backend) if isinstance(backend, Troubled) else client

    def make(name="lock", backend=store, **options):
        if "thread_local" in options:
            options["task_local"] = options.pop("thread_local")
        return Driven(
            thread, thread.call(partial(AsyncLock, for_asyncio(backend), name, **options))
        )

    return make


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def waiters_stay(monkeypatch):
    """A waiter stays queued although its wait is over, until it leaves."""
    monkeypatch.setattr(turn_module.LockWait, "liveness", turn_module.LIVENESS)


@pytest.fixture
def brisk(monkeypatch):
    """Waiters look every 0.2 s, where a test is about a wake-up that does not come."""
    monkeypatch.setattr(turn_module, "HEARTBEAT", 0.2)


def holders(store, name="lock"):
    return [holder.token for holder in store.inspect(name).holders]


def await_waiting(store, number, name="lock"):
    eventually(lambda: store.inspect(name).waiting == number)


def acquire_in(pool, lock, **options):
    """Acquire in a thread of its own; return the future of (acquired, lock)."""
    return pool.submit(lambda: lock.acquire(**options))


def take_elsewhere(store, name="lock", lease=30.0):
    """Acquire the lock without a Lock object; return the token."""
    owner = Owner(new_token())
    assert store.acquire(owner, Claim(name, lease=lease)).verdict == "granted"
    return owner.token


def queue_elsewhere(store, name="lock"):
    """Another client waits, and dies."""
    owner = Owner(new_token())
    assert store.acquire(owner, Claim(name), wait=30).verdict == "waiting"
    return owner.token


def give_back(store, token, name="lock"):
    return store.release(name, token, Ending.FINAL).verdict


# --- the interface --------------------------------------------------------------------------------


def test_a_lock_is_acquired_and_released(make_lock, store):
    lock = make_lock()
    assert lock.acquire()
    assert (lock.held, lock.lost, lock.locked(), lock.owned()) == (True, False, True, True)
    assert 20 < lock.expires_in <= 30
    assert lock.fencing_token > 0
    assert repr(lock) in {"<Lock 'lock', held>", "<AsyncLock 'lock', held>"}
    lock.release()
    assert (lock.held, lock.lost, lock.locked(), lock.owned()) == (False, False, False, False)
    assert (lock.expires_in, lock.fencing_token) == (0.0, 0)
    assert holders(store) == []


def test_a_busy_lock_is_refused_at_once_without_blocking(make_lock):
    with make_lock():
        assert not make_lock().acquire(blocking=False)
        assert not make_lock(blocking=False).acquire()


@pytest.mark.usefixtures("no_heartbeat")
def test_a_busy_lock_is_waited_for_no_longer_than_allowed(make_lock, store):
    with make_lock():
        began = time.monotonic()
        assert not make_lock().acquire(blocking_timeout=0.3)
        assert not make_lock(blocking_timeout=0.3).acquire()
        took = time.monotonic() - began
    assert 0.6 <= took < FAR
    assert store.inspect("lock").waiting == 0


def test_a_with_statement_raises_if_the_lock_is_not_acquired(make_lock):
    holder, other = make_lock(), make_lock(blocking_timeout=0.05)
    holder.acquire()
    with pytest.raises(LockWaitTimeout, match="'lock' is busy") as caught, other:
        pytest.fail("both are in")
    assert caught.value.name == "lock"


def test_an_error_of_the_body_is_not_replaced_by_one_of_the_release(make_lock, store, caplog):
    """Without an error in the body, a lost lock raises."""

    def fail_after_the_loss():
        with make_lock():
            store.reset("lock")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_the_loss()
    assert "was not released after an error" in caplog.text
    lock = make_lock()
    lock.acquire()
    store.reset("lock")
    with pytest.raises(LockNotOwned):
        lock.__exit__(None, None, None)


def test_threads_that_share_one_object_exclude_each_other(make_lock, pool):
    """Read, pause, write: a thousand times without a lost update."""
    lock, counter = make_lock(), [0]

    def add():
        for _ in range(25):
            with lock:
                seen = counter[0]
                threading.Event().wait(0.0005)
                counter[0] = seen + 1

    for done in [pool.submit(add) for _ in range(8)]:
        done.result()
    assert counter == [200]


def test_waiters_get_the_lock_in_the_order_of_arrival(make_lock, pool, store):
    served, first = [], make_lock()
    first.acquire()

    def enter(number):
        with make_lock():
            served.append(number)

    entering = []
    for number in range(8):
        entering.append(pool.submit(enter, number))
        await_waiting(store, number + 1)
    first.release()
    for done in entering:
        done.result()
    assert served == list(range(8))


def test_a_newcomer_does_not_pass_a_waiter(make_lock, store):
    first = make_lock()
    first.acquire()
    waiter = queue_elsewhere(store)
    first.release()
    assert not make_lock().acquire(blocking=False)
    assert granted_tokens(store, "lock") == [waiter]


def test_the_fencing_token_grows_with_every_grant(make_lock, lose_data, store):
    """Also over an expiry, and when the server has lost its data."""
    fences = []
    for _ in range(3):
        with make_lock() as lock:
            fences.append(lock.fencing_token)
    lose_data()
    with make_lock() as lock:
        fences.append(lock.fencing_token)
    assert fences == sorted(set(fences))


@pytest.mark.not_on_quorum("two majorities need not name the same holders")
def test_a_semaphore_admits_its_limit(make_lock, store):
    first, second, third = (make_lock(limit=2) for _ in range(3))
    assert first.acquire()
    assert not first.locked()
    assert second.acquire()
    assert first.locked()
    assert not third.acquire(blocking=False)
    first.release()
    assert third.acquire(blocking=False)


def test_a_second_acquire_by_the_holder_is_refused(make_lock):
    """Instead of waiting for itself."""
    lock = make_lock()
    with lock:
        with pytest.raises(LockReentered) as caught:
            lock.acquire()
        assert caught.value.name == "lock"
        assert lock.held
    assert lock.acquire(blocking=False)


def test_a_thread_does_not_release_what_another_holds(make_lock, pool):
    lock = make_lock()
    lock.acquire()
    with pytest.raises(LockNotOwned):
        pool.submit(lock.release).result()
    assert lock.owned()


def test_one_thread_may_release_for_another_if_the_lock_says_so(make_lock, pool):
    lock = make_lock(thread_local=False)
    pool.submit(lock.acquire).result()
    assert lock.owned()
    lock.release()
    assert not lock.locked()


def test_locks_with_different_prefixes_are_independent(
    lock_client, each_client, new_prefix, make_lock
):
    one, other = (make_lock(backend=lock_client, prefix=new_prefix(each)) for each in ("a", "b"))
    with one, other:
        keys = {key for client in each_client for key in client.scan_iter()}
        assert {key.split(b":")[0] for key in keys} - {b"csl"} == {b"a", b"b"}


@pytest.mark.not_on_quorum("it is about one client")
def test_a_client_that_decodes_replies_will_do(redis_server, redis_url, make_thread_lock, pool):
    with redis_server.client(decode_responses=True) as client:
        lock = make_thread_lock(backend=client)
        lock.acquire()
        waiting = acquire_in(pool, make_thread_lock(backend=client))
        await_waiting(lock._store, 1)
        lock.release()
        assert waiting.result(60)
        lock._store.close()


def test_every_key_in_redis_expires(make_lock, each_client, store):
    """Every key has an expiry, also while held, and after a waiter came and went.

    But for the mark by which a server of a quorum knows that it was not restarted.
    """

    def endless():
        found = {key for each in each_client for key in each.scan_iter() if each.ttl(key) == -1}
        return found - {store.keyspace.quorum.encode()}

    with make_lock():
        make_lock().acquire(blocking_timeout=0.05)
        assert endless() <= {store.keyspace.lock("lock").due.encode()}
    assert endless() == set()


# --- leases ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("renew_often")
def test_a_held_lock_is_renewed_for_as_long_as_it_is_held(make_lock, store):
    with make_lock(lease=20) as lock:
        await_renewals(store, times=3)
        assert not lock.lost
        assert lock.owned()


def test_without_renewal_the_lease_ends(make_lock, store):
    lock = make_lock(lease=0.3, renew=False)
    lock.acquire()
    eventually(lambda: lock.lost)
    eventually(lambda: holders(store) == [])
    assert not lock.held
    assert not lock.owned()


def test_a_lock_object_that_is_dropped_is_not_renewed(make_thread_lock, store):
    """Nothing could release it: the lease expires as with a dead process."""
    lock = Lock(store, "lock", lease=0.6)
    lock.acquire()
    dog = lock._watchdog
    del lock
    gc.collect()
    eventually(lambda: holders(store) == [])
    dog.stop()


def test_a_thread_that_ends_without_release_is_not_renewed(make_thread_lock, store):
    lock = make_thread_lock(lease=0.6)
    taker = threading.Thread(target=lock.acquire)
    taker.start()
    taker.join()
    eventually(lambda: holders(store) == [])


def test_extend_adds_to_what_is_left(make_lock, store):
    lock = make_lock(lease=30, renew=False)
    began = time.monotonic()

    def left(seconds):
        """Whether so much is left, but for the time that a busy machine has taken."""
        found = lock.expires_in
        took = time.monotonic() - began
        return seconds - took - 0.1 < found <= seconds

    lock.acquire()
    assert lock.extend(30)
    assert left(60)
    kept = store.inspect("lock").holders[0].expires_in
    assert lock.expires_in <= kept + 0.01
    assert lock.extend(90, replace_ttl=True)
    assert left(90)
    assert lock.reacquire()
    assert left(90)  # never shortened


def test_the_server_keeps_a_lease_at_least_as_long_as_the_client_assumes(
    make_lock, troubled, store
):
    """Validity counts from before the request was sent, however slow the reply."""
    lock = make_lock(backend=troubled, lease=30, renew=False)
    pause = threading.Event()
    for verb, call in [("acquire", lock.acquire), ("extend", lock.reacquire)]:
        troubled.before[verb] = lambda: pause.wait(0.2)
        call()
        assert lock.expires_in <= 29.8 + 0.01
        kept = store.inspect("lock").holders[0].expires_in
        assert lock.expires_in <= kept


def test_ensure_held_asks_the_store(make_lock, store):
    lock = make_lock()
    with pytest.raises(LockNotOwned):
        lock.ensure_held()
    lock.acquire()
    lock.ensure_held()
    store.reset("lock")
    assert lock.held  # as far as it knows
    with pytest.raises(LockLost) as caught:
        lock.ensure_held()
    assert caught.value.name == "lock"
    assert lock.lost


@pytest.mark.usefixtures("renew_often")
def test_T10_a_holder_is_notified_of_its_loss_within_one_renewal(make_lock, store):
    """The flag is set, and the callback called once, from another thread."""
    heard = []
    lock = make_lock(lease=30, on_lost=lambda name, token: heard.append((name, token)))
    lock.acquire()
    (token,) = holders(store)
    store.reset("lock")
    began = time.monotonic()
    eventually(lambda: lock.lost)
    took = time.monotonic() - began
    eventually(lambda: heard == [("lock", token)])
    assert not lock.held
    with pytest.raises(LockNotOwned):
        lock.release()
    assert not lock.lost
    assert lock.acquire(blocking=False)
    assert took < FAR, "and not at the end of its lease"


@pytest.mark.needs_real_redis("CLIENT KILL")
@pytest.mark.not_in_memory("it has no connections to cut")
@pytest.mark.usefixtures("renew_often")
def test_T8_a_dropped_connection_costs_no_lease(make_lock, each_client, store):
    """All connections are cut, the lease is renewed, and again."""
    with make_lock(lease=20) as lock:
        for _ in range(3):
            for client in each_client:
                client.client_kill_filter(_type="normal", skipme=True)
            await_renewals(store, times=1)
            assert not lock.lost
        assert lock.owned()


def test_T9_no_lease_is_extended_after_its_release(make_thread_lock, troubled, pool, monkeypatch):
    """Many short locks and a busy watchdog: a renewal never has a released token."""
    monkeypatch.setattr(watchdog_module.Watchdog.forget, "__defaults__", (60.0,))
    released, late = set(), []
    extend = troubled._store.extend

    def checked(leases):
        tokens = {token for _, token, _ in leases}
        late.extend(tokens & released)
        answers = extend(leases)
        late.extend(tokens & released)
        return answers

    troubled.extend = checked

    def work(name):
        lock = make_thread_lock(name, backend=troubled, lease=0.1)
        for turn in range(150):
            lock.acquire()
            token = lock._hold.lease.token
            threading.Event().wait(0.04 if turn % 10 == 0 else 0)
            with suppress(LockNotOwned):  # a lease this short lapses on a busy machine
                lock.release()
            released.add(token)

    for done in [pool.submit(work, f"lock-{number}") for number in range(4)]:
        done.result()
    assert late == []
    assert len(released) == 600


# --- lost replies ---------------------------------------------------------------------------------


def test_L1_a_release_with_a_lost_reply_grants_one_waiter(make_lock, troubled, store, pool):
    """The second release finds it done, says so, and hands over nothing more."""
    lock = make_lock(backend=troubled)
    lock.acquire()
    first = queue_elsewhere(store)
    queue_elsewhere(store)
    troubled.lost = ["release"]
    lock.release()
    assert troubled.calls.count("release") == 2
    assert granted_tokens(store, "lock") == [first]
    assert store.inspect("lock").waiting == 1


@pytest.mark.parametrize("trouble", ["lost", "cut"])
@pytest.mark.parametrize("verb", ["acquire", "release", "extend", "inspect"])
def test_L1_one_connection_fault_changes_no_outcome(make_lock, troubled, store, verb, trouble):
    lock = make_lock(backend=troubled)
    getattr(troubled, trouble).append(verb)
    assert lock.acquire()
    assert lock.extend(1)
    assert lock.owned()
    lock.release()
    assert getattr(troubled, trouble) == []
    assert holders(store) == []


@pytest.mark.parametrize("trouble", ["lost", "cut"])
@pytest.mark.parametrize("verb", ["claim", "acquire", "wait"])
def test_L1_one_connection_fault_in_the_queue_changes_no_outcome(
    make_lock, troubled, store, pool, verb, trouble, brisk
):
    """Also a wake-up whose reply was lost: the grant is in the holder record."""
    token = take_elsewhere(store)
    lock = make_lock(backend=troubled, thread_local=False)
    waiting = acquire_in(pool, lock)
    await_waiting(store, 1)
    getattr(troubled, trouble).append(verb)
    if verb != "claim":
        eventually(lambda: getattr(troubled, trouble) == [])
    give_back(store, token)
    assert waiting.result(60)
    assert lock.owned()
    assert len(holders(store)) == 1


@pytest.mark.parametrize("trouble", ["lost", "cut"])
def test_L1_one_connection_fault_in_a_cancel_leaves_no_waiter(make_lock, troubled, store, trouble):
    take_elsewhere(store)
    getattr(troubled, trouble).append("release")
    assert not make_lock(backend=troubled).acquire(blocking_timeout=0.1)
    assert getattr(troubled, trouble) == []
    assert store.inspect("lock").waiting == 0


def test_L13_an_acquire_with_a_lost_reply_succeeds(make_lock, troubled, store):
    """It is asked again with the same token, and is one grant."""
    lock = make_lock(backend=troubled)
    troubled.lost = ["acquire"]
    assert lock.acquire(blocking=False)
    assert holders(store) == [lock._hold.lease.token]
    assert store.inspect("lock").counters["grants"] == 1


def test_L13_a_waiter_that_gives_up_leaves_nothing_behind(make_lock, troubled, store):
    """No answer twice: an error, not "not acquired", and the lock is free for others."""
    lock = make_lock(backend=troubled)
    troubled.lost = ["acquire", "acquire"]
    with pytest.raises(BackendUnreachable):
        lock.acquire()
    assert not lock.held
    assert holders(store) == []
    assert lock.acquire(blocking=False)


def test_L13_a_waiter_that_gives_up_leaves_the_queue(make_lock, troubled, store, pool):
    take_elsewhere(store)
    troubled.lost = ["acquire", "acquire"]
    with pytest.raises(BackendUnreachable):
        make_lock(backend=troubled).acquire()
    assert store.inspect("lock").waiting == 0


def test_L13_an_attempt_may_be_taken_up_again_with_its_token(make_lock, troubled, store):
    """When even the clean-up did not get there, the token finds what it left."""
    lock, token = make_lock(backend=troubled), new_token()
    troubled.lost, troubled.cut = ["acquire", "acquire"], ["release"]
    with pytest.raises(BackendUnreachable):
        lock.acquire(token=token)
    assert holders(store) == [token]
    assert lock.acquire(blocking=False, token=token)
    lock.release()
    assert holders(store) == []


@pytest.mark.parametrize("trouble", ["lost", "cut"])
def test_L19_a_release_that_failed_can_be_tried_again(make_lock, troubled, store, trouble):
    """The token is kept until the store has answered; done twice is done."""
    lock = make_lock(backend=troubled)
    lock.acquire()
    getattr(troubled, trouble).extend(["release", "release"])
    with pytest.raises(BackendUnreachable):
        lock.release()
    assert (lock.held, lock.lost) == (False, False)
    with pytest.raises(LockNotOwned):
        lock.extend(1)
    lock.release()
    assert holders(store) == []
    with pytest.raises(LockNotOwned):
        lock.release()


def test_L19_a_lock_of_which_the_release_failed_is_not_renewed(make_lock, troubled, store):
    """Its lease expires if the release is not repeated."""
    lock = make_lock(backend=troubled, lease=0.6)
    lock.acquire()
    troubled.cut = ["release", "release"]
    with pytest.raises(BackendUnreachable):
        lock.release()
    eventually(lambda: holders(store) == [])


def test_a_release_reports_a_lapsed_lease_even_if_nobody_else_held_the_lock(
    make_lock, store, caplog
):
    """Redis may still have the token; another holder may also have had the lock in between."""
    lock = make_lock(lease=0.2, renew=False)
    lock.acquire()
    eventually(lambda: lock.lost)
    with pytest.raises(LockNotOwned, match=r"'lock'.*Its lease has ended"):
        lock.release()
    assert not lock.lost

    def outlive(lock, then=lambda: None):
        with lock:
            eventually(lambda: lock.lost)
            then()
        return "the end"

    with pytest.raises(LockNotOwned):
        outlive(make_lock(lease=0.2, renew=False))
    told = outlive(make_lock(lease=0.2, renew=False, raise_on_release_error=False))
    assert told == "the end"
    assert "'lock' was lost before the end of its block" in caplog.text
    assert make_lock().acquire(blocking=False)


def test_an_error_of_a_body_that_outlived_its_lease_comes_first(make_lock):
    """With a note, from Python 3.11 on, that the lock was lost as well."""
    lock = make_lock(lease=0.2, renew=False)

    def fail():
        with lock:
            eventually(lambda: lock.lost)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    notes = getattr(caught.value, "__notes__", ["its lease has ended"])
    assert len(notes) == 1
    assert "lease has ended" in notes[0]


# --- hand-over ------------------------------------------------------------------------------------


def test_L2_a_late_release_grants_nothing(make_lock, store):
    """The lease ended and another is in: comparison and hand-over are one script."""
    lock = make_lock(lease=0.2, renew=False)
    lock.acquire()
    eventually(lambda: holders(store) == [])
    successor = take_elsewhere(store)
    queue_elsewhere(store)
    with pytest.raises(LockNotOwned):
        lock.release()
    assert holders(store) == [successor]
    assert store.inspect("lock").waiting == 1


@pytest.mark.usefixtures("grants_lapse", "brisk")
def test_L3_L9_a_waiter_that_dies_with_its_grant_delays_the_next_by_the_claim_lease(
    make_lock, store, pool
):
    """The grant lives in the holder record and lapses; the element in the list only wakes."""
    token = take_elsewhere(store)
    queue_elsewhere(store)
    await_waiting(store, 1)
    waiting = acquire_in(pool, make_lock())
    await_waiting(store, 2)
    began = time.monotonic()
    give_back(store, token)
    assert waiting.result(60)
    took = time.monotonic() - began
    assert 0.4 < took < FAR, "and not when the dead waiter leaves the queue"


@pytest.mark.usefixtures("grants_lapse", "brisk")
def test_L4_a_slow_waiter_does_not_overwrite_the_new_owner(make_lock, troubled, store, pool):
    """Woken, it sleeps past its grant; another is in when it claims. It queues again."""
    token = take_elsewhere(store)
    lock = make_lock(backend=troubled)
    woken, go_on = threading.Event(), threading.Event()
    troubled.before["claim"] = lambda: (woken.set(), go_on.wait(60))
    waiting = acquire_in(pool, lock)
    await_waiting(store, 1)
    give_back(store, token)
    assert woken.wait(60)
    eventually(lambda: granted_tokens(store, "lock") == [])
    successor = take_elsewhere(store)
    go_on.set()
    await_waiting(store, 1)
    assert holders(store) == [successor]
    assert not waiting.done()
    give_back(store, successor)
    assert waiting.result(60)


@pytest.mark.full("quorum-0.9", "cluster-0.9")
@pytest.mark.parametrize("lease", [0.3, 0.9])
def test_L5_L6_an_expired_lease_leaves_neither_two_holders_nor_a_stuck_lock(
    make_lock, store, pool, lease
):
    """Holder and queue expire as data of one script, not as two keys."""
    take_elsewhere(store, lease=lease)
    waiting = [acquire_in(pool, make_lock(lease=lease, renew=False)) for _ in range(3)]
    seen = []
    eventually(lambda: seen.append(len(holders(store))) or all(w.done() for w in waiting))
    assert [w.result() for w in waiting] == [True] * 3
    assert max(seen) <= 1
    eventually(lambda: make_lock().acquire(blocking=False))


@pytest.mark.not_on_quorum("who cancels gives its turn up, which is not yet the lock")
@pytest.mark.usefixtures("waiters_stay")
def test_L7_a_grant_that_comes_just_before_the_cancel_is_kept(make_lock, troubled, store):
    """The waiter's time is up, and the releaser is quicker: not "busy" on a free lock."""
    token = take_elsewhere(store)
    lock = make_lock(backend=troubled)
    troubled.before["release"] = lambda: give_back(store, token)
    assert lock.acquire(blocking_timeout=0.1)
    assert lock.owned()
    assert lock.expires_in > 15  # claimed: a full lease, not that of the grant


@pytest.mark.usefixtures("no_heartbeat")
def test_L8_L11_a_waiter_checks_when_the_crashed_holders_lease_ends(make_lock, store):
    """It does not wait for its own timeout, which is much longer."""
    began = time.monotonic()
    take_elsewhere(store, lease=0.5)
    assert make_lock().acquire(blocking_timeout=60)
    assert 0.4 < time.monotonic() - began < FAR


@pytest.mark.usefixtures("no_heartbeat")
def test_L10_a_release_between_refusal_and_wait_is_not_missed(make_lock, troubled, store):
    token = take_elsewhere(store)
    troubled.before["wait"] = lambda: give_back(store, token)
    began = time.monotonic()
    assert make_lock(backend=troubled).acquire()
    assert time.monotonic() - began < FAR, "and not when the first lease would have ended"


def test_L10_a_wake_up_that_has_expired_is_not_missed(
    make_lock, troubled, store, key_clients, brisk
):
    """The waiter's sign of life finds the grant without it."""
    token = take_elsewhere(store)

    def hand_over_and_lose_the_wake_up():
        give_back(store, token)
        (waiter,) = granted_tokens(store, "lock")
        wake = store.keyspace.wake("lock", waiter)
        assert sum(client.delete(wake) for client in key_clients) == 1

    troubled.before["wait"] = hand_over_and_lose_the_wake_up
    assert make_lock(backend=troubled).acquire()


def test_L14_every_attempt_has_a_token_of_its_own(make_lock, store):
    """Two locks of one name, thread and process are two owners."""
    first, second, tokens = make_lock(), make_lock(), set()
    for _ in range(10):
        first.acquire()
        tokens.update(holders(store))
        assert not second.acquire(blocking=False)
        with pytest.raises(LockNotOwned):
            second.release()
        assert first.owned()
        first.release()
    assert len(tokens) == 10


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.needs_real_redis("socket time-outs")
@pytest.mark.not_on_quorum("it is about one client")
def test_L16_a_long_wait_with_a_default_client_is_no_error(redis_url, make_thread_lock, pool):
    """redis-py 8's defaults turned blpop(key, 7) into a TimeoutError after 58.9 s."""
    with redis.Redis.from_url(redis_url) as client:
        lock, waiter = make_thread_lock(backend=client), make_thread_lock(backend=client)
        with lock:
            began = time.monotonic()
            blocked = pool.submit(lock._store.wait, "lock", new_token(), 8)
            assert waiter.acquire(blocking_timeout=12) is False
            assert time.monotonic() - began >= 12
            assert blocked.result() is False
        lock._store.close()


@pytest.mark.usefixtures("renew_often")
def test_L28_client_clocks_do_not_matter(make_lock, store, pool, monkeypatch):
    """The wall clock jumps by hours at each read: order and leases do not change."""
    offsets = iter(range(0, 10**9, 7200))
    monkeypatch.setattr(time, "time", lambda: float(next(offsets)))
    token, served = take_elsewhere(store), []

    def enter(number):
        with make_lock(lease=16) as lock:
            served.append(number)
            never(lambda: lock.lost, during=0.5)  # it is renewed after 0.4 s

    entering = []
    for number in range(4):
        entering.append(pool.submit(enter, number))
        await_waiting(store, number + 1)
    give_back(store, token)
    for done in entering:
        done.result()
    assert served == [0, 1, 2, 3]


def test_L23_a_lapsed_lease_is_not_created_again(make_lock, lose_data, store):
    """Neither while the lock is free, nor after a loss of data."""
    for lose in (lambda: eventually(lambda: holders(store) == []), lose_data):
        lock = make_lock(lease=0.2, renew=False)
        lock.acquire()
        lose()
        for late in (lambda lock=lock: lock.extend(30), lock.reacquire):
            with pytest.raises(LockNotOwned):
                late()
        assert holders(store) == []
        with pytest.raises((LockNotOwned, LockLost)):
            lock.ensure_held()


def test_L24_a_refused_call_changes_nothing(make_lock, store):
    """redis-py's extend(0) deletes the key."""
    lock = make_lock()
    lock.acquire()
    with pytest.raises(ValueError, match="additional_time"):
        lock.extend(0)
    assert lock.owned()


def test_a_key_of_another_program_is_named(make_lock, key_clients, store):
    for client in key_clients:
        client.set(store.keyspace.lock("lock").holders, "theirs")
    with pytest.raises(BackendRefused, match="prefix"):
        make_lock().acquire()


# --- processes and asynchronous exceptions --------------------------------------------------------


@pytest.mark.not_in_memory("a forked child is refused its copy of it")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("renew_often")
def test_L21_a_forked_child_owns_nothing(make_thread_lock, store):
    """Its release does not affect its parent's lock, and it can acquire its own locks."""
    lock = make_thread_lock(lease=20)
    lock.acquire()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert not lock.held
            assert not lock.owned()
            with pytest.raises(LockNotOwned):
                lock.release()
            assert not lock.acquire(blocking=False)
            assert not lock.acquire(blocking_timeout=0.2)
            with make_thread_lock("other", lease=20) as other:
                eventually(lambda: other._watchdog.renewed >= 2)
                assert other.owned()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lock.owned()
    lock.release()


@IN_THREAD
@pytest.mark.needs_real_redis("INFO tells who blocks")
@pytest.mark.usefixtures("no_heartbeat")
def test_L18_an_interrupted_wait_leaves_the_queue(make_thread_lock, store, pool, each_client):
    """Ctrl-C or a soft time limit while the thread blocks in the socket."""

    def interrupt(number, frame):
        raise SoftTimeLimitExceeded

    def interrupt_once_it_waits(main):
        # Not merely queued: interrupted while it connects, redis-py leaves an open socket behind.
        eventually(
            lambda: sum(each.info("clients")["blocked_clients"] for each in each_client) == 1
        )
        signal.pthread_kill(main, signal.SIGUSR1)

    take_elsewhere(store)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        pool.submit(interrupt_once_it_waits, threading.get_ident())
        with pytest.raises(SoftTimeLimitExceeded):
            make_thread_lock().acquire(blocking_timeout=20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert store.inspect("lock").waiting == 0
    assert not make_thread_lock().acquire(blocking_timeout=0.1)


MODULES = (hold_module, lock_module, plans_module, turn_module, watchdog_module)
"""Those that a thread passes on the way to a lock and back."""


def just_acquire(lock):
    lock.acquire()


def acquire_and_release(lock):
    lock.acquire()
    lock.release()


def use_with(lock):
    with lock:
        pass


@pytest.mark.full
@IN_THREAD
@pytest.mark.parametrize("contended", [False, True], ids=["free", "handed over"])
@pytest.mark.parametrize("work", [just_acquire, acquire_and_release, use_with])
def test_L18_an_asynchronous_exception_at_any_line_leaks_nothing(
    make_thread_lock, troubled, store, work, contended
):
    """Released, or tracked: then the holder can release it. Never queued, nor renewed unseen."""
    at, interrupted = 0, True
    while interrupted:
        at += 1
        lock = make_thread_lock(backend=troubled)
        if contended:
            token = take_elsewhere(store)
            troubled.before["wait"] = lambda token=token: give_back(store, token)
        with Injected(at, *MODULES) as injected, suppress(SoftTimeLimitExceeded):
            work(lock)
        interrupted = injected.where is not None
        if contended:  # perhaps it was interrupted itself
            troubled.before.clear()
            give_back(store, token)
        if lock.held:
            assert holders(store) == [lock._hold.lease.token], injected.where
        if lock._hold is not None:  # tracked, perhaps let go already: a second release is no error
            lock.release()
        assert holders(store) == [], injected.where
        assert store.inspect("lock").waiting == 0, injected.where
        assert lock._watchdog.watching() == (), injected.where
    assert at > 30  # it did interrupt
