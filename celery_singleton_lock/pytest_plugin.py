"""Fixtures for pytest: locks without a Redis, and their time. See docs/testing.md.

pytest imports this in every run, so nothing is imported before a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from celery_singleton_lock.testing import LockTime, SingletonLocks

_APPS: Final = ("celery_app", "celery_session_app")
"""Fixtures of Celery's own plugin."""


@pytest.fixture
def singleton_lock_app(request: pytest.FixtureRequest) -> Any:
    """The app whose locks are tested. Override this fixture, in ``conftest.py``, to return yours.

    Otherwise it is that of Celery's fixtures ``celery_app`` and ``celery_session_app``, if the test
    uses one of them, or else Celery's current app.
    """
    for name in _APPS:
        if name in request.fixturenames:
            return request.getfixturevalue(name)
    from celery import current_app  # noqa: PLC0415  # not for those who test without locks

    return current_app._get_current_object()  # noqa: SLF001  # Celery's proxy has no other way


@pytest.fixture
def singleton_locks(singleton_lock_app: Any) -> Iterator[SingletonLocks]:
    """The app's locks, in the memory of this process, and what may be asserted of them."""
    from celery_singleton_lock.testing import SingletonLocks  # noqa: PLC0415  # likewise

    with SingletonLocks(singleton_lock_app) as locks:
        yield locks


@pytest.fixture
def lock_time(singleton_locks: SingletonLocks) -> LockTime:
    """The time of the locks: ``advance(seconds)``, ``freeze()``."""
    return singleton_locks.time
