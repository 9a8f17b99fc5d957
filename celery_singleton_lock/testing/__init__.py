"""For tests of projects that use this library: locks in memory, control of their time, assertions.

The pytest fixtures in :mod:`celery_singleton_lock.pytest_plugin` use this package. With another
test runner use it directly::

    with SingletonLocks(app) as locks, locks.worker():
        with locks.hold("account:42"):
            result = settle.delay(42)
            locks.assert_parked(result)
        locks.assert_ran_alone(result)
"""

from __future__ import annotations

from celery_singleton_lock.testing.client import memory_client
from celery_singleton_lock.testing.clock_control import LockTime
from celery_singleton_lock.testing.fake_holder import Hold
from celery_singleton_lock.testing.fixture import SingletonLocks
from celery_singleton_lock.testing.worker import worker_in_thread

__all__ = ["Hold", "LockTime", "SingletonLocks", "memory_client", "worker_in_thread"]
