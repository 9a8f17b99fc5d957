"""A task that is declared with async def."""

from __future__ import annotations

import warnings

import pytest
from celery import Celery

from celery_singleton_lock import LockedTask
from celery_singleton_lock.config.option_checks import ConfigurationWarning


def declared(body, name):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.task(body, base=LockedTask, name=name, lock_key="k:{account}", shared=False)
    app.finalize()


def test_a_task_that_celery_does_not_await_is_declared_with_a_warning():
    """It succeeded with a coroutine as its result, and nobody learned that it never ran."""

    async def settle(account):
        """Never runs."""

    with pytest.warns(ConfigurationWarning, match="shop.settle: it is declared with async def"):
        declared(settle, "shop.settle")


def test_a_plain_task_is_declared_without_a_warning():
    def close(account):
        """Runs."""

    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigurationWarning)
        declared(close, "shop.close")
