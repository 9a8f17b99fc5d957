"""``manage.py check`` reports the errors in CELERY_SINGLETON_LOCK_… that a worker would raise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("django")

from celery import Celery, _state
from django.core import checks

from celery_singleton_lock import LockedTask
from celery_singleton_lock.django import checks as django_checks
from celery_singleton_lock.django.checks import TAG
from support import django_project

LOCKS = {"BACKEND": django_project.REDIS, "LOCATION": "redis://:secret@h/2"}
CACHES = {"default": {"BACKEND": django_project.REDIS, "LOCATION": "redis://h/1"}, "locks": LOCKS}


def messages(caches=CACHES, **settings):
    """Return the messages of the checks for these settings: id and text."""
    settings = {f"CELERY_SINGLETON_LOCK_{name}": value for name, value in settings.items()}
    with django_project.project(CACHES=caches, **settings):
        found = checks.run_checks(tags=[TAG])
    assert all("secret" not in str(each) for each in found)
    return [(each.id.removeprefix(f"{TAG}."), each.msg) for each in found]


def test_valid_settings_give_no_message():
    """Of every type, and no settings at all."""
    assert messages() == []
    assert messages(BACKEND="django-cache://locks", LEASE=20, EAGER=True, ON_CONFLICT="skip") == []
    assert messages(BACKEND="redis://:secret@h/0", WAIT_TIMEOUT=None, PREFIX="shop") == []
    assert messages(BACKEND=["redis://:secret@h", "redis://i", "redis://j"]) == []


@pytest.mark.parametrize(
    ("settings", "number", "says"),
    [
        (
            {"LEESE": 20},
            "E001",
            "no setting 'CELERY_SINGLETON_LOCK_LEESE'. Did you mean CELERY_SINGLETON_LOCK_LEASE?",
        ),
        ({"QQQ": 1}, "E001", "There are: CELERY_SINGLETON_LOCK_BACKEND, "),
        ({"LEASE": "20"}, "E002", "CELERY_SINGLETON_LOCK_LEASE is '20': it must be a number"),
        ({"LEASE": 0.5}, "E002", "below 1 s cannot be renewed in time"),
        ({"ON_CONFLICT": "skipp"}, "E002", 'Did you mean "skip"?'),
        ({"EAGER": 1}, "E002", "CELERY_SINGLETON_LOCK_EAGER is 1: it must be True or False"),
        ({"BACKEND": "memcached://h"}, "E002", "locks need a Redis"),
        ({"BACKEND": "django-cache://lokcs"}, "E003", 'Did you mean "locks"?'),
        ({"BACKEND": "django-cache://lokcs"}, "E003", "CELERY_SINGLETON_LOCK_BACKEND is 'django-"),
        ({"BACKEND": "django-cache://memory"}, "E003", "is a django.core.cache.backends.locmem"),
        ({"BACKEND": "sentinel://h"}, "E003", "Sentinel needs the name of a master"),
        ({"LEASE": 900}, "W001", "it need not exceed the task's run time"),
        (
            {"BACKEND": "django-cache://default"},
            "W002",
            "are in the database of the cache 'default': its clear() would delete them",
        ),
        ({"BACKEND": "django-cache://twin"}, "W002", "in the database of the cache 'default'"),
    ],
)
def test_each_mistake_has_its_number(settings, number, says):
    """The text uses the names of Django's settings."""
    caches = {
        **CACHES,
        "memory": {"BACKEND": django_project.MEMORY},
        "twin": dict(CACHES["default"]),
    }
    ((found, text),) = messages(caches, **settings)
    assert found == number
    assert says in text


def test_all_mistakes_are_reported_at_once():
    found = messages(LEESE=20, LEASE="20", EAGER=1)
    assert sorted(number for number, _ in found) == ["E001", "E002", "E002"]


@pytest.mark.parametrize("name", ["CELERY_LOCK_LEASE", "CELERY_SINGELTON_LOCK_LEASE"])
def test_a_misspelt_prefix_is_an_error(name):
    with django_project.project(CACHES=CACHES, **{name: 20, "LOCK_MODE": "own"}):
        (found,) = checks.run_checks(tags=[TAG])
    assert found.id == f"{TAG}.E001"
    assert found.msg == (
        f"The setting {name!r} has no effect. Did you mean CELERY_SINGLETON_LOCK_LEASE?"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("SINGLETON_LOCK_LEASE", "has no effect. Did you mean CELERY_SINGLETON_LOCK_LEASE?"),
        ("SINGLETON_LOCK_LEESE", "Did you mean CELERY_SINGLETON_LOCK_LEASE?"),
    ],
)
def test_a_setting_without_the_namespace_is_an_error_before_a_worker_refuses_it(name, says):
    with django_project.project(CACHES=CACHES, **{name: 20, "LOCK_MODE": "own"}):
        (found,) = checks.run_checks(tags=[TAG])
    assert found.id == f"{TAG}.E001"
    assert says in found.msg


def messages_of(app, monkeypatch):
    """Return the messages of the checks before a deploy for this app."""
    monkeypatch.setattr(django_checks, "current_app", SimpleNamespace(_get_current_object=app))
    with django_project.project(CACHES=CACHES):
        found = checks.run_checks(tags=[TAG], include_deployment_checks=True)
    return [(each.id.removeprefix(f"{TAG}."), each.msg) for each in found]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, None),
        ({"lock_rate": "ten per minute"}, "app.settle: lock_rate: Rate 'ten per minute' cannot"),
        ({"lock_limit": 0}, "app.settle: lock_limit is 0"),
        ({"lock_fair_by": "{tenant}"}, "app.settle: "),
        (
            {"lock_unique": "until_done", "lock_on_duplicate": "follow"},
            "lock_on_duplicate is 'follow': a duplicate ends with the first task's stored result",
        ),
    ],
)
def test_a_wrong_option_of_a_task_is_reported_before_a_deploy(monkeypatch, options, says):
    """Else the first worker of the new version would end with it."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    app = Celery("shop", set_as_current=False)

    @app.task(base=LockedTask, lock_key="account:{account}", name="app.settle", **options)
    def settle(account): ...

    found = messages_of(lambda: app, monkeypatch)
    if says is None:
        assert found == []
    else:
        ((number, text),) = found
        assert number == "E004"
        assert says in text
    app.close()


def test_tasks_that_cannot_be_imported_are_reported_before_a_deploy(monkeypatch):
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    app = Celery("shop", set_as_current=False, include=["no.such.module"])
    ((number, text),) = messages_of(lambda: app, monkeypatch)
    assert number == "W003"
    assert "The tasks of shop cannot be imported: No module named 'no'" in text
    app.close()
