"""Eager tasks with ``singleton_lock_eager``: a real Redis, no worker."""

from __future__ import annotations

import threading
from contextvars import copy_context
from types import SimpleNamespace

import pytest
from celery import Celery, Task, chain, chord, group, states
from celery.exceptions import Ignore, TaskRevokedError
from celery.signals import task_postrun, task_prerun

from celery_singleton_lock import (
    BackendUnreachable,
    ConfigurationError,
    Lock,
    LockConflict,
    LockedTask,
    LockQueueFull,
    LockReentered,
    LockWaitTimeout,
    current_lock,
)
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.worker.execution.eager import EagerTracer
from support.waiting import PATIENCE, eventually


class Scene(SimpleNamespace):
    """An app with locked tasks that note what they saw of their lock."""

    def task(self, name, body=None, **options):
        """Declare a locked task ``name(key, n)`` that runs ``body(task, key, n)``."""
        options.setdefault("lock_key", "k:{key}")

        def run(self_, key, n=0):
            lock = current_lock()
            self.seen.append((name, n, lock.name, lock.held, lock.fencing_token > 0))
            return body(self_, key, n) if body else n

        return self.app.task(bind=True, base=LockedTask, name=name, shared=False, **options)(run)

    def holders(self, key="a"):
        """Return who holds a key now."""
        return self.store.inspect(f"k:{key}").holders


@pytest.fixture
def scene(redis_url, redis_client):
    """An app whose eager tasks take locks."""
    app = Celery("eager", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        singleton_lock_backend=redis_url, singleton_lock_lease=30, singleton_lock_eager=True
    )
    yield Scene(app=app, seen=[], store=RedisStore(redis_client), client=redis_client)
    app.close()


@pytest.fixture
def other(scene):
    """Somebody else who holds the key "a"."""
    lock = Lock(scene.client, "k:a", lease=60, thread_local=False)
    lock.acquire()
    yield lock
    if lock.held:
        lock.release()


def total_of(numbers):
    """The body of a chord."""
    return sum(numbers)


def held(name, n=0, key="a"):
    """What a task notes that holds its lock."""
    return (name, n, f"k:{key}", True, True)


def unlocked(name, n=0):
    """What a task notes that holds none."""
    return (name, n, "", False, False)


def test_without_the_setting_apply_takes_no_lock(scene):
    """The default is False: then nothing is asked of Redis."""
    scene.app.conf.singleton_lock_eager = False
    act = scene.task("act", lambda *_: len(scene.holders()))
    assert act.apply(("a",)).get() == 0
    assert scene.seen == [unlocked("act")]


def test_apply_takes_headers_that_are_no_mapping(scene):
    """As in Celery, which has such a test."""
    scene.app.conf.singleton_lock_eager = False
    assert scene.task("act", lambda *_: 1).apply(("a",), headers=123).get() == 1


def test_the_setting_must_be_a_bool(scene):
    """A text, as from an environment variable, is refused by name."""
    scene.app.conf.singleton_lock_eager = "yes"
    act = scene.task("act")
    with pytest.raises(ConfigurationError, match="singleton_lock_eager is 'yes'"):
        act.apply(("a",))


def test_apply_holds_the_lock_and_gives_it_back(scene):
    """The body runs under the lock, which is free afterwards, also after a failure and Ignore."""
    act = scene.task("act", lambda *_: len(scene.holders()))
    assert act.apply(("a",)).get() == 1
    assert act.apply(kwargs={"key": "a"}).get() == 1
    assert not scene.holders()
    for name, error in (("bad", ValueError("no")), ("ignored", Ignore())):

        def fail(*_, error=error):
            raise error

        result = scene.task(name, fail).apply(("a",))
        assert result.state in {states.FAILURE, states.IGNORED}
        assert not scene.holders()
    assert scene.seen == [held("act"), held("act"), held("bad"), held("ignored")]


@pytest.mark.parametrize("propagates", [True, False])
def test_always_eager_holds_the_lock(scene, propagates):
    """``delay``, ``apply_async`` and signatures, with and without propagation of errors."""
    scene.app.conf.update(task_always_eager=True, task_eager_propagates=propagates)
    act = scene.task("act")
    assert act.delay("a", 1).get() == 1
    assert act.apply_async(("a",), {"n": 2}).get() == 2
    assert act.s("a", 3).apply_async().get() == 3
    assert scene.seen == [held("act", n) for n in (1, 2, 3)]
    assert not scene.holders()


def test_of_two_threads_that_call_a_task_first_both_take_its_lock(scene, monkeypatch):
    """The first call prepares the task. A second one, in between, ran the body without its lock."""
    act = scene.task("act")
    prepares, goes_on = threading.Event(), threading.Event()
    guarded = EagerTracer._guarded

    def slowly(*args):
        if not prepares.is_set():
            prepares.set()
            assert goes_on.wait(PATIENCE)
        return guarded(*args)

    monkeypatch.setattr(EagerTracer, "_guarded", slowly)
    first = threading.Thread(target=act.apply, args=(("a", 1),))
    second = threading.Thread(target=act.apply, args=(("b", 2),))
    first.start()
    assert prepares.wait(PATIENCE)
    second.start()
    second.join(PATIENCE)
    goes_on.set()
    first.join(PATIENCE)
    assert act.apply(("c", 3)).get() == 3
    assert scene.seen == [held("act", n, key=key) for n, key in ((2, "b"), (1, "a"), (3, "c"))]


def test_a_direct_call_takes_no_lock(scene):
    """``task(…)`` is a function call, also from inside a task that holds its own lock."""
    act = scene.task("act")
    assert act("a", 1) == 1
    inner = scene.task("inner", lambda task, *_: (task.lock.held, task.lock.name))
    outer = scene.task("outer", lambda task, *_: (inner("a"), task.lock.held), lock_key="o:{key}")
    assert outer.apply(("a",)).get() == ((False, ""), True)
    assert scene.seen[0] == unlocked("act", 1)
    assert not scene.holders()


def test_t33_a_direct_call_of_itself_frees_nothing(scene):
    """A task that calls itself directly keeps its lock until its own end."""

    def again(task, key, n):
        return len(scene.holders()) if n else (task(key, 1), task.run(key, 2), len(scene.holders()))

    act = scene.task("act", again)
    assert act.apply(("a",)).get() == (1, 1, 1)
    assert scene.seen == [held("act", n) for n in (0, 1, 2)]
    assert not scene.holders()


def test_a_thread_with_the_tasks_context_sees_its_lock(scene):
    """As with ``asyncio.to_thread``: what the task hands on is no direct call."""

    def ask(task, *_):
        seen = []
        context = copy_context()
        thread = threading.Thread(target=lambda: seen.append(context.run(lambda: task.lock.name)))
        thread.start()
        thread.join()
        return seen

    assert scene.task("act", ask).apply(("a",)).get() == ["k:a"]


def test_t33_an_unlocked_apply_inside_of_a_locked_run_holds_nothing(scene):
    """With the setting off, ``apply()`` shows an inert lock, whatever the task around it holds."""
    inner = scene.task("inner", lambda task, *_: (task.lock.held, current_lock().name))

    def switch_off(*_):
        scene.app.conf.singleton_lock_eager = False
        return inner.apply(("b",)).get(disable_sync_subtasks=False), current_lock().held

    assert scene.task("outer", switch_off).apply(("a",)).get() == ((False, ""), True)


def test_t33_apply_neither_frees_nor_leaks_anothers_lock(scene, other):
    """A refused call does not affect the holder, and leaves no waiter."""
    act = scene.task("act", lock_on_conflict="fail")
    token = other._hold.lease.token
    assert act.apply(("a",)).state == states.FAILURE
    view = scene.store.inspect("k:a")
    assert ([holder.token for holder in view.holders], view.waiting) == ([token], 0)
    other.release()
    assert act.apply(("a",)).get() == 0


@pytest.mark.parametrize("policy", ["park"])
def test_a_blocked_eager_task_waits_in_place(scene, other, policy):
    """There is no worker to park it; the caller waits."""
    act = scene.task("act", lock_on_conflict=policy)
    results = []
    thread = threading.Thread(target=lambda: results.append(act.apply(("a", 1)).get()))
    thread.start()
    eventually(lambda: scene.store.inspect("k:a").waiting == 1, 5)
    other.release()
    thread.join(60)
    assert results == [1]
    assert scene.seen == [held("act", 1)]
    assert not scene.holders()


def test_a_blocked_eager_task_waits_no_longer_than_lock_wait_timeout(scene, other):
    """Then it fails, and leaves no place in the queue."""
    result = scene.task("act", lock_wait_timeout=0.3).apply(("a",))
    assert result.state == states.FAILURE
    with pytest.raises(LockWaitTimeout, match="k:a"):
        result.get()
    assert scene.store.inspect("k:a").waiting == 0
    assert scene.seen == []


def test_fail_fails_at_once_and_is_not_retried(scene, other):
    """With name and remaining lease; ``autoretry_for`` is for errors of the body."""
    act = scene.task(
        "act", lock_on_conflict="fail", autoretry_for=(Exception,), retry_backoff=False
    )
    result = act.apply(("a",))
    assert isinstance(result.result, LockConflict)
    assert result.result.name == "k:a"
    assert 0 < result.result.expires_in <= 60
    with pytest.raises(LockConflict):
        act.apply(("a",), throw=True)
    assert scene.seen == []


def test_skip_ends_revoked_with_a_reason(scene, other):
    """As in a worker: ``get()`` raises TaskRevokedError, which names lock and holder."""
    result = scene.task("act", lock_on_conflict="skip").apply(("a",))
    assert result.state == states.REVOKED
    with pytest.raises(TaskRevokedError, match=r"k:a.*pid"):
        result.get()
    assert scene.seen == []


def test_skip_is_stored_where_eager_results_are(scene, other):
    """With ``task_store_eager_result`` the backend says REVOKED too."""
    act = scene.task("act", lock_on_conflict="skip", store_eager_result=True)
    result = act.apply(("a",))
    assert scene.app.AsyncResult(result.id).state == states.REVOKED


@pytest.mark.parametrize(
    ("on_full", "state", "error"),
    [("fail", states.FAILURE, LockQueueFull), ("skip", states.REVOKED, TaskRevokedError)],
)
def test_lock_max_waiting_bounds_the_number_of_waiting_calls(scene, other, on_full, state, error):
    """With 0 no call waits."""
    result = scene.task("act", lock_max_waiting=0, lock_on_full=on_full).apply(("a",))
    assert (result.state, type(result.result)) == (state, error)


def test_a_nested_call_of_the_same_key_raises(scene):
    """It would wait for its own caller: LockReentered names task and lock, and nothing hangs."""
    inner = scene.task("inner")
    outer = scene.task("outer", lambda _, key, n: inner.apply((key,)).get())
    result = outer.apply(("a",))
    assert isinstance(result.result, LockReentered)
    assert "inner" in str(result.result)
    assert result.result.name == "k:a"
    assert not scene.holders()
    assert scene.seen == [held("outer")]


def test_a_nested_call_of_the_same_key_raises_under_always_eager(scene):
    """``delay`` in the body, two levels down, with another key in between."""
    scene.app.conf.task_always_eager = True
    inner = scene.task("inner")
    middle = scene.task("middle", lambda *_: inner.delay("a"), lock_key="m")
    outer = scene.task("outer", lambda *_: middle.delay("a").get(disable_sync_subtasks=False))
    with pytest.raises(LockReentered):
        outer.delay("a").get()
    assert scene.seen == [held("outer"), ("middle", 0, "m", True, True)]
    assert not scene.holders()


def test_a_nested_call_of_another_key_takes_its_own_lock(scene):
    """And the outer one is held again, or rather still, after it."""
    inner = scene.task("inner")

    def nest(task, key, n):
        value = inner.apply(("b", 1)).get(disable_sync_subtasks=False)
        return value, current_lock().name, len(scene.holders("a"))

    assert scene.task("outer", nest).apply(("a",)).get() == (1, "k:a", 1)
    assert scene.seen == [held("outer"), held("inner", 1, "b")]


def test_a_nested_call_that_does_not_wait_follows_its_policy(scene):
    """The key is taken, if by the caller: skip is skipped and fail fails, as beside a worker."""
    skips = scene.task("skips", lock_on_conflict="skip")
    fails = scene.task("fails", lock_on_conflict="fail")
    both = scene.task("both", lambda *_: (skips.apply(("a",)).state, fails.apply(("a",)).state))
    assert both.apply(("a",)).get() == (states.REVOKED, states.FAILURE)


def test_a_retry_is_an_attempt_of_its_own(scene):
    """The lock is released before the next attempt, and acquired again for it."""
    fences = []

    def retry(task, key, n):
        fences.append(current_lock().fencing_token)
        if task.request.retries < 2:
            raise task.retry(countdown=0)
        return task.request.retries

    assert scene.task("act", retry).apply(("a",)).get() == 2
    assert len(set(fences)) == 3
    assert not scene.holders()


def test_autoretry_is_an_attempt_of_its_own(scene):
    """Likewise."""
    calls = []

    def fail_once(task, key, n):
        calls.append(current_lock().held)
        if len(calls) == 1:
            raise OSError
        return "done"

    act = scene.task("act", fail_once, autoretry_for=(OSError,), retry_backoff=False)
    assert act.apply(("a",)).get() == "done"
    assert calls == [True, True]
    assert not scene.holders()


@pytest.mark.parametrize("kind", ["same", "other", "chain"])
def test_a_replacement_takes_its_own_lock(scene, kind):
    """``self.replace`` with the same key, with another, and with a chain of the same key."""
    after = scene.task("after")

    def replace(task, key, n):
        one = after.si(key if kind != "other" else "b", 1)
        return task.replace(chain(one, after.si(key, 2)) if kind == "chain" else one)

    result = scene.task("act", replace).apply(("a",))
    assert result.get() == (2 if kind == "chain" else 1)
    expected = {"chain": [held("after", 1), held("after", 2)], "same": [held("after", 1)]}
    assert scene.seen[1:] == expected.get(kind, [held("after", 1, "b")])
    assert not scene.holders("a")
    assert not scene.holders("b")


def test_a_canvas_of_one_key_completes_eagerly(scene):
    """Links of a chain, callbacks, members of a group and a chord: each has the lock in turn."""
    scene.app.conf.task_always_eager = True
    act = scene.task("act")
    total = scene.app.task(name="total", shared=False)(total_of)
    assert chain(act.si("a", 1), act.si("a", 2))().get() == 2
    assert group(act.si("a", n) for n in (3, 4)).apply_async().get() == [3, 4]
    assert chord([act.si("a", n) for n in (5, 6)])(total.s()).get() == 11
    act.apply_async(("a", 7), link=act.si("a", 8))
    bad = scene.task("bad", lambda *_: 1 / 0)
    bad.apply_async(("a",), link_error=act.si("a", 9))
    assert scene.seen == [held("act", n) for n in range(1, 9)] + [held("bad"), held("act", 9)]
    assert not scene.holders()


def test_wrong_arguments_fail_as_without_a_lock(scene):
    """Python's TypeError, and nothing is held."""
    act = scene.task("act")
    assert isinstance(act.apply(("a",), {"wrong": 1}).result, TypeError)
    assert isinstance(act.apply((None,)).result, ConfigurationError)


def test_signals_come_once_and_from_the_task_itself(scene):
    """Receivers that are connected with the task as sender still get it."""
    act = scene.task("act")
    heard = []

    def note(signal, **_):
        heard.append(signal.name)

    for signal in (task_prerun, task_postrun):
        signal.connect(note, sender=act, weak=False)
    try:
        act.apply(("a",)).get()
        act.apply(("a",)).get()
    finally:
        for signal in (task_prerun, task_postrun):
            signal.disconnect(note, sender=act)
    assert heard == ["task_prerun", "task_postrun"] * 2


def test_overriding_call_and_before_start_without_super_does_not_disarm_it(scene):
    """As in a worker."""

    class Own(LockedTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            return self.run(*args, **kwargs)

        def before_start(self, *_):
            pass

    @scene.app.task(base=Own, lock_key="k:{key}", name="own", shared=False)
    def own(key):
        return len(scene.holders())

    assert own.apply(("a",)).get() == 1
    assert own("a") == 0
    assert not scene.holders()


def test_a_task_class_with_run_takes_the_lock(scene):
    """Tasks that are classes, registered as instances."""

    class Classic(LockedTask):
        name = "classic"
        lock_key = "k:{key}"

        def run(self, key):
            return len(scene.holders())

    classic = scene.app.register_task(Classic())
    assert classic.apply(("a",)).get() == 1
    assert not scene.holders()


def test_plain_tasks_are_not_changed(scene):
    """Eager tasks without LockedTask run as ever."""

    @scene.app.task(name="plain", shared=False, base=Task)
    def plain():
        return current_lock().held

    assert plain.apply().get() is False


@pytest.mark.parametrize(("policy", "error"), [("retry", True), ("fail", True), ("run", False)])
def test_without_redis_an_eager_task_fails_or_runs_unlocked(scene, policy, error):
    """``retry`` fails here: no worker could keep the task until Redis is back."""
    scene.app.conf.singleton_lock_backend = "redis://127.0.0.1:1/0"
    result = scene.task("act", lock_on_backend_error=policy).apply(("a",))
    assert isinstance(result.result, BackendUnreachable) is error
    assert scene.seen == ([] if error else [unlocked("act")])


def test_a_pydantic_task_is_named_by_what_would_be_sent(scene):
    """A model, given to ``apply`` or ``delay``, and the dict of the wire name the same lock."""
    pydantic = pytest.importorskip("pydantic")
    if not hasattr(scene.task("act"), "_dump_pydantic_arguments"):
        pytest.skip("this Celery does not dump the models that a caller passes")

    class Order(pydantic.BaseModel):
        account: str

    def run(order):
        return current_lock().name

    run.__annotations__["order"] = Order  # text would not be resolved from in here
    options = {"lock_key": "k:{order[account]}", "pydantic": True, "shared": False}
    settle = scene.app.task(base=LockedTask, name="order", **options)(run)
    scene.app.conf.task_always_eager = True
    for order in (Order(account="a"), {"account": "a"}):
        assert settle.apply((order,)).get() == "k:a"
        assert settle.delay(order=order).get() == "k:a"
