"""``Celery(task_cls=LockedTask)``: all tasks of the app take locks, but Celery's own."""

from __future__ import annotations

from contextlib import ExitStack

import celery
import pytest
from celery import Celery, Task, _state

from celery_singleton_lock import LockedTask, observe
from celery_singleton_lock import install as install_by_name
from celery_singleton_lock.metrics import log_events
from celery_singleton_lock.worker.install import install


def settle(account_id=0):
    """Return the account."""
    return account_id


@pytest.fixture
def app():
    with Celery(
        "shop", task_cls=LockedTask, set_as_current=False, backend="cache+memory://"
    ) as app:
        app.task(settle, name="settle", shared=False)
        app.finalize()
        yield app


def test_celerys_own_tasks_take_no_lock(app):
    declared = install(app).declared()
    assert "settle" in declared
    assert not [name for name in declared if name.startswith("celery.")]
    unlock = app.tasks["celery.chord_unlock"]
    assert type(unlock).Request == Task.Request
    assert unlock.__trace__ is None


def test_celerys_own_tasks_run(app):
    twice = app.tasks["celery.map"]
    assert twice.apply((app.signature("settle"), [1, 2])).get() == [1, 2]
    assert twice(app.tasks["settle"].s(), [1, 2]) == [1, 2]


def test_a_task_of_the_user_with_such_a_name_takes_a_lock(app):
    app.task(settle, name="celery.nightly", shared=False)
    assert "celery.nightly" in install(app).declared()


def test_a_task_class_that_celery_names_takes_a_lock():
    """``register_task`` names the instance alone, so the worker found no task and did not start."""

    class Settle(LockedTask):
        lock_key = "account:{account_id}"

        def run(self, account_id):
            """Return nothing."""

    with Celery("shop", set_as_current=False) as app:
        task = app.register_task(Settle())
        assert install(app).name_of(task, (7,), {}) == "account:7"
        assert install(app).modes()[task.name] == "enforce"


@pytest.fixture
def current_app():
    before = getattr(_state._tls, "current_app", None)
    with Celery("shop", broker="memory://", set_as_current=False) as app:
        _state._set_current_app(app)
        yield app
    _state._set_current_app(before)


def test_a_task_class_that_asks_for_its_app_in_init_is_sent(current_app):
    """Celery bound the class to a proxy. No task of the process could be sent any more."""

    class Settle(LockedTask):
        lock_key = "account:{account_id}"

        def __init__(self):
            self.limit = self.app.conf.task_time_limit

        def run(self, account_id):
            """Return nothing."""

    task = current_app.register_task(Settle())
    other = current_app.task(settle, name="other", shared=False)
    assert task.delay(7).id
    assert other.delay().id
    assert current_app.send_task("other").id
    assert install(current_app).name_of(task, (7,), {}) == "account:7"
    assert install(current_app).modes()[task.name] == "enforce"


def test_a_task_class_that_is_not_registered_is_sent(current_app):
    class Settle(LockedTask):
        name = "settle"
        lock_key = "account:{account_id}"

        def run(self, account_id):
            """Return nothing."""

    assert Settle().delay(7).id
    assert current_app.send_task("other").id


def test_the_current_app_can_be_told_of_calls_by_name(current_app):
    install_by_name(celery.current_app)
    assert current_app.send_task("other").id


@pytest.fixture
def proxy(current_app):
    """One like werkzeug's ``LocalProxy``, in its context, and what ends that context."""
    context = ExitStack()

    class LocalProxy:  # what werkzeug's does, as far as it matters here
        __class__ = property(lambda _: Celery)
        apps = (current_app,)

        def _get_current_object(self):
            for app in LocalProxy.apps:
                return app
            msg = "Working outside of application context."
            raise RuntimeError(msg)

        def __getattr__(self, name):
            return getattr(self._get_current_object(), name)

        def __setattr__(self, name, value):
            setattr(self._get_current_object(), name, value)

    context.callback(setattr, LocalProxy, "apps", ())
    return LocalProxy(), context.close


def test_a_proxy_of_a_web_framework_can_be_told_of_calls_by_name(current_app, proxy):
    """Like ``LocalProxy(lambda: flask.current_app.extensions["celery"])``; all calls failed."""
    install_by_name(proxy[0])
    assert current_app.send_task("other").id


@pytest.mark.parametrize(
    "register", [log_events, lambda app: observe(app)(print)], ids=["log_events", "observe"]
)
def test_a_worker_starts_whose_module_gave_a_proxy_of_a_web_framework(current_app, proxy, register):
    """It asked the proxy outside of its context, and ended with RuntimeError."""
    app, leave = proxy
    register(app)
    leave()
    task = current_app.task(settle, base=LockedTask, lock_key="a:{account_id}", shared=False)
    current_app.finalize()
    assert install(current_app).modes()[task.name] == "enforce"
