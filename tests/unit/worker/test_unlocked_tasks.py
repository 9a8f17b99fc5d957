"""Lock options of tasks that are no LockedTask."""

from __future__ import annotations

import sys

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured

from celery_singleton_lock import LockedTask
from celery_singleton_lock.worker.celery_hook import STEP, add_check_to_all_apps
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.unlocked_tasks import refuse_unlocked


def settle(account_id=0):
    """A task."""


@pytest.fixture
def checked():
    """Check an app that has one task, by its declaration and its annotations."""

    def check(annotations=None, **declaration):
        with Celery("shop", set_as_current=False) as app:
            app.conf.task_annotations = annotations
            app.task(name="settle", shared=False, **declaration)(settle)
            app.finalize()
            refuse_unlocked(app)
            task = app.tasks["settle"]
            return install(app).options(task) if isinstance(task, LockedTask) else None

    return check


@pytest.fixture
def unaware(monkeypatch):
    """Nobody has imported LockedTask."""
    monkeypatch.delitem(sys.modules, "celery_singleton_lock.task")


class Audited(Task):
    """A base class of the user's own."""


class OwnLock(Task):
    """One that may read the options itself."""

    lock_key = "mine"

    def run(self):
        """Do nothing."""


@pytest.mark.parametrize("base", [None, Audited])
def test_lock_options_without_LockedTask_are_refused(checked, base):
    with pytest.raises(ImproperlyConfigured, match=r"^task settle: lock_args is set, but"):
        checked(base=base, lock_args=[])


@pytest.mark.usefixtures("unaware")
def test_undeclared_locks_are_refused_if_LockedTask_is_not_imported(checked):
    with pytest.raises(ImproperlyConfigured, match=r"^task settle: lock_args is set, but"):
        checked(lock_args=[])


@pytest.mark.usefixtures("unaware")
def test_there_a_class_of_the_users_own_is_warned_of(checked, caplog):
    """It may read them itself."""
    checked(base=Audited, lock_key="a")
    assert "task settle has lock_key, and its class Audited is not derived" in caplog.text
    caplog.clear()
    with Celery("shop", set_as_current=False) as app:
        app.register_task(OwnLock())
        refuse_unlocked(app)
    assert "has lock_key, and its class Task" in caplog.text


@pytest.mark.parametrize("imported", [True, False])
def test_locks_that_a_base_class_declares_without_LockedTask_are_warned_of(
    checked, caplog, monkeypatch, imported
):
    """Its tasks run without a lock, and nothing else says so. A worker checks them twice."""
    if not imported:
        monkeypatch.delitem(sys.modules, "celery_singleton_lock.task")

    class Team(Task):
        lock_key = "account:{account_id}"

    for _ in range(2):
        checked(base=Team)
    (warning,) = caplog.messages
    assert "task settle has lock_key, and its class" in warning
    assert "Team is not derived" in warning


def test_celerys_own_tasks_are_not_warned_of_for_the_apps_task_class(caplog):
    class Team(Task):
        lock_lease = 3

    with Celery("shop", set_as_current=False, task_cls=Team) as app:
        app.task(name="a.settle", shared=False)(settle)
        app.finalize()
        refuse_unlocked(app)
    (warning,) = caplog.messages
    assert "task a.settle has lock_lease, and its class" in warning


def test_no_base_class_of_a_locked_task_is_warned_of(checked, caplog):
    class Mixed(LockedTask, OwnLock):
        """Reads the attributes of OwnLock."""

    assert checked(base=Mixed).limit == 1
    checked(base=Audited)
    checked()
    assert not caplog.records


def test_what_is_annotated_for_all_tasks_is_no_mistake_of_a_plain_one(checked):
    """It counts for locked tasks."""
    for_all = {"*": {"lock_lease": 12}}
    checked(for_all)
    assert checked(for_all, base=LockedTask).lease == 12
    checked([for_all, {"other": {"lock_lease": 5}}])
    with pytest.raises(ImproperlyConfigured, match=r"^task settle: lock_limit is set, but"):
        checked({"*": {"lock_lease": 12}, "settle": {"lock_limit": 2}})
    with pytest.raises(ImproperlyConfigured, match=r"^task settle: lock_lease is set, but"):
        checked({"*": {"lock_lease": 12}, "settle": {"lock_lease": 5}})
    with pytest.raises(ImproperlyConfigured, match=r"^task settle: lock_key is set, but"):
        checked(for_all, lock_key="a")


def test_workers_look_whether_their_app_was_finalized_before_or_after():
    with Celery("before", set_as_current=False) as before:
        before.finalize()
        before.steps["worker"].clear()
        add_check_to_all_apps()
        assert STEP in before.steps["worker"]
    with Celery("after", set_as_current=False) as after:
        after.finalize()
        assert STEP in after.steps["worker"]
