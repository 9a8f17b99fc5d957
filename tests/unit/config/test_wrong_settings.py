"""A worker refuses settings that have no effect in its app, and no others."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from celery import Celery, _state

from celery_singleton_lock import LockedTask
from celery_singleton_lock.config.unknown_names import wrong_settings
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.startup_checks_app import check_app

NAMESPACES = (None, "CELERY", "celery", "SHOP_", "Shop")


def settle():
    """Do nothing."""


def app_with(namespace, *names):
    """Return an app that has these settings, and a locked task."""
    app = Celery(set_as_current=False, broker="memory://")
    app.config_from_object(SimpleNamespace(**dict.fromkeys(names, 20)), namespace=namespace)
    app.task(settle, name="settle", base=LockedTask, lock_key="settle", shared=False)
    app.finalize()
    return app


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("spelled", [str.lower, str.upper, str.title])
@pytest.mark.parametrize("prefix", ["", "celery_", "shop_"])
def test_a_setting_that_celery_does_not_read_is_refused(namespace, spelled, prefix):
    """One that Celery reads is not, and neither is one with the namespace of another app."""
    name = spelled(f"{prefix}singleton_lock_lease")
    told = [text for _, text in wrong_settings(app_with(namespace, name).conf, namespace)]
    of_another_app = prefix.strip("_") not in {"", (namespace or "celery").lower().strip("_")}
    if of_another_app or "singleton_lock_lease" in app_with(namespace, name).conf:
        assert told == []
    else:
        assert len(told) == 1
        assert told[0].startswith(f"The setting {name!r} has no effect")
        right = re.search(r"(?:Write|Did you mean) (\w+)", told[0])[1]
        assert "singleton_lock_lease" in app_with(namespace, right).conf


@pytest.mark.parametrize(
    ("namespace", "name", "right"),
    [
        (None, "lock_lease", "singleton_lock_lease"),
        (None, "lock_on_conflict", "singleton_lock_on_conflict"),
        (None, "singelton_lock_lease", "singleton_lock_lease"),
        (None, "singleton_locks_lease", "singleton_lock_lease"),
        (None, "singletonlock_leas", "singleton_lock_lease"),
        (None, "SINGELTON_LOCK_LEASE", "singleton_lock_lease"),
        (None, "CELERY_SINGELTON_LOCK_WAIT_TIMEOUT", "singleton_lock_wait_timeout"),
        (None, "CELERY_SINGLETON_LOCK_LEAS", "singleton_lock_lease"),
        ("CELERY", "lock_lease", "singleton_lock_lease"),
        ("CELERY", "CELERY_LOCK_LEASE", "CELERY_SINGLETON_LOCK_LEASE"),
        ("CELERY", "CELERY_SINGELTON_LOCK_LEASE", "CELERY_SINGLETON_LOCK_LEASE"),
        ("SHOP", "SHOP_SINGLETON_LOCK_LEAS", "SHOP_SINGLETON_LOCK_LEASE"),
        ("celery", "celery_lock_lease", "celery_singleton_lock_lease"),
    ],
)
def test_a_misspelt_setting_stops_the_worker(namespace, name, right):
    """The text has the setting and what to write, and never the value."""
    app = app_with(namespace, name)
    app.conf[name] = "redis://:secret@h"
    with pytest.raises(ConfigurationError) as caught:
        check_app(install(app))
    assert repr(name) in str(caught.value)
    assert re.search(rf"(Write|Did you mean) {right}\b", str(caught.value))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_settings_of_others_are_not_refused(namespace):
    """Celery's own, celery-singleton's, and whatever else a settings module holds."""
    names = [
        "singleton_backend_url",
        "singleton_lock_expiry",
        "singleton_key_prefix",
        "singleton_raise_on_duplicate",
        "SINGLETON_MODE",
        "LOCK_LEASE",
        "LOCK_MODE",
        "lock_backend",
        "lock_prefix",
        "lock_timeout",
        "market_lock_mode",
        "DISTRIBUTED_LOCK_LEASE",
        "single_lock_mode",
        "redis_lock_backend",
        "global_lock_prefix",
    ]
    assert list(wrong_settings(app_with(namespace, *names).conf, namespace)) == []


@pytest.mark.parametrize("name", ["SINGLETON_LOCK_LEASE", "lock_lease", "singelton_lock_lease"])
def test_a_constant_from_which_the_setting_is_computed_is_not_refused(name):
    """A settings module may have constants of its own; the setting itself has an effect."""
    assert list(wrong_settings([name, "singleton_lock_lease"], None)) == []


@pytest.mark.parametrize("name", ["MY_SINGLETON_LOCK_LEASE", "x_singleton_lock_lease"])
def test_a_setting_with_a_prefix_of_the_project_is_not_refused(name):
    assert list(wrong_settings([name], None)) == []
    assert list(wrong_settings([name], "CELERY")) == []


def test_an_app_without_locked_tasks_may_have_settings_named_as_task_options(monkeypatch):
    monkeypatch.setattr(_state, "_on_app_finalizers", set())  # shared tasks of other tests
    app = Celery(set_as_current=False, broker="memory://")
    app.conf.lock_mode = "strict"
    check_app(install(app))
