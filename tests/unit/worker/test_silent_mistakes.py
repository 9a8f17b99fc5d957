"""Declarations that are valid, and probably do not have the intended effect."""

from __future__ import annotations

import types
import warnings

import pytest
from celery import Celery

from celery_singleton_lock import LockedTask
from celery_singleton_lock.config.option_checks import ConfigurationWarning


def declared(base=LockedTask, **options):
    app = Celery("shop", broker="memory://", set_as_current=False)

    def settle(account, user=None):
        """The arguments of the task."""

    app.task(settle, base=base, name="shop.settle", shared=False, **options)
    app.finalize()


@pytest.mark.parametrize(
    ("options", "write"),
    [
        ({"lock_key": "account"}, '"account:{account}"'),
        ({"lock_key": "k", "lock_fair_by": "user"}, '"{user}"'),
        ({"lock_key": "k", "lock_unique": "until_done", "lock_unique_key": "user"}, '"{user}"'),
    ],
    ids=["lock_key", "lock_fair_by", "lock_unique_key"],
)
def test_the_name_of_an_argument_without_braces_is_told(options, write):
    """All calls shared one lock; with lock_unique_key, calls of other users were not sent."""
    option, name = list(options.items())[-1]
    told = f"task shop.settle: {option} is '{name}', the same text for all calls, although an"
    with pytest.warns(ConfigurationWarning) as warned:
        declared(**options)
    (text,) = {str(each.message) for each in warned}
    assert text.startswith(told)
    assert f"For its value write {write}; if the text is meant, use another one." in text


@pytest.mark.parametrize("keys", [["account", "crm"], {"account": 1, "crm": 5}])
def test_one_of_several_keys_that_is_the_name_of_an_argument_is_told(keys):
    """All transfers waited for each other."""
    told = r"a key of lock_keys is 'account', the same text for all calls.* \"account:{account}\""
    with pytest.warns(ConfigurationWarning, match=told):
        declared(lock_keys=keys)


@pytest.mark.parametrize(
    ("option", "value", "package"),
    [
        ("unique_on", ["account"], "celery-singleton"),
        ("raise_on_duplicate", True, "celery-singleton"),
        ("once", {"keys": ["account"]}, "celery-once"),
        ("heimdall", {"unique": True}, "celery-heimdall"),
    ],
)
def test_an_option_of_another_package_is_told(option, value, package):
    """After a migration the task kept it, and its lock was that of all arguments."""
    told = rf"{option} is .*, an option of {package}, and has no effect .*docs/migrate/{package}.md"
    with pytest.warns(ConfigurationWarning, match=told):
        declared(**{option: value})


def without_a_warning(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigurationWarning)
        declared(**options)


def test_texts_and_templates_are_declared_without_a_warning():
    without_a_warning(lock_key="accounts", lock_fair_by="users")
    without_a_warning(lock_keys=["accounts", "account:{account}", lambda account, user: "user"])
    without_a_warning(lock_key="account:{account}", lock_unique=5, lock_unique_key="{user}")


def test_a_method_of_that_name_is_declared_without_a_warning():
    class Own(LockedTask):
        def once(self):
            """Of this application."""

    without_a_warning(base=Own)


def test_a_task_that_derives_from_the_other_package_is_declared_without_a_warning():
    other = types.new_class(
        "Singleton",
        (LockedTask,),
        exec_body=lambda ns: ns.update(__module__="celery_singleton.singleton"),
    )
    without_a_warning(base=other, unique_on=["account"])
