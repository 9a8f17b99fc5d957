"""The protocol :class:`~celery_singleton_lock.store.base.Store`, and its implementations."""
