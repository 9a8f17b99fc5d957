"""AsyncLock: cancelled at any await, it leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import types
import weakref
from contextlib import asynccontextmanager, suppress

import pytest
import redis.asyncio

from celery_singleton_lock.core import loop_tasks
from celery_singleton_lock.core.model import Claim, Ending, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.errors import (
    BackendUnreachable,
    ConfigurationError,
    LockLost,
    LockNotOwned,
    LockReentered,
    LockTimeout,
)
from celery_singleton_lock.lock import aio, async_lease_watchdog, uncancelled_calls
from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.lock.async_lease_watchdog import AsyncWatchdog
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.redis.sync import RedisStore
from support.garbage import no_earlier_garbage
from support.renewals import await_renewals
from support.waiting import eventually

pytestmark = pytest.mark.contract


@pytest.fixture
def url(redis_url):
    return redis_url


@pytest.fixture
def store(redis_client):
    """The same locks, seen from a thread."""
    store = RedisStore(redis_client)
    yield store
    store.close()


@asynccontextmanager
async def connected(url):
    """A store with its own client; at the end no asyncio task of this package may remain."""
    async with redis.asyncio.Redis.from_url(url) as client:
        yield AsyncRedisStore(client)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


def in_loop(url, scene):
    """Play a scene in a loop of its own: a coroutine function that takes a store."""

    async def play():
        async with connected(url) as store:
            return await asyncio.wait_for(scene(store), 120)

    return asyncio.run(play())


def holders(store, name="lock"):
    return [holder.token for holder in store.inspect(name).holders]


def taken(store, name="lock", lease=30.0):
    """Acquire the lock as another client; return the token."""
    owner = Owner(new_token())
    assert store.acquire(owner, Claim(name, lease=lease)).verdict == "granted"
    return owner.token


def renews(lock):
    """Whether the watchdog of a lock has a timer, or a round under way."""
    return lock._watchdog._timer is not None or lock._watchdog._task is not None


async def renewed(store, name="lock"):
    """Wait until a lease is renewed twice; the loop is free meanwhile."""
    await asyncio.to_thread(await_renewals, store, name)


async def until(predicate):
    """Wait for a condition of a synchronous store."""
    while not predicate():  # noqa: ASYNC110  # the fact is in a server
        await asyncio.sleep(0.005)


# --- cancelled at every await ---------------------------------------------------------------------


class Cancelled:
    """Runs a coroutine, and cancels a task when the coroutine waits for the n-th time.

    Args:
        at: which time, from 1.
        late: only when what it waits for is there, in the same round of the loop: the answer and
            the cancellation meet.
    """

    def __init__(self, at, *, late=False):
        self.left, self.late, self.struck, self.task = at, late, False, None

    @types.coroutine
    def run(self, coroutine):
        value, error = None, None
        while True:
            try:
                future = coroutine.throw(error) if error else coroutine.send(value)
            except StopIteration as end:
                return end.value
            self.left -= 1
            if self.left == 0:
                self._strike(future)
            value, error = None, None
            try:
                value = yield future
            except BaseException as raised:  # noqa: BLE001  # thrown into the coroutine
                error = raised

    def _strike(self, future):
        self.struck = True
        if self.late and future is not None:
            future.add_done_callback(lambda _: self.task.cancel())
        else:
            self.task.cancel()

    def work(self, coroutine):
        """Return the work as a task that is struck in its own waits."""
        self.task = asyncio.ensure_future(as_task(self.run(coroutine)))
        return self.task


class CancelledBetween(Cancelled):
    """Cancels the task at each stage of a request: unsent, sent, answered."""

    def work(self, coroutine):
        self.task = asyncio.ensure_future(coroutine)
        return self.task

    def sending(self, send):
        return lambda calls, call: send(calls, as_task(self.run(call)))


async def just_acquire(lock):
    return await lock.acquire()


async def acquire_and_release(lock):
    await lock.acquire()
    await lock.release()


async def use_with(lock):
    async with lock:
        await asyncio.sleep(0)


async def ask(lock):
    async with lock:
        await lock.owned()
        await lock.extend(1)
        await lock.ensure_held()


async def give_up(lock):
    assert not await lock.acquire(blocking_timeout=0.05)


@pytest.fixture(params=["while it waits", "as the answer comes", "while it is asked"])
def strike(request, monkeypatch):
    """How the n-th await is interrupted."""
    send = aio.UncancelledCalls._send

    def at(number):
        if request.param == "while it is asked":
            cancelled = CancelledBetween(number)
            monkeypatch.setattr(aio.UncancelledCalls, "_send", cancelled.sending(send))
            return cancelled
        return Cancelled(number, late=request.param == "as the answer comes")

    return at


@pytest.mark.parametrize("work", [just_acquire, acquire_and_release, use_with, ask])
def test_L18_a_task_cancelled_at_any_await_leaves_nothing(url, store, work, strike):
    """Released, or held by a task that knows it. Nobody in the queue, and no renewal unseen."""
    in_loop(url, lambda there: cancel_everywhere(there, store, work, strike, contended=False))


@pytest.mark.parametrize("work", [just_acquire, acquire_and_release, use_with])
def test_L18_a_waiter_cancelled_at_any_await_leaves_nothing(url, store, work, strike):
    """The lock is handed to it at the moment in which it begins to wait."""
    in_loop(url, lambda there: cancel_everywhere(there, store, work, strike, contended=True))


def test_L18_a_waiter_that_is_cancelled_at_any_await_leaves_the_queue(url, store, strike):
    """The holder has not noticed anything."""

    async def scene(there):
        token, at, struck = taken(store), 0, True
        while struck:
            at += 1
            await there.client.connection_pool.disconnect()  # it has to connect, too
            cancelled = strike(at)
            with suppress(asyncio.CancelledError):
                await cancelled.work(give_up(AsyncLock(there, "lock")))
            struck = cancelled.struck
            await until(lambda: not loop_tasks.tasks)
            assert holders(store) == [token], at
            assert store.inspect("lock").waiting == 0, at
        assert at > 2  # it did strike

    in_loop(url, scene)


async def cancel_everywhere(there, store, work, strike, *, contended):
    at, struck = 0, True
    handing = Handing(there, store)
    while struck:
        at += 1
        await there.client.connection_pool.disconnect()  # it has to connect, too
        lock = AsyncLock(handing if contended else there, "lock", task_local=False)
        handing.token = taken(store) if contended else None
        cancelled = strike(at)
        with suppress(asyncio.CancelledError):
            await cancelled.work(work(lock))
        struck = cancelled.struck
        handing.end()
        if lock.held:  # it was cancelled behind its end, or between two verbs
            assert holders(store) == [lock.token], at
            await lock.release()
        await until(lambda: not loop_tasks.tasks)
        assert holders(store) == [], at
        assert store.inspect("lock").waiting == 0, at
        assert lock._watchdog.watching() == (), at
    assert at > (2 if contended else 1)  # it did strike


async def as_task(awaitable):
    return await awaitable


class Handing(AsyncRedisStore):
    """A store that grants the lock at the moment when a wait starts."""

    def __init__(self, there, store):
        super().__init__(there.client)
        self._store, self.token = store, None

    async def wait(self, name, token, timeout):
        self.end()
        return await super().wait(name, token, timeout)

    def end(self):
        if self.token is not None:
            self._store.release("lock", self.token, Ending.FINAL)
            self.token = None


def test_a_cancelled_wait_leaves_the_queue_and_the_next_in_line_is_served(url, store):
    """Three wait; the second is cancelled, and the others get the lock in order."""

    async def scene(there):
        token, served = taken(store), []

        async def enter(number):
            async with AsyncLock(there, "lock"):
                served.append(number)

        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(enter(number)))
            await until(lambda number=number: store.inspect("lock").waiting == number + 1)
        tasks[1].cancel()
        await asyncio.wait({tasks[1]})
        assert tasks[1].cancelled()
        assert store.inspect("lock").waiting == 2
        store.release("lock", token, Ending.FINAL)
        await asyncio.gather(tasks[0], tasks[2])
        assert served == [0, 2]

    in_loop(url, scene)


def test_a_waiter_whose_cancellation_is_lost_leaves_the_queue_too(url, store):
    """As in ``asyncio.wait_for`` before Python 3.12, which redis-py uses."""

    class Deaf(AsyncRedisStore):
        async def wait(self, *about):
            with suppress(asyncio.CancelledError):
                waits.set()
                await asyncio.Event().wait()
            return await super().wait(*about)

    waits = asyncio.Event()

    async def scene(there):
        token, deaf = taken(store), Deaf(there.client)
        task = asyncio.create_task(just_acquire(AsyncLock(deaf, "lock")))
        await waits.wait()
        task.cancel()
        await asyncio.wait({task}, timeout=60)
        assert task.cancelled()
        assert holders(store) == [token]
        assert store.inspect("lock").waiting == 0

    in_loop(url, scene)


def test_T22_many_cancellations_leave_no_second_holder_and_no_waiter(url, store):
    """Thirty tasks come again and again; each is cancelled at some moment, or is not."""

    async def scene(there):
        dice, inside, most, turns = random.Random(22), [0], [0], [0]

        async def work():
            async with AsyncLock(there, "lock"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                try:
                    await asyncio.sleep(0)
                    turns[0] += 1
                finally:
                    inside[0] -= 1

        async def come_again():
            for _ in range(8):
                task = asyncio.create_task(work())
                await asyncio.wait({task}, timeout=dice.choice([0.001, 0.01, 0.05, 60]))
                task.cancel()
                await asyncio.wait({task})

        await asyncio.gather(*(come_again() for _ in range(30)))
        assert most == [1]
        assert turns[0] > 10
        await until(lambda: not loop_tasks.tasks)
        assert holders(store) == []
        assert store.inspect("lock").waiting == 0
        assert await AsyncLock(there, "lock", renew=False, task_local=False).acquire(blocking=False)
        store.reset("lock")

    in_loop(url, scene)


def test_a_cancelled_release_releases(url, store):
    """The task is cancelled nevertheless."""

    async def scene(there):
        lock = AsyncLock(there, "lock")

        async def work():
            await lock.acquire()
            asyncio.current_task().cancel()
            await lock.release()

        task = asyncio.create_task(work())
        await asyncio.wait({task})
        assert task.cancelled()
        await until(lambda: not loop_tasks.tasks)
        assert holders(store) == []

    in_loop(url, scene)


def test_a_timeout_around_a_wait_raises_timeout_error(url, store):
    """For asyncio; it counts cancellations."""

    async def scene(there):
        taken(store)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(AsyncLock(there, "lock").acquire(), 0.1)
        await until(lambda: not loop_tasks.tasks)
        assert store.inspect("lock").waiting == 0

    in_loop(url, scene)


@pytest.mark.usefixtures("renew_often")
def test_what_a_wait_for_has_acquired_is_held_by_the_object(url, store):
    """Before Python 3.12 it runs in a separate task, which ends with it."""

    async def scene(there):
        lock = AsyncLock(there, "lock", lease=20)
        assert await asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
        gc.collect()
        assert lock.held
        await renewed(store)
        assert await lock.owned()
        await lock.release()
        assert holders(store) == []

    in_loop(url, scene)


class Stalled(AsyncRedisStore):
    """A store in which one method gets its reply only after a signal."""

    def __init__(self, there, verb):
        super().__init__(there.client)
        self.go_on, self.asked = asyncio.Event(), asyncio.Event()
        real = getattr(self, verb)

        async def stalled(*args, **options):
            answer = await real(*args, **options)
            self.asked.set()
            await self.go_on.wait()
            return answer

        setattr(self, verb, stalled)


@pytest.mark.parametrize("verb", ["acquire", "release"])
def test_a_server_that_does_not_answer_holds_no_cancelled_task_for_ever(
    url, store, verb, monkeypatch
):
    """It ends after its timeout; its request is undone when the reply comes."""
    for module in (async_lease_watchdog, uncancelled_calls):
        monkeypatch.setattr(module, "PATIENCE", 0.1)

    async def scene(there):
        stalled = Stalled(there, verb)
        lock = AsyncLock(stalled, "lock", renew=False)
        task = asyncio.create_task(acquire_and_release(lock))
        await stalled.asked.wait()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=60)
        assert done == {task}
        assert task.cancelled()
        stalled.go_on.set()
        await until(lambda: not loop_tasks.tasks)
        assert holders(store) == []

    in_loop(url, scene)


def test_a_loop_that_ends_while_redis_is_silent_leaves_neither_task_nor_connection(
    url, monkeypatch, caplog
):
    """``Task was destroyed but it is pending`` and ``unclosed Connection`` stood at the end."""
    for module in (async_lease_watchdog, uncancelled_calls):
        monkeypatch.setattr(module, "PATIENCE", 0.1)
    monkeypatch.setattr(loop_tasks, "LAST_WAIT", 30)
    no_earlier_garbage(caplog)

    async def main():
        client = redis.asyncio.Redis.from_url(url)
        silent = AsyncRedisStore(client)
        silent.release = lambda *about, **more: asyncio.Event().wait()
        await AsyncLock(silent, "lock", task_local=False, renew=False).acquire()
        waiting.append(asyncio.create_task(AsyncLock(silent, "lock").acquire()))
        await until(lambda: silent._blocking._waiting)
        await client.aclose()

    waiting = []
    asyncio.run(main())
    assert waiting.pop().cancelled()
    assert not loop_tasks.tasks
    gc.collect()
    assert "destroyed" not in caplog.text


def test_a_loop_begins_while_another_thread_begins_and_ends_loops():
    """A lock raised RuntimeError or KeyError then: a thread was switched at the wrong moment."""

    class Loop(asyncio.SelectorEventLoop):
        def is_closed(self):
            if super().is_closed() and not switched:
                switched.append(True)
                thread = threading.Thread(target=careless)
                thread.start()
                thread.join()
            return super().is_closed()

    def careless():
        loop = Loop()
        loop.run_until_complete(turn())
        loop.close()

    async def turn():
        loop_tasks.start(asyncio.sleep(0))
        await asyncio.sleep(0)

    switched = [True]
    careless()
    switched.clear()
    asyncio.run(turn())
    assert switched
    asyncio.run(turn())
    assert not [loop for loop in loop_tasks._ends if loop.is_closed()]
    assert not loop_tasks.tasks


def test_no_reference_to_an_ended_loop_remains(url):
    """Neither after asyncio.run, nor of a loop that was closed without its generators."""

    async def turn():
        async with redis.asyncio.Redis.from_url(url) as client, AsyncLock(client, "lock"):
            ended.append(weakref.ref(asyncio.get_running_loop()))

    ended = []
    asyncio.run(turn())
    assert not [loop for loop in loop_tasks._ends if loop.is_closed()]
    careless = asyncio.new_event_loop()
    careless.run_until_complete(turn())
    careless.close()
    del careless
    asyncio.run(turn())
    gc.collect()
    assert [loop() for loop in ended] == [None] * 3


def test_an_error_that_a_cancelled_task_would_have_seen_is_logged(url, caplog, monkeypatch):
    """The task gets only its cancellation; the lease expires."""
    monkeypatch.setattr(uncancelled_calls, "PATIENCE", 60)

    async def scene(there):
        async def refuse(*args, **options):
            await asyncio.sleep(0.01)
            raise BackendUnreachable("gone")

        there.release = refuse
        lock = AsyncLock(there, "lock", task_local=False, lease=0.3)
        await lock.acquire()
        task = asyncio.create_task(lock.release())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    in_loop(url, scene)
    assert "a request of a cancelled task failed: gone" in caplog.text


# --- who holds ------------------------------------------------------------------------------------


def test_tasks_that_share_one_object_exclude_each_other(url):
    """Read, pause, write, without a lost update; each holds for itself."""

    async def scene(there):
        lock, counter = AsyncLock(there, "lock"), [0]

        async def add():
            for _ in range(5):
                async with lock:
                    seen = counter[0]
                    await asyncio.sleep(0)
                    counter[0] = seen + 1

        await asyncio.gather(*(add() for _ in range(6)))
        assert counter == [30]

    in_loop(url, scene)


def test_a_task_does_not_release_what_another_holds(url):
    async def scene(there):
        lock = AsyncLock(there, "lock")
        async with lock:
            with pytest.raises(LockReentered):
                await lock.acquire()
            told = "does not hold it: .* another task has .*To share it use task_local="
            with pytest.raises(LockNotOwned, match=told):
                await asyncio.create_task(as_task(lock.release()))
            assert await lock.owned()

    in_loop(url, scene)


def test_the_error_after_a_blocked_event_loop_names_it_as_a_possible_cause(url, redis_client):
    """Its lease has ended although it is renewed."""

    async def scene(there):
        lock = AsyncLock(there, "lock", lease=0.1)
        await lock.acquire()
        eventually(lambda: not lock.held)  # in the loop's thread: nothing is renewed meanwhile
        redis_client.flushall()
        with pytest.raises(LockNotOwned, match="not answer or the event loop was blocked; or an"):
            await lock.release()

    in_loop(url, scene)


def test_a_task_that_ends_without_release_is_not_renewed(url, store):
    """Nothing could release the lock."""

    async def scene(there):
        lock = AsyncLock(there, "lock", lease=0.4)
        assert await asyncio.create_task(just_acquire(lock))
        gc.collect()
        await until(lambda: holders(store) == [])
        await until(lambda: not renews(lock))

    in_loop(url, scene)


def test_a_task_that_ends_without_release_is_reported_once_and_not_renewed(url, store, caplog):
    """Also while the task object is referenced, as by asyncio.gather's caller."""

    async def scene(there):
        lock = AsyncLock(there, "lock", lease=0.4)
        other = AsyncLock(there, "other", lease=30)
        await other.acquire()
        task = asyncio.create_task(just_acquire(lock), name="forgetful")
        await task
        await until(lambda: holders(store) == [])
        assert task.done()
        assert await other.owned()
        await other.release()

    in_loop(url, scene)
    (told,) = [each.getMessage() for each in caplog.records if "forgetful" in each.getMessage()]
    assert "lock 'lock' is no longer renewed: task 'forgetful' has acquired it" in told


def test_an_object_that_gets_two_grants_at_once_keeps_one(url, store):
    """The second permit of the semaphore is released, and the second caller gets an error."""

    async def scene(there):
        lock = AsyncLock(there, "lock", limit=2, task_local=False)
        ended = await asyncio.gather(lock.acquire(), lock.acquire(), return_exceptions=True)
        assert sorted(type(each).__name__ for each in ended) == ["LockReentered", "bool"]
        assert holders(store) == [lock.token]
        await lock.release()
        assert holders(store) == []

    in_loop(url, scene)


def test_threads_and_tasks_contend_for_the_same_name(url, redis_client):
    """In the order of their arrival."""

    async def scene(there):
        lock, served = AsyncLock(there, "lock"), []
        await lock.acquire()
        thread = threading.Thread(target=use_in_thread, args=(redis_client, served))
        thread.start()
        store = RedisStore(redis_client)
        await until(lambda: store.inspect("lock").waiting == 1)
        task = asyncio.create_task(use_in_task(there, served))
        await until(lambda: store.inspect("lock").waiting == 2)
        await lock.release()
        await task
        thread.join()
        assert served == ["thread", "task"]

    in_loop(url, scene)


def use_in_thread(client, served):
    with Lock(client, "lock", renew=False):
        served.append("thread")


async def use_in_task(store, served):
    async with AsyncLock(store, "lock"):
        served.append("task")


# --- renewal --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("renew_often")
def test_a_held_lock_is_renewed_and_the_watchdog_ends_with_it(url, store):
    async def scene(there):
        async with AsyncLock(there, "lock", lease=20) as lock:
            await renewed(store)
            assert holders(store) == [lock.token]
            assert not lock.lost
            assert renews(lock)
        await until(lambda: not renews(lock))

    in_loop(url, scene)


@pytest.mark.usefixtures("renew_often")
def test_a_lock_is_renewed_although_all_tasks_are_cancelled(url, store):
    """As at the end of asyncio.run: a task that cleans up under its lock keeps it."""

    async def scene(there):
        asked, real = [], there.extend

        async def extend(leases):
            asked.append(leases)
            if len(asked) == 1:
                await asyncio.sleep(60)
            return await real(leases)

        there.extend = extend
        async with AsyncLock(there, "lock", lease=20) as lock:
            await until(lambda: asked)
            for task in asyncio.all_tasks():
                if task.get_name() == "csl-watchdog":
                    task.cancel()
            await until(lambda: len(asked) > 3)
            assert await lock.owned()

    in_loop(url, scene)


def test_a_loop_that_is_closed_while_a_lock_is_held_leaves_no_task_of_ours(url, caplog):
    """``Task was destroyed but it is pending`` stood at the end of the program."""
    no_earlier_garbage(caplog)
    loop = asyncio.new_event_loop()
    client = redis.asyncio.Redis.from_url(url)
    lock = AsyncLock(client, "lock", lease=30)
    loop.run_until_complete(lock.acquire())
    assert asyncio.all_tasks(loop) == set()
    loop.run_until_complete(client.aclose())
    loop.close()
    del lock, client
    gc.collect()
    assert "pending" not in caplog.text


@pytest.mark.usefixtures("renew_often")
def test_T10_a_holder_is_notified_of_its_loss_and_can_stop_its_work(url, store):
    """The callback runs in the loop, so that it can cancel the task."""

    async def scene(there):
        heard = []

        async def work():
            me = asyncio.current_task()
            lock = AsyncLock(
                there, "lock", lease=20, on_lost=lambda *lost: (heard.append(lost), me.cancel())
            )
            async with lock:
                heard.append(lock.token)
                store.reset("lock")
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.wait({task})
        assert task.cancelled()
        token, lost = heard
        assert lost == ("lock", token)

    in_loop(url, scene)


@pytest.mark.usefixtures("renew_often")
def test_T8_L12_no_error_ends_the_watchdog(url, store, caplog):
    """Neither a lost connection nor an internal error; the lease is renewed."""

    async def scene(there):
        troubles = [BackendUnreachable("cut"), ValueError("a fault of ours"), OSError("odd")]
        real = there.extend

        async def extend(leases):
            if troubles:
                raise troubles.pop()
            return await real(leases)

        there.extend = extend
        async with AsyncLock(there, "lock", lease=20) as lock:
            await until(lambda: not troubles)
            await renewed(store)
            assert await lock.owned()

    in_loop(url, scene)
    assert "could not be renewed" in caplog.text


@pytest.mark.usefixtures("renew_often")
def test_T9_a_renewal_on_its_way_ends_before_the_release_is_sent(url, monkeypatch):
    """Also if other locks are held."""
    monkeypatch.setattr(async_lease_watchdog, "PATIENCE", 60)

    async def scene(there):
        said, real = [], (there.extend, there.release)
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def extend(leases):
            if "lock" not in [name for name, _, _ in leases]:
                return await real[0](leases)
            said.append("asks")
            asked.set()
            await go_on.wait()
            answers = await real[0](leases)
            said.append("renewed")
            return answers

        async def release(*args):
            said.append("releases")
            return await real[1](*args)

        there.extend, there.release = extend, release
        other = AsyncLock(there, "other", lease=30)
        await other.acquire()
        lock = AsyncLock(there, "lock", lease=20, task_local=False)
        await lock.acquire()
        await asked.wait()
        leaving = asyncio.create_task(lock.release())
        for _ in range(10):  # it could send its request by now
            await asyncio.sleep(0)
        go_on.set()
        await leaving
        assert said == ["asks", "renewed", "releases"]
        await other.release()

    in_loop(url, scene)


def test_T11_a_loop_blocked_for_longer_than_the_lease_notices_the_loss(url, store):
    """Nothing was renewed meanwhile; validity is counted, not assumed."""

    async def scene(there):
        lock = AsyncLock(there, "lock", lease=0.3)
        await lock.acquire()
        threading.Event().wait(0.5)  # work that does not await
        assert lock.lost
        with pytest.raises(LockLost):
            await lock.ensure_held()
        taken(store)
        with pytest.raises(LockNotOwned):
            await lock.release()

    in_loop(url, scene)


@pytest.mark.usefixtures("renew_often")
def test_a_lock_may_be_made_once_and_used_in_loop_after_loop(url, store):
    """With a client that keeps no connection from loop to loop."""
    locks = []

    async def scene(there):
        locks[:] = locks or [AsyncLock(there, "lock", lease=20)]
        async with locks[0]:
            await renewed(store)
        await there.client.connection_pool.disconnect()

    async def again():
        async with locks[0]:
            await renewed(store)
            assert await locks[0].owned()
        await locks[0]._store.client.connection_pool.disconnect()

    in_loop(url, scene)
    asyncio.run(again())
    assert holders(store) == []
    assert not locks[0].held


# --- connections and words ------------------------------------------------------------------------


def test_waiters_do_not_use_up_the_connection_pool(url, store):
    """Ten waiters and a pool of two connections: the holder's release is executed at once."""

    async def scene(there):
        pool = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=2, timeout=30)
        small = redis.asyncio.Redis(connection_pool=pool)
        first = AsyncLock(small, "lock")
        await first.acquire()
        others = [asyncio.create_task(use_in_task(AsyncRedisStore(small), [])) for _ in range(10)]
        await until(lambda: store.inspect("lock").waiting == 10)
        await first.release()
        await asyncio.gather(*others)
        assert first._store._blocking._idle == []
        await pool.disconnect()

    in_loop(url, scene)


@pytest.mark.needs_real_redis("INFO tells who is connected")
def test_without_waiters_no_connection_stays_open(url, store, redis_client):
    """So a lock has nothing to close: the client is closed, and that is all."""

    async def scene(there):
        before = redis_client.info("clients")["connected_clients"]
        token = taken(store)
        task = asyncio.create_task(use_in_task(there, []))
        await until(lambda: redis_client.info("clients")["blocked_clients"] == 1)
        store.release("lock", token, Ending.FINAL)
        await task
        await until(lambda: redis_client.info("clients")["connected_clients"] <= before + 1)

    in_loop(url, scene)


def test_the_error_after_a_wait_names_the_holder(url, store):
    async def scene(there):
        async with AsyncLock(there, "lock", lease=20) as lock:
            assert (await lock.owner()).token == lock.token
            with pytest.raises(LockTimeout, match=r"after a wait of 0\.05 s") as caught:
                async with AsyncLock(there, "lock", blocking_timeout=0.05):
                    pytest.fail("both are in")
        assert caught.value.holder.startswith(f"pid {os.getpid()} on ")
        assert 5 < caught.value.expires_in <= 20
        assert await lock.owner() is None

    in_loop(url, scene)


def test_a_reset_takes_the_lock_from_any_holder(url, store):
    async def scene(there):
        taken(store)
        lock = AsyncLock(there, "lock")
        assert await lock.locked()
        assert await lock.reset() == 1
        assert not await lock.locked()
        assert await lock.reset() == 0

    in_loop(url, scene)


@pytest.mark.parametrize(
    ("backend", "options", "says"),
    [
        (redis.Redis(), {}, r"not a redis\.Redis. For threads use Lock\.$"),
        (object(), {}, "AsyncRedisStore"),
        (redis.asyncio.Redis(), {"on_lost": acquire_and_release}, "plain function"),
        (redis.asyncio.Redis(), {"task_local": 1}, "task_local"),
        (redis.asyncio.Redis(), {"lease": 0}, "lease"),
        (AsyncRedisStore(redis.asyncio.Redis()), {"prefix": "mine"}, "a keyspace"),
    ],
)
def test_invalid_arguments_are_refused_by_the_constructor(backend, options, says):
    with pytest.raises(ConfigurationError, match=says):
        AsyncLock(backend, "lock", **options)


def test_locks_of_one_client_share_a_watchdog():
    """However many are made."""
    client = redis.asyncio.Redis()
    first, second = AsyncLock(client, "a"), AsyncLock(client, "b")
    assert first._watchdog is second._watchdog
    assert isinstance(first._watchdog, AsyncWatchdog)
    assert AsyncLock(client, "a", prefix="mine")._watchdog is not first._watchdog
    assert first._store.client is client


def test_a_client_that_threads_have_used_is_refused_all_the_same(redis_client, redis_url):
    """Also in reverse: an existing watchdog is for one kind of client."""
    with Lock(redis_client, "a", lease=30):
        pass
    with pytest.raises(ConfigurationError, match="AsyncLock needs"):
        AsyncLock(redis_client, "a")

    async def use_and_share():
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            async with AsyncLock(client, "a", lease=30):
                pass
            with pytest.raises(ConfigurationError, match="A Lock needs"):
                Lock(client, "a")

    asyncio.run(use_and_share())
