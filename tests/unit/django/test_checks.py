"""``manage.py check`` says what is wrong with CELERY_SINGLETON_LOCK_…, as a worker would."""

from __future__ import annotations

import pytest

pytest.importorskip("django")

from django.core import checks

from celery_singleton_lock.django.checks import TAG
from support import django_project as djangos

LOCKS = {"BACKEND": djangos.REDIS, "LOCATION": "redis://:secret@h/2"}
CACHES = {"default": {"BACKEND": djangos.REDIS, "LOCATION": "redis://h/1"}, "locks": LOCKS}


def said(caches=CACHES, **settings):
    """What the checks say of these settings: id and text."""
    settings = {f"CELERY_SINGLETON_LOCK_{name}": value for name, value in settings.items()}
    with djangos.project(CACHES=caches, **settings):
        found = checks.run_checks(tags=[TAG])
    assert all("secret" not in str(each) for each in found)
    return [(each.id.removeprefix(f"{TAG}."), each.msg) for each in found]


def test_settings_that_can_be_used_are_not_spoken_of():
    """Of every type; and none at all."""
    assert said() == []
    assert said(BACKEND="django-cache://locks", LEASE=20, EAGER=True, ON_CONFLICT="skip") == []
    assert said(BACKEND="redis://:secret@h/0", WAIT_TIMEOUT=None, PREFIX="shop") == []
    assert said(BACKEND=["redis://:secret@h", "redis://i", "redis://j"]) == []


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
        ({"LEASE": 0.5}, "E002", "below 1 s the watchdog cannot serve it"),
        ({"ON_CONFLICT": "skipp"}, "E002", 'Did you mean "skip"?'),
        ({"EAGER": 1}, "E002", "CELERY_SINGLETON_LOCK_EAGER is 1: it must be True or False"),
        ({"BACKEND": "memcached://h"}, "E002", "locks live in Redis"),
        ({"BACKEND": "django-cache://lokcs"}, "E003", 'Did you mean "locks"?'),
        ({"BACKEND": "django-cache://lokcs"}, "E003", "CELERY_SINGLETON_LOCK_BACKEND is 'django-"),
        ({"BACKEND": "django-cache://memory"}, "E003", "is a django.core.cache.backends.locmem"),
        ({"BACKEND": "sentinel://h"}, "E003", "Sentinel must be asked for a master by name"),
        ({"LEASE": 900}, "W001", "it need not exceed the task's run time"),
        (
            {"BACKEND": "django-cache://default"},
            "W002",
            "live in the database of the cache 'default': its clear() would delete them",
        ),
        ({"BACKEND": "django-cache://twin"}, "W002", "in the database of the cache 'default'"),
    ],
)
def test_each_mistake_is_told_of_by_its_number(settings, number, says):
    """What to write instead is in the words of Django's settings."""
    caches = {**CACHES, "memory": {"BACKEND": djangos.MEMORY}, "twin": dict(CACHES["default"])}
    ((found, text),) = said(caches, **settings)
    assert found == number
    assert says in text


def test_all_mistakes_are_told_of_at_once():
    found = said(LEESE=20, LEASE="20", EAGER=1)
    assert sorted(number for number, _ in found) == ["E001", "E002", "E002"]
