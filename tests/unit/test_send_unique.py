"""Whether a call counts whose sending has failed."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from uuid import UUID

import pytest
from celery import Celery, Task

from celery_singleton_lock import LockedTask
from celery_singleton_lock.core.unique import Announced, EntryState, unpacked
from celery_singleton_lock.events import Observers
from celery_singleton_lock.send_by_name import install as install_by_name
from celery_singleton_lock.send_unique import Call, send_unique
from celery_singleton_lock.worker.extension import Extension
from celery_singleton_lock.worker.install import install


class Store:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def announce(self, name, key, task_id, *, instead_of=""):
        self.told.append("announce")
        return Announced(EntryState.ANNOUNCED, task_id)

    def withdraw(self, name, key, task_id, retries):
        self.told.append("withdraw")


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def send(store):
    app = Celery(set_as_current=False)

    @app.task(base=LockedTask, lock_key="report", lock_unique="until_done", shared=False)
    def report(): ...

    options = report._lock_extension.options(report)

    def send(error):
        def fail(**sending):
            raise error

        def call():
            return Call(report, options, "report", "report", {"task_id": "a"})

        send_unique(call, lambda: store, fail, {"task_id": "a"}, Observers())

    return send


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TypeError("not serialisable")])
def test_a_call_that_was_certainly_not_sent_is_withdrawn(store, send, error):
    with pytest.raises(type(error)):
        send(error)
    assert store.told == ["announce", "withdraw"]


def test_a_call_that_was_perhaps_sent_counts(store, send):
    with pytest.raises(TimeoutError):
        send(TimeoutError())
    assert store.told == ["announce"]


def test_an_error_that_the_caller_handles_proves_nothing(store, send):
    """A call in an ``except`` block was withdrawn, and was sent twice."""
    try:
        raise ConnectionRefusedError
    except ConnectionRefusedError:
        with pytest.raises(TimeoutError):
            send(TimeoutError())
    assert store.told == ["announce"]


class Following(Store):
    """Knows of a first call."""

    def announce(self, name, key, task_id, *, instead_of=""):
        super().announce(name, key, task_id)
        return Announced(EntryState.PENDING, "first")


@pytest.mark.parametrize(
    ("sending", "own_id", "first"),
    [
        ({}, False, "first"),
        ({"link": []}, False, "first"),
        ({"chord": {}}, True, "first"),
        ({"retries": 1}, False, None),
    ],
)
def test_a_duplicate_that_follows_is_sent_at_once_with_the_id_of_the_first(sending, own_id, first):
    """Also in a canvas. A retry is no duplicate."""
    app = Celery(set_as_current=False)
    options = {"lock_key": "report", "lock_unique": "until_done", "lock_on_duplicate": "follow"}

    @app.task(base=LockedTask, shared=False, **options)
    def report(): ...

    given = {"task_id": "a", "headers": {"tenant": "x"}, **sending}
    task = app.tasks[report.name]
    call = Call(task, task._lock_extension.options(task), "report", "key", given, own_id)
    store, sent = Following(), []

    def send(**options):
        sent.append(options)
        return SimpleNamespace()

    found = send_unique(lambda: call, lambda: store, send, given, Observers())
    (options,) = sent
    header = unpacked(options["headers"].get("csl-unique"))
    assert (header and header.follows) == first
    assert options["headers"]["tenant"] == "x"
    assert found.duplicate is (first is not None)
    assert store.told == ["announce"]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"singleton_lock_mode": "observe"}, {}),
        ({"singleton_lock_mode": "off"}, {}),
        ({"task_always_eager": True}, {}),
        ({}, {"lock_unique": None}),
    ],
    ids=["observe", "off", "eager", "not unique"],
)
def test_a_result_says_that_it_is_no_duplicate_whatever_lets_its_call_be_sent(settings, options):
    """Else a program that asks result.duplicate fails as soon as the mode is observe."""
    with Celery(set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.update(singleton_lock_backend="memory://", **settings)

        @app.task(base=LockedTask, lock_key="report", lock_unique="until_done", shared=False)
        def report(): ...

        app.finalize()
        assert report.apply_async(**options).duplicate is False

        @app.task(base=LockedTask, lock_key="other", shared=False)
        def other(): ...

        told = {"lock_unique": "until_done", **options}
        assert other.apply_async(**told).duplicate is False, "the option of one call"
        if not app.conf.task_always_eager:  # send_task is never eager
            assert app.send_task(report.name, **options).duplicate is False


def test_the_first_calls_of_several_threads_are_unique(monkeypatch):
    """Celery shows a task to other threads before it is bound, as in a web server that starts."""

    def slowly(app):
        time.sleep(0.2)  # imports, at the first use
        return install(app)

    monkeypatch.setattr("celery_singleton_lock.task.install", slowly)
    with Celery(set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.singleton_lock_backend = "memory://first-calls"

        @app.task(base=LockedTask, lock_key="report", lock_unique="until_done", shared=False)
        def report(): ...

        def call():
            return report.delay().duplicate  # the attribute of the proxy binds the task

        with ThreadPoolExecutor(8) as threads:
            calls = [threads.submit(call) for _ in range(8)]
            assert sorted(each.result() for each in calls) == [False] + [True] * 7


def test_a_handler_that_calls_the_task_that_loads_the_settings_does_not_wait_for_itself(
    monkeypatch,
):
    """The first call in a process loads the settings while it binds its task."""
    monkeypatch.setattr("celery_singleton_lock.task._BINDING", 60)
    with Celery(set_as_current=False, broker="memory://", backend="cache+memory://") as app:

        @app.task(base=LockedTask, lock_key="report", shared=False)
        def report(): ...

        sent = []

        @app.on_after_configure.connect
        def warm_up(sender, **_kwargs):
            sent.append(report.delay())

        begun = time.monotonic()
        sent.append(report.delay())
        assert time.monotonic() - begun < 30
        assert len(sent) == 2


def test_a_class_that_hides_our_on_bound_delays_only_its_first_call(monkeypatch):
    """It takes no lock, as before. Nobody waits for the five seconds at each call."""
    monkeypatch.setattr("celery_singleton_lock.task._BINDING", 0.3)
    with Celery(set_as_current=False, broker="memory://", backend="cache+memory://") as app:

        class Hiding(LockedTask):
            @classmethod
            def on_bound(cls, app):
                pass

        @app.task(base=Hiding, shared=False)
        def report(): ...

        report.delay()
        monkeypatch.setattr("celery_singleton_lock.task._BINDING", 60)
        report.delay()


def test_threads_that_bind_the_first_tasks_of_an_app_share_its_locks(monkeypatch):
    """Else the tasks of all threads but one are unknown to it, and calls are counted twice."""

    def slowly(function):
        def called(*args):
            time.sleep(0.1)
            return function(*args)

        return called

    monkeypatch.setattr("celery_singleton_lock.worker.install.Extension", slowly(Extension))
    monkeypatch.setattr("celery_singleton_lock.send_by_name.wraps", slowly(functools.wraps))
    with Celery(set_as_current=False, broker="memory://") as app, ThreadPoolExecutor(8) as threads:
        bare = app.send_task
        found = [threads.submit(install, app) for _ in range(8)]
        assert {each.result() for each in found} == {install(app)}
        for each in [threads.submit(install_by_name, app) for _ in range(8)]:
            each.result()
        assert app.send_task.__wrapped__ == bare


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"singleton_lock_mode": "off"}, {"lock_unique": "until_done"}),
        ({}, {"lock_unique": "until_done"}),
    ],
    ids=["not unique", "off", "unique"],
)
def test_a_call_whose_class_returns_the_id_of_the_task_is_sent_without_an_error(settings, options):
    """The message has been sent by then, and a caller that sees an error sends it again."""

    class Tenants(Task):
        def apply_async(self, *args, **options):
            return super().apply_async(*args, **options).id

    class TenantTask(LockedTask, Tenants): ...

    with Celery(set_as_current=False, broker="memory://") as app:
        app.conf.update(singleton_lock_backend="memory://", **settings)

        @app.task(base=TenantTask, lock_key="report", shared=False)
        def report(): ...

        app.finalize()
        assert UUID(report.apply_async(**options))


def test_a_call_whose_class_returns_a_strict_model_is_sent_without_an_error():
    """A model of pydantic raises ValueError if a field that it does not have is set."""

    class Sent:
        def __setattr__(self, name, value):
            msg = f'"Sent" object has no field "{name}"'
            raise ValueError(msg)

    class Tenants(Task):
        def apply_async(self, *args, **options):
            super().apply_async(*args, **options)
            return Sent()

    class TenantTask(LockedTask, Tenants): ...

    with Celery(set_as_current=False, broker="memory://") as app:
        app.conf.singleton_lock_backend = "memory://"

        @app.task(base=TenantTask, lock_key="report", shared=False)
        def report(): ...

        app.finalize()
        assert isinstance(report.delay(), Sent)
