"""``delay_on_commit`` of locked tasks, with each kind of base class."""

from __future__ import annotations

import pytest

pytest.importorskip("django")

from celery import Celery, Task
from celery.contrib.django.task import DjangoTask
from django.db import transaction

from celery_singleton_lock import LockedTask
from support import django_project


class LockedFirst(LockedTask, DjangoTask):
    """As in docs/calls.md."""


class LockedLast(DjangoTask, LockedTask):
    """With the bases in reverse order."""


class Counted(Task):
    """A project's own base class."""


class LockedOwn(LockedTask, Counted):
    """Locked, and derived from the project's base class."""


@pytest.fixture
def in_a_project():
    with django_project.project():
        yield


@pytest.fixture
def make():
    """A function that makes an app with a locked task. Messages stay in memory."""
    apps = []

    def make(base=None, **options):
        app = Celery("shop", broker="memory://", set_as_current=False, **options)
        apps.append(app)
        app.conf.singleton_lock_backend = "redis://127.0.0.1:1"
        given = {} if base is None else {"base": base}

        @app.task(name="shop.settle", shared=False, lock_key="account:{account}", **given)
        def settle(account):
            """Settle."""

        return app.tasks["shop.settle"]

    yield make
    for app in apps:
        app.close()


def sent(task):
    """Return the number of messages in the queue."""
    with task.app.connection_for_read() as connection, connection.channel() as channel:
        return channel.queue_declare(queue="celery", passive=False).message_count


BASES = [LockedTask, LockedFirst, LockedLast, LockedOwn]


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_t19_a_locked_task_is_sent_on_commit(in_a_project, make, base):
    """Not before the commit, and not after a rollback."""
    task = make(base)
    before = sent(task)
    with transaction.atomic():
        task.delay_on_commit(1)
        task.apply_async_on_commit((2,), countdown=1)
        assert sent(task) == before
    assert sent(task) == before + 2
    with transaction.atomic():
        task.delay_on_commit(3)
        transaction.set_rollback(True)
    assert sent(task) == before + 2


@pytest.mark.parametrize("base", [LockedTask, LockedFirst], ids=lambda base: base.__name__)
def test_t19_a_task_of_an_app_with_a_locked_task_class_is_sent_on_commit(in_a_project, make, base):
    """``Celery(task_cls=…)``: Celery does not replace the task class of such an app."""
    task = make(task_cls=base)
    before = sent(task)
    with transaction.atomic():
        task.delay_on_commit(1)
        assert sent(task) == before
    assert sent(task) == before + 1


def test_without_a_django_project_the_task_has_no_on_commit_methods(make, monkeypatch):
    """The error says what to set. Other unknown names raise the usual error."""
    from django.conf import LazySettings  # noqa: PLC0415

    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    monkeypatch.setattr("django.conf.settings", LazySettings())
    task = make(LockedTask)
    assert not hasattr(task, "apply_async_on_commit")
    with pytest.raises(AttributeError, match="set DJANGO_SETTINGS_MODULE"):
        task.delay_on_commit(1)
    with pytest.raises(AttributeError, match="object has no attribute 'delay_on_comit'"):
        _ = task.delay_on_comit
