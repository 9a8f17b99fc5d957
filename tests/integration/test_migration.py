"""What the tests of other packages assert of unique tasks, and its equivalent here.

Each test is a row of a table in docs/migrate: what the other package's tests assert, and the
docstring. Write the tables anew with ``PYTHONPATH=tests python -m support.migration_tables``.
"""

from __future__ import annotations

import uuid
from functools import partial

import pytest
from celery import Celery, chain

from celery_singleton_lock import ConfigurationError, DuplicateTask, Lock, LockedTask
from celery_singleton_lock.store.connect import in_memory
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.testing import SingletonLocks, worker_in_thread
from support.migration_tables import PAGES, written
from support.waiting import eventually

SINGLETON, ONCE, HEIMDALL = "celery-singleton", "celery-once", "celery-heimdall"


def asserts(*rows):
    """Note what another package's tests assert: pairs of its name and a sentence."""

    def note(test):
        test.asserted = rows
        return test

    return note


@pytest.fixture
def app():
    name = f"migrated-{uuid.uuid4().hex}"
    app = Celery(name, broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        singleton_lock_backend=f"memory://{name}",
        task_default_queue=name,
        worker_hijack_root_logger=False,
    )
    yield app
    app.close()


def returns(*args):
    return args


def takes_one(a): ...


def bound(self): ...


@pytest.fixture
def declare(app):
    """Declare a task with ``lock_unique``."""

    def declare(function=returns, **options):
        options = {"lock_unique": "until_done", "name": "task", **options}
        return app.task(base=LockedTask, shared=False, **options)(function)

    return declare


@pytest.fixture
def lock_time(app):
    with SingletonLocks(app) as locks, locks.time.frozen() as found:
        yield found


# --- the same call, and other calls ---------------------------------------------------------------


@asserts(
    (SINGLETON, "Ten equal calls have one id."),
    (SINGLETON, "By default a duplicate is no error."),
    (ONCE, "With `graceful`, a duplicate is no error."),
)
def test_equal_calls_have_one_id(declare):
    """`lock_unique="until_done"`: `apply_async` returns the result of the first call."""
    task = declare()
    results = [task.apply_async((1, 2, 3)) for _ in range(10)]
    assert len({each.id for each in results}) == 1
    assert [each.duplicate for each in results] == [False] + [True] * 9


@asserts(
    (SINGLETON, "Calls with other arguments have other ids."),
    (HEIMDALL, "Calls with other arguments are sent."),
)
def test_other_arguments_are_other_calls(declare):
    """Without `lock_key`, all arguments count."""
    task = declare()
    assert len({task.delay(n, n + 1).id for n in range(5)}) == 5


@asserts(
    (SINGLETON, "`raise_on_duplicate`: the error has the id of the first task."),
    (ONCE, "A call that is queued raises `AlreadyQueued`."),
    (HEIMDALL, "A second call raises an error with the id of the first one."),
)
def test_a_duplicate_can_be_an_error(declare):
    """`lock_on_duplicate="raise"`: `DuplicateTask` has the `task_id`."""
    task = declare(lock_on_duplicate="raise")
    first = task.delay(1)
    with pytest.raises(DuplicateTask) as raised:
        task.delay(1)
    assert raised.value.task_id == first.id


@asserts((SINGLETON, "The option of a task counts before that of the app."))
def test_the_app_can_set_the_option(app, declare):
    """`task_annotations` sets an option of several tasks; there is no setting for it."""
    app.conf.task_annotations = {"strict": {"lock_on_duplicate": "raise"}}
    strict, lax = declare(name="strict"), declare(name="lax")
    for task in (strict, lax):
        task.delay(1)
    with pytest.raises(DuplicateTask):
        strict.delay(1)
    assert lax.delay(1).duplicate


@asserts((ONCE, "`once={'graceful': True}` for one call."))
def test_one_call_can_differ(declare):
    """`apply_async(args, lock_on_duplicate="existing")`; with `lock_unique=None` it is sent."""
    task = declare(lock_on_duplicate="raise")
    first = task.delay(1)
    assert task.apply_async((1,), lock_on_duplicate="existing").id == first.id
    assert task.apply_async((1,), lock_unique=None).id != first.id


# --- which arguments count ------------------------------------------------------------------------


@asserts(
    (SINGLETON, "`unique_on`: only these positional arguments count."),
    (SINGLETON, "`unique_on`: only these keyword arguments count."),
    (ONCE, "`keys`: only these arguments count."),
    (ONCE, "Positional and keyword arguments give one key."),
)
def test_some_arguments_count(declare):
    """`lock_args=["a"]`, or `lock_key="settle:{a}"`. Defaults count as if they were given."""

    def settle(a, b=2): ...

    task = declare(settle, lock_args=["a"])
    first = task.delay(1, 5)
    assert task.delay(1, b=6).id == task.delay(a=1).id == first.id
    assert not task.delay(2).duplicate


@asserts((SINGLETON, "`unique_on` may be a text."))
def test_a_text_is_a_template(app):
    """`lock_args` is a list, and a text is an error that says so; `lock_key` is a template."""

    @app.task(base=LockedTask, shared=False, name="wrong", lock_args="a")
    def settle(a): ...

    with pytest.raises(ConfigurationError, match="must be a list of names"):
        app.finalize()


@asserts(
    (ONCE, "A task without arguments has its name as key."),
    (ONCE, "`self` of a bound task is no argument."),
)
def test_a_bound_task(declare):
    """Likewise."""
    task = declare(bound, bind=True)
    assert task.delay().id == task.delay().id


@asserts((HEIMDALL, "`key`: a function gives the key."))
def test_a_function_gives_the_key(declare):
    """`lock_key` may be a callable with the task's parameters."""
    task = declare(takes_one, lock_key=lambda a: "one")
    assert task.delay(1).id == task.delay(2).id


# --- when the next call is sent -------------------------------------------------------------------


def ended(result):
    """Wait until a task has ended, and a call like it can be sent."""
    result.get(timeout=20, propagate=False)


def sent_again(task, *args):
    """Send a call until it is no duplicate: the worker ends the entry after the task."""

    def sent():
        result = task.delay(*args)
        return None if result.duplicate else result

    return eventually(sent, 20)


@asserts(
    (SINGLETON, "After a success the next call is sent."),
    (SINGLETON, "After an error the next call is sent."),
    (HEIMDALL, "When the task has ended, it can be queued again."),
)
def test_after_its_end(app, declare):
    """`until_done` ends in any way: success, failure, revoke, skip."""

    def act(fails):
        assert not fails

    task = declare(act)
    with worker_in_thread(app):
        for fails in (False, True):
            first = task.delay(fails)
            ended(first)
            assert sent_again(task, fails).id != first.id


@asserts((ONCE, "`unlock_before_run`: the key is cleared before the task runs."))
def test_until_its_start(app, declare):
    """`lock_unique="until_started"`. The lock still lets one run at a time."""
    found = []

    def act():
        if not found:
            found.append(task.delay())

    task = declare(act, lock_unique="until_started")
    with worker_in_thread(app):
        first = task.delay()
        ended(first)
        ended(found[0])
    assert not found[0].duplicate
    assert found[0].id != first.id


@asserts((ONCE, "A retry is not blocked by its own key, and the key is cleared at the end."))
def test_a_retry(app, declare):
    """A retry is sent. Other calls are duplicates until the last attempt has ended."""
    found = []

    def act(self):
        found.append(task.delay().duplicate)
        if self.request.retries == 0:
            raise self.retry(countdown=0, max_retries=1)

    task = declare(act, bind=True)
    with worker_in_thread(app):
        first = task.delay()
        ended(first)
        assert found == [True, True]
        assert sent_again(task).id != first.id


@asserts(
    (SINGLETON, "Two chains of unique tasks both end."),
    (ONCE, "A chain with a task that is queued (expected to fail there)."),
)
def test_chains(app, declare):
    """A member of a canvas is always sent; its lock lets one run at a time."""
    task = declare()
    with worker_in_thread(app):
        results = [chain(task.si(1), task.s(n)).delay() for n in (2, 3)]
        assert [result.get(timeout=20)[1] for result in results] == [2, 3]


@asserts(
    (SINGLETON, "`lock_expiry`: seconds for which the lock stays."),
    (ONCE, "`timeout`, of a task or of one call: seconds for which the key stays."),
    (ONCE, "When it has expired, the next call is sent."),
)
def test_for_a_time(declare, lock_time):
    """`lock_unique=60`, also for one call. With `until_done` no time need be guessed."""
    task = declare(lock_unique=60)
    task.delay(1)
    task.apply_async((2,), lock_unique=120)
    lock_time.advance(59)
    assert task.delay(1).duplicate
    lock_time.advance(2)
    assert not task.delay(1).duplicate
    assert task.delay(2).duplicate


# --- errors, and what operators do ----------------------------------------------------------------


@asserts(
    (SINGLETON, "If sending fails, the lock is cleared."),
    (SINGLETON, "If sending fails, the error is raised."),
)
def test_sending_fails(declare):
    """Likewise, if the message was certainly not sent. Else the next sender waits a second."""
    task = declare(takes_one, lock_args=[])
    with pytest.raises(Exception, match="serializ"):
        task.delay(object())
    assert not task.delay(1).duplicate


@asserts((SINGLETON, "The id of the task that counts can be read."))
def test_who_counts(app, declare):
    """`locks try` tells it, and for how long it counts."""
    task = declare(lock_key="one")
    first = task.delay(1)
    store = RedisAdminStore(in_memory(app.conf.singleton_lock_backend.removeprefix("memory://")))
    assert store.find_call("one", "task").task_id == first.id
    store.close()


@asserts((ONCE, "A key can be cleared by hand."))
def test_a_call_can_be_forgotten(declare):
    """`task.forget_call(args)`, or `locks forget-call`, if the message is lost."""
    task = declare()
    task.delay(1)
    assert task.forget_call((1,))
    assert not task.delay(1).duplicate


# --- other features of celery-heimdall ------------------------------------------------------------


@asserts(
    (HEIMDALL, "`times` and `per`: two tasks in ten seconds; the others wait."),
    (HEIMDALL, "The rate may be given by a function."),
)
def test_rates(app, lock_time):
    """`lock_rate="2/10s"`, or a callable with the task's parameters. What waits is parked."""
    ran = []

    def act(n):
        ran.append(n)

    def rate(n):
        return "2/10s"

    fixed, computed = (
        app.task(
            base=LockedTask,
            shared=False,
            name=name,
            lock_key=name,
            lock_limit=None,
            lock_rate=given,
        )(act)
        for name, given in (("fixed", "2/10s"), ("computed", rate))
    )
    with SingletonLocks(app) as locks, locks.worker(pool="threads"):
        for task in (fixed, computed):
            ran.clear()
            results = [task.delay(n) for n in range(6)]
            for so_far in (2, 4, 6):
                if so_far < 6:
                    locks.assert_parked(lock=task.name, count=6 - so_far)
                eventually(partial(has_run, results, so_far), 20)
                assert len(ran) == so_far
                lock_time.advance(10)


def has_run(results, number):
    return sum(each.ready() for each in results) >= number


@asserts((HEIMDALL, "`only_after(key, 5)`: a block runs at most once in five seconds."))
def test_a_block(app, lock_time):
    """`Lock(client, "key", limit=None, rate="1/5s").acquire(blocking=False)` in the task."""
    client = in_memory(app.conf.singleton_lock_backend.removeprefix("memory://"))

    def may():
        lock = Lock(client, "block", limit=None, rate="1/5s")
        got = lock.acquire(blocking=False)
        if got:
            lock.release()
        return got

    assert (may(), may()) == (True, False)
    lock_time.advance(5)
    assert may()


# --- the pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [SINGLETON, ONCE, HEIMDALL])
def test_the_page_has_the_table(library):
    """Write it anew with ``PYTHONPATH=tests python -m support.migration_tables``."""
    page = PAGES[library].read_text(encoding="utf-8")
    assert written(library, page, globals()) == page
