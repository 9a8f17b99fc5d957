"""What ``app.send_task`` is in an app with locked tasks."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from celery import Celery

from celery_singleton_lock import LockedTask


@pytest.fixture
def app():
    return Celery(set_as_current=False)


def test_a_test_can_ask_its_mock_of_send_task_for_its_calls(app):
    @app.task(base=LockedTask, shared=False)
    def report(): ...

    app.send_task = Mock()
    report.delay()  # the first use of the task
    app.send_task.assert_called_once()


def test_a_task_is_sent_by_name_from_a_registry_without_get(app):
    class Registry:
        def __getitem__(self, name):
            return {"report": report}[name]

    @app.task(base=LockedTask, name="report", shared=False)
    def report(): ...

    sent = []
    app.send_task = lambda name, *_, **__: sent.append(name)
    app.finalize()
    app._tasks = Registry()
    app.send_task("report")
    app.send_task("another")
    assert sent == ["report", "another"]
