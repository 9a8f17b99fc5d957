"""Workers in threads of this process and locks in its memory: no Redis, and a clock that moves."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from celery import Celery, states
from celery.exceptions import ImproperlyConfigured
from celery.worker.worker import WorkController

from celery_singleton_lock import (
    ConfigurationError,
    Lock,
    LockConflict,
    LockedTask,
    LockWaitTimeout,
    current_lock,
)
from celery_singleton_lock.testing import SingletonLocks, worker_in_thread
from support.waiting import eventually

pytestmark = pytest.mark.integration

NAME = "account:42"


@pytest.fixture(scope="module")
def shop():
    """An app, and what its tasks note."""
    app = Celery("in-memory", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_backend="memory://kit", singleton_lock_eager=True)
    noted, gates = [], {"open": threading.Event()}

    def task(name, body, **options):
        options.setdefault("lock_key", "account:{a}")
        return app.task(bind=True, base=LockedTask, name=name, shared=False, **options)(body)

    def settle(self, a, n=0):
        noted.append(n)
        return n

    def long(self, a):
        noted.append("long")
        gates["open"].wait(120)
        return self.lock.held

    def once_more(self, a):
        noted.append(self.request.retries)
        if not self.request.retries:
            raise self.retry(countdown=0)

    def unlocked(a):
        noted.append("unlocked")

    yield SimpleNamespace(
        app=app,
        noted=noted,
        gates=gates,
        settle=task("settle", settle),
        long=task("long", long, lock_lease=30),
        two=task("two", long, lock_key="two:{a}", lock_limit=2),
        patient=task("patient", settle, lock_wait_timeout=600),
        waits=task("waits", settle, lock_on_conflict="wait", lock_wait_timeout=600),
        skips=task("skips", settle, lock_on_conflict="skip"),
        fails=task("fails", settle, lock_on_conflict="fail"),
        full=task("full", settle, lock_max_waiting=0, lock_on_full="skip"),
        requeued=task("requeued", settle, lock_on_conflict="requeue", lock_requeue_delay=60),
        once_more=task("once_more", once_more),
        settles=task("settles", settle, lock_debounce=60),
        follows=task("follows", settle, lock_unique="until_done", lock_on_duplicate="follow"),
        relaxed=task("relaxed", long, lock_mode="off"),
        plain=app.task(name="plain", shared=False)(unlocked),
    )
    app.close()


@pytest.fixture(scope="module")
def worker(shop):
    """One worker for all tests, in a thread."""
    with worker_in_thread(shop.app) as worker:
        yield worker


@pytest.fixture
def locks(shop):
    """The locks, empty."""
    shop.noted.clear()
    shop.gates["open"].clear()
    with SingletonLocks(shop.app) as locks:
        yield locks
        shop.gates["open"].set()
        for name in (NAME, "two:1"):
            locks.assert_free(name)


def running(shop, task, *args):
    """Send a task that runs until the gate is opened, and wait until it does."""
    result = task.delay(*args)
    eventually(lambda: "long" in shop.noted)
    return result


def test_parked_tasks_run_in_their_order(shop, worker, locks):
    with locks.hold(NAME):
        results = [shop.settle.delay(42, n) for n in range(5)]
        parked = locks.assert_parked(lock=NAME, count=5)
        assert [each.task_id for each in parked] == [result.id for result in results]
        assert locks.holders(NAME)[0].task == "the test's hold()"
        assert shop.noted == []
    for result in results:
        locks.assert_ran_alone(result, lock=NAME)
    locks.assert_ran_alone(lock=NAME)
    assert shop.noted == [0, 1, 2, 3, 4]


def test_a_settling_task_is_parked_until_its_quiet_period_ends(shop, worker, locks):
    """A test could not wait for it, and a lock with such a task was free."""
    with locks.time.frozen() as frozen:
        first, newest = shop.settles.delay(42, 1), shop.settles.delay(42, 2)
        (parked,) = locks.assert_parked(newest, waits_for="settling")
        assert (parked.state, parked.task_id) == ("settling", newest.id)
        locks.assert_skipped(first)
        assert locks.assert_parked(lock=NAME, count=1, waits_for="settling") == (parked,)
        with pytest.raises(AssertionError, match=r"is not free.*waiting: settles.*settling"):
            locks.assert_free(NAME, timeout=0.1)
        with pytest.raises(AssertionError, match="does not wait for 'rate'"):
            locks.assert_parked(newest, waits_for="rate", timeout=0.1)
        with pytest.raises(AssertionError, match="it settled before it queued for the lock"):
            locks.assert_skipped(newest, timeout=0.1)
        assert 59 < locks.next_start(NAME) <= 60
        frozen.advance(locks.next_start(NAME) - 1)
        locks.assert_parked(newest)
        frozen.advance(locks.next_start(NAME))
        locks.assert_ran_alone(newest, lock=NAME)
    assert shop.noted == [2]
    assert locks.next_start(NAME) == 0


def test_a_settling_task_does_not_wait_for_what_the_queue_waits_for(shop, worker, locks):
    with locks.hold(NAME):
        settles, queued = shop.settles.delay(42), shop.settle.delay(42)
        locks.assert_parked(queued, waits_for="holder")
        locks.assert_parked(settles, waits_for="settling")
        assert [each.task_id for each in locks.assert_parked(lock=NAME, count=2)] == [
            queued.id,
            settles.id,
        ]
        assert locks.next_start(NAME) == 0
    locks.assert_ran_alone(queued)
    locks.time.advance(60)
    locks.assert_ran_alone(settles)


def test_the_story_of_a_duplicate_that_follows_says_that_it_did_not_run(shop, worker, locks):
    """It has no lock, because its body does not run: that it "ran without the lock" is wrong."""
    with locks.hold(NAME):
        first, second = shop.follows.delay(42, 1), shop.follows.delay(42, 1)
        locks.assert_parked(second, waits_for="following")
    locks.assert_ran_alone(first)
    told = r"did not run: it ended with the result of another task.*waited for the result of the "
    with pytest.raises(AssertionError, match=f"(?s){told}"):
        locks.assert_ran_alone(second)
    assert shop.noted == [1]


def test_a_retry_is_a_run_of_its_own(shop, worker, locks):
    result = shop.once_more.delay(42)
    eventually(lambda: shop.noted == [0, 1])
    locks.assert_ran_alone(result)


def test_skipped_failed_and_completed_tasks_are_distinguished(shop, worker, locks):
    with locks.hold(NAME):
        for task in (shop.skips, shop.full):
            locks.assert_skipped(task.delay(42))
        failed = shop.fails.delay(42)
        eventually(lambda: failed.state == states.FAILURE)
        with pytest.raises(AssertionError, match=r"(?s)was not skipped.*refused.*FAILURE"):
            locks.assert_skipped(failed, timeout=0.3)
    ran = shop.settle.delay(42)
    locks.assert_ran_alone(ran)
    with pytest.raises(AssertionError, match=r"(?s)was not skipped.*it started under the lock"):
        locks.assert_skipped(ran, timeout=0.1)


def test_a_failed_assertion_shows_the_events_and_the_state_of_the_lock(shop, worker, locks):
    with locks.hold(NAME):
        result = shop.settle.delay(42)
        locks.assert_parked(result)
        with pytest.raises(AssertionError) as told:
            locks.assert_ran_alone(result, timeout=0.1)
        for fact in (result.id, "has not ended", "a worker received it", "(parked)"):
            assert fact in str(told.value)
        assert f"The lock {NAME!r}: held by the test's hold() (for " in str(told.value)
        with pytest.raises(AssertionError, match=f"not 2, but 1 are parked for the lock {NAME!r}"):
            locks.assert_parked(lock=NAME, count=2, timeout=0.1)
        with pytest.raises(
            AssertionError, match=r"is not free.*held by the test's hold\(\).*parked"
        ):
            locks.assert_free(NAME, timeout=0.1)
        with pytest.raises(AssertionError, match="could not acquire the lock"):
            locks.hold(NAME)
    with pytest.raises(AssertionError, match=r"No worker in this process has received it"):
        locks.assert_parked("4711", timeout=0.1)
    with pytest.raises(TypeError, match=r"what delay\(\) or apply\(\) returned, .*, not an int"):
        locks.assert_parked(5)
    with pytest.raises(ConfigurationError, match="must be a str that is not empty, not 5"):
        locks.hold(5)


def test_overlapping_tasks_did_not_run_alone(shop, worker, locks):
    """Also beside one that does not keep its lock, by its mode."""
    held = running(shop, shop.long, 42)
    shop.noted.clear()
    relaxed = running(shop, shop.relaxed, 42)
    shop.gates["open"].set()
    held.get(timeout=60)
    with pytest.raises(
        AssertionError, match=rf"did not run alone: it overlapped relaxed\[{relaxed.id}"
    ):
        locks.assert_ran_alone(held)
    with pytest.raises(AssertionError, match="ran without the lock 'account:42'"):
        locks.assert_ran_alone(relaxed)
    with pytest.raises(AssertionError, match="its base is not LockedTask"):
        locks.assert_ran_alone(shop.plain.delay(42))


def test_as_many_as_the_limit_run_alone_together(shop, worker, locks):
    results = [shop.two.delay(1) for _ in range(3)]
    eventually(lambda: shop.noted.count("long") == 2)
    locks.assert_parked(lock="two:1", count=1)
    shop.gates["open"].set()
    for result in results:
        locks.assert_ran_alone(result, lock="two:1")


def test_a_running_task_keeps_its_lock_however_much_time_passes(shop, worker, locks):
    result = running(shop, shop.long, 42)
    other = shop.settle.delay(42)
    locks.assert_parked(other)
    locks.time.advance(86_400)
    locks.assert_parked(other, timeout=0.1)
    shop.gates["open"].set()
    assert result.get(timeout=60) is True
    locks.assert_ran_alone(result)
    locks.assert_ran_alone(other)


def test_a_lock_that_is_not_renewed_expires(shop, worker, locks):
    with locks.time.frozen() as frozen:
        locks.hold(NAME, lease=30)
        result, began = shop.settle.delay(42), frozen.now()
        locks.assert_parked(result)
        frozen.advance(29.9)
        locks.assert_parked(result, timeout=0)
        assert frozen.now() - began < 30
        frozen.advance(0.2)
        locks.assert_ran_alone(result)


def test_events_within_an_advance_happen_in_order(shop, worker, locks):
    """The lease ends, and the next task runs, before its own wait would have been over."""
    locks.hold(NAME, lease=30)
    result = shop.patient.delay(42)
    locks.assert_parked(result)
    locks.time.advance(7200)
    locks.assert_ran_alone(result)


def test_a_parked_task_fails_when_its_wait_is_over(shop, worker, locks):
    with locks.hold(NAME):
        result = shop.patient.delay(42)
        locks.assert_parked(result)
        locks.time.advance(601)
        with pytest.raises(LockWaitTimeout):
            result.get(timeout=60)
    assert shop.noted == []


def test_the_wait_of_a_task_in_its_slot_follows_the_clock(shop, worker, locks):
    with locks.hold(NAME):
        result = shop.waits.delay(42)
        eventually(lambda: locks.waiting(NAME))
        locks.time.advance(300)
        assert locks.waiting(NAME)
        locks.time.advance(301)
        with pytest.raises(LockWaitTimeout):
            result.get(timeout=60)


def test_a_requeued_task_runs_again_after_its_delay(shop, worker, locks):
    with locks.hold(NAME):
        result = shop.requeued.delay(42)
        eventually(lambda: "requeue" in locks._event_log.history(result.id))
    locks.time.advance(61)
    locks.assert_ran_alone(result)


def test_a_lock_that_was_taken_away_is_reported(shop, worker, locks):
    result = running(shop, shop.long, 42)
    assert locks.take_away(NAME) == 1
    locks.time.advance(15)
    shop.gates["open"].set()
    assert result.get(timeout=60) is False
    with pytest.raises(AssertionError, match="lost the lock 'account:42' while it ran"):
        locks.assert_ran_alone(result)


def test_threads_that_hold_and_wait_live_on_too(shop, worker, locks):
    first, second = Lock(locks.client, NAME, lease=10), Lock(locks.client, NAME, lease=10)
    bare = Lock(locks.client, "bare", lease=10, renew=False)
    assert first.acquire()
    assert bare.acquire()
    waits = threading.Thread(target=lambda: second.acquire() and second.release())
    waits.start()
    eventually(lambda: locks.waiting(NAME))
    token = locks.waiting(NAME)[0].token
    locks.time.advance(60)
    assert first.owned()
    assert not bare.owned()
    assert [each.token for each in locks.waiting(NAME)] == [token]
    first.release()
    waits.join(60)
    assert not waits.is_alive()


def test_eager_tasks_lock_as_they_do_with_a_redis(shop, locks):
    result = shop.settle.apply((42, 1))
    locks.assert_ran_alone(result, lock=NAME)
    with locks.hold(NAME):
        locks.assert_skipped(shop.skips.apply((42,)))
        assert locks.take_away(NAME) == 1
    assert shop.noted == [1]


def test_a_lock_is_held_once_unless_its_permits_are_named(shop, locks):
    """Twice was two permits of a lock that has one."""
    with locks.hold(NAME):
        with pytest.raises(AssertionError, match=r"an earlier hold\(\) of this test holds it"):
            locks.hold(NAME)
        with pytest.raises(LockConflict, match=r"is held by the test's hold\(\)\.$"):
            shop.fails.apply((42,)).get()
    for _ in range(2):
        locks.hold("api", limit=2)
    with pytest.raises(AssertionError, match=r"lock: it is held by the test's hold\(\)\.$"):
        locks.hold("api", limit=2)
    with pytest.raises(ConfigurationError, match="limit must be a whole number"):
        locks.hold("api", limit=0)
    locks.release("api")
    locks.hold("api", lease=10)
    locks.time.advance(11)
    locks.hold("api")


def test_an_app_gets_its_own_settings_back(shop):
    app = Celery("mine", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_backend = "redis://localhost:1/0"
    task = app.task(base=LockedTask, lock_key="k", name="mine", shared=False)(current_lock)
    with SingletonLocks(app) as locks:
        assert locks.app.conf.singleton_lock_backend == "memory://"
        locks.hold("k")
    assert app.conf.singleton_lock_backend == "redis://localhost:1/0"
    assert str(task._lock_extension.settings.address()) == "redis://localhost:1/0"
    with SingletonLocks(app) as locks:
        locks.assert_free("k", timeout=0)


def test_no_loss_is_reported_between_two_tests(shop, worker, locks):
    """A worker of the whole session has parked tasks of the first one."""
    before = locks.store.identify()
    locks.reset()
    assert locks.store.identify().differs(before) == ""


def test_a_reset_deletes_a_lock_whatever_its_name_is(locks):
    locks.hold("shop:schema")
    locks.reset()
    locks.assert_free("shop:schema")


def test_a_pool_of_processes_is_refused_at_its_start(shop):
    """Each of them would have locks of its own."""
    with pytest.raises(ImproperlyConfigured, match=r"memory://kit.*--pool threads or solo"):
        WorkController(app=shop.app, pool="prefork", concurrency=2)
