"""Read and change locks as an operator: for the command line, Flower, and programs.

::

    store = RedisAdminStore(client)
    for lock in list_locks(store, order="waiting", most=20):
        print(lock.name, lock.held, lock.waiting, *lock.holders)
    print(why(store, task_id).sentence)
    force_release(store, "account:42", token, Operator("jane", via="python"))

This package does not import Celery. A :class:`Witness` supplies what only the app knows about a
task.
"""

from __future__ import annotations

from celery_singleton_lock.admin.force_release import (
    Refused,
    end_holder,
    force_release,
    forced_release_warning,
)
from celery_singleton_lock.admin.lock_views import ORDERS, Detail, list_locks, order_of, show_lock
from celery_singleton_lock.admin.why import Answer, Witness, why
from celery_singleton_lock.store.operator.base import Glance, Operator, Standing, Waiting
from celery_singleton_lock.store.operator.redis import RedisAdminStore

__all__ = [
    "ORDERS",
    "Answer",
    "Detail",
    "Glance",
    "Operator",
    "RedisAdminStore",
    "Refused",
    "Standing",
    "Waiting",
    "Witness",
    "end_holder",
    "force_release",
    "forced_release_warning",
    "list_locks",
    "order_of",
    "show_lock",
    "why",
]
