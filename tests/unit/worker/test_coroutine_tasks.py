"""A task that is declared with async def."""

from __future__ import annotations

import asyncio
import functools
import warnings

import pytest
from celery import Celery

from celery_singleton_lock import LockedTask
from celery_singleton_lock.config.option_checks import ConfigurationWarning


def declared(body, name, **options):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.task(body, base=LockedTask, name=name, lock_key="k:{account}", shared=False, **options)
    app.finalize()


def test_a_task_that_celery_does_not_await_is_declared_with_a_warning():
    """It succeeded with a coroutine as its result, and nobody learned that it never ran."""

    async def settle(account):
        """Never runs."""

    with pytest.warns(ConfigurationWarning, match="shop.settle: it is declared with async def"):
        declared(settle, "shop.settle")


def test_a_coroutine_that_celery_retries_is_declared_with_a_warning():
    """Celery wraps its body."""

    async def settle(account):
        """Never runs."""

    with pytest.warns(ConfigurationWarning, match="async def"):
        declared(settle, "shop.settle", autoretry_for=(ValueError,))


def test_a_plain_wrapper_that_runs_a_coroutine_is_declared_without_a_warning():
    """It was told to call asyncio.run(), which it does."""

    def in_loop(coroutine):
        @functools.wraps(coroutine)
        def run(account):
            return asyncio.run(coroutine(account))

        return run

    @in_loop
    async def settle(account):
        """Runs."""

    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigurationWarning)
        declared(settle, "shop.settle")


def test_a_plain_task_is_declared_without_a_warning():
    def close(account):
        """Runs."""

    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigurationWarning)
        declared(close, "shop.close")
