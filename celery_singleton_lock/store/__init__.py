"""Where locks live: :class:`~celery_singleton_lock.store.base.Store` and what implements it."""
