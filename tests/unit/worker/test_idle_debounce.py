"""A worker that cannot let calls settle says so."""

from __future__ import annotations

import logging

from celery import Celery

from celery_singleton_lock import LockedTask
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.startup_checks_app import tell_of_idle_debounce


def test_the_tasks_are_named_whose_calls_do_not_settle(caplog):
    app = Celery("shop", set_as_current=False)

    @app.task(base=LockedTask, name="shop.index", shared=False, lock_debounce=5)
    def index(): ...

    @app.task(base=LockedTask, name="shop.settle", shared=False)
    def settle(): ...

    app.finalize()
    with caplog.at_level(logging.WARNING):
        tell_of_idle_debounce(install(app))
    (told,) = caplog.messages
    assert told.endswith("lock_debounce has no effect here, so each call runs: shop.index")
    app.close()
