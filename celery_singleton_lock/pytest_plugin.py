"""Fixtures for pytest: locks without a Redis, and control of their time. See docs/testing.md.

pytest imports this module in every run, so it imports Celery only when a test uses a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from celery_singleton_lock.testing import LockTime, SingletonLocks

_APPS: Final = ("celery_app", "celery_session_app")
"""Fixtures of Celery's pytest plugin."""


@pytest.fixture
def singleton_lock_app(request: pytest.FixtureRequest) -> Any:
    """The Celery app under test. Override this fixture in ``conftest.py`` to return your app.

    Default: the app of Celery's fixtures ``celery_app`` and ``celery_session_app`` if the test uses
    one of them, else Celery's current app.
    """
    for name in _APPS:
        if name in request.fixturenames:
            return request.getfixturevalue(name)
    from celery import current_app  # noqa: PLC0415  # see the docstring of this module

    return current_app._get_current_object()  # noqa: SLF001  # Celery's proxy has no other way


@pytest.fixture
def singleton_locks(singleton_lock_app: Any) -> Iterator[SingletonLocks]:
    """The app's locks in the memory of this process, with assertions."""
    from celery_singleton_lock.testing import SingletonLocks  # noqa: PLC0415  # see above

    with SingletonLocks(singleton_lock_app) as locks:
        yield locks


@pytest.fixture
def lock_time(singleton_locks: SingletonLocks) -> LockTime:
    """The clock of the locks: ``advance(seconds)``, ``freeze()``."""
    return singleton_locks.time
